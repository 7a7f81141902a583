"""A capture of any forward, through the platform alone."""

from collections.abc import Callable
from typing import Any

import torch

from graphhal.boundaries import Boundaries
from graphhal.plan import GraphKey
from graphhal.platform import CaptureRequest


def a_request(
    device: torch.device, forward: Callable[[torch.Tensor, torch.Tensor], Any]
) -> CaptureRequest:
    """Forward of an (8, 2) input and an output of the same shape."""
    x = torch.zeros(8, 2, device=device)
    out = torch.zeros(8, 2, device=device)
    packed = torch.zeros(16, dtype=torch.uint8, device=device)
    return CaptureRequest(
        key=GraphKey("direct", "image", 8),
        forward=lambda: forward(x, out),
        inputs={"x": x, "cu_seqlens": packed[:8].view(torch.int32)},
        packed=packed,
        output=out,
        boundaries={"cu_seqlens": Boundaries((8,))},
        warmups=1,
        pool=None,
        device=device,
    )
