"""The captured graphs of one adapter: one pool, shared arenas, largest first."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, TypeVar

import torch

from graphhal.adapter import EncoderAdapter
from graphhal.arena import Arena, Layout
from graphhal.boundaries import Boundaries
from graphhal.errors import CaptureError, PluginError, ResourceExhaustedError
from graphhal.memory_limits import first_to_keep
from graphhal.module_notes import ModuleNotes
from graphhal.outputs import write_levels
from graphhal.peers import Peers
from graphhal.plan import Capacity, GraphKey
from graphhal.platform import CapturedGraph, CaptureRequest, MemoryProfile, Platform
from graphhal.settings import Settings

log = logging.getLogger(__name__)

_Given = TypeVar("_Given")
_Made = TypeVar("_Made")

Progress = Callable[[int, int, GraphKey], None]
"""Called with (graphs done, graphs in all, key) after each graph; again from the first where a
memory limit has the ladder captured once more, with as many in all as that has."""

SHOWN = 6
"""Graphs that one line names."""

Stage = Callable[
    [Capacity, Layout, Mapping[str, torch.Tensor], torch.Tensor], Mapping[str, Boundaries]
]
"""Fills the static inputs and the packed buffer with an example; returns its boundaries."""


@dataclass(frozen=True, slots=True)
class Captured:
    """One line of a capture report: a graph that was captured."""

    key: GraphKey
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Dropped:
    """One line of a capture report: a graph that is not there, and why."""

    key: GraphKey
    reason: str


@dataclass(slots=True)
class CaptureReport:
    """What capture did.

    Attributes:
        captured: graphs that can be replayed.
        dropped: graphs that failed, disagreed with eager, or did not fit the memory limit.
        seconds: of capture, self-check left out.
        self_check_seconds: of the self-check.
        num_bytes: device bytes of arenas and graphs.
    """

    captured: list[Captured] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    seconds: float = 0.0
    self_check_seconds: float = 0.0
    num_bytes: int = 0

    def drop(self, key: GraphKey, reason: str) -> None:
        """A graph is not used, whether it was captured or not."""
        self.captured = [line for line in self.captured if line.key != key]
        self.dropped.append(Dropped(key, reason))

    def dropped_lines(self) -> Iterator[str]:
        """A line for each reason: how many graphs, the first of them, why."""
        keys: dict[str, list[str]] = {}
        for line in self.dropped:
            keys.setdefault(line.reason, []).append(str(line.key))
        for reason, names in keys.items():
            shown = ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
            yield f"graphs that are not used: {len(names)} ({shown}): {reason}"

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "graphs": [
                {"key": str(c.key), "bytes": c.num_bytes, "seconds": c.seconds}
                for c in self.captured
            ],
            "dropped": [{"key": str(d.key), "reason": d.reason} for d in self.dropped],
            "seconds": self.seconds,
            "self_check_seconds": self.self_check_seconds,
            "bytes": self.num_bytes,
        }


@dataclass(frozen=True, slots=True)
class Entry:
    """A graph that can be replayed, and where its inputs lie.

    Attributes:
        writes_packed: its forward changes packed inputs in place; they must be sent every time.
        kept: tensors that modules held during the capture; the graph may read them.
    """

    capacity: Capacity
    layout: Layout
    graph: CapturedGraph
    writes_packed: bool = False
    kept: tuple[torch.Tensor, ...] = ()


@dataclass(slots=True)
class _Attempt:
    """One way through a ladder.

    Attributes:
        stage: as for `GraphSet.capture`.
        limit_bytes: as for `GraphSet.capture`.
        report: what became of each graph.
        tried: bytes of each graph from the first on that was kept, those beyond the limit too.
    """

    stage: Stage
    limit_bytes: int | None
    report: CaptureReport = field(default_factory=CaptureReport)
    tried: list[tuple[Capacity, int]] = field(default_factory=list)

    def without(self, largest: Sequence[Capacity]) -> Iterator[Dropped]:
        """These, for which smaller graphs are captured instead; what failed, as it failed."""
        known = {line.key: line for line in self.report.dropped}
        reason = f"memory_limit: smaller graphs take its room within {self.limit_bytes} bytes"
        for capacity in largest:
            yield known.get(capacity.key, Dropped(capacity.key, reason))


class GraphSet:
    """Captures a ladder and holds it.

    Warm-up, capture, replay*, close. All graphs share one input arena, one packed buffer and one
    static output, each of the largest graph's size: a replay overwrites what the one before left.
    """

    def __init__(
        self, adapter: EncoderAdapter, platform: Platform, settings: Settings, peers: Peers
    ) -> None:
        self._adapter = adapter
        self._peers = peers
        self._platform = platform
        self._settings = settings
        self._pool: Any = None
        self.arena: Arena | None = None
        self.entries: dict[GraphKey, Entry] = {}

    def capture(
        self,
        ladder: Sequence[Capacity],
        output: torch.Tensor,
        stage: Stage,
        limit_bytes: int | None,
        progress: Progress | None = None,
    ) -> CaptureReport:
        """Capture what fits, largest first.

        Where the limit leaves no room for smaller graphs, once more without as many of the largest
        as leave most graphs; as before, where fewer are left then.

        Args:
            ladder: capacities, in any order.
            output: an eager output of any size; tells width and dtype.
            stage: fills the static inputs of a capacity with an example; returns its boundaries.
            limit_bytes: device bytes that arenas and graphs may take; None for no limit.
        """
        started = perf_counter()
        left, given_up, kept = _largest_first(ladder), list[Dropped](), 0
        attempt = self._go_through(left, output, stage, limit_bytes, progress)
        while (begin := self._begin_anew(left, attempt)) and len(self.entries) > kept:
            kept = len(self.entries)
            without = [*given_up, *attempt.without(left[:begin])]
            self.close()
            attempt = self._go_through(left[begin:], output, stage, limit_bytes, progress)
            if len(self.entries) < kept:  # memory that is not in proportion: what was had before
                self.close()
                attempt = self._go_through(left, output, stage, limit_bytes, progress)
                break
            left, given_up = left[begin:], without
        report = attempt.report
        report.dropped = given_up + report.dropped
        report.seconds = perf_counter() - started
        report.num_bytes = self.num_bytes
        return report

    def _begin_anew(self, ladder: Sequence[Capacity], attempt: "_Attempt") -> int:
        """Index of the graph to begin with, where more are kept then; the same on all ranks."""
        if attempt.limit_bytes is None or self.arena is None:
            return 0
        costs = [(capacity.rows, num_bytes) for capacity, num_bytes in attempt.tried]
        first = first_to_keep(costs, self.arena.num_bytes, attempt.limit_bytes)
        begin = ladder.index(attempt.tried[first][0]) if first else 0
        return max(self._peers.exchange("graphs beyond memory_limit", begin))

    def _go_through(
        self,
        ladder: Sequence[Capacity],
        output: torch.Tensor,
        stage: Stage,
        limit_bytes: int | None,
        progress: Progress | None,
    ) -> "_Attempt":
        """Capture each graph that can be had within the limit."""
        attempt = _Attempt(stage, limit_bytes)
        report = attempt.report
        left: list[tuple[Capacity, Layout]] = []
        broken: dict[GraphKey, CaptureError] = {}
        for capacity in ladder:
            try:
                layout = Layout.of(self._adapter, capacity)
            except Exception as error:
                log.debug("%s: no buffers", capacity.key, exc_info=True)
                broken[capacity.key] = CaptureError(f"no buffers: {type(error).__name__}: {error}")
                layout = Layout({})
            left.append((capacity, layout))
        total = len(left)
        while left:
            problem = self._make_arena(left, output)
            capacity, layout = left.pop(0)
            problem = broken.get(capacity.key, problem)
            # Agreed before a capture, too: the others would run its collectives alone.
            problem = self._agreed(capacity.key, problem)
            if problem is None and self.arena is not None:
                problem = self._try(capacity, layout, self.arena, attempt)
                problem = self._agreed(capacity.key, problem)
            if problem is not None:
                report.drop(capacity.key, str(problem))
                self._shrink(attempt)
                if isinstance(problem, ResourceExhaustedError) and self.entries:
                    report.dropped += [
                        Dropped(rest.key, f"capture stopped: {problem}") for rest, _ in left
                    ]
                    left.clear()
            if progress is not None:
                progress(total - len(left), total, capacity.key)
        return attempt

    @property
    def num_bytes(self) -> int:
        """Device bytes of arenas and graphs."""
        arena = 0 if self.arena is None else self.arena.num_bytes
        return arena + sum(entry.graph.num_bytes for entry in self.entries.values())

    def poison(self, entry: Entry) -> None:
        """Fill a graph's static inputs, the static output and the pool's free memory with NaN.

        Integers become zero: an index out of range would end the process instead of the check.
        """
        request = entry.graph.request
        with self.reference_step(request.inputs):
            for tensor in (*request.inputs.values(), request.output):
                tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
            if entry.graph.poison is not None:
                entry.graph.poison()

    def reference_step(self, inputs: Mapping[str, torch.Tensor]) -> AbstractContextManager[object]:
        """A step of the platform for work at start-up: it sees a failure at once."""
        return self._platform.step("reference", None, inputs, {}) or nullcontext()

    def drop(self, key: GraphKey) -> None:
        """Release one graph; its inputs run in a larger graph, or eagerly."""
        entry = self.entries.pop(key, None)
        if entry is not None:
            self._release([entry.graph])

    def close(self) -> None:
        """Release all graphs and arenas. May be called twice."""
        graphs = [entry.graph for entry in self.entries.values()]
        self.entries.clear()
        if graphs:
            self._release(graphs)
        self.arena = None
        self._pool = None

    def _release(self, graphs: Sequence[CapturedGraph]) -> None:
        """Graphs that are not used any more; a device that failed may fail here as well, and what
        asks for this, a request or a host that shuts down, goes on."""
        try:
            self._platform.release(graphs)
        except Exception as error:  # noqa: BLE001  (a third party's code: report it)
            names = ", ".join(str(graph.key) for graph in graphs[:SHOWN])
            log.warning("%s: not released, their memory is lost: %r", names, error)

    def profile(
        self,
        ladder: Sequence[Capacity],
        output: torch.Tensor,
        stage: Stage,
    ) -> tuple[MemoryProfile, int]:
        """What the graphs of a ladder would take, captured largest first over one arena, and the
        bytes of that arena, which such a profile does not see. Graphs without buffers or an example
        are left out, as `capture` drops them. Nothing is kept."""
        planned = list(_all_that_can(self._planned, _largest_first(ladder)))
        arena = self._allocate(planned, output)
        notes = ModuleNotes(self._adapter.modules())

        def staged(each: tuple[Capacity, Layout]) -> CaptureRequest:
            return self._staged_late(each, arena, stage, notes)

        try:
            requests = list(_all_that_can(staged, planned))
            profile = self._platform.profile_memory(requests)
        finally:
            notes.put_back()
        asked = {request.key for request in requests}
        if not isinstance(profile, MemoryProfile) or not asked.issuperset(profile.per_graph):
            wanted = "a MemoryProfile of the graphs it was asked for"
            raise _wrong_answer("graphhal_profile_memory", wanted, profile)
        return profile, arena.num_bytes

    def _planned(self, capacity: Capacity) -> tuple[Capacity, Layout]:
        return capacity, Layout.of(self._adapter, capacity)

    def _staged_late(
        self, planned: tuple[Capacity, Layout], arena: Arena, stage: Stage, notes: ModuleNotes
    ) -> CaptureRequest:
        """A request that stages its example again in its first warm-up: until then the requests
        made after it have left theirs in the shared arena, and the one captured before it what it
        noted on its modules."""
        capacity, layout = planned
        request = self._request(capacity, layout, arena, stage, notes)
        staged = False

        def forward() -> None:
            nonlocal staged
            if not staged:
                notes.put_back()
                stage(capacity, layout, request.inputs, request.packed)
                staged = True
            request.forward()

        return replace(request, forward=forward, warmups=max(2, request.warmups))

    def _try(
        self,
        capacity: Capacity,
        layout: Layout,
        arena: Arena,
        attempt: "_Attempt",
    ) -> CaptureError | None:
        """Capture one graph; the reason where it cannot be kept."""
        started = perf_counter()
        try:
            notes = ModuleNotes(self._adapter.modules())
            request = self._request(capacity, layout, arena, attempt.stage, notes)
            with self.reference_step(request.inputs):
                staged = request.packed.clone()
            try:
                graph = self._captured(request)
            finally:
                notes.put_back()
            with self.reference_step(request.inputs):
                writes_packed = not torch.equal(request.packed, staged)
        except CaptureError as error:
            log.debug("%s: capture failed", capacity.key, exc_info=True)
            return error
        except torch.OutOfMemoryError as error:
            return ResourceExhaustedError(f"out of memory while capturing: {error}")
        except Exception as error:
            log.debug("%s: capture failed", capacity.key, exc_info=True)
            return CaptureError(f"{type(error).__name__}: {error}")
        kept = notes.attributes()
        if self._adapter.whole_model:  # a host's caches are among them; encoders read none
            kept = ()
        entry = Entry(capacity, layout, graph, writes_packed, kept)
        limit = attempt.limit_bytes
        fits = limit is None or self.num_bytes + graph.num_bytes <= limit
        attempt.tried.append((capacity, graph.num_bytes))
        if not fits:
            self._release([graph])
            return CaptureError(f"memory_limit: it would take more than {limit} bytes")
        self._pool = graph.pool
        self.entries[capacity.key] = entry
        attempt.report.captured.append(
            Captured(capacity.key, graph.num_bytes, perf_counter() - started)
        )
        return None

    def _captured(self, request: CaptureRequest) -> CapturedGraph:
        graph = self._platform.capture(request)
        if not isinstance(graph, CapturedGraph) or not isinstance(graph.num_bytes, int):
            raise _wrong_answer("graphhal_capture", "a CapturedGraph of so many bytes", graph)
        return graph

    def _agreed(self, key: GraphKey, problem: CaptureError | None) -> CaptureError | None:
        """The problem of any rank: a graph that one rank lacks, none of them keeps."""
        if self._peers.size == 1:
            return problem
        exhausted = isinstance(problem, ResourceExhaustedError)
        own = None if problem is None else str(problem)
        stop = any(self._peers.exchange(f"exhausted at {key}", exhausted))
        found = self._peers.first_problem(f"capture of {key}", own)
        if found is None:
            return None
        self.drop(key)
        return ResourceExhaustedError(found) if stop else CaptureError(found)

    def _shrink(self, attempt: "_Attempt") -> None:
        """Give the arenas back where no graph reads them: a smaller graph gets smaller ones."""
        if not self.entries:
            self.arena = None
            self._pool = None
            attempt.tried.clear()

    def _make_arena(
        self, planned: Sequence[tuple[Capacity, Layout]], output: torch.Tensor
    ) -> CaptureError | None:
        """Allocate the arenas where none are; the reason where the largest graph's do not fit."""
        try:
            if self.arena is None:
                self.arena = self._allocate(planned, output)
        except CaptureError as error:
            return error
        except RuntimeError as error:  # torch.OutOfMemoryError is one; a host's allocator has none
            return ResourceExhaustedError(f"out of memory for its inputs and outputs: {error}")
        return None

    def _allocate(self, planned: Sequence[tuple[Capacity, Layout]], output: torch.Tensor) -> Arena:
        """The arenas, filled with zeros."""
        device, tokens = self._adapter.device, max(capacity.tokens for capacity, _ in planned)
        there = {"device": torch.empty(0, device=device)}  # which one, for the platform
        with self.reference_step(there):
            return Arena(
                device,
                max(layout.bulk_bytes for _, layout in planned),
                max(layout.packed_bytes for _, layout in planned),
                torch.zeros((tokens, output.shape[1]), dtype=output.dtype, device=device),
            )

    def _request(
        self,
        capacity: Capacity,
        layout: Layout,
        arena: Arena,
        stage: Stage,
        notes: ModuleNotes,
    ) -> CaptureRequest:
        inputs = layout.bulk_views(arena.bulk) | layout.packed_views(arena.packed)
        output = arena.output[: capacity.tokens]
        bounds = {name: bound.max_seqlen for name, bound in capacity.sequences.items()}
        adapter = self._adapter

        def forward() -> None:
            notes.take()
            with torch.no_grad():
                write_levels(adapter.forward(inputs, bounds), output, adapter.name)

        packed = arena.packed[: layout.packed_bytes]
        boundaries = stage(capacity, layout, inputs, packed)
        return CaptureRequest(
            key=capacity.key,
            forward=forward,
            inputs=inputs,
            packed=packed,
            output=output,
            boundaries=boundaries,
            warmups=self._settings.warmups,
            pool=self._pool,
            device=self._adapter.device,
        )


def _all_that_can(make: Callable[[_Given], _Made], given: Iterable[_Given]) -> Iterator[_Made]:
    """What is made of each, but for those where that fails."""
    for each in given:
        try:
            made = make(each)
        except Exception:
            log.debug("left out of the memory profile: %s", each, exc_info=True)
        else:
            yield made


def _wrong_answer(hook: str, wanted: str, got: object) -> PluginError:
    return PluginError(f"{hook} must return {wanted}, got {got!r:.100}")


def _largest_first(ladder: Sequence[Capacity]) -> list[Capacity]:
    return sorted(ladder, key=lambda c: (c.rows, c.tokens, c.key), reverse=True)
