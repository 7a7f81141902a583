"""A failed warm-up, capture or first replay in words: what, where, and the way out."""

import linecache
import re
import traceback
from itertools import islice
from types import TracebackType

from graphhal.errors import (
    CaptureError,
    HostReadError,
    ResourceExhaustedError,
    UnsupportedOperationError,
)
from graphhal.plan import GraphKey

_Cause = tuple[type[CaptureError], str]
_HOST_READ = (
    HostReadError,
    "it waits for a device value (.item(), .tolist(), bool(), …); use host integers instead",
)
_HOST_COPY = ("cpu tensor is pinned", "copy between cpu and cuda tensors during")
_TO_HOST = re.compile(
    r"""(?:\.|\A)(?:(?:tolist|item|cpu|numpy)\([^()]*\)|to\([^()]*["']cpu["'][^()]*\))\Z"""
)
_CAUSES: tuple[tuple[tuple[str, ...], type[CaptureError], str], ...] = (
    (
        ("out of memory", "memory allocation failure"),
        ResourceExhaustedError,
        "the device is out of memory. Lower memory_limit, max_tokens or the token budgets",
    ),
    (
        _HOST_COPY,
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
        *_HOST_READ,
    ),
    (
        ("previous error during capture", "streamcaptureinvalidated", "invalid capture"),
        UnsupportedOperationError,
        "something that a graph cannot hold ended the capture, and the code went on",
    ),
)


def explained(
    key: GraphKey, error: BaseException, phase: str, end: BaseException | None = None
) -> CaptureError:
    """The error of a phase in words, with the line to blame; frees what its frames hold.

    Args:
        key: of the graph.
        error: what went wrong first.
        phase: when.
        end: how the capture ended, for an error that says nothing of captures.
    """
    where, call = _site(error)
    traceback.clear_frames(error.__traceback__)
    summary = str(error).strip().splitlines()[0][:300] if str(error).strip() else ""
    if isinstance(error, CaptureError):
        return type(error)(f"{key}: {phase} failed{where}: {summary}")
    found = _cause(str(error).lower(), call) or _cause(str(end).lower(), "")
    if found is None:
        return CaptureError(f"{key}: {phase} failed{where}: {type(error).__name__}: {summary}")
    kind, cause = found
    return kind(f"{key}: {phase} failed{where}: {cause}. [{summary}]")


def _cause(text: str, call: str) -> _Cause | None:
    if any(mark in text for mark in _HOST_COPY) and _TO_HOST.search(call):
        return _HOST_READ
    for marks, kind, cause in _CAUSES:
        if any(mark in text for mark in marks):
            return kind, cause
    return None


def _site(error: BaseException) -> tuple[str, str]:
    """` at FILE:LINE `code`` of the innermost frame outside PyTorch, and the call that failed.

    Both are empty if there is no such frame.
    """
    where = call = ""
    trace = error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_globals.get("__name__", "")
        if not f"{module}.".startswith((f"{__package__}.", "torch.")):
            name, line = trace.tb_frame.f_code.co_filename, trace.tb_lineno
            where = f" at {name}:{line} `{linecache.getline(name, line).strip()}`"
            call = _call(trace)
        trace = trace.tb_next
    return where, call


def _call(trace: TracebackType) -> str:
    """Source of the expression that failed; its line where the interpreter kept no positions."""
    code = trace.tb_frame.f_code
    first, last, start, end = next(
        islice(code.co_positions(), trace.tb_lasti // 2, None), (None, None, None, None)
    )
    if first is None or last is None or start is None or end is None:
        return linecache.getline(code.co_filename, trace.tb_lineno).strip()
    lines = [linecache.getline(code.co_filename, n).encode() for n in range(first, last + 1)]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    return b"".join(lines).decode(errors="replace")
