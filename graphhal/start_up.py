"""What happens once, before requests: an example's output, capture, self-check, costs."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from graphhal import cost, self_check
from graphhal.adapter import EncoderAdapter, wrong_answer
from graphhal.cost_table import CostTable
from graphhal.errors import AdapterError, CaptureError
from graphhal.execution import Execution, GroupOutput, without_autocast
from graphhal.graph_set import CaptureReport, Dropped, GraphSet, Progress
from graphhal.outputs import token_starts
from graphhal.peers import Peers
from graphhal.plan import Capacity
from graphhal.platform import MemoryProfile, Platform
from graphhal.settings import Policy, Settings
from graphhal.weights import WeightWatch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ready:
    """What is left of start-up while requests are served.

    Attributes:
        report: what was captured, and what was not.
        watch: notices weights that move from now on; None where nothing was captured.
        costs: measured on this card, with policy `measured`.
    """

    report: CaptureReport
    watch: WeightWatch | None = None
    costs: CostTable | None = None


@contextmanager
def _mode(device: torch.device) -> Iterator[None]:
    """For what makes static buffers and graphs, whatever mode the host is in: buffers born in
    inference mode could not be staged outside of it, and a graph keeps autocast's dtypes."""
    with torch.inference_mode(False), torch.no_grad(), without_autocast(device):
        yield


class StartUp:
    """Captures a ladder into the graph set, as the settings of this moment say.

    Arguments are `EncoderGraphs`' own.
    """

    def __init__(
        self,
        adapter: EncoderAdapter,
        platform: Platform,
        settings: Settings,
        peers: Peers,
        execution: Execution,
        graphs: GraphSet,
    ) -> None:
        self._adapter = adapter
        self._platform = platform
        self._settings = settings
        self._peers = peers
        self._execution = execution
        self._graphs = graphs

    def capture(self, ladder: Sequence[Capacity], progress: Progress | None) -> Ready:
        """Capture these graphs, check them, and measure what the policy wants measured. Whatever
        is raised, half a ladder may be there."""
        for what, value in self._decides(ladder).items():
            self._peers.all_have(what, value)
        if not ladder:
            return Ready(CaptureReport())
        with _mode(self._adapter.device):
            ready = self._capture(ladder, progress)
            if self._moved_meanwhile(ready.watch):
                log.info("%s: its modules changed; captured again", self._adapter.name)
                self._graphs.close()
                ready = self._capture(ladder, progress)
        for line in ready.report.dropped_lines():
            log.warning("%s: %s", self._adapter.name, line)
        ready.report.num_bytes = self._graphs.num_bytes
        return ready

    def profile_memory(self, ladder: Sequence[Capacity]) -> MemoryProfile:
        """What capturing these graphs would take; nothing is kept."""
        if not ladder:
            return MemoryProfile(0, 0)
        with _mode(self._adapter.device):
            output = self.first_output(ladder)
            graphs, arenas = self._graphs.profile(ladder, output, self._execution.example)
            self._execution.forget()
            rows = {capacity.key: capacity.rows for capacity in ladder}
            return graphs.kept_within(self._limit(), arenas, rows)

    def first_output(self, ladder: Sequence[Capacity]) -> torch.Tensor:
        """An eager output of the smallest graph that has an example: tells the static output's
        width and dtype.

        Raises:
            CaptureError: there are no graphs, or the smallest has no worst case that fits, and no
                other has an example.
            Exception: what its example raised.
        """
        first: Exception | None = None
        for capacity in sorted(ladder, key=_by_size):
            try:
                return self._example_output(capacity)
            except Exception as error:  # noqa: BLE001  (raised below, where no graph does better)
                first = first or error
        raise first or CaptureError(f"{self._adapter.name} offers no graphs")

    def _example_output(self, capacity: Capacity) -> torch.Tensor:
        items = self._execution.fullest(capacity)
        starts = token_starts(items)
        output = GroupOutput(starts[-1])
        example = self._adapter.example(items, seed=0)
        self._execution.eager(example, items, starts, output, "reference")
        return output.filled()

    def _capture(self, ladder: Sequence[Capacity], progress: Progress | None) -> Ready:
        example, reason = None, self._no_collectives()
        if reason is None:
            example, reason = self._example(ladder)
        if example is None:
            dropped = [Dropped(capacity.key, str(reason)) for capacity in ladder]
            return Ready(CaptureReport(dropped=dropped))
        output, watch = example
        report = self._graphs.capture(
            ladder, output, self._execution.example, self._limit(), progress
        )
        self._execution.forget()
        self._check(report)
        costs = self._measured() if self._settings.policy is Policy.MEASURED else None
        watch.settle()
        if self._adapter.device.type != "cpu":
            # Where it waits for the device, and that fails or never ends.
            with suppress(RuntimeError, CaptureError), self._graphs.reference_step({"": output}):
                torch.accelerator.empty_cache()  # what references took is the host's again
        return Ready(report, watch, costs)

    def _no_collectives(self) -> str | None:
        """Why a tower that is spread over ranks must run eagerly as a whole, or None."""
        info = self._platform.info
        if not self._adapter.collectives or "collectives" in info.capabilities:
            return None
        return f"platform {info.name} cannot capture collectives, and this tower runs some"

    def _example(
        self, ladder: Sequence[Capacity]
    ) -> tuple[tuple[torch.Tensor, WeightWatch] | None, str | None]:
        """The output of the smallest graph's example and what the tower was like after it, or why
        there is none. Where it fails as others do not, as where a graph is too small for any item,
        the next larger one's."""
        first: str | None = None
        for capacity in sorted(ladder, key=_by_size):
            found, problem = None, None
            try:
                self._adapter.forget()
                output = self._example_output(capacity)
                # After the first forward: it may have made what it keeps between calls.
                found = output, self._watch()
            except (AdapterError, CaptureError) as error:
                problem = str(error)
            except Exception as error:
                log.debug("%s: first output failed", self._adapter.name, exc_info=True)
                problem = f"an eager example failed: {type(error).__name__}: {error}"
            problem = self._peers.first_problem("first output", problem)
            if problem is None:
                return found, None
            first = first or problem
        return None, first

    def _watch(self) -> WeightWatch:
        adapter = self._adapter
        modules = adapter.modules()
        if not isinstance(modules, Iterable):
            raise wrong_answer(adapter, "modules", "a tuple of modules", modules)
        return WeightWatch(modules, adapter.places(), attributes=not adapter.whole_model)

    def _moved_meanwhile(self, watch: WeightWatch | None) -> bool:
        """Whether a forward replaced weights or buffers while the ladder was captured, as tables of
        positions that grow: no graph would serve."""
        moved = bool(self._graphs.entries) and watch is not None and watch.moved()
        return any(self._peers.exchange("weights moved meanwhile", moved))

    def _decides(self, ladder: Sequence[Capacity]) -> dict[str, Any]:
        """What becomes of a group depends on its sizes and on these; ranks compare them."""
        info, settings = self._platform.info, self._settings
        return {
            "ladder to capture": [str(capacity.key) for capacity in ladder],
            "bounds of the ladder": [
                (capacity.rows, capacity.tokens, capacity.items, dict(capacity.sequences))
                for capacity in ladder
            ],
            "policy": str(settings.policy),
            "exact_only": settings.exact_only,
            "self_check": str(settings.self_check),
            "platform": info.name,
            "platform's allow_empty": info.allow_empty,
            "platform's collectives": "collectives" in info.capabilities,
        }

    def _limit(self) -> int | None:
        limits = self._peers.exchange("memory limit", self._own_limit())
        return min((each for each in limits if each is not None), default=None)

    def _own_limit(self) -> int | None:
        limit, free = self._settings.memory_limit, self._platform.info.free_bytes
        if not isinstance(limit, float):
            return limit
        if free is None:  # refused at construction
            return None
        device = self._adapter.device
        try:
            with torch.accelerator.device_index(None if device.type == "cpu" else device.index):
                return int(limit * free())
        except Exception as error:  # noqa: BLE001  (a third party's code: report it)
            log.warning(
                "%s: free device memory is unknown, no graphs: %r", self._adapter.name, error
            )
            return 0

    def _check(self, report: CaptureReport) -> None:
        """Drop what disagrees with eager."""
        started = perf_counter()
        found = self_check.check(
            self._adapter,
            self._execution,
            self._graphs,
            self._settings.self_check,
            self._settings.tolerance,
            report.seconds,
            self._peers,
        )
        for key, reason in found:
            self._graphs.drop(key)
            report.drop(key, reason)
        self._execution.forget()
        report.self_check_seconds = perf_counter() - started

    def _measured(self) -> CostTable:
        """Times of what is left; without costs, the plan replays whatever fits."""
        try:
            costs = cost.measure(self._adapter, self._execution, self._graphs)
        except Exception as error:
            log.warning("%s: costs could not be measured: %r", self._adapter.name, error)
            log.debug("", exc_info=True)
            costs = CostTable()
        costs = self._peers.exchange("measured costs", costs)[0]
        self._execution.forget()
        return costs


def _by_size(capacity: Capacity) -> tuple[int, int]:
    return capacity.rows, capacity.tokens
