"""Where one replay or eager call is queued, and what becomes of its failures."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType

import torch
from torch_npu import npu

from graphhal.npu.acl_errors import capture_error, is_runtime_error, replay_error
from graphhal.npu.attention import Serving, serve
from graphhal.npu.capture_state import direct_launches
from graphhal.npu.task_update import TASK_UPDATE, Lane, lane_of


class StepOnLane:
    """The replay stream, from where the caller's stream is; the caller goes on where it ends.

    Args:
        lane: of the device.
        serving: the forward that runs.
        typed: makes a typed error of one of the runtime's; kernels are then launched directly, so
            that a failure raises within the scope. None for eager calls, which keep torch_npu's
            queue.
    """

    def __init__(
        self,
        lane: Lane,
        serving: Serving,
        typed: Callable[[BaseException], Exception] | None = None,
    ) -> None:
        self._lane = lane
        self._error = typed
        self._serving = serving
        self._exit = ExitStack()

    def __enter__(self) -> "StepOnLane":
        lane = self._lane
        with ExitStack() as entered:
            entered.enter_context(TASK_UPDATE)
            entered.enter_context(npu.device(lane.index))
            if self._error is not None:
                entered.enter_context(direct_launches())
            entered.push(self._typed)
            self._caller = npu.current_stream()
            lane.hand_in(self._caller)
            entered.callback(lane.hand_back, self._caller)
            entered.enter_context(npu.stream(lane.replay))
            entered.enter_context(serve(self._serving))
            self._exit = entered.pop_all()
        return self

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
        if self._error is not None and error is not None and is_runtime_error(error):
            raise self._error(error) from error

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory of the caller's stream, outside every pool."""
        with npu.stream(self._caller):
            return torch.empty(tuple(shape), dtype=dtype, device=f"npu:{self._lane.index}")


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
    if _is_captured(lane.index):
        return None
    return StepOnLane(lane, serving, partial(replay_error, what=what))


def eager_scope(serving: Serving, is_reference: bool) -> StepOnLane | StepOnCurrentStream:
    """Scope of an eager call, on the device that its inputs are on.

    Raises:
        CaptureError: a reference, and the device is out of streams.
    """
    device = next((tensor.device for tensor in serving.inputs.values()), None)
    if device is None or device.index is None:
        device = torch.device("npu", npu.current_device())
    if _is_captured(device.index):
        return StepOnCurrentStream(device, serving)
    typed = partial(capture_error, what="eager reference") if is_reference else None
    try:
        return StepOnLane(lane_of(device), serving, typed)
    except RuntimeError as error:
        if typed is not None:
            raise typed(error) from error
        return StepOnCurrentStream(device, serving)


def _is_captured(index: int) -> bool:
    """Whether somebody captures the current stream of this device."""
    with npu.device(index):
        captured: bool = npu.is_current_stream_capturing()
    return captured
