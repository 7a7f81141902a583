"""A failed warm-up, capture or first replay in words: what, where, and the way out."""

import linecache
import traceback

from graphhal.errors import (
    CaptureError,
    HostReadError,
    ResourceExhaustedError,
    UnsupportedOperationError,
)
from graphhal.plan import GraphKey

_CAUSES: tuple[tuple[tuple[str, ...], type[CaptureError], str], ...] = (
    (
        ("out of memory", "memory allocation failure"),
        ResourceExhaustedError,
        "the device is out of memory. Lower memory_limit, max_tokens or the token budgets",
    ),
    (
        ("cpu tensor is pinned", "copy between cpu and cuda tensors during"),
        UnsupportedOperationError,
        "it copies from unpinned host memory. Move the tensor to the device before, or pin it",
    ),
    (
        ("unjoined", "uncaptured work in another stream", "last recorded in a capturing stream"),
        UnsupportedOperationError,
        "it uses another stream and does not join it. Let the streams wait for each other",
    ),
    (
        ("legacy stream", "capture sequence was not initiated", "would merge two independent"),
        UnsupportedOperationError,
        "it mixes streams that are not part of this capture. Stay on the current stream",
    ),
    (
        ("not permitted when stream is capturing", "streamcaptureunsupported"),
        HostReadError,
        "it waits for a device value (.item(), .tolist(), bool(), …); use host integers instead",
    ),
    (
        ("previous error during capture", "streamcaptureinvalidated", "invalid capture"),
        UnsupportedOperationError,
        "something that a graph cannot hold ended the capture, and the code went on",
    ),
)


def explained(key: GraphKey, error: BaseException, phase: str) -> CaptureError:
    """The error of a phase in words, with the line to blame; frees what its frames hold."""
    text = str(error).lower()
    where = _site(error)
    traceback.clear_frames(error.__traceback__)
    summary = str(error).strip().splitlines()[0][:300] if str(error).strip() else ""
    if isinstance(error, CaptureError):
        return type(error)(f"{key}: {phase} failed{where}: {summary}")
    for marks, kind, cause in _CAUSES:
        if any(mark in text for mark in marks):
            return kind(f"{key}: {phase} failed{where}: {cause}. [{summary}]")
    return CaptureError(f"{key}: {phase} failed{where}: {type(error).__name__}: {summary}")


def _site(error: BaseException) -> str:
    """` at FILE:LINE `code`` of the innermost frame outside PyTorch; empty if there is none."""
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if not f"{module}.".startswith((f"{__package__}.", "torch.")):
            name = frame.f_code.co_filename
            found = f" at {name}:{line} `{linecache.getline(name, line).strip()}`"
    return found
