"""Where one replay or eager call is queued, and what becomes of its failures."""

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType

import torch
from torch_npu import npu

from graphhal.errors import CaptureError, GraphhalError, ReplayError
from graphhal.npu.acl_errors import capture_error, is_runtime_error, replay_error
from graphhal.npu.attention import Serving, serve
from graphhal.npu.capture_state import direct_launches
from graphhal.npu.lane import CAPTURED, HANGS, Lane, is_captured
from graphhal.npu.task_update import TASK_UPDATE, lane_of
from graphhal.platform import StepKind

REFERENCE = "eager reference"
_ERRORS: dict[StepKind, type[GraphhalError]] = {"replay": ReplayError, "reference": CaptureError}


class StepOnLane:
    """The replay stream, from where the caller's stream is; the caller goes on where it ends.

    Kernels of a replay or a reference are launched directly, so that a failure raises within the
    scope, as a typed error. Eager calls keep torch_npu's queue, but for the one that follows a step
    that failed: the device may fail again, and the queue would keep that to itself. A reference
    begins and ends with the device done, so that nothing that is read within it, or after it, waits
    for ever. Where the lane hangs, eager calls run on the caller's stream, the others are refused.

    Args:
        lane: of the device.
        serving: the forward that runs.
        kind: of the step.
        what: the step is, in words.
    """

    def __init__(self, lane: Lane, serving: Serving, kind: StepKind, what: str) -> None:
        self._lane = lane
        self._kind = kind
        self._what = what
        self._serving = serving
        self._made: list[torch.Tensor] = []
        self._exit = ExitStack()

    def __enter__(self) -> "StepOnLane":
        lane = self._lane
        with ExitStack() as entered:
            entered.enter_context(TASK_UPDATE)
            entered.enter_context(npu.device(lane.index))
            if not lane.hangs:
                self._enter_lane(entered)
            elif self._kind == "eager":
                self._caller = npu.current_stream()
            else:
                raise _ERRORS[self._kind](f"{self._what}: {HANGS}")
            entered.enter_context(serve(self._serving))
            self._exit = entered.pop_all()
        return self

    def _enter_lane(self, entered: ExitStack) -> None:
        lane = self._lane
        if self._kind != "eager":
            entered.enter_context(direct_launches())
            entered.push(self._typed)
        elif lane.in_doubt:
            entered.enter_context(direct_launches())
            lane.in_doubt = False
        self._caller = npu.current_stream()
        lane.hand_in(self._caller)
        entered.callback(self._leave_lane)
        entered.enter_context(npu.stream(lane.replay))
        if self._kind == "reference":
            lane.settle(self._what)

    def _leave_lane(self) -> None:
        lane = self._lane
        try:
            if self._kind == "reference" and not lane.hangs:
                lane.settle(self._what)
        finally:
            if not lane.hangs:
                lane.hand_back(self._caller)
            lane.hold(self._serving, self._made)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exit.__exit__(kind, error, trace)

    def _typed(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """A failure of the runtime, whichever call it hit, becomes a typed one."""
        if error is not None and is_runtime_error(error):
            self._lane.in_doubt = True
            typed = replay_error if self._kind == "replay" else capture_error
            raise typed(error, self._what) from error

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory of the caller's stream, outside every pool."""
        with npu.stream(self._caller):
            made = torch.empty(tuple(shape), dtype=dtype, device=f"npu:{self._lane.index}")
        self._made.append(made)
        return made


class StepOnCurrentStream:
    """An eager call on the caller's stream, as it is: somebody else captures it, or there is no
    stream left for it."""

    def __init__(self, device: torch.device, serving: Serving) -> None:
        self._device = device
        self._serve = serve(serving)

    def __enter__(self) -> "StepOnCurrentStream":
        self._serve.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._serve.__exit__(kind, error, trace)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory of the caller's stream, or of the capture that runs."""
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)


def replay_scope(lane: Lane, what: str, serving: Serving) -> StepOnLane | None:
    """Scope of a replay; None within an outer capture."""
    return None if is_captured(lane.index) else StepOnLane(lane, serving, "replay", what)


def eager_scope(serving: Serving, is_reference: bool) -> StepOnLane | StepOnCurrentStream:
    """Scope of an eager call, on the device that its inputs are on.

    Raises:
        CaptureError: a reference, and the device is out of streams, or the current stream is
            captured.
    """
    device = next((tensor.device for tensor in serving.inputs.values()), None)
    if device is None or device.index is None:
        device = torch.device("npu", npu.current_device())
    if is_captured(device.index):
        if is_reference:
            raise CaptureError(f"{REFERENCE}: {CAPTURED}")
        return StepOnCurrentStream(device, serving)
    try:
        lane = lane_of(device)
    except CaptureError:
        if is_reference:
            raise
        return StepOnCurrentStream(device, serving)
    return StepOnLane(lane, serving, "reference" if is_reference else "eager", REFERENCE)
