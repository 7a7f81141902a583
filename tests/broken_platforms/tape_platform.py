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


@dataclass
class Launch:
    """One operator of a recording; `outputs` are the tensors that it writes, if it is no in-place
    one."""

    func: Callable[..., Any]
    args: Any
    kwargs: Any
    outputs: list[torch.Tensor] | None

    def run(self) -> None:
        again = self.func(*self.args, **self.kwargs)
        if self.outputs is not None:
            for old, new in zip(self.outputs, _tensors(again), strict=True):
                old.copy_(new)


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.memory: list[torch.Tensor] = []
        self.reads_uninitialised = False

    @classmethod
    def _should_skip_dynamo(cls):
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in HOST_READS:
            raise HostReadError(f"captured code called {func}")
        result = func(*args, **kwargs)
        outputs = _tensors(result)
        if func._schema.is_mutable:
            self.launches.append(Launch(func, args, kwargs, None))
        elif not _is_view(outputs, args):
            self.memory += outputs
            if func.overloadpacket.__name__ in UNINITIALISED:
                self.reads_uninitialised = True
            else:
                self.launches.append(Launch(func, args, kwargs, outputs))
        return result

    def run(self) -> None:
        with torch.inference_mode():
            for launch in self.launches:
                launch.run()


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
        scores = query.transpose(0, 1) @ key.permute(1, 2, 0) * scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        value = torch.where(written[:, None, None], value, 0.0)
        out = (weights @ value.transpose(0, 1)).transpose(0, 1)
        return torch.where(written[:, None, None], out, torch.empty_like(out))


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return [inner for value in values for inner in _tensors(value)] if _nested(values) else []


def _nested(values: Any) -> bool:
    return isinstance(values, list | tuple)


def _is_view(outputs: list[torch.Tensor], args: Any) -> bool:
    """By storage: an operator like `reshape` is a view at times only."""
    places = {t.untyped_storage().data_ptr() for t in _tensors(args) if t.numel()}
    return any(t.untyped_storage().data_ptr() in places for t in outputs)


def map_foreign_tensors(graph: CapturedGraph, replace_by: Callable[[torch.Tensor], Any]) -> None:
    """Replace every tensor that a recording reads but neither made nor was given: the weights."""
    known = [*graph.request.inputs.values(), graph.request.packed, graph.request.output]
    places = {t.untyped_storage().data_ptr() for t in (*known, *graph.handle.memory)}
    replaced: dict[int, Any] = {}
    for launch in graph.handle.launches:
        launch.args = [
            replaced.setdefault(id(a), replace_by(a))
            if isinstance(a, torch.Tensor) and a.untyped_storage().data_ptr() not in places
            else a
            for a in launch.args
        ]


def _in_pool(request: CaptureRequest, pool: Pool) -> CaptureRequest:
    return replace(request, pool=pool)
