"""Measures at start-up what replays and eager calls take on this card, for policy `measured`."""

from collections.abc import Callable, Hashable, Sequence
from statistics import median
from time import perf_counter

import torch

from graphhal.adapter import EncoderAdapter
from graphhal.cost_table import CostTable, Timing
from graphhal.execution import Execution, GroupOutput
from graphhal.graph_set import Entry, GraphSet
from graphhal.items import ItemSpec
from graphhal.outputs import token_starts
from graphhal.plan import Capacity

REPEATS = 3
"""Timed calls of each kind, after one that is not; their median counts."""
NEARLY_FULL = 0.75
"""Share of a graph's rows that a case must fill to say what the full graph takes."""
ALIKE = 0.03
"""Rows that two eager calls may differ by, as a share, to be timings of one size."""
EAGER_EVERY = 3
"""Eager calls are measured for one graph in so many: their time changes slowly with size."""


def measure(adapter: EncoderAdapter, execution: Execution, graphs: GraphSet) -> CostTable:
    """Time graphs, and eager calls of the same items, with long and with short sequences."""
    replays: dict[Hashable, tuple[Timing, ...]] = {}
    eager: dict[str, dict[int, tuple[Timing, ...]]] = {}
    paths: dict[str, list[Entry]] = {}
    for entry in sorted(graphs.entries.values(), key=lambda e: e.capacity.rows):
        paths.setdefault(entry.capacity.key.path, []).append(entry)
    for path, entries in paths.items():
        for number, entry in enumerate(entries):
            cases = _extremes(execution, entry)
            replays[entry.capacity.key] = tuple(
                _timing(
                    entry.capacity,
                    items,
                    _replay_call(adapter, execution, graphs, entry, items),
                    graphs,
                    entry,
                )
                for items in cases
            )
            if number % EAGER_EVERY == 0 or number == len(entries) - 1:
                rows = sum(item.rows for item in cases[0])
                eager.setdefault(path, {})[rows] = tuple(
                    # Priced without padding, as the plan prices an eager call.
                    _timing(
                        Capacity.of(items, entry.capacity.key),
                        items,
                        _eager_call(adapter, execution, items),
                        graphs,
                        entry,
                    )
                    for items in cases
                    if abs(sum(item.rows for item in items) - rows) <= rows * ALIKE
                )
    return CostTable(replays, eager)


def _extremes(execution: Execution, entry: Entry) -> list[tuple[ItemSpec, ...]]:
    """The nearly full cases with the most and the least attention work."""
    capacity = entry.capacity
    full = [
        items
        for items in execution.worst_cases(capacity)
        if sum(item.rows for item in items) >= NEARLY_FULL * capacity.rows
    ] or [execution.fullest(capacity)]
    heavy = max(full, key=capacity.attention_work)
    light = min(full, key=capacity.attention_work)
    return [heavy] if light is heavy else [heavy, light]


def _timing(
    capacity: Capacity,
    items: Sequence[ItemSpec],
    call: Callable[[], None],
    graphs: GraphSet,
    entry: Entry,
) -> Timing:
    request, times = entry.graph.request, []
    for _ in range(1 + REPEATS):
        # A wait for the device would end another thread's capture: a platform's step keeps it off.
        with graphs.reference_step(request.inputs):
            synchronize(request.device)
            started = perf_counter()
            call()
            synchronize(request.device)
            times.append((perf_counter() - started) * 1e3)
    return Timing(capacity.attention_work(items), median(times[1:]))


def _replay_call(
    adapter: EncoderAdapter,
    execution: Execution,
    graphs: GraphSet,
    entry: Entry,
    items: tuple[ItemSpec, ...],
) -> Callable[[], None]:
    starts = token_starts(items)
    request = adapter.example(items, seed=2)
    step = execution.prepare(entry, items, starts)

    def call() -> None:
        execution.forget()
        with graphs.reference_step(entry.graph.request.inputs):  # as the eager calls: it may wait
            execution.replay(request, step, GroupOutput(starts[-1]))

    return call


def _eager_call(
    adapter: EncoderAdapter, execution: Execution, items: tuple[ItemSpec, ...]
) -> Callable[[], None]:
    starts = token_starts(items)
    request = adapter.example(items, seed=2)

    def call() -> None:
        execution.eager(request, items, starts, GroupOutput(starts[-1]), "reference")

    return call


def synchronize(device: torch.device) -> None:
    """Wait for the device; nothing to wait for on the host."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
