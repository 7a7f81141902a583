"""Device memory on ROCm: what is free, and what a ladder would take."""

from collections.abc import Sequence

import torch

from graphhal import stream_capture
from graphhal.platform import CaptureRequest, MemoryProfile
from graphhal.rocm import graph


def free_bytes() -> int:
    """Bytes that are free on the current device now, as the driver counts them."""
    return int(torch.cuda.mem_get_info()[0])


def profile_memory(requests: Sequence[CaptureRequest]) -> MemoryProfile:
    """Settled and transient bytes of capturing these requests in this order; keeps nothing."""
    return stream_capture.profile(requests, graph.capture)
