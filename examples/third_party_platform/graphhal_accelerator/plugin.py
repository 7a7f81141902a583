"""Platform `accelerator`: whatever device PyTorch can capture on. Imports no device library."""

from functools import cache

from graphhal.hookspecs import hookimpl
from graphhal.platform import PlatformInfo, Unavailable

HAVE_THEIR_OWN = ("cuda", "npu")
"""Device types that graphhal brings a platform for; beside it this one is used only if named."""

UNCLAIMED = {
    "poison_shows_unwritten_rows": "PyTorch has no device-generic way to allocate in a graph's pool"
}


@hookimpl
def graphhal_probe():
    """Usable where PyTorch has an accelerator and device-generic graphs."""
    try:
        import torch
    except ImportError as error:
        return Unavailable(f"torch cannot be imported: {error}", absent=True)
    device = torch.accelerator.current_accelerator()
    if device is None or not torch.accelerator.is_available():
        return Unavailable("PyTorch sees no accelerator in this machine", absent=True)
    if not hasattr(torch.accelerator, "Graph"):
        return Unavailable(
            f"torch {torch.__version__} has no torch.accelerator.Graph; install 2.13 or newer"
        )
    from graphhal_accelerator.attention import masked_attention
    from graphhal_accelerator.memory import free_bytes

    return PlatformInfo(
        name="accelerator",
        device_type=device.type,
        versions={"torch": str(torch.__version__), "device": device.type},
        attention=masked_attention,
        reference=device.type in HAVE_THEIR_OWN,
        free_bytes=free_bytes,
        unclaimed=UNCLAIMED,
    )


@cache
def _graph():
    from graphhal_accelerator import graph

    return graph


@hookimpl
def graphhal_capture(request):
    """Warm up and capture on a stream of its own."""
    return _graph().capture(request)


@hookimpl
def graphhal_replay(graph):
    """Launch on the caller's stream."""
    _graph().replay(graph)


@hookimpl
def graphhal_update_boundaries(graph, boundaries):
    """One copy of the packed block, before the replay."""
    graph.request.packed.copy_(boundaries.block, non_blocking=True)


@hookimpl
def graphhal_step(kind, graph, inputs, boundaries):
    """The caller's stream, after whatever used the pool before."""
    return _graph().step(kind, graph)


@hookimpl
def graphhal_profile_memory(requests):
    """Capture the ladder, note what it takes, release it."""
    from graphhal_accelerator.memory import profile_memory

    return profile_memory(requests)


@hookimpl
def graphhal_release(graphs):
    """Destroy graphs."""
    _graph().release(graphs)
