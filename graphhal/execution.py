"""One step of a request on the device: a replay or an eager call, with its staging and copy-out."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

from graphhal.adapter import EncoderAdapter, wrong_answer
from graphhal.arena import Layout, host_block
from graphhal.boundaries import Boundaries
from graphhal.errors import AdapterError, CaptureError, ReplayError
from graphhal.graph_set import Entry
from graphhal.items import ItemSpec
from graphhal.outputs import as_levels, runs, write_levels
from graphhal.plan import Capacity, GraphKey
from graphhal.platform import HostUpdate, Platform, StepScope

log = logging.getLogger(__name__)


class OuterCaptureError(Exception):
    """No replay may happen now: another capture is running on the caller's stream."""


class NestedReplayError(Exception):
    """No replay may happen now: this thread is within another, whose inputs lie staged."""


@dataclass(frozen=True, slots=True)
class PreparedReplay:
    """Everything about a replay that depends on sizes alone, kept for equal sizes."""

    entry: Entry
    items: tuple[ItemSpec, ...]
    stage: Callable[[Mapping[str, Any]], None]
    update: HostUpdate
    copies: tuple[tuple[torch.Tensor, int, int], ...]
    whole: torch.Tensor | None
    label: str
    rows: int


@dataclass(slots=True)
class GroupOutput:
    """The output of a whole group, filled step by step; allocated by the first step."""

    tokens: int
    tensor: torch.Tensor | None = None

    def filled(self) -> torch.Tensor:
        """The (tokens, width) output, after every step has run."""
        if self.tensor is None:
            raise AdapterError("a plan without steps has no output")
        return self.tensor


@dataclass(frozen=True, slots=True)
class _PlainScope:
    """The caller's stream as it is, where the platform enters no step (an outer capture runs)."""

    device: torch.device

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)


_NOTHING = nullcontext()


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A graph computes in the dtypes of its capture, so neither what stages its inputs nor an eager
    call may follow autocast."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return _NOTHING


def _without_gradients() -> AbstractContextManager[None]:
    """No gradients are recorded; a server has switched them off already, and pays nothing here."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


class Execution:
    """Runs steps of one adapter on one platform. Not thread-safe: the runner holds a lock."""

    def __init__(self, adapter: EncoderAdapter, platform: Platform) -> None:
        self._adapter = adapter
        self._platform = platform
        self._update_first = platform.info.boundary_order == "before"
        self._persist = platform.info.boundaries_persist
        self._clones = "ordinary_outputs" in platform.info.capabilities
        self._on_device: HostUpdate | None = None
        self._outer: list[HostUpdate] = []
        self._replaying = False
        self._told_of: set[torch.dtype] = set()

    def forget(self) -> None:
        """The packed buffer no longer holds what the last replay put there."""
        self._on_device = None

    def start_over(self) -> None:
        """In a forked process: the thread that was within a replay is not there."""
        self.forget()
        self._replaying = False

    def worst_cases(self, capacity: Capacity) -> Iterator[tuple[ItemSpec, ...]]:
        """The adapter's worst cases that this platform's attention can take, fullest first."""
        for items in self._adapter.worst_cases(capacity):
            if self.fits(capacity, items):
                yield items

    def fits(self, capacity: Capacity, items: Sequence[ItemSpec]) -> bool:
        """Whether a graph of this capacity can hold the items on this platform."""
        return capacity.misfit(items, self._platform.info.allow_empty) is None

    def fullest(self, capacity: Capacity) -> tuple[ItemSpec, ...]:
        """The worst case that fills the graph most.

        Raises:
            CaptureError: the adapter has none that fits.
        """
        for items in self.worst_cases(capacity):
            return items
        raise CaptureError(f"{capacity.key}: no worst case of {self._adapter.name} fits")

    def _capture_case(self, capacity: Capacity) -> tuple[ItemSpec, ...]:
        # Kernels that take boundaries themselves are captured, and sized, with the longest ones.
        items = self._adapter.capture_case(capacity) if self._update_first else None
        if items is None or not self.fits(capacity, items):
            return self.fullest(capacity)
        return items

    def prepare(
        self, entry: Entry, items: tuple[ItemSpec, ...], starts: Sequence[int]
    ) -> PreparedReplay:
        """Compute a replay's host data: boundaries and the packed block."""
        update = self._host_update(entry.capacity, entry.layout, items)
        label, rows = str(entry.capacity.key), sum(item.rows for item in items)
        output = entry.graph.request.output
        copies = tuple(
            (output[source : source + length], target, target + length)
            for source, target, length in runs(items, starts)
        )
        one = bool(copies) and copies[0][2] - copies[0][1] == starts[-1]
        whole = copies[0][0] if one else None
        stage = self._adapter.stager(items, entry.graph.request.inputs)
        if not callable(stage):
            raise wrong_answer(self._adapter, "stager", "a function", stage)
        return PreparedReplay(entry, items, stage, update, copies, whole, label, rows)

    def example(
        self,
        capacity: Capacity,
        layout: Layout,
        inputs: Mapping[str, torch.Tensor],
        packed: torch.Tensor,
    ) -> Mapping[str, Boundaries]:
        """Fill static inputs with the exactly full example; returns its boundaries."""
        items = self._capture_case(capacity)
        update = self._host_update(capacity, layout, items)
        example = self._adapter.example(items, seed=0)
        with self._platform.step("reference", None, inputs, update.boundaries) or _NOTHING:
            packed.copy_(update.block)
            self._adapter.stage(example, items, inputs)
        self._on_device = None
        return update.boundaries

    def replay(
        self, mm_kwargs: Mapping[str, Any], step: PreparedReplay, group: GroupOutput
    ) -> None:
        """Stage, replay and copy out; never waits for the device.

        Raises:
            OuterCaptureError: nothing was queued.
            NestedReplayError: nothing was queued; an adapter's `stage`, or a signal handler, asked.
            ReplayError: the platform failed, whatever it raised.
            RefusedError: the adapter's data does not fit; nothing was launched.
        """
        if self._replaying:
            raise NestedReplayError
        graph = step.entry.graph
        request = graph.request
        staging: Exception | None = None
        self._replaying = True
        try:
            entered = self._platform.step("replay", graph, request.inputs, step.update.boundaries)
            if entered is not None:
                autocast_off = without_autocast(self._adapter.device)
                with entered as scope, _without_gradients(), autocast_off:
                    try:
                        step.stage(mm_kwargs)
                    except Exception as error:
                        staging = error
                        raise
                    if self._update_first:
                        self._update(step.entry, step.update)
                    self._platform.replay(graph)
                    if not self._update_first:
                        self._update(step.entry, step.update)
                    self._copy_out(step, group, scope)
        except (ReplayError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if error is staging:
                raise  # the request's or the adapter's fault: an eager call would meet it too
            raise ReplayError(f"{graph.key}: {type(error).__name__}: {error}") from error
        finally:
            self._replaying = False
        if entered is None:
            raise OuterCaptureError

    def _copy_out(self, step: PreparedReplay, group: GroupOutput, scope: StepScope) -> None:
        if step.whole is not None and self._clones:
            group.tensor = step.whole.clone()
            return
        output = step.entry.graph.request.output
        if group.tensor is None:
            group.tensor = scope.empty((group.tokens, output.shape[1]), output.dtype)
        for source, start, end in step.copies:
            group.tensor[start:end].copy_(source)

    def eager(
        self,
        mm_kwargs: Mapping[str, Any],
        items: Sequence[ItemSpec],
        starts: Sequence[int],
        group: GroupOutput,
        kind: Literal["eager", "reference"] = "eager",
    ) -> None:
        """One eager call of the adapter's forward on exactly these items.

        Out of memory, it is tried once more: a platform that ran it inside the graphs' memory has
        emptied its caches by then and runs it outside.
        """
        try:
            self._eager(mm_kwargs, items, starts, group, kind)
        except torch.OutOfMemoryError:
            if kind == "reference":
                raise
            again = True
        else:
            again = False
        if again:  # outside the handler: the error's frames hold the first call's tensors
            self._eager(mm_kwargs, items, starts, group, kind)

    def _eager(
        self,
        mm_kwargs: Mapping[str, Any],
        items: Sequence[ItemSpec],
        starts: Sequence[int],
        group: GroupOutput,
        kind: Literal["eager", "reference"],
    ) -> None:
        adapter = self._adapter
        exact = Capacity.of(items, GraphKey(adapter.name, adapter.path(items[0]), 0))
        layout = Layout.of(adapter, exact)
        update = self._host_update(exact, layout, items)
        self._on_device = None  # a platform may keep the boundaries of the step it entered last
        packed = torch.empty(update.block.numel(), dtype=torch.uint8, device=adapter.device)
        # A platform reads off its inputs which device the step is on.
        inputs = layout.packed_views(packed) or {"": packed}
        entered = self._platform.step(kind, None, inputs, update.boundaries)
        if entered is None:
            self._outer.append(update)  # the outer graph copies from this block at every replay
        with (
            entered or nullcontext(_PlainScope(adapter.device)) as scope,
            torch.no_grad(),
            without_autocast(adapter.device),
        ):
            packed.copy_(update.block, non_blocking=kind == "eager")
            inputs.pop("", None)
            bulk = adapter.eager_inputs(mm_kwargs, items)
            if not isinstance(bulk, Mapping):
                raise wrong_answer(adapter, "eager_inputs", "tensors by name", bulk)
            inputs.update(bulk)
            bounds = {name: bound.max_seqlen for name, bound in exact.sequences.items()}
            levels = as_levels(adapter.forward(inputs, bounds), adapter.name)
            self._heed_dtype(levels[0].dtype)
            rows = len(levels[0])
            if rows != exact.tokens:
                raise AdapterError(
                    f"{adapter.name}: forward made {rows} tokens for items of {exact.tokens}; "
                    "count them in item_specs as the forward makes them"
                )
            width = sum(level.shape[1] for level in levels)
            copies = tuple(runs(items, starts))
            if group.tensor is None:
                group.tensor = scope.empty((group.tokens, width), levels[0].dtype)
            for source, target, length in copies:
                write_levels(
                    [level[source : source + length] for level in levels],
                    group.tensor[target : target + length],
                    adapter.name,
                )

    def _heed_dtype(self, dtype: torch.dtype) -> None:
        """Outputs come as the forward makes them; who believes the adapter is told, once."""
        if dtype != self._adapter.dtype and dtype not in self._told_of:
            self._told_of.add(dtype)
            log.warning(
                "%s: its outputs are %s, but its dtype is %s; set that to what forward returns",
                self._adapter.name,
                dtype,
                self._adapter.dtype,
            )

    def _update(self, entry: Entry, update: HostUpdate) -> None:
        if self._persist and self._on_device is update:
            return
        self._on_device = None
        self._platform.update_boundaries(entry.graph, update)
        if not entry.writes_packed:
            self._on_device = update

    def _host_update(
        self, capacity: Capacity, layout: Layout, items: Sequence[ItemSpec]
    ) -> HostUpdate:
        boundaries = capacity.boundaries(items, self._platform.info.allow_empty)
        metadata = self._adapter.metadata(items)
        if not isinstance(metadata, Mapping):
            raise wrong_answer(self._adapter, "metadata", "arrays by name", metadata)
        arrays = dict(metadata)
        for name, ends in boundaries.items():
            arrays[name] = ends.cu_seqlens
        block = layout.pack(arrays, host_block(layout.packed_bytes, self._adapter.device))
        return HostUpdate(boundaries, block)
