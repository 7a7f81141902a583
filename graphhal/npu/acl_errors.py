"""What an error of the Ascend runtime means, and how to get out of it.

torch_npu raises plain RuntimeErrors that carry the runtime's code in their text. One that follows
another (507903, the capture is invalid) names the first as its context.
"""

import re
from time import monotonic, sleep
from typing import Any

import torch

from graphhal.errors import (
    CaptureError,
    GraphhalError,
    HostReadError,
    ReplayError,
    ResourceExhaustedError,
    UnsupportedOperationError,
)

WAIT_SECONDS = 60.0
"""How long the host waits for the device at start-up; the driver's own limit is half an hour."""

_FEWER = "Capture fewer graphs: lower memory_limit, token_budgets, audio_chunks or max_tokens"
_NO_STREAMS = f"the device is out of streams or events, which every captured graph takes. {_FEWER}"
_HOST_READ = (
    "captured code waits for the device (.item(), .tolist(), .cpu(), bool(), synchronize()); "
    "compute it from host integers"
)
_TWO_OWNERS = (
    "a task group was updated by two owners, or left open. Hold "
    "graphhal.npu.task_update.TASK_UPDATE around other code's updates in this process"
)
CAUSES: dict[int, tuple[type[CaptureError], str]] = {
    207001: (ResourceExhaustedError, f"the device is out of memory. {_FEWER}"),
    207005: (ResourceExhaustedError, _NO_STREAMS),
    207007: (ResourceExhaustedError, _NO_STREAMS),
    207008: (ResourceExhaustedError, _NO_STREAMS),
    207009: (ResourceExhaustedError, _NO_STREAMS),
    107027: (HostReadError, _HOST_READ),
    107030: (HostReadError, _HOST_READ),
    107024: (
        UnsupportedOperationError,
        "captured code waits for work that was queued outside the capture; queue it before",
    ),
    107025: (
        UnsupportedOperationError,
        "captured code forks to another stream and does not join it; wait for that stream",
    ),
    107031: (UnsupportedOperationError, "captured code uses the default stream; stay on yours"),
    107033: (CaptureError, _TWO_OWNERS),
    107034: (CaptureError, _TWO_OWNERS),
    507011: (
        CaptureError,
        "the device stopped at an invalid address or task; capture again after weights moved",
    ),
    507046: (CaptureError, "the device did not finish in time; a queued wait is never satisfied"),
    507903: (CaptureError, "something that a graph cannot hold ended the capture"),
}
_OF_THE_RUNTIME = re.compile(r"NPU|CANN|\b(?i:acl)")  # not npu: any mistake may name the device
_CODE = re.compile(r"(?:error code is|error code:|ret(?:urn)? ?=|\[)\s*(\d{6})\b")


def codes_of(error: BaseException) -> list[int]:
    """Runtime codes named by an error and by the errors behind it, the oldest error first."""
    codes: list[int] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        codes[:0] = [int(code) for code in _CODE.findall(str(current))]
        current = current.__cause__ or current.__context__
    return codes


def is_runtime_error(error: BaseException) -> bool:
    """Whether the device or its runtime raised it, rather than code that was called wrongly."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError)
        and (_OF_THE_RUNTIME.search(str(error)) is not None or bool(codes_of(error)))
    )


def capture_error(error: BaseException, what: str) -> CaptureError:
    """An error during capture as a typed one; `what` names graph and phase."""
    if isinstance(error, CaptureError):
        return error
    kind, cause = _cause(error)
    return kind(f"{what} failed: {cause}")


def replay_error(error: BaseException, what: str) -> ReplayError:
    """An error while a replay was queued, as a typed one; `what` names the graph."""
    if isinstance(error, ReplayError):
        return error
    return ReplayError(f"{what} failed: {_cause(error)[1]}")


def _cause(error: BaseException) -> tuple[type[CaptureError], str]:
    if isinstance(error, torch.OutOfMemoryError):
        return CAUSES[207001]
    first_line = (str(error).strip().splitlines() or [""])[0][:300]
    for code in codes_of(error):
        if code in CAUSES:
            kind, cause = CAUSES[code]
            return kind, f"{cause}. [{code}: {first_line}]"
    name = type(error).__name__
    return CaptureError, first_line if isinstance(error, GraphhalError) else f"{name}: {first_line}"


def reached(waited: Any) -> bool:
    """Whether the device got there; a failed device never does."""
    try:
        return bool(waited.query())
    except RuntimeError:
        return False


def wait_for(waited: Any, what: str) -> None:
    """Wait on the host until the device got there; start-up and release only.

    Raises:
        CaptureError: it did not within `WAIT_SECONDS`.
    """
    started = monotonic()
    while not waited.query():
        elapsed = monotonic() - started
        if elapsed > WAIT_SECONDS:
            raise CaptureError(
                f"{what}: the device did not finish within {WAIT_SECONDS:g} s; it waits for "
                "something that never comes, or another process holds it"
            )
        sleep(min(max(elapsed / 50, 5e-5), 5e-3))  # also where it is timed: 2 % too late at most
