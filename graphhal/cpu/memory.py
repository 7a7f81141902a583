"""What stands in for device memory: poison, snapshots of static memory, and accounting in bytes."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphhal.errors import CaptureError
from graphhal.platform import CapturedGraph, CaptureRequest, MemoryProfile

_aten = torch.ops.aten
EMPTY_OPS = frozenset(
    getattr(packet, overload)
    for packet in (
        _aten.empty,
        _aten.empty_like,
        _aten.empty_permuted,
        _aten.empty_strided,
        _aten.new_empty,
        _aten.new_empty_strided,
    )
    for overload in packet.overloads()  # type: ignore[no-untyped-call]
    if overload not in ("out", "names", "names_out")
)


def free_bytes() -> int:
    """Bytes of physical memory that no process uses now."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested sequences and mappings."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, Mapping):
        yield from tensors_in(list(values.values()))


def holds_tensor(value: Any) -> bool:
    """Whether there is a tensor in nested sequences and mappings."""
    return next(tensors_in(value), None) is not None


def storage_of(tensor: torch.Tensor) -> int:
    """A number that tensors over the same memory share, while one of them lives."""
    return tensor.untyped_storage()._cdata if has_storage(tensor) else id(tensor)


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor has plain memory (an mkldnn or sparse tensor has none of its own)."""
    return torch._C._has_storage(tensor)


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill the tensor's whole storage with NaN, integers with their largest value; returns it."""
    dtype = tensor.dtype
    if dtype.is_floating_point or dtype.is_complex:
        value: float = float("nan")
    else:
        value = 1 if dtype == torch.bool else torch.iinfo(dtype).max
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    tensor.as_strided((elements,), (1,), 0).fill_(value)
    return tensor


class PoisonEmpties(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, uninitialised memory of any kernel comes back as a device pool leaves it."""

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = op(*args, **(kwargs or {}))
        return poison(result) if op in EMPTY_OPS else result


class Snapshot:
    """Contents of static memory before a capture writes to it.

    A device records writes without doing them; the reference platform does them, and undoes
    them here.
    """

    def __init__(self) -> None:
        self._saved: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the copies."""
        return sum(copy.nbytes for _, copy in self._saved.values())

    def save(self, tensor: torch.Tensor) -> None:
        """Remember the contents of this view of static memory, once."""
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if place not in self._saved:
            self._saved[place] = (tensor.detach(), tensor.detach().clone())

    def restore(self) -> None:
        """Put everything back, the last one saved first, and forget it."""
        with torch.inference_mode():
            for tensor, copy in reversed(self._saved.values()):
                tensor.copy_(copy)
        self._saved.clear()


@dataclass(slots=True)
class Pool:
    """Memory that the graphs of one owner share: as large as the largest needs."""

    num_bytes: int = 0

    def grow_to(self, num_bytes: int) -> int:
        """Make room for a graph of this many bytes; returns the bytes added."""
        added = max(0, num_bytes - self.num_bytes)
        self.num_bytes += added
        return added


def peak_bytes(spans: Iterable[tuple[int, int, int]]) -> int:
    """Largest sum of bytes that live at once, from (bytes, first step, last step) per storage."""
    changes: dict[int, int] = {}
    for num_bytes, first, last in spans:
        changes[first] = changes.get(first, 0) + num_bytes
        changes[last + 1] = changes.get(last + 1, 0) - num_bytes
    return max(accumulate(changes[step] for step in sorted(changes)), default=0)


def poison_all(tensors: Iterable[torch.Tensor]) -> None:
    """Poison each tensor; what a graph's pool held while it was captured."""
    with torch.inference_mode():
        for tensor in tensors:
            poison(tensor)


def profile_memory(
    requests: Sequence[CaptureRequest],
    capture: Callable[[CaptureRequest, Pool], CapturedGraph],
    release: Callable[[Sequence[CapturedGraph]], None],
) -> MemoryProfile:
    """Capture the requests in order into one pool of their own, measure, and release them.

    A request that is refused takes nothing.
    """
    pool, transient = Pool(), 0
    per_graph: dict[Any, int] = {}
    for request in requests:
        try:
            graph = capture(request, pool)
        except CaptureError:
            per_graph[request.key] = 0
            continue
        per_graph[request.key] = graph.num_bytes
        transient = max(transient, graph.handle.snapshot_bytes)
        release([graph])
    settled: Mapping[Any, int] = per_graph
    return MemoryProfile(sum(settled.values()), transient, settled)
