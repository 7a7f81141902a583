"""The streams of a device that graphs run on: waits for them end, also where the device hangs."""

import os
from typing import Any

from torch_npu import npu

from graphhal.errors import CaptureError
from graphhal.npu.acl_errors import reached, wait_for

HANGS = (
    "work that was queued before never ends on this device, so no graph is captured or replayed "
    "until it does; restart the process"
)


FORKED = "this process was forked from the one that opened the device; start it with spawn"
CAPTURED = "another capture runs on the current stream, and this would end it; ask outside of it"


def is_captured(index: int) -> bool:
    """Whether somebody captures the current stream of this device."""
    with npu.device(index):
        captured: bool = npu.is_current_stream_capturing()
    return captured


class Lane:
    """The two streams of a device on which all graphs of this process are captured and run.

    Attributes:
        index: of the device.
        replay: warm-up, capture, replays and eager calls.
        update: rewrites attention tasks, nothing else.
        in_doubt: a step failed, and no eager call came since.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.in_doubt = False
        self._process = os.getpid()
        self._given_up: Any = None
        self._held: list[object] = []
        with npu.device(index):
            self.replay = npu.Stream()
            self.update = npu.Stream()
            self.handed_in = npu.Event()
            self.handed_back = npu.Event()

    def hand_in(self, caller: Any) -> None:
        """The replay stream goes on where the caller's stream is."""
        self.handed_in.record(caller)
        self.replay.wait_event(self.handed_in)

    def hand_back(self, caller: Any) -> None:
        """The caller's stream goes on where the replay stream is."""
        self.handed_back.record(self.replay)
        caller.wait_event(self.handed_back)

    @property
    def hangs(self) -> bool:
        """Whether a wait for this lane was given up, and the device has not got there since.

        Nothing is queued on the lane then, and nothing waits for it.
        """
        if self._given_up is not None and reached(self._given_up):
            self._given_up = None
            self._held.clear()
        return self._given_up is not None

    @property
    def forked(self) -> bool:
        """Whether the device is another process's, from which this one was forked."""
        return os.getpid() != self._process

    @property
    def may_free(self) -> bool:
        """Whether freeing a graph now does no harm: it would end a capture of the caller's, and a
        forked process has no device to free it on."""
        return not self.forked and not is_captured(self.index)

    def refuse(self, what: str) -> None:
        """Keep work away from a lane that hangs, and waits away from a capture of the caller's.

        Raises:
            CaptureError: it hangs, the current stream is captured, or the process was forked.
        """
        if self.forked:
            raise CaptureError(f"{what}: {FORKED}")
        if self.hangs:
            raise CaptureError(f"{what}: {HANGS}")
        if is_captured(self.index):
            raise CaptureError(f"{what}: {CAPTURED}")

    def hold(self, *things: object) -> None:
        """Keep what the lane may still read or write, until it is through; only while it hangs."""
        if self.hangs:
            self._held.append(things)

    def wait_for(self, waited: Any, what: str) -> None:
        """Wait on the host, not for ever; a lane that does not get there hangs from then on.

        Args:
            waited: an event, or updates, of this lane.
            what: is waited for, in words.

        Raises:
            CaptureError: the device does not get there, or hangs already.
        """
        if self.hangs and not reached(waited):
            self.refuse(what)
        try:
            wait_for(waited, what)
        except CaptureError:
            self._given_up = waited
            raise

    def settle(self, what: str) -> None:
        """Wait, not for ever, until the replay stream is done, and hear of every failed launch.

        Raises:
            CaptureError: the device does not get there, or hangs already.
        """
        self.refuse(what)
        done = npu.Event()
        done.record(self.replay)
        self.wait_for(done, what)
        self.replay.synchronize()
