"""A platform in memory for tests of the engine: a replay calls the request's forward again.

It freezes nothing; the strict reference is `graphhal.cpu`. Faults are switched on by name, and
every hook call is written down.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from graphhal import hookimpl
from graphhal.boundaries import Boundaries
from graphhal.discovery import bind
from graphhal.platform import (
    CapturedGraph,
    CaptureRequest,
    HostUpdate,
    MemoryProfile,
    Platform,
    PlatformInfo,
    StepKind,
    StepScope,
)


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
) -> torch.Tensor:
    """Packed attention without host reads, as harsh as a kernel: a row outside every sequence, or
    beyond the baked bound, is not written (NaN here)."""
    ends = cu_seqlens[1:].long()
    rows = torch.arange(len(query))
    sequence = torch.searchsorted(ends, rows, right=True)
    start = torch.cat([ends.new_zeros(1), ends])[sequence.clamp(max=len(ends))]
    within = (sequence < len(ends)) & (rows - start < max_seqlen)
    visible = (sequence[:, None] == sequence[None, :]) & within[None, :]
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    mixed = torch.einsum("hqk,khd->qhd", weights, value.masked_fill(~within[:, None, None], 0.0))
    return mixed.masked_fill(~within[:, None, None], float("nan"))


PLAIN = PlatformInfo(
    name="plain", device_type="cpu", versions={}, attention=plain_attention, reference=True
)

After = Callable[[CapturedGraph], None]


@dataclass
class PlainPlugin:
    """Attributes are the knobs; see `faults` of tests/test_self_check.py for how they are used.

    Attributes:
        capture_errors: raised when a graph of this size is captured.
        replay_errors: raised when a graph of this size is replayed.
        after_replay: called after a replay; spoils its output.
        skip_updates: boundaries never reach the device.
        frozen_output: a replay gives the output of the warm-up, whatever was staged.
        graph_bytes: what a graph of this size adds.
        closed: an outer capture runs: no step may be entered.
    """

    info: PlatformInfo = PLAIN
    capture_errors: dict[int, Exception] = field(default_factory=dict)
    replay_errors: dict[int, Exception] = field(default_factory=dict)
    after_replay: After | None = None
    skip_updates: bool = False
    frozen_output: bool = False
    graph_bytes: Callable[[int], int] = lambda size: 0
    closed: bool = False
    calls: list[tuple[str, Any]] = field(default_factory=list)
    live: int = 0

    @hookimpl
    def graphhal_probe(self) -> PlatformInfo:
        return self.info

    @hookimpl
    def graphhal_capture(self, request: CaptureRequest) -> CapturedGraph:
        size = request.key.size
        self.calls.append(("capture", size))
        if size in self.capture_errors:
            raise self.capture_errors[size]
        for _ in range(request.warmups):
            request.forward()
        self.live += 1
        return CapturedGraph(
            request=request,
            handle=request.output.clone(),
            pool=request.pool or object(),
            num_bytes=self.graph_bytes(size),
        )

    @hookimpl
    def graphhal_replay(self, graph: CapturedGraph) -> None:
        size = graph.key.size
        self.calls.append(("replay", size))
        if graph.handle is None:
            raise AssertionError(f"{graph.key} was replayed after its release")
        if size in self.replay_errors:
            raise self.replay_errors[size]
        if self.frozen_output:
            graph.request.output.copy_(graph.handle)
        else:
            graph.request.forward()
        if self.after_replay is not None:
            self.after_replay(graph)

    @hookimpl
    def graphhal_update_boundaries(self, graph: CapturedGraph, boundaries: HostUpdate) -> None:
        self.calls.append(("update", graph.key.size))
        if not self.skip_updates:
            graph.request.packed.copy_(boundaries.block)

    @hookimpl
    def graphhal_step(
        self,
        kind: StepKind,
        graph: CapturedGraph | None,
        inputs: Mapping[str, torch.Tensor],
        boundaries: Mapping[str, Boundaries],
    ) -> AbstractContextManager[StepScope] | None:
        self.calls.append(("step", kind))
        return None if self.closed else _scope()

    @hookimpl
    def graphhal_profile_memory(self, requests: Sequence[CaptureRequest]) -> MemoryProfile:
        for request in requests:
            request.forward()
            if not torch.isfinite(request.output).all():
                raise AssertionError(f"{request.key} was profiled on stale inputs")
        sizes = {request.key: self.graph_bytes(request.key.size) for request in requests}
        return MemoryProfile(sum(sizes.values()), 0, sizes)

    @hookimpl
    def graphhal_release(self, graphs: Sequence[CapturedGraph]) -> None:
        for graph in graphs:
            self.calls.append(("release", graph.key.size))
            self.live -= graph.handle is not None
            graph.handle = None

    def count(self, what: str) -> int:
        return sum(1 for name, _ in self.calls if name == what)


class _Scope:
    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        # As a device allocator would: whatever was there before.
        return torch.full(tuple(shape), float("nan"), dtype=dtype)


@contextmanager
def _scope() -> Iterator[StepScope]:
    yield _Scope()


def plain_platform(plugin: PlainPlugin | None = None, **info: Any) -> Platform:
    """The plugin bound as `open_platform` binds one; `info` replaces fields of its info."""
    used = plugin or PlainPlugin()
    used.info = replace(used.info, **info)
    return bind(used, used.info, used.info.name)
