"""Where one replay or eager call is queued, and what becomes of its failures."""

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType

import torch
from torch_npu import npu

from graphhal.npu.acl_errors import is_runtime_error, replay_error
from graphhal.npu.attention import Serving, serve
from graphhal.npu.capture_state import direct_launches
from graphhal.npu.task_update import TASK_UPDATE, Lane


class StepOnLane:
    """The replay stream, from where the caller's stream is; the caller goes on where it ends."""

    def __init__(self, lane: Lane, what: str | None, serving: Serving) -> None:
        self._lane = lane
        self._what = what
        self._serving = serving
        self._exit = ExitStack()

    def __enter__(self) -> "StepOnLane":
        lane = self._lane
        with ExitStack() as entered:
            entered.enter_context(TASK_UPDATE)
            entered.enter_context(npu.device(lane.index))
            if self._what is not None:
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
        """A failure of the runtime within a replay, whichever call it hit, is a `ReplayError`."""
        if self._what is not None and error is not None and is_runtime_error(error):
            raise replay_error(error, self._what) from error

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory of the caller's stream, outside every pool."""
        with npu.stream(self._caller):
            return torch.empty(tuple(shape), dtype=dtype, device=f"npu:{self._lane.index}")


class StepInOuterCapture:
    """An eager call that somebody else's capture records: on the current stream, as it is."""

    def __init__(self, device: torch.device, serving: Serving) -> None:
        self._device = device
        self._serve = serve(serving)

    def __enter__(self) -> "StepInOuterCapture":
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
        """Uninitialised memory of the capture that runs."""
        return torch.empty(tuple(shape), dtype=dtype, device=self._device)
