"""Facts about graph task update, and the streams and order that follow from them.

- An attention task of a captured graph waits for its own flag, clears it, and runs. The host
  rewrites the task on another stream and sets the flag there: one write for each flag and replay.
- The flag is binary. Set twice before it is waited for, it counts once: the second replay hangs.
  Set early, it lets a replay run with the boundaries of the one before. So an update waits, on the
  device, for the previous replay of its graph; the host waits for nothing.

      update stream   ──wait(done n-1)──┬─ rewrite task 1, set flag 1 ─ … ─┬─ ready n ──
      replay stream   ──copy block n────┴──────────── wait(ready n) ───────┴─ replay n ─ done n ──

- A task that is rewritten after the replay passed it takes effect one replay late. So the replay
  waits for its update too. That also makes an update that failed half-way harmless: the next one
  rewrites every task before anything runs, and sets the flags that are not set yet. (It cannot
  clear the others: outside a capture, resetting an external event does nothing.)
- An operator that raises leaves the update open on its stream, and the runtime then refuses every
  other update of the process (107033). So lengths are checked before an update begins, and an
  update that fails is closed.
- A queued update names the graph, as a queued replay does: both must be over before it is freed.
  Where a failure came between, the two streams tell.
- Streams come from a pool of 32 that hands them out in turn. Two are taken once and kept: a new one
  per replay would sooner or later be somebody else's, the capture stream's included.
- Two threads that update in one process disturb each other, and so do two that queue work on one
  stream while one of them captures it: one lock for all captures, steps and updates.
"""

import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch_npu import npu

from graphhal.npu.acl_errors import capture_error, reached
from graphhal.npu.attention import AttentionTask
from graphhal.npu.lane import Lane

TASK_UPDATE = threading.RLock()
"""Held around every capture, step and update of this process; hold it around foreign updates."""

# In a forked process the thread that held it is not there to let go of it.
os.register_at_fork(after_in_child=TASK_UPDATE._at_fork_reinit)  # type: ignore[attr-defined]


@cache
def _lane(index: int) -> Lane:
    return Lane(index)


def lane_of(device: torch.device) -> Lane:
    """The lane of a device, made once per process.

    Raises:
        CaptureError: its streams cannot be had.
    """
    with TASK_UPDATE:
        try:
            return _lane(npu.current_device() if device.index is None else device.index)
        except RuntimeError as error:
            raise capture_error(error, f"streams for graphs on {device}") from error


class TaskUpdates:
    """Rewrites the attention tasks of one graph, once per replay.

    Attributes:
        tasks: every attention call that the graph captured, in order.
        armed: updated, and not replayed since.
    """

    def __init__(self, lane: Lane, tasks: Sequence[AttentionTask]) -> None:
        self.tasks = tuple(tasks)
        self.armed = False
        self._lane = lane
        self._ready = npu.Event()
        self._done = npu.Event()
        self._flags_set: set[int] = set()  # by updates that no replay has followed yet
        self._last: tuple[Any, ...] = ()  # streams or events, done when the device is

    def queue(self, ends: Mapping[str, list[int]]) -> None:
        """Queue one rewrite of every task; the replay stream waits for it on the device.

        Args:
            ends: checked `actual_seq_lengths` of every boundary set that a task reads.
        """
        stream = self._lane.update
        with TASK_UPDATE, npu.stream(stream):
            if self._last == (self._done,):
                stream.wait_event(self._done)
            elif self._last:  # an update or a replay failed half-way
                stream.wait_stream(self._lane.replay)
            self._last = (stream, self._lane.replay)
            for number, task in enumerate(self.tasks):
                self._rewrite(task, ends[task.boundary_set])
                if number not in self._flags_set:
                    task.flag.record(stream)
                    self._flags_set.add(number)
            self._ready.record(stream)
            self._lane.replay.wait_event(self._ready)
        self.armed = True

    def _rewrite(self, task: AttentionTask, ends: list[int]) -> None:
        stream = self._lane.update
        try:
            npu.graph_task_update_begin(stream, task.handle)
            task.issue(ends)
            npu.graph_task_update_end(stream)
        except BaseException:
            with suppress(RuntimeError):  # where that did not happen yet
                npu.graph_task_update_end(stream)
            raise

    def launch(self, graph: Any) -> None:
        """Queue a replay; the next update waits for it."""
        self.armed = False
        flags_set, self._flags_set = self._flags_set, set()  # one that is interrupted may be queued
        try:
            graph.replay()
        except RuntimeError:  # the runtime refused it, so nothing clears them
            self._flags_set = flags_set
            raise
        self._done.record(self._lane.replay)
        self._last = (self._done,)

    def query(self) -> bool:
        """Whether the device is through with the last update and replay."""
        return all(bool(each.query()) for each in self._last)

    def is_done(self) -> bool:
        """As `query`; a failed device never is."""
        return reached(self)
