"""Platform `cpu`: the strict reference, wherever PyTorch is. Imports no device library."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING, Any

from graphhal.hookspecs import hookimpl
from graphhal.platform import PlatformInfo, Unavailable

if TYPE_CHECKING:
    import torch

    from graphhal.boundaries import Boundaries
    from graphhal.platform import (
        CapturedGraph,
        CaptureRequest,
        HostUpdate,
        MemoryProfile,
        StepKind,
        StepScope,
    )


@hookimpl
def graphhal_probe() -> PlatformInfo | Unavailable:
    """Usable where PyTorch can be imported; never chosen beside an accelerator."""
    try:
        import torch
    except ModuleNotFoundError:
        return Unavailable("the package torch is not installed", absent=True)
    except (ImportError, OSError) as error:
        return Unavailable(f"torch is installed and cannot be imported: {error}")
    from graphhal.cpu.attention import varlen_attention
    from graphhal.cpu.memory import free_bytes

    return PlatformInfo(
        name="cpu",
        device_type="cpu",
        versions={"torch": str(torch.__version__)},
        attention=varlen_attention,
        reference=True,
        free_bytes=free_bytes,
        capabilities=frozenset({"collectives", "poison"}),
    )


@cache
def _graph() -> Any:
    from graphhal.cpu import graph

    return graph


@hookimpl
def graphhal_capture(request: "CaptureRequest") -> "CapturedGraph":
    """Warm up and record on a tape."""
    captured: CapturedGraph = _graph().capture(request)
    return captured


@hookimpl
def graphhal_replay(graph: "CapturedGraph") -> None:
    """Run the tape; the one platform that has finished when this returns."""
    _graph().replay(graph)


@hookimpl
def graphhal_update_boundaries(graph: "CapturedGraph", boundaries: "HostUpdate") -> None:
    """One copy of the packed block, before the replay."""
    _graph().update_boundaries(graph, boundaries)


@hookimpl
def graphhal_step(
    kind: "StepKind",
    graph: "CapturedGraph | None",
    inputs: "Mapping[str, torch.Tensor]",
    boundaries: "Mapping[str, Boundaries]",
) -> "AbstractContextManager[StepScope] | None":
    """No stream and no pool to enter; None while a capture runs on this thread."""
    scope: AbstractContextManager[StepScope] | None = _graph().step()
    return scope


@hookimpl
def graphhal_profile_memory(requests: "Sequence[CaptureRequest]") -> "MemoryProfile":
    """Capture the requests, measure, release."""
    from graphhal.cpu.memory import profile_memory

    graph = _graph()
    return profile_memory(requests, graph.capture, graph.release)


@hookimpl
def graphhal_release(graphs: "Sequence[CapturedGraph]") -> None:
    """Drop the tapes."""
    _graph().release(graphs)
