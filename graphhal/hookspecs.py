"""Every hook of graphhal. A platform implements all but the last, adapters only the last."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch

    from graphhal.adapter import AdapterFactory
    from graphhal.boundaries import Boundaries
    from graphhal.platform import (
        CapturedGraph,
        CaptureRequest,
        HostUpdate,
        MemoryProfile,
        PlatformInfo,
        StepKind,
        StepScope,
        Unavailable,
    )

PROJECT = "graphhal"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def graphhal_probe() -> PlatformInfo | Unavailable:
    """Say whether this platform can serve. At start-up, every plugin, perhaps more than once; the
    device library is imported only here."""


@hookspec(firstresult=True)
def graphhal_capture(request: CaptureRequest) -> CapturedGraph:
    """Warm up and record `request.forward`. Start-up only. On failure raise a `CaptureError` and
    leave the device as it was."""


@hookspec(firstresult=True)
def graphhal_replay(graph: CapturedGraph) -> None:
    """Launch the graph on the stream that `graphhal_step` entered. Per request; never waits."""


@hookspec(firstresult=True)
def graphhal_update_boundaries(graph: CapturedGraph, boundaries: HostUpdate) -> None:
    """Make the graph read this packed block and its attention these ends. Per request, before the
    replay or after its launch, as `PlatformInfo.boundary_order` says; never waits."""


@hookspec(firstresult=True)
def graphhal_step(
    kind: StepKind,
    graph: CapturedGraph | None,
    inputs: Mapping[str, torch.Tensor],
    boundaries: Mapping[str, Boundaries],
) -> AbstractContextManager[StepScope] | None:
    """Enter the stream and pool for one replay or eager call; hand over to the caller's stream on
    leaving. Return None where neither may happen there now (an outer capture runs)."""


@hookspec(firstresult=True)
def graphhal_profile_memory(requests: Sequence[CaptureRequest]) -> MemoryProfile:
    """Measure what capturing these requests, in this order, would take; keep nothing. Start-up,
    before KV allocation."""


@hookspec(firstresult=True)
def graphhal_release(graphs: Sequence[CapturedGraph]) -> None:
    """Free the graphs: clear, recapture, shutdown. Safe twice, safe after the device is gone."""


@hookspec
def graphhal_adapters() -> Sequence[AdapterFactory]:
    """Adapters that this plugin adds. At start-up, perhaps more than once."""
