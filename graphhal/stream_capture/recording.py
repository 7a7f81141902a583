"""Start-up: warm up, record, recover from what cannot be recorded, release."""

import atexit
import contextlib
import gc
import logging
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from graphhal.errors import (
    CaptureError,
    PluginError,
    ResourceExhaustedError,
    UnsupportedOperationError,
)
from graphhal.platform import CapturedGraph, CaptureRequest
from graphhal.stream_capture.failure import explained
from graphhal.stream_capture.pool import GraphPool, pool_for, pools

log = logging.getLogger(__name__)

ErrorMode = Literal["global", "thread_local", "relaxed"]
_EXEC_BYTES = 64 * 2**20  # beyond what a graph needs to launch, another process allocated
_capturing = threading.RLock()  # PyTorch allows one capture at a time in a process
_recordings: "weakref.WeakSet[Recording]" = weakref.WeakSet()
_abandoned: list[Any] = []
_postponed: "list[Recording]" = []
"""Released within a capture of the caller's, which a wait for the device would end."""


class Recording:
    """A device graph and the pool it lives in; closed once, at the latest when nobody holds it.

    Attributes:
        launch: queues the graph on the current stream.
        pool: its pool.
        transient_bytes: memory that warm-up took and gave back.
    """

    def __init__(self, graph: Any, pool: GraphPool, transient_bytes: int) -> None:
        self.launch: Callable[[], None] = graph.replay
        self.pool = pool
        self.transient_bytes = transient_bytes
        self._graph: Any = graph
        pool.graphs += 1
        _recordings.add(self)

    def close(self) -> None:
        """Destroy the graph. Safe twice, and after the device is gone."""
        graph, self._graph = self._graph, None
        if graph is None:
            return
        del self.launch
        try:
            graph.reset()
        except RuntimeError:
            log.debug("the device refused to destroy a graph", exc_info=True)
        finally:
            self.pool.closed_one()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at interpreter exit anything may be gone
            if self._graph is not None and torch._C._cuda_isCurrentStreamCapturing():
                _postponed.append(self)
            else:
                self.close()


def capture(
    request: CaptureRequest, error_mode: ErrorMode = "thread_local", check_replay: bool = False
) -> CapturedGraph:
    """Warm up and record `request.forward` on its pool's stream.

    Args:
        request: what to capture; its pool is one that an earlier call returned, or None.
        error_mode: whose unsafe calls end the capture; `thread_local` lets other threads go on.
        check_replay: compare the first replay with the warm-up, for runtimes that record wrongly
            without saying so.

    Raises:
        CaptureError: and its subclasses; device, streams and allocator are as they were.
    """
    if not isinstance(request.pool, GraphPool | None):
        raise PluginError(f"{request.key}: pool is not one of this platform: {request.pool!r}")
    with _capturing:
        pool = request.pool or pool_for(request.device)
        with pool.lock, torch.cuda.device(pool.index):
            return _capture_in(pool, request, error_mode, check_replay)


def _capture_in(
    pool: GraphPool, request: CaptureRequest, error_mode: ErrorMode, check_replay: bool
) -> CapturedGraph:
    if torch._C._cuda_isCurrentStreamCapturing():
        raise CaptureError(f"{request.key}: another capture is running on this stream")
    if pool.broken:
        raise ResourceExhaustedError(
            f"{request.key}: an earlier capture could not be ended cleanly, so this pool takes "
            "no more graphs; those it holds go on. Capture again after clear()"
        )
    if pool.unchecked:
        pool.look_for_leftovers()
    if pool.leaked:
        raise CaptureError(
            f"{request.key}: an eager call left tensors in the graph pool (see the log), so it "
            "takes no more graphs. Capture again after clear()"
        )
    _destroy(())
    caller = pool.current()
    pool.open()
    try:
        try:
            with torch.cuda.stream(pool.stream):
                return _capture_fitting(request, pool, error_mode, check_replay)
        finally:
            with contextlib.suppress(RuntimeError) if pool.broken else contextlib.nullcontext():
                pool.hand_back(caller)
            pool.shut_if_empty()
    except BaseException:
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()  # what warm-up left is cached for the capture stream alone
        raise


def _capture_fitting(
    request: CaptureRequest, pool: GraphPool, error_mode: ErrorMode, check_replay: bool
) -> CapturedGraph:
    """Capture; a pool's first graph once more where it does not fit the piece made for it."""
    first = pool.graphs == 0
    captured = _capture_here(request, pool, error_mode, check_replay)
    for spare in pool.spares_to_try() if first else ():
        release([captured])
        pool.open()
        pool.spare = spare
        captured = _capture_here(request, pool, error_mode, check_replay)
        if pool.fits():
            break
    return captured


def _capture_here(
    request: CaptureRequest, pool: GraphPool, error_mode: ErrorMode, check_replay: bool
) -> CapturedGraph:
    _settle(pool)
    before = torch.cuda.memory_reserved(pool.index)
    try:
        pool.begin()
        try:
            pool.warm_libraries()
        finally:
            pool.end()
        peak = _warm_up(request, pool)
    except Exception as error:  # a forward may raise anything; its inputs then run eagerly
        raise explained(request.key, error, "warm-up") from error
    transient = max(0, torch.cuda.memory_reserved(pool.index) - before)
    _settle(pool)
    reserved, free = torch.cuda.memory_reserved(pool.index), torch.cuda.mem_get_info(pool.index)[0]
    with pool.room_for(peak, len(request.output)) if peak else contextlib.nullcontext():
        graph = _record(request, pool, error_mode)
    recording = Recording(graph, pool, transient)
    try:
        _first_replay(request, recording, check_replay)
    except BaseException:
        recording.close()
        raise
    _settle(pool)
    settled = torch.cuda.memory_reserved(pool.index)
    taken = free - torch.cuda.mem_get_info(pool.index)[0]
    beside = min(max(0, taken - (settled - reserved)), _EXEC_BYTES)
    pool.remember_live()
    return CapturedGraph(
        request=request,
        handle=recording,
        pool=pool,
        num_bytes=max(0, settled - before) + beside,
        poison=pool.poison if pool.shared else None,
    )


def _warm_up(request: CaptureRequest, pool: GraphPool) -> int:
    """Run the forward; the bytes that the last pass held at once, 0 without a pass.

    The allocator keeps one peak for the whole process, which is reset for it.
    """
    held: int | None = None
    with torch.no_grad():
        for left in reversed(range(request.warmups)):
            if left == 0:
                torch.cuda.reset_peak_memory_stats(pool.index)
                held = torch.cuda.memory_allocated(pool.index)
            request.forward()
    torch.cuda.synchronize(pool.index)
    return 0 if held is None else torch.cuda.max_memory_allocated(pool.index) - held


def _settle(pool: GraphPool) -> None:
    """Nothing runs and nothing is cached, so that free memory can be compared."""
    torch.cuda.synchronize(pool.index)
    torch.cuda.empty_cache()


def _record(request: CaptureRequest, pool: GraphPool, error_mode: ErrorMode) -> Any:
    """Capture on the current stream; a graph, or an error with everything put back."""
    graph = torch.cuda.CUDAGraph()
    failure: BaseException | None = None
    end: BaseException | None = None
    collecting = gc.isenabled()
    gc.disable()  # a collected graph or event would end the capture
    try:
        graph.capture_begin(pool=pool.id, capture_error_mode=error_mode)
        try:
            with torch.no_grad():
                request.forward()
        except BaseException as error:  # noqa: BLE001  (raised again below, once the capture has ended)
            failure = error
        try:
            _end(graph)
        except RuntimeError as error:
            end = error
            failure = failure or error
    except RuntimeError as error:
        end = failure = error
    finally:
        if collecting:
            gc.enable()
    if failure is None:
        return graph
    if end is not None:
        _mend(graph, pool)
    else:
        graph.reset()
    if not isinstance(failure, Exception):
        raise failure
    raise explained(request.key, failure, "capture", end) from failure


def _end(graph: Any) -> None:
    with warnings.catch_warnings():  # as an error, the warning would leave the capture half ended
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        graph.capture_end()


def _mend(graph: Any, pool: GraphPool) -> None:
    """End what a failed `capture_end` left open.

    PyTorch up to 2.13 stops half-way: both allocators still filter through the dead graph, and the
    random generator still believes in a capture. Its own clean-up runs only after a capture that
    ends well, so give it an empty one. Newer versions have cleaned up; then the second end fails
    before it touches the stream, and the empty capture is ended as usual.
    """
    helper = torch.cuda.CUDAGraph()
    spare = torch.cuda.graph_pool_handle()
    try:
        helper.capture_begin(pool=spare, capture_error_mode="relaxed")
        try:
            _end(graph)
        except RuntimeError:
            _end(helper)
            helper.reset()
        else:
            torch._C._cuda_endAllocateToPool(pool.index, spare)
            torch._C._cuda_releasePool(pool.index, spare)
            _abandoned.append(helper)  # the host allocator keeps a pointer to it
        graph.reset()
    except RuntimeError:
        log.warning("a failed capture could not be ended cleanly", exc_info=True)
        _abandoned.extend((graph, helper))
        pool.broken = True


def _first_replay(request: CaptureRequest, recording: Recording, check: bool) -> None:
    """Launch once: uploads the graph, so that its memory is counted and no request pays for it."""
    expected = request.output.clone() if check else None
    try:
        if expected is not None:
            request.output.view(torch.uint8).fill_(0xFF)
        recording.launch()
        torch.cuda.synchronize(recording.pool.index)
    except RuntimeError as error:
        raise explained(request.key, error, "first replay") from error
    if expected is not None and not _close(request.output, expected):
        raise UnsupportedOperationError(
            f"{request.key}: the first replay does not repeat the warm-up. Captured code did "
            "something that the graph does not hold (a copy from unpinned memory, a read of a "
            "device value, work on another stream) and this runtime does not report it"
        )


def _close(output: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal up to the rounding of reordered sums; non-finite values only where expected."""
    tolerance = 1e-5 if output.dtype in (torch.float32, torch.float64) else 2e-2
    difference = (output.double() - expected.double()).nan_to_num(nan=0.0)
    same_holes = torch.equal(output.isfinite(), expected.isfinite())
    scale = expected.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).norm()
    return same_holes and bool(difference.norm() <= tolerance * scale + 1e-12)


def release(graphs: Sequence[CapturedGraph]) -> None:
    """Destroy graphs and, with the last one of a pool, give its memory back. Safe twice.

    Within a capture of the caller's they are kept, and destroyed with what is released or captured
    next.
    """
    recordings: list[Recording] = []
    for graph in graphs:
        recording, graph.handle = graph.handle, None
        if recording is not None:
            recordings.append(recording)
    if recordings and torch._C._cuda_isCurrentStreamCapturing():
        _postponed.extend(recordings)
    else:
        _destroy(recordings)


def _destroy(released: Sequence[Recording]) -> None:
    """Destroy these graphs, and those that were released earlier and kept."""
    postponed = [_postponed.pop() for _ in range(len(_postponed))]
    recordings = [*released, *postponed]
    for index in {recording.pool.index for recording in recordings}:
        try:
            torch.cuda.synchronize(index)
        except RuntimeError:
            log.debug("device %d is gone", index, exc_info=True)
    for recording in recordings:
        with recording.pool.lock:
            recording.close()
    if any(recording.pool.graphs == 0 for recording in recordings):
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()


def release_all() -> None:
    """Close every graph that is still open: before device libraries are torn down."""
    for recording in list(_recordings):
        recording.close()


atexit.register(pools.clear)  # runs after release_all: streams go before device libraries do
atexit.register(release_all)
