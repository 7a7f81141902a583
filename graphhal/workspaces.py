"""Memory that libraries take once for a stream, at the first call of their kind on it."""

import torch


def take_workspaces(device: torch.device) -> None:
    """Let the BLAS libraries take their workspaces for this thread and the current stream.

    32 MiB and more on an H200. Nothing is waited for.
    """
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float32):
            square = torch.zeros((16, 16), dtype=dtype, device=device)
            torch.nn.functional.linear(square, square, square[0])
            torch.mm(square, square)
            del square
