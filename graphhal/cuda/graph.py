"""Capture, replay and release on CUDA.

CUDA reports every operation that a graph cannot hold, and honours thread-local captures: another
thread may copy to the device or wait for it while this one captures. So the shared mechanism needs
no precautions here.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from graphhal import stream_capture
from graphhal.platform import CapturedGraph, CaptureRequest, StepKind, StepScope

replay = stream_capture.replay
update_boundaries = stream_capture.update_boundaries


def capture(request: CaptureRequest) -> CapturedGraph:
    """Warm up and capture on the pool's stream; see `stream_capture.capture` for errors."""
    return stream_capture.capture(request, error_mode="thread_local")


def step(
    kind: StepKind, graph: CapturedGraph | None, inputs: Mapping[str, torch.Tensor]
) -> AbstractContextManager[StepScope] | None:
    """Scope of one replay or eager call; None while an outer capture runs."""
    return stream_capture.step(kind, graph, inputs)


def release(graphs: Sequence[CapturedGraph]) -> None:
    """Destroy graphs. Safe twice, safe after the device is gone."""
    stream_capture.release(graphs)
