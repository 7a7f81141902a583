"""Platform `rocm`: AMD GPUs through PyTorch's HIP build and AITER. Imports no device library."""

import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from importlib import metadata
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
    """Usable where PyTorch was built for ROCm, AITER is there and the runtime is not a bad one."""
    try:
        import torch
    except ModuleNotFoundError:
        return Unavailable("the package torch is not installed", absent=True)
    except (ImportError, OSError) as error:
        return Unavailable(f"torch is installed and cannot be imported: {error}")
    if torch.version.hip is None:
        return Unavailable("this torch is not built for ROCm", absent=True)
    problem = _device_problem()
    if problem is not None:
        return problem
    from graphhal.rocm.graph import runtime_problem

    index = torch.cuda.current_device()
    architecture = str(torch.cuda.get_device_properties(index).gcnArchName).partition(":")[0]
    version = rocm_version(torch.version.hip)
    reason = runtime_problem(version, architecture)
    if reason is not None:
        return Unavailable(reason)
    try:
        from aiter import flash_attn_varlen_func
    except ImportError as error:
        return Unavailable(f"AITER, which attention needs, cannot be imported: {error}")
    from graphhal.rocm.attention import PackedAttention
    from graphhal.rocm.memory import free_bytes

    try:
        attention = PackedAttention(flash_attn_varlen_func)
    except TypeError as error:
        return Unavailable(f"this AITER is not a version that graphhal knows: {error}")
    return PlatformInfo(
        name="rocm",
        device_type="cuda",  # PyTorch's word for HIP devices, too
        versions={
            "torch": str(torch.__version__),
            "rocm": ".".join(map(str, version)),
            "hip": str(torch.version.hip),
            "aiter": _installed("amd-aiter") or _installed("aiter") or "unknown",
            "device": torch.cuda.get_device_name(index),
            "architecture": architecture,
        },
        attention=attention,
        free_bytes=free_bytes,
        allow_empty=False,
        capabilities=frozenset({"mem_pool_eager", "no_empty_sequences", "poison"}),
    )


def _device_problem() -> Unavailable | None:
    """Why a ROCm build cannot reach a device."""
    import torch

    if torch.cuda._is_in_bad_fork():
        return Unavailable("this process was forked from one that uses HIP; start it with spawn")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if torch.cuda.device_count() == 0:
                return Unavailable("no AMD device is visible to this process", absent=True)
            torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, Warning) as error:
        return Unavailable(f"HIP cannot start: {str(error).strip().splitlines()[0]}")
    return None


def rocm_version(hip: str) -> tuple[int, ...]:
    """Major, minor and, where the installed packages tell it, patch of ROCm.

    HIP's own version shares the first two numbers only; its third is a build number.
    """
    import torch

    for text in (getattr(torch.version, "rocm", None), _installed("rocm")):
        match = re.match(r"(\d+)\.(\d+)\.(\d+)", text or "")
        if match:
            return tuple(map(int, match.groups()))
    return tuple(map(int, re.findall(r"\d+", hip)[:2]))


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@cache
def _graph() -> Any:
    from graphhal.rocm import graph

    return graph


@hookimpl
def graphhal_capture(request: "CaptureRequest") -> "CapturedGraph":
    """Warm up and capture on the pool's stream, then compare the first replay."""
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
    from graphhal.rocm.memory import profile_memory

    return profile_memory(requests)


@hookimpl
def graphhal_release(graphs: "Sequence[CapturedGraph]") -> None:
    """Destroy graphs; the last one of a pool gives its memory back."""
    _graph().release(graphs)
