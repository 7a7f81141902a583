"""Capture, replay and release on ROCm.

Facts about HIP graphs, and what follows from them here
-------------------------------------------------------

PyTorch gives HIP the same Python surface as CUDA, so pools, streams and hand-over are
`stream_capture`. What differs is below; all of it was reported by others on AMD hardware.

**The runtime can record wrongly and say nothing.** Before ROCm 7.14, HIP does not report most
operations that a graph cannot hold: a copy from unpinned memory or a read on another stream simply
runs once, at capture, and is missing from every replay. So the first replay of each graph is
compared with the warm-up, from an output filled with NaN, and a graph that does not repeat it is
refused. This is a tripwire at capture; the engine's self-check tests further inputs.

**Some runtimes replay wrongly.** ROCm 7.2.0 to 7.2.3 corrupts replays on gfx94x in about one of
five processes, from the same binary and inputs: no check at start-up can be trusted to see it, so
these versions are refused on these chips. On gfx11 and gfx12, attention kernels fault inside
graphs. Eager work is right on all of them.

**Another thread can end our capture.** Up to ROCm 7.2.0, `hipEventQuery` ignores that a capture
is thread-local. The watchdog thread of a process group calls it all the time. Nothing is wrong with
the captured code then, so a capture that ends without a fault of its own is tried again.

**AITER compiles, and keeps state, on first use.** Its kernels are built by a just-in-time compiler
when first called, and workspaces are looked up by stream. A capture on a stream that never ran the
kernel misses both. Warm-up runs on the capture stream; replay may then use any stream.

**AITER's attention wants no empty sequence and leaves rows unwritten.** Its grids are sized by the
number of sequences, and some of its kernels divide by a length. The platform says
`allow_empty=False`, so that spare slots get a row each; and `attention.py` hands the kernel a
zeroed output, so that rows past the last end are zero and not what the shared pool held before.

**Dynamic per-tensor fp8 scales are refused.** Such a scale is the maximum over all rows, the
padding rows of a graph included, so one request's result would depend on what pads it, and differ
from eager. Scales per row, and static ones, are fine.

**Destroying a graph is lazy.** HIP frees a graph's memory at the next synchronisation. If the
process group goes first, its teardown and the graphs' race, and the process aborts after all work
was done. So graphs are released before `destroy_process_group`, and at exit before PyTorch goes.
"""

import functools
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphhal import stream_capture
from graphhal.errors import UnsupportedOperationError
from graphhal.platform import CapturedGraph, CaptureRequest

log = logging.getLogger(__name__)

ATTEMPTS = 3
CORRUPTS_REPLAYS = ((7, 2, 0), (7, 2, 3))
_PER_TENSOR = ("dynamic_per_tensor", "dynamic_scaled_fp8_quant")  # AITER's name, and vLLM's

step = stream_capture.step
release = stream_capture.release
refused = stream_capture.refused


def runtime_problem(version: Sequence[int], architecture: str) -> str | None:
    """Why graphs must not be used with this ROCm version on this chip, or None.

    Args:
        version: major, minor and, where known, patch; without a patch the worst is assumed.
        architecture: of the chip (`"gfx942"`).
    """
    if re.match(r"gfx1[12]", architecture):
        return (
            f"{architecture} faults when attention runs inside a graph, with every known runtime; "
            "eager work is not affected"
        )
    low, high = CORRUPTS_REPLAYS
    known = tuple(version[:3])
    inside = low <= known <= high if len(known) == 3 else known == low[: len(known)]
    if architecture.startswith("gfx94") and inside:
        shown = ".".join(map(str, version))
        return (
            f"ROCm {shown} on {architecture}: versions 7.2.0 to 7.2.3 corrupt the results of graph "
            "replays in some processes and not in others. Use 7.1, or 7.2.4 and later"
            + ("" if len(known) == 3 else "; the patch version is unknown here")
        )
    return None


def capture(request: CaptureRequest) -> CapturedGraph:
    """Warm up and capture on the pool's stream, and compare the first replay with the warm-up.

    Raises:
        UnsupportedOperationError: also for dynamic per-tensor fp8 scales, and for a graph that
            does not repeat its warm-up.
    """
    release_before_teardown()
    watched = replace(request, forward=refusing_dynamic_scales(request.forward))
    for attempt in range(1, ATTEMPTS + 1):
        try:
            graph = stream_capture.capture(watched, error_mode="thread_local", check_replay=True)
        except UnsupportedOperationError as error:
            if attempt == ATTEMPTS or not _ended_from_outside(error):
                raise
            log.info("%s: another thread ended the capture; trying again", request.key)
        else:
            graph.request = request
            return graph
    raise AssertionError("unreachable")


def _ended_from_outside(error: UnsupportedOperationError) -> bool:
    """The capture was invalidated, and no captured call failed."""
    text = str(error.__cause__).lower()
    return any(mark in text for mark in ("previous error during capture", "invalidated"))


def refusing_dynamic_scales(forward: Callable[[], None]) -> Callable[[], None]:
    """The same forward; its first call, a warm-up, is watched.

    Raises:
        UnsupportedOperationError: it quantises to fp8 with a scale computed over all rows.
    """
    calls = iter((True,))

    def watched() -> None:
        if not next(calls, False):
            return forward()
        watch = ScaleWatch()
        with watch:
            forward()
        if watch.found is not None:
            raise UnsupportedOperationError(
                f"{watch.found} takes one fp8 scale over all rows, padding included, so that a "
                "padded replay would differ from eager. Use static scales or one per row"
            )
        return None

    return watched


class ScaleWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds operators on fp8 data with a single scale that is a maximum over data.

    Attributes:
        found: the first such operator, or None.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: str | None = None
        self._maxima: dict[int, torch.Tensor] = {}  # held, so that an id stays one tensor's

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator; remember single values that derive from a maximum."""
        tensors = [a for a in (*args, *(kwargs or {}).values()) if isinstance(a, torch.Tensor)]
        derived = any(id(tensor) in self._maxima for tensor in tensors)
        name = str(func)
        eight_bit = any(t.is_floating_point() and t.itemsize == 1 for t in tensors)
        if (derived and eight_bit) or any(quantises in name for quantises in _PER_TENSOR):
            self.found = self.found or name
        result = func(*args, **(kwargs or {}))
        if derived or ("max" in name and any(tensor.numel() > 1 for tensor in tensors)):
            for value in result if isinstance(result, tuple | list) else (result,):
                if isinstance(value, torch.Tensor) and value.numel() == 1:
                    self._maxima[id(value)] = value
        return result


def release_before_teardown() -> None:
    """Make `destroy_process_group` release all graphs first. Does nothing the second time."""
    if not torch.distributed.is_available():
        return
    from torch.distributed import distributed_c10d

    original: Callable[..., Any] = torch.distributed.destroy_process_group
    if getattr(original, "releases_graphs", False):
        return

    @functools.wraps(original)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        stream_capture.release_all()
        return original(*args, **kwargs)

    destroy_process_group.releases_graphs = True  # type: ignore[attr-defined]
    for module in (torch.distributed, distributed_c10d):  # callers use either
        setattr(module, original.__name__, destroy_process_group)
