"""Capture, replay and release on CUDA.

CUDA reports every operation that a graph cannot hold, and honours thread-local captures: another
thread may copy to the device or wait for it while this one captures. So the shared mechanism needs
no precautions here.
"""

from graphhal import stream_capture
from graphhal.platform import CapturedGraph, CaptureRequest

step = stream_capture.step
release = stream_capture.release
refused = stream_capture.refused


def capture(request: CaptureRequest) -> CapturedGraph:
    """Warm up and capture on the pool's stream; see `stream_capture.capture` for errors."""
    return stream_capture.capture(request, error_mode="thread_local")
