"""What the engine calls per request: enter a step, update boundaries, replay."""

from collections.abc import Mapping

import torch

from graphhal.errors import CaptureError, ReplayError
from graphhal.platform import CapturedGraph, StepKind
from graphhal.stream_capture.pool import EagerScope, GraphPool, PlainScope, ReplayScope, pools


def step(
    kind: StepKind, graph: CapturedGraph | None, inputs: Mapping[str, torch.Tensor]
) -> ReplayScope | EagerScope | PlainScope | None:
    """Scope of one replay or eager call; None where a replay may not happen now.

    A reference runs outside the pool: what it takes can be given back, and the pool does not grow.

    Raises:
        CaptureError: a reference, and the current stream is captured: what starts up waits.
    """
    outer = torch._C._cuda_isCurrentStreamCapturing()
    if kind == "replay":
        if graph is None or outer:
            return None
        pool: GraphPool = graph.pool
        if pool.unchecked:
            with pool.lock:
                pool.look_for_leftovers()
        return None if pool.leaked else pool.replay_scope
    if kind == "reference" and outer:
        raise CaptureError(
            "another capture runs on the current stream, and start-up would end it; ask outside"
        )
    device = next((tensor.device for tensor in inputs.values()), None)
    if device is None or device.index is None:
        device = torch.device("cuda", torch._C._cuda_getDevice())
    found = None if outer or kind == "reference" else _pool_on(device.index)
    if found is None:
        return PlainScope(device)
    if found.unchecked:
        with found.lock:
            found.look_for_leftovers()
    return found.eager_scope if found.shared else PlainScope(device)


def _pool_on(index: int) -> GraphPool | None:
    """The pool on this device with the most graphs: the one whose memory is worth sharing."""
    candidates = [pool for pool in pools if pool.index == index and pool.graphs > 0 and pool.shared]
    return max(candidates, key=lambda pool: pool.graphs, default=None)


def refused(graph: CapturedGraph, error: Exception) -> ReplayError:
    """Why a graph could not be launched.

    Plugins launch `graph.handle` themselves: each call in between would cost every request.
    """
    if graph.handle is None or isinstance(error, AttributeError):
        return ReplayError(f"{graph.key} was released; capture it again")
    return ReplayError(f"{graph.key}: the device refused the launch: {error}")
