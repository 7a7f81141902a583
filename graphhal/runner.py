"""`EncoderGraphs`: captures an encoder's ladder and serves requests by replay, or eagerly."""

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from threading import RLock
from typing import Any
from weakref import WeakSet

import torch

from graphhal.adapter import EncoderAdapter, refuse_hidden_methods, refuse_misplaced, wrong_answer
from graphhal.cost_table import CostTable
from graphhal.errors import (
    AdapterError,
    RefusedError,
    ReplayError,
    SettingsError,
)
from graphhal.execution import (
    Execution,
    GroupOutput,
    NestedReplayError,
    OuterCaptureError,
    PreparedReplay,
)
from graphhal.graph_set import CaptureReport, Dropped, GraphSet, Progress
from graphhal.group_plans import GroupPlan, GroupPlans, check_items, no_specs
from graphhal.items import ItemSpec
from graphhal.outputs import split_items, token_starts
from graphhal.peers import Peers
from graphhal.plan import Capacity, Eager, GraphKey, MissReason, Planner, by_path
from graphhal.platform import MemoryProfile, Platform
from graphhal.settings import Settings
from graphhal.start_up import StartUp
from graphhal.stats import Statistics
from graphhal.weights import WeightWatch

log = logging.getLogger(__name__)

_all: WeakSet["EncoderGraphs"] = WeakSet()


def _free_locks() -> None:
    """In a forked process: the thread that held a lock is not there to let go of it, nor to finish
    what it had staged."""
    for graphs in _all:
        graphs._lock = RLock()
        graphs._execution.start_over()


os.register_at_fork(after_in_child=_free_locks)


class EncoderGraphs:
    """Serves one encoder: captured graphs where they hold a group, eager where they do not.

    Args:
        adapter: the encoder.
        platform: the active platform, from `graphhal.open_platform`.
        settings: options; by default from the environment.
        peers: the ranks that serve the same encoder together (tensor-parallel weights); they
            capture alike and take the same decision for every group. By default this one alone.

    Every tensor that `run` returns belongs to the caller; no later replay overwrites it. The items
    of a request are views of one tensor, as they are after an eager call. A caller's autocast does
    not apply: graphs have the dtypes of their capture, and eager calls the same. Safe to call from
    several threads, one request at a time.

    Raises:
        SettingsError: `memory_limit` is a fraction, and the platform does not know free memory.
        AdapterError: an attribute of the adapter hides one of its methods, or its tower is on
            another device than the platform's.
    """

    def __init__(
        self,
        adapter: EncoderAdapter,
        platform: Platform,
        settings: Settings | None = None,
        peers: Peers | None = None,
    ) -> None:
        self.adapter = adapter
        self.platform = platform
        self.settings = settings or Settings()
        self.peers = peers or Peers()
        self.statistics = Statistics()
        self.report = CaptureReport()
        self._lock = RLock()
        if isinstance(self.settings.memory_limit, float) and platform.info.free_bytes is None:
            raise SettingsError(
                f"memory_limit is a fraction, but platform {platform.info.name} cannot say how "
                "much memory is free; set bytes"
            )
        refuse_hidden_methods(adapter)
        refuse_misplaced(adapter, platform)
        adapter.prepare(platform)
        self._execution = Execution(adapter, platform)
        self._graphs = GraphSet(adapter, platform, self.settings, self.peers)
        self._watch: WeightWatch | None = None
        self._costs: CostTable | None = None
        self._output_kind: tuple[int, torch.dtype] | None = None
        self._plan_with_graphs()
        _all.add(self)

    def ladder(self) -> tuple[Capacity, ...]:
        """Every graph that these settings ask for, captured or not.

        Raises:
            AdapterError: the adapter offers no capacities, or two of one key.
        """
        offered = self.adapter.capacities(self.settings)
        ladder = tuple(offered) if isinstance(offered, Iterable) else None
        if ladder is None or not all(isinstance(capacity, Capacity) for capacity in ladder):
            raise wrong_answer(self.adapter, "capacities", "a tuple of Capacity", offered)
        if len({capacity.key for capacity in ladder}) < len(ladder):
            keys = ", ".join(str(capacity.key) for capacity in ladder)
            raise AdapterError(f"{self.adapter.name}: every capacity needs its own key, got {keys}")
        return ladder

    def capture(
        self, progress: Progress | None = None, keys: Sequence[GraphKey] | None = None
    ) -> CaptureReport:
        """Capture the ladder, largest first, check it, and serve from it.

        Captured before: everything is released and captured anew. Never raises for a graph that
        cannot be had; the report names it and its inputs run eagerly.

        Args:
            progress: called with (done, total, key) after each graph.
            keys: capture only these of the ladder.

        Raises:
            SettingsError: a key is none of the ladder's.
        """
        with self._lock:
            ladder = self._asked_for(keys)  # before all is released: a mistake costs no graph
            self.clear()
            try:
                ready = self._start_up().capture(ladder, progress)
            except BaseException:
                self.clear()  # half a ladder, unchecked, must not serve
                raise
            self.report, self._watch, self._costs = ready.report, ready.watch, ready.costs
            self._plan_with_graphs()
            return self.report

    def run(self, mm_kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Encode a request: by replay where the plan says so, eagerly where it must.

        Returns:
            One (tokens, width) tensor per item, in order, owned by the caller; DeepStack levels
            stand side by side.

        Raises:
            InputError: an item is wrong; nothing was computed.
        """
        return self.run_items(mm_kwargs, self.adapter.item_specs(mm_kwargs))

    def run_items(
        self, mm_kwargs: Mapping[str, Any], items: tuple[ItemSpec, ...]
    ) -> list[torch.Tensor]:
        """As `run`, for some of a request's items: their `row_offset` says where their rows are,
        their `index` where they come in the result (0, 1, …)."""
        if not items:
            return self._nothing(items)
        with self._lock:
            return self._run(mm_kwargs, items, self._plans.of(items))

    def try_replay(self, mm_kwargs: Mapping[str, Any]) -> list[torch.Tensor] | None:
        """As `run`, but None, with a counted miss, where any item would run eagerly."""
        items = self.adapter.item_specs(mm_kwargs)
        with self._lock:
            outputs = self.replay_items(mm_kwargs, items)
            if isinstance(outputs, MissReason):
                self.statistics.count_misses(items, outputs)
                return None
            self.statistics.count_hits(items)
            return outputs

    def miss_reason(self, items: tuple[ItemSpec, ...]) -> MissReason | None:
        """Why the plan of these items runs any of them eagerly; None where it replays all."""
        with self._lock:
            return self._plans.of(items).miss_reason() if items else None

    def replay_items(
        self, mm_kwargs: Mapping[str, Any], items: tuple[ItemSpec, ...]
    ) -> list[torch.Tensor] | MissReason:
        """As `try_replay`, for a caller that counts hits and misses itself: why any item would run
        eagerly."""
        if not items:
            return self._nothing(items)
        with self._lock:
            group = self._plans.of(items)
            reason = group.miss_reason()
            if reason is not None:
                return reason
            output = GroupOutput(group.starts[-1])
            for step in group.steps:
                if isinstance(step, PreparedReplay):
                    reason = self._replay(mm_kwargs, step, output)
                    if reason is not None:
                        return reason
            return split_items(output.filled(), group.starts)

    def run_eager(self, mm_kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The eager forward of the same adapter, uncounted: the reference of `run`. Items of
        several paths are a call for each path, as a host encodes them, and as `run` does."""
        items = self.adapter.item_specs(mm_kwargs)
        if not items:
            return self._nothing(items)
        with self._lock:
            check_items(self.adapter, items)
            starts = token_starts(items)
            output = GroupOutput(starts[-1])
            for _, part in by_path(items, self.adapter.path):
                self._execution.eager(mm_kwargs, part, starts, output)
            return split_items(output.filled(), starts)

    def check_weights(self) -> bool:
        """Whether the captured graphs still read the weights in use; clears them where not.

        Call it after a reload, or after waking from sleep, on every rank of `peers`; `run` looks by
        itself as well.
        """
        with self._lock:
            moved = self._watch is not None and self._watch.moved()
            # A rank's new weights may have got the old addresses; it must not replay alone.
            if not any(self.peers.exchange("weights moved", moved)):
                return True
            self._weights_moved()
            return False

    def output_kind(self) -> tuple[int, torch.dtype]:
        """Width and dtype of every output."""
        with self._lock:
            if self._output_kind is None:
                output = self._start_up().first_output(self.ladder())
                self._output_kind = (output.shape[1], output.dtype)
            return self._output_kind

    def profile_memory(self) -> MemoryProfile:
        """What capturing the ladder would take, measured, arenas included, graphs beyond
        `memory_limit` left out; nothing is kept."""
        with self._lock:
            return self._start_up().profile_memory(self.ladder())

    def keys(self) -> list[GraphKey]:
        """Graphs that can be replayed now."""
        with self._lock:
            return sorted(self._graphs.entries)

    def stats(self) -> dict[str, Any]:
        """Counters, graphs and memory as plain data; see `graphhal.stats.Statistics.as_dict`."""
        with self._lock:
            return {
                "adapter": self.adapter.name,
                "platform": self.platform.info.name,
                "policy": str(self.settings.policy),
                **self.statistics.as_dict(),
                "graph_count": len(self._graphs.entries),
                "graph_bytes": self._graphs.num_bytes,
                "capture": self.report.as_dict(),
            }

    def drop(self, key: GraphKey, reason: str) -> None:
        """Stop using one graph; its inputs run in a larger one, or eagerly."""
        with self._lock:
            if key not in self._graphs.entries:
                return
            try:
                self._graphs.drop(key)
            finally:  # no plan may name a graph that is gone, also after an interrupt
                self.report.drop(key, reason)
                self._plan_with_graphs()

    def clear(self) -> None:
        """Release every graph; requests run eagerly until the next `capture`. Safe twice."""
        with self._lock:
            try:
                self._graphs.close()
            finally:  # as above
                self._execution.forget()
                self._watch = None
                self._costs = None
                self.report = CaptureReport()
                self._plan_with_graphs()

    def _asked_for(self, keys: Sequence[GraphKey] | None) -> list[Capacity]:
        offered = {capacity.key: capacity for capacity in self.ladder()}
        unknown = [] if keys is None else [str(key) for key in keys if key not in offered]
        if unknown:
            raise SettingsError(
                f"{self.adapter.name} offers no graph {unknown[0]} under these settings; its "
                f"ladder: {', '.join(map(str, offered))}"
            )
        return [capacity for key, capacity in offered.items() if keys is None or key in keys]

    def _start_up(self) -> StartUp:
        return StartUp(
            self.adapter, self.platform, self.settings, self.peers, self._execution, self._graphs
        )

    def _nothing(self, items: object) -> list[torch.Tensor]:
        """The outputs of no items, unless an adapter forgot to return what it found."""
        if not isinstance(items, tuple | list):
            raise no_specs(self.adapter, items)
        return []

    def _run(
        self, mm_kwargs: Mapping[str, Any], items: tuple[ItemSpec, ...], group: GroupPlan
    ) -> list[torch.Tensor]:
        output = GroupOutput(group.starts[-1])
        missed: set[int] = set()
        for step in group.steps:
            reason = (
                step.reason if isinstance(step, Eager) else self._replay(mm_kwargs, step, output)
            )
            if reason is not None:
                self._execution.eager(mm_kwargs, step.items, group.starts, output)
                first_time = {item.index for item in step.items} - missed
                self.statistics.count_misses((items[i] for i in sorted(first_time)), reason)
                missed |= first_time
        self.statistics.count_hits(
            [item for item in items if item.index not in missed] if missed else items
        )
        return split_items(output.filled(), group.starts)

    def _replay(
        self, mm_kwargs: Mapping[str, Any], step: PreparedReplay, output: GroupOutput
    ) -> MissReason | None:
        """Replay one step; the reason where it must run eagerly after all."""
        watch = self._watch
        if watch is not None and self._moved(watch):
            self._weights_moved()
            # Beside ranks that replay, an eager call would meet their collectives in other shapes.
            self.peers.all_have("weights moved", True)
            return MissReason.WEIGHTS_MOVED
        capacity = step.entry.capacity
        if capacity.key not in self._graphs.entries:  # an earlier step of this group lost it
            moved = self._without is MissReason.WEIGHTS_MOVED
            return self._without if moved else MissReason.REPLAY_FAILED
        try:
            self._execution.replay(mm_kwargs, step, output)
        except OuterCaptureError:
            return MissReason.OUTER_CAPTURE
        except NestedReplayError:
            return MissReason.NESTED
        except RefusedError as refused:
            if self.peers.size > 1 and isinstance(refused.__cause__, torch.OutOfMemoryError):
                raise  # of this rank alone, as below; other reasons are every rank's
            log.debug("graph %s: %s", capacity.key, refused)
            return MissReason.REFUSED
        except ReplayError as error:
            if self.peers.size > 1:
                raise  # the other ranks replay: an eager call here would miss their collectives
            if watch is not None and watch.outdated():
                self._weights_moved()
                return MissReason.WEIGHTS_MOVED
            log.exception("graph %s: its inputs run eagerly from now on", capacity.key)
            self._execution.forget()
            self.drop(capacity.key, f"replay failed: {error}")
            return MissReason.REPLAY_FAILED
        if watch is not None and watch.outdated():
            self._weights_moved()
            return MissReason.WEIGHTS_MOVED  # the output is computed again, eagerly
        self.statistics.count_replay(step.label, step.rows, capacity.rows)
        return None

    def _moved(self, watch: WeightWatch) -> bool:
        """Ranks look at everything before each launch: a sample could differ between them."""
        return watch.unsafe_to_launch() if self.peers.size == 1 else watch.moved()

    def _weights_moved(self) -> None:
        reason = (
            "weights were rebound after capture, or modules hooked or patched; capture again to "
            "use graphs"
        )
        log.warning("%s: %s", self.adapter.name, reason)
        keys = list(self._graphs.entries)
        self.clear()
        self.report.dropped = [Dropped(key, reason) for key in keys]
        self._plan_with_graphs(MissReason.WEIGHTS_MOVED)

    def _plan_with_graphs(self, without: MissReason = MissReason.NO_GRAPHS) -> None:
        """Plan anew; `without` is why items miss where no graph is there."""
        self._without = without
        planner = Planner(
            [entry.capacity for entry in self._graphs.entries.values()],
            self.settings.policy,
            self.adapter.path,
            self.adapter.refusal,
            exact_only=self.settings.exact_only,
            allow_empty=self.platform.info.allow_empty,
            costs=self._costs,
            without=without,
        )
        self._plans = GroupPlans(self.adapter, self._execution, planner, self._graphs.entries)
