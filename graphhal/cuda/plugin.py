"""Platform `cuda`: NVIDIA GPUs through `torch.cuda.CUDAGraph`. Imports no device library."""

import warnings
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

NO_DEVICE = ("no nvidia driver", "no cuda-capable device", "no cuda gpus")


@hookimpl
def graphhal_probe() -> PlatformInfo | Unavailable:
    """Usable where PyTorch was built for CUDA and can reach a device."""
    try:
        import torch
    except ModuleNotFoundError:
        return Unavailable("the package torch is not installed", absent=True)
    except (ImportError, OSError) as error:
        return Unavailable(f"torch is installed and cannot be imported: {error}")
    if torch.version.hip is not None:
        return Unavailable("this torch is built for ROCm; platform rocm serves it", absent=True)
    if torch.version.cuda is None:
        return Unavailable("this torch is built without CUDA; install a CUDA build", absent=True)
    problem = _device_problem()
    if problem is not None:
        return problem
    from graphhal.cuda.attention import bind_attention
    from graphhal.cuda.memory import free_bytes

    index = torch.cuda.current_device()
    capability = torch.cuda.get_device_capability(index)
    driver = getattr(torch._C, "_cuda_getDriverVersion", int)()  # 0 where PyTorch cannot say
    attention = bind_attention(capability)
    private_pools = torch.cuda.get_allocator_backend() == "native"
    return PlatformInfo(
        name="cuda",
        device_type="cuda",
        versions={
            "torch": str(torch.__version__),
            "cuda": str(torch.version.cuda),
            "driver": f"{driver // 1000}.{driver % 1000 // 10}",
            "device": torch.cuda.get_device_name(index),
            "capability": f"{capability[0]}.{capability[1]}",
        },
        attention=attention,
        lone_sequence_from=attention.lone_sequence_from,
        free_bytes=free_bytes,
        capabilities=frozenset(
            {
                "collectives",
                "ordinary_outputs",
                *(("mem_pool_eager", "poison") if private_pools else ()),
            }
        ),
    )


def _device_problem() -> Unavailable | None:
    """Why a CUDA build cannot reach a device, in the driver's words."""
    import torch

    if torch.cuda._is_in_bad_fork():
        return Unavailable("this process was forked from one that uses CUDA; start it with spawn")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # PyTorch warns with the driver's message, then says 0
            if torch.cuda.device_count() == 0:
                return Unavailable("no NVIDIA device is visible to this process", absent=True)
            torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, Warning) as error:
        message = str(error).strip().splitlines()[0]
        absent = any(words in message.lower() for words in NO_DEVICE)
        return Unavailable(f"CUDA cannot start: {message}", absent=absent)
    return None


@cache
def _graph() -> Any:
    from graphhal.cuda import graph

    return graph


@hookimpl
def graphhal_capture(request: "CaptureRequest") -> "CapturedGraph":
    """Warm up and capture on the pool's stream."""
    captured: CapturedGraph = _graph().capture(request)
    return captured


@hookimpl
def graphhal_replay(graph: "CapturedGraph") -> None:
    """Launch on the caller's stream."""
    try:
        graph.handle.launch()
    except (AttributeError, RuntimeError) as error:
        raise _graph().refused(graph, error) from error


@hookimpl
def graphhal_update_boundaries(graph: "CapturedGraph", boundaries: "HostUpdate") -> None:
    """One copy of the packed block, before the replay.

    From pinned memory it does not wait; PyTorch's host allocator keeps the block until the copy,
    recorded on the current stream, has run.
    """
    packed, block = graph.request.packed, boundaries.block
    size = block.numel()
    (packed if packed.numel() == size else packed[:size]).copy_(block, non_blocking=True)


@hookimpl
def graphhal_step(
    kind: "StepKind",
    graph: "CapturedGraph | None",
    inputs: "Mapping[str, torch.Tensor]",
    boundaries: "Mapping[str, Boundaries]",
) -> "AbstractContextManager[StepScope] | None":
    """Order one use of the pool after the last; eager calls enter the pool's stream and memory."""
    scope: AbstractContextManager[StepScope] | None = _graph().step(kind, graph, inputs)
    return scope


@hookimpl
def graphhal_profile_memory(requests: "Sequence[CaptureRequest]") -> "MemoryProfile":
    """Capture a sample of the ladder and release it."""
    from graphhal.cuda.memory import profile_memory

    return profile_memory(requests)


@hookimpl
def graphhal_release(graphs: "Sequence[CapturedGraph]") -> None:
    """Destroy graphs; the last one of a pool gives its memory back."""
    _graph().release(graphs)
