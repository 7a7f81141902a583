"""Capture and replay without a device, as strict as one.

A capture runs the forward once on a tape (`tape.py`) that notes every operator below autograd and
autocast. A replay runs the same operators again: on the same static memory, which the tape holds
by storage (so `parameter.data = other` goes unnoticed and an in-place update is seen, as on a
device), and on fresh intermediates whose uninitialised memory is NaN. A device only records during
capture; so what the tape's own run wrote to static memory is put back, and the intermediates that
the forward kept are poisoned.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch

from graphhal.cpu.guard import Refusals
from graphhal.cpu.memory import Pool, poison_all, storage_of
from graphhal.cpu.recording import Recording
from graphhal.cpu.refusal import reseeding
from graphhal.cpu.tape import Tape
from graphhal.errors import (
    CaptureError,
    ReplayError,
    ResourceExhaustedError,
    UnsupportedOperationError,
)
from graphhal.platform import CapturedGraph, CaptureRequest, HostUpdate

_here = threading.local()


def capturing() -> bool:
    """Whether a capture of this platform runs on this thread."""
    return getattr(_here, "capturing", False)


def capture(request: CaptureRequest, pool: Pool | None = None) -> CapturedGraph:
    """Warm up and record `request.forward`.

    The last warm-up is a rehearsal: it shows which memory exists before the capture. With
    `warmups=0` its writes are undone.

    Args:
        request: what to record.
        pool: instead of the request's own.

    Raises:
        HostReadError: the forward read device data on the host.
        UnsupportedOperationError: the forward did what a device graph cannot hold.
        ResourceExhaustedError: the host is out of memory.
        CaptureError: the forward raised; the cause is kept.
    """
    if capturing():
        raise UnsupportedOperationError(
            f"{request.key} cannot be captured inside another capture. Capture one after the other"
        )
    if pool is None:
        pool = Pool() if request.pool is None else request.pool
    seed, generator = torch.initial_seed(), torch.get_rng_state()
    _here.capturing = True
    try:
        with torch.no_grad():
            for _ in range(request.warmups - 1):
                request.forward()
            with _uncompiled():
                recording = _record(request.forward, seed, keep=request.warmups > 0)
    except CaptureError:
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ResourceExhaustedError(f"no memory to capture {request.key}: {error}") from error
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        if "allocate memory" in what:
            raise ResourceExhaustedError(f"no memory to capture {request.key}: {what}") from error
        raise CaptureError(f"the forward of {request.key} raised {what}") from error
    finally:
        _here.capturing = False
        if torch.initial_seed() != seed:
            torch.set_rng_state(generator)
    discard = partial(poison_all, recording.escaped)
    discard()
    return CapturedGraph(
        request, recording, pool, pool.grow_to(recording.peak_bytes), poison=discard
    )


class _Uncompiled:
    """While entered, on any thread, compiled functions run as they were written.

    Dynamo skips what it first meets under a dispatch mode, and for good: `torch.cond` and
    `flex_attention`, which compile themselves, would fail in every eager call after a capture.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entered = 0
        self._before: Any = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if "torch._dynamo" not in sys.modules:  # nothing was compiled; its import takes seconds
            yield
            return
        with self._lock:
            if not self._entered:
                self._before = torch.compiler.set_stance("force_eager")
            self._entered += 1
        try:
            yield
        finally:
            with self._lock:
                self._entered -= 1
                if not self._entered:
                    self._before.__exit__(None, None, None)


_uncompiled = _Uncompiled()


def _record(forward: Callable[[], None], seed: int, keep: bool) -> Recording:
    rehearsal = Tape()
    rehearsal.record(partial(_guarded, forward, rehearsal), undo=not keep)
    # Held until the end, so that no storage of the capture can take the number of an older one.
    witnesses = rehearsal.living()
    tape = Tape(frozenset(storage_of(tensor) for tensor in witnesses))
    tape.record(partial(_guarded, forward, tape), undo=True)
    if torch.initial_seed() != seed:
        raise reseeding()
    return tape.finish()


def _guarded(forward: Callable[[], None], tape: Tape) -> None:
    with Refusals(tape):
        forward()


def replay(graph: CapturedGraph) -> None:
    """Run the graph's operators again on its static memory.

    Raises:
        ReplayError: the graph was released, an operator failed, or a capture runs on this thread.
    """
    recording: Recording | None = graph.handle
    if recording is None:
        raise ReplayError(f"{graph.key} was released; capture it again before a replay")
    if capturing():
        raise ReplayError(f"{graph.key} cannot be replayed while a capture runs on this thread")
    with torch.inference_mode():
        if torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                recording.run()
        else:
            recording.run()


def update_boundaries(graph: CapturedGraph, update: HostUpdate) -> None:
    """Copy the host block, boundaries included, to the graph's packed buffer.

    Raises:
        ReplayError: the graph was released.
    """
    if graph.handle is None:
        raise ReplayError(f"{graph.key} was released; capture it again before an update")
    with torch.inference_mode():
        graph.request.packed.copy_(update.block)


def release(graphs: Sequence[CapturedGraph]) -> None:
    """Drop the recordings; safe twice."""
    for graph in graphs:
        graph.handle = graph.pool = graph.poison = None


class Scope:
    """The step of a platform that has no streams: nothing to enter, nothing to hand over."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory that the caller owns."""
        return torch.empty(shape, dtype=dtype, device="cpu")


_SCOPE = Scope()


def step() -> Scope | None:
    """The scope of a replay or eager call, or None while a capture runs on this thread."""
    return None if capturing() else _SCOPE
