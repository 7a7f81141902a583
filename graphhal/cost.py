"""What replays and eager calls take on this card, measured at start-up for `measured`."""

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

from graphhal.adapter import EncoderAdapter
from graphhal.execution import Execution, GroupOutput
from graphhal.graph_set import GraphSet
from graphhal.outputs import token_starts
from graphhal.plan import CostTable, GraphKey

REPEATS = 5
"""Timed calls of each kind, after one that is not; their median counts."""


def measure(adapter: EncoderAdapter, execution: Execution, graphs: GraphSet) -> CostTable:
    """Time every graph exactly full, and the eager call of the same items, staging included."""
    replay_ms: dict[GraphKey, float] = {}
    eager_ms: dict[str, list[tuple[int, float]]] = {}
    for entry in graphs.entries.values():
        items = execution.fullest(entry.capacity)
        starts = token_starts(items)
        request = adapter.example(items, seed=2)
        step = execution.prepare(entry, items, starts)

        def replay() -> None:
            execution.forget()
            execution.replay(request, step, GroupOutput(starts[-1]))  # noqa: B023  (called at once)

        def eager() -> None:
            execution.eager(request, items, starts, GroupOutput(starts[-1]))  # noqa: B023  (same)

        replay_ms[entry.capacity.key] = _median_ms(replay, adapter.device)
        rows = sum(item.rows for item in items)
        eager_ms.setdefault(entry.capacity.key.path, []).append(
            (rows, _median_ms(eager, adapter.device))
        )
    return CostTable(replay_ms, {path: tuple(sorted(p)) for path, p in eager_ms.items()})


def _median_ms(call: Callable[[], None], device: torch.device) -> float:
    times = []
    for _ in range(1 + REPEATS):
        synchronize(device)
        started = perf_counter()
        call()
        synchronize(device)
        times.append((perf_counter() - started) * 1e3)
    return median(times[1:])


def synchronize(device: torch.device) -> None:
    """Wait for the device; nothing to wait for on the host."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
