"""Platform `npu`: Ascend NPUs through `torch.npu.NPUGraph`. Imports no device library."""

import ctypes
import importlib.util
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

RUNTIME_LIBRARY = "libascendcl.so"
VALUE_FLAGS = ("aclrtValueWait", "aclrtValueWrite")
"""Runtime calls that an external event is made of; without them replays run unsynchronised."""


@hookimpl
def graphhal_probe() -> PlatformInfo | Unavailable:
    """Usable where torch_npu reaches an Ascend device that can update captured attention."""
    if importlib.util.find_spec("torch_npu") is None:
        return Unavailable("the package torch_npu is not installed", absent=True)
    try:
        # Importing torch imports torch_npu too, and fails where CANN is not found.
        import torch
        import torch_npu
        from torch_npu import npu
    except (ImportError, OSError, RuntimeError) as error:
        return Unavailable(
            f"torch_npu is installed and cannot be imported: {_first_line(error)}. Source CANN's "
            "set_env.sh, or put its lib64 on LD_LIBRARY_PATH"
        )
    try:
        if not npu.is_available():
            return Unavailable(
                "no Ascend device is visible; look at npu-smi and ASCEND_RT_VISIBLE_DEVICES"
            )
        index = npu.current_device()
        soc = str(npu.get_device_name(index))
    except RuntimeError as error:
        return Unavailable(f"the Ascend device cannot be opened: {_first_line(error)}")
    problem = soc_problem(soc) or runtime_problem(ctypes.CDLL(RUNTIME_LIBRARY))
    if problem is None and not hasattr(npu, "graph_task_update_begin"):
        problem = (
            f"torch_npu {torch_npu.__version__} has no graph task update; install 2.11 or newer"
        )
    if problem is not None:
        return Unavailable(problem)
    from graphhal.npu.attention import attention
    from graphhal.npu.fused_attention import fused_attention
    from graphhal.npu.pool import free_bytes

    operator = fused_attention()
    if operator is None:
        return Unavailable(
            f"torch_npu {torch_npu.__version__} has no fused inference attention that a graph can "
            "update (npu_fused_infer_attention_score)"
        )
    return PlatformInfo(
        name="npu",
        device_type="npu",
        versions={
            "torch": str(torch.__version__),
            "torch_npu": str(torch_npu.__version__),
            "cann": _cann_version(),
            "device": soc,
            "attention": operator.name,
        },
        attention=attention,
        boundaries_persist=False,
        free_bytes=free_bytes,
        capabilities=frozenset({"collectives", "host_ends", "poison"}),
    )


def soc_problem(soc: str) -> str | None:
    """Why a chip of this name cannot serve, or None."""
    if "310" in soc:
        return (
            f"{soc}: attention on 310-series chips reads boundaries on the host, and their events "
            "are too few for graphs. Encoders run eagerly there"
        )
    return None


def runtime_problem(library: Any) -> str | None:
    """Why this CANN runtime library cannot serve, or None."""
    missing = [name for name in VALUE_FLAGS if not hasattr(library, name)]
    if missing:
        return (
            f"this CANN runtime lacks {' and '.join(missing)}, so that a replay could overtake its "
            "own boundary update; install CANN 8.5 or newer"
        )
    return None


def _cann_version() -> str:
    from torch_npu.npu import utils

    try:
        return str(utils.get_cann_version())
    except (AttributeError, RuntimeError):
        return "unknown"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


@cache
def _graph() -> Any:
    from graphhal.npu import graph

    return graph


@hookimpl
def graphhal_capture(request: "CaptureRequest") -> "CapturedGraph":
    """Warm up and capture on the platform's replay stream."""
    captured: CapturedGraph = _graph().capture(request)
    return captured


@hookimpl
def graphhal_replay(graph: "CapturedGraph") -> None:
    """Launch on the replay stream, which the step entered."""
    _graph().replay(graph)


@hookimpl
def graphhal_update_boundaries(graph: "CapturedGraph", boundaries: "HostUpdate") -> None:
    """Copy the packed block, then rebind every attention task of the graph."""
    _graph().update_boundaries(graph, boundaries)


@hookimpl
def graphhal_step(
    kind: "StepKind",
    graph: "CapturedGraph | None",
    inputs: "Mapping[str, torch.Tensor]",
    boundaries: "Mapping[str, Boundaries]",
) -> "AbstractContextManager[StepScope] | None":
    """Enter the replay stream; the caller's stream waits for it afterwards."""
    scope: AbstractContextManager[StepScope] | None = _graph().step(kind, graph, inputs, boundaries)
    return scope


@hookimpl
def graphhal_profile_memory(requests: "Sequence[CaptureRequest]") -> "MemoryProfile":
    """Capture the ladder once and release it."""
    from graphhal.npu.memory import profile_memory

    return profile_memory(requests)


@hookimpl
def graphhal_release(graphs: "Sequence[CapturedGraph]") -> None:
    """Destroy graphs and all that their updates refer to."""
    _graph().release(graphs)
