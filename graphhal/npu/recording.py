"""A captured graph of torch_npu, which is freed only when the device is done with it."""

import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from graphhal.npu.task_update import Lane, TaskUpdates

_kept: list[tuple[Any, TaskUpdates]] = []


@dataclass(slots=True)
class Recording:
    """A captured graph and its updates, which hold what both read."""

    graph: Any
    lane: Lane
    updates: TaskUpdates

    def keep(self) -> None:
        """Hold the graph until the device is done with it."""
        _kept.append((self.graph, self.updates))

    def __del__(self) -> None:
        """Dropped without a release, maybe while the device runs it."""
        if not sys.is_finalizing() and not self.updates.is_done():
            self.keep()


def free_finished() -> None:
    """Free the graphs that were kept and that the device has finished."""
    for pair in [pair for pair in _kept if pair[1].is_done()]:
        _kept.remove(pair)
        discard(pair[0])


def discard(graph: Any) -> None:
    """Free a graph, whatever state it is in."""
    with suppress(RuntimeError):
        graph.reset()
