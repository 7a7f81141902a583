"""A captured graph of torch_npu, which is freed only when the device is done with it."""

import logging
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from graphhal.boundaries import Boundaries
from graphhal.errors import CaptureError
from graphhal.npu.lane import Lane
from graphhal.npu.task_update import TaskUpdates

log = logging.getLogger(__name__)

_kept: list[tuple[Any, TaskUpdates]] = []


@dataclass(slots=True)
class Recording:
    """A captured graph and its updates, which hold what both read."""

    graph: Any
    lane: Lane
    updates: TaskUpdates

    def try_out(self, boundaries: Mapping[str, Boundaries]) -> None:
        """Queue a first replay, with the boundaries of the capture."""
        names = {task.boundary_set for task in self.updates.tasks}
        self.updates.queue({name: boundaries[name].actual_seq_lengths for name in names})
        self.updates.launch(self.graph)

    def free(self, what: str) -> None:
        """Free the graph; one that the device does not finish in time is kept until it does."""
        try:
            self.lane.wait_for(self.updates, what)
            self.graph.reset()
        except (RuntimeError, CaptureError) as error:
            # Its text alone: who keeps the line would keep the graph, by the error's frames.
            log.warning("%s: the graph is not freed yet: %s", what, str(error))
            self.keep()

    def keep(self) -> None:
        """Hold the graph until the device is done with it. Safe twice."""
        pair = (self.graph, self.updates)
        if pair not in _kept:
            _kept.append(pair)

    def __del__(self) -> None:
        """Dropped without a release, maybe while the device runs it, or within a capture."""
        if sys.is_finalizing() or (self.lane.may_free and self.updates.is_done()):
            return
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
