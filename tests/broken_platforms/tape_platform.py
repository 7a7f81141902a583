"""A correct in-memory platform that is small enough to be broken one method at a time.

It records the operators of the forward and runs them again on the tensors of the recording. Rows
past the last end stay unwritten and keys past `max_seqlen` unread, as in a varlen kernel.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from graphhal.errors import CaptureError, HostReadError, ReplayError
from graphhal.hookspecs import hookimpl
from graphhal.platform import (
    CapturedGraph,
    CaptureRequest,
    HostUpdate,
    MemoryProfile,
    PlatformInfo,
)

aten = torch.ops.aten
HOST_READS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default}
HOST_METHODS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}
UNINITIALISED = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}


@dataclass
class Pool:
    num_bytes: int = 0
    memory: list[torch.Tensor] = field(default_factory=list)

    def poison(self) -> None:
        with torch.inference_mode():
            for tensor in self.memory:
                tensor.fill_(float("nan") if tensor.is_floating_point() else -1)


class RefuseHostMethods(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in HOST_METHODS:
            raise HostReadError(f"captured code called {func.__name__}")
        return func(*args, **(kwargs or {}))


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Callable[[], None]] = []
        self.memory: list[torch.Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in HOST_READS:
            raise HostReadError(f"captured code called {func}")
        result = func(*args, **kwargs)
        outputs = [t for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor)]
        if func._schema.is_mutable:
            self.launches.append(lambda: func(*args, **kwargs))
        elif not _is_view(outputs, args):
            self.memory += outputs
            if func.overloadpacket.__name__ not in UNINITIALISED:
                self.launches.append(lambda: self._again(func, args, kwargs, outputs))
        return result

    @staticmethod
    def _again(func, args, kwargs, outputs):
        again = [t for t in tree_flatten(func(*args, **kwargs))[0] if isinstance(t, torch.Tensor)]
        for old, new in zip(outputs, again, strict=True):
            old.copy_(new)

    def run(self) -> None:
        with torch.inference_mode():
            for launch in self.launches:
                launch()


class Scope:
    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)


class TapePlatform:
    """Every hook is one short method; a broken platform overrides one of them."""

    def __init__(self) -> None:
        self.capturing = False

    @hookimpl
    def graphhal_probe(self) -> PlatformInfo:
        return PlatformInfo(
            name="tape",
            device_type="cpu",
            versions={"torch": torch.__version__},
            attention=self.attend,
            reference=True,
        )

    @hookimpl
    def graphhal_capture(self, request: CaptureRequest) -> CapturedGraph:
        tape = Tape()
        try:
            self.warm_up(request)
            self.capturing = True
            with RefuseHostMethods(), tape:
                request.forward()
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(f"{request.key}: {error}") from error
        finally:
            self.capturing = False
        pool = request.pool or Pool()
        needed = sum(tensor.nbytes for tensor in tape.memory)
        added = max(0, needed - pool.num_bytes)
        pool.num_bytes += added
        pool.memory += tape.memory
        return CapturedGraph(request, tape, pool, added, pool.poison)

    def warm_up(self, request: CaptureRequest) -> None:
        for _ in range(request.warmups):
            request.forward()

    @hookimpl
    def graphhal_replay(self, graph: CapturedGraph) -> None:
        if graph.handle is None:
            raise ReplayError(f"{graph.key} was released")
        graph.handle.run()

    @hookimpl
    def graphhal_update_boundaries(self, graph: CapturedGraph, boundaries: HostUpdate) -> None:
        graph.request.packed.copy_(boundaries.block)

    @hookimpl
    def graphhal_step(self, kind, graph, inputs, boundaries):
        return None if self.capturing else self.enter(kind)

    @contextlib.contextmanager
    def enter(self, kind: str) -> Iterator[Scope]:
        yield self.scope(kind)

    def scope(self, kind: str) -> Scope:
        return Scope()

    @hookimpl
    def graphhal_profile_memory(self, requests: Sequence[CaptureRequest]) -> MemoryProfile:
        pool, per_graph = Pool(), {}
        for request in requests:
            before = pool.num_bytes
            self.graphhal_release([TapePlatform.graphhal_capture(self, _in_pool(request, pool))])
            per_graph[request.key] = pool.num_bytes - before
        return MemoryProfile(pool.num_bytes, 0, per_graph)

    @hookimpl
    def graphhal_release(self, graphs: Sequence[CapturedGraph]) -> None:
        for graph in graphs:
            graph.handle = None

    def attend(self, query, key, value, cu_seqlens, max_seqlen, scale):
        ends = cu_seqlens[1:]
        row = torch.arange(len(query), dtype=torch.int32)
        sequence = torch.searchsorted(ends, row, right=True)
        written = sequence < len(ends)
        start = cu_seqlens[sequence.clamp(max=len(ends) - 1)]
        seen = (sequence[:, None] == sequence) & (row - start < max_seqlen)
        scores = torch.einsum("qhd,khd->hqk", query, key) * scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        value = torch.where(written[:, None, None], value, 0.0)
        out = torch.einsum("hqk,khd->qhd", weights, value)
        return torch.where(written[:, None, None], out, torch.empty_like(out))


def _is_view(outputs, args) -> bool:
    """By storage: an operator like `reshape` is a view at times only."""
    given = [t for t in tree_flatten(args)[0] if isinstance(t, torch.Tensor)]
    places = {t.untyped_storage().data_ptr() for t in given if t.numel()}
    return any(t.untyped_storage().data_ptr() in places for t in outputs)


def _in_pool(request: CaptureRequest, pool: Pool) -> CaptureRequest:
    return replace(request, pool=pool)
