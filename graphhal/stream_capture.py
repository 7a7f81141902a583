"""Stream capture through PyTorch's CUDA API: the mechanism that cuda and rocm share.

    caller's stream ──●── stage, boundaries, replay, copy out ──●──   a graph runs where launched
                      │ wait for the pool's last use            │ record it
    capture stream ───┴── warm-up, capture, eager calls ────────┴──   one per pool

Facts that decide the shape of this file:

- A replay may be launched on any stream, but graphs of one pool share memory, so every use of the
  pool waits for the one before it. The wait is an event on the device; the host never waits.
- The allocator keeps free blocks per stream. Eager calls therefore run on the capture stream,
  inside the pool, and reuse the memory of the graphs, which are idle meanwhile.
- What an eager call leaves allocated in the pool lies in memory that replays overwrite. Nothing may
  stay there: outputs are allocated outside, and leftovers are looked for before the next step.
- Resetting any graph drops the BLAS workspaces of its capture stream, which the other graphs still
  use. So workspaces are allocated inside the pool, where only ordered work can reuse them.
- Where `cudaStreamEndCapture` fails, PyTorch up to 2.13 leaves its allocators and its random
  generator in capture mode. `_mend` ends that.
- A pool's `MemPool` must outlive its graphs, also at interpreter exit.
"""

import atexit
import contextlib
import gc
import linecache
import logging
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch

from graphhal.errors import (
    CaptureError,
    HostReadError,
    PluginError,
    ReplayError,
    ResourceExhaustedError,
    UnsupportedOperationError,
)
from graphhal.plan import GraphKey
from graphhal.platform import CapturedGraph, CaptureRequest, HostUpdate, MemoryProfile, StepKind

log = logging.getLogger(__name__)

ErrorMode = Literal["global", "thread_local", "relaxed"]
StreamKey = tuple[int, int, int]
"""Stream id, device index, device type: PyTorch's name of a stream, without a stream object."""

_EXEC_BYTES = 64 * 2**20  # beyond what a graph needs to launch, another process allocated
_SMALL_BLOCK = 2**20  # the allocator serves requests above this from another list of blocks
_capturing = threading.RLock()  # PyTorch allows one capture at a time in a process
_pools: "weakref.WeakSet[GraphPool]" = weakref.WeakSet()
_recordings: "weakref.WeakSet[Recording]" = weakref.WeakSet()
_abandoned: list[Any] = []


class GraphPool:
    """Memory, stream and order of use of the graphs of one owner.

    Attributes:
        device: the CUDA or HIP device, with its index.
        stream: where warm-up, capture and eager calls run.
        id: the allocator's name of the pool; None while nothing is captured.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.index: int = index
        self.device = torch.device(device.type, index)
        with torch.cuda.device(index):
            self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.stream_key: StreamKey = (
            self.stream.stream_id,
            self.stream.device_index,
            self.stream.device_type,
        )
        self.lock = threading.RLock()
        self.id: Any = None
        self.graphs = 0
        self.broken = False
        self.leaked = False
        self.unchecked = False
        self.eager_fits = True
        self._mem: Any = None
        self._live: set[int] = set()
        self._epoch = 0
        self._warm = threading.local()
        self._streams: dict[StreamKey, torch.cuda.Stream] = {self.stream_key: self.stream}
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._handed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._last: StreamKey | None = None
        self.replay_scope = _ReplayScope(self)
        self.eager_scope = _EagerScope(self)
        _pools.add(self)

    @property
    def shared(self) -> bool:
        """Eager calls can use the memory of the graphs."""
        return self._mem is not None and self.eager_fits and not self.leaked

    def open(self) -> None:
        """Give the pool memory to grow in; does nothing where it has some."""
        if self.id is None:
            if torch.cuda.get_allocator_backend() == "native":
                self._mem = torch.cuda.MemPool()
                self.id = self._mem.id
            else:  # no private pools for eager work there; graphs still share one
                self.id = torch.cuda.graph_pool_handle()

    def closed_one(self) -> None:
        """A graph was reset: workspaces are gone, and with the last graph the memory is."""
        self.graphs -= 1
        self._epoch += 1
        self.shut_if_empty()

    def shut_if_empty(self) -> None:
        """Give the memory back where no graph uses it; the pool can be opened again."""
        if self.graphs == 0:
            self._mem = self.id = None
            self._live = set()
            self.leaked = self.broken = self.unchecked = False
            self.eager_fits = True

    def current(self) -> StreamKey:
        """The caller's stream on this pool's device."""
        return torch._C._cuda_getCurrentStream(self.index)

    def stream_of(self, key: StreamKey) -> torch.cuda.Stream:
        """A stream object for a key, built once."""
        found = self._streams.get(key)
        if found is None:
            found = torch.cuda.Stream(  # type: ignore[no-untyped-call]
                stream_id=key[0], device_index=key[1], device_type=key[2]
            )
            self._streams[key] = found
        return found

    def wait_for_last_use(self, key: StreamKey) -> None:
        """Make a stream wait, on the device, for whatever used the pool before."""
        if self._last is not None and self._last != key:
            self.stream_of(key).wait_event(self._done)

    def used_on(self, key: StreamKey) -> None:
        """Everything queued on this stream so far may have used the pool."""
        self._done.record(self.stream_of(key))
        self._last = key

    def hand_in(self, caller: StreamKey) -> None:
        """The capture stream goes on where the caller's stream and the pool's last use are."""
        if caller != self.stream_key:
            self._handed.record(self.stream_of(caller))
            self.stream.wait_event(self._handed)
        self.wait_for_last_use(self.stream_key)

    def hand_back(self, caller: StreamKey) -> None:
        """The caller's stream goes on where the capture stream is."""
        self.used_on(self.stream_key)
        self.wait_for_last_use(caller)

    def begin(self) -> None:
        """Route this thread's allocations into the pool."""
        if self.id is not None:
            torch._C._cuda_beginAllocateCurrentThreadToPool(self.index, self.id)

    def end(self) -> None:
        """Stop routing; `begin` took a reference to the pool, which goes too."""
        if self.id is not None:
            torch._C._cuda_endAllocateToPool(self.index, self.id)
            torch._C._cuda_releasePool(self.index, self.id)

    def warm_libraries(self) -> None:
        """Let the BLAS libraries allocate their workspaces for this thread and stream, in the pool.

        Called on the capture stream between `begin` and `end`.
        """
        if getattr(self._warm, "epoch", None) == self._epoch:
            return
        with torch.no_grad():
            for dtype in (torch.bfloat16, torch.float32):
                square = torch.zeros((16, 16), dtype=dtype, device=self.device)
                torch.nn.functional.linear(square, square, square[0])
                torch.mm(square, square)
                del square
        self._warm.epoch = self._epoch
        self.remember_live()

    def remember_live(self) -> None:
        """What is allocated in the pool now may stay there."""
        if self._mem is not None:
            self._live = {block["address"] for _, block in self._blocks() if _is_live(block)}

    def look_for_leftovers(self) -> None:
        """Refuse further replays if an eager call left a tensor where replays overwrite it."""
        self.unchecked = False
        if self._mem is None or torch._C._cuda_checkPoolLiveAllocations(
            self.index, self._mem.id, self._live
        ):
            return
        live = {b["address"]: b["size"] for _, b in self._blocks() if _is_live(b)}
        left = [size for address, size in live.items() if address not in self._live]
        if not left:
            self._live = set(live)
            return
        self.leaked = True
        log.warning(
            "an eager encoder call kept %d tensors (%d bytes) in the graph pool, where a replay "
            "would overwrite them. Replays stop until the graphs are captured again. Let the "
            "adapter create what it keeps in prepare(), not in forward()",
            len(left),
            sum(left),
        )

    def poison(self) -> None:
        """Fill the pool's free memory with 0xFF bytes: NaN in every floating-point type."""
        if self._mem is None:
            return
        with self.eager_scope:
            held = [
                torch.full((size,), 0xFF, dtype=torch.uint8, device=self.device)
                for size in self._free_sizes()
            ]
            held.clear()

    def _free_sizes(self) -> list[int]:
        raw = self.stream.cuda_stream
        sizes = []
        for segment, block in self._blocks():
            if segment.get("stream") != raw or block["state"] != "inactive":
                continue
            size = block["size"]
            if segment.get("segment_type") == "small":
                pieces, rest = divmod(size, _SMALL_BLOCK)
                sizes += [_SMALL_BLOCK] * pieces + ([rest] if rest else [])
            else:
                sizes.append(size)
        return sorted(sizes, reverse=True)

    def _blocks(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """(segment, block) of the pool, each block with its address."""
        for segment in self._mem.snapshot():
            address = segment["address"]
            for block in segment["blocks"]:
                yield segment, {**block, "address": block.get("address", address)}
                address += block["size"]


class _ReplayScope:
    """The caller's stream, after the pool's last use; entered once per replay."""

    __slots__ = ("_caller", "_pool")

    def __init__(self, pool: GraphPool) -> None:
        self._pool = pool
        self._caller: StreamKey = (0, 0, 0)

    def __enter__(self) -> "_ReplayScope":
        pool = self._pool
        pool.lock.acquire()
        self._caller = caller = pool.current()
        if caller != pool._last:
            pool.wait_for_last_use(caller)
        return self

    def __exit__(self, *_: object) -> None:
        pool = self._pool
        try:
            pool.used_on(self._caller)
        finally:
            pool.lock.release()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory of the caller, outside the pool, on the caller's stream."""
        return torch.empty(shape, dtype=dtype, device=self._pool.device)


class _EagerScope:
    """The capture stream inside the pool; the caller's stream waits for it afterwards.

    Tensors that a step reads and that were allocated before it must be kept until it ends.
    """

    __slots__ = ("_caller", "_device", "_pool")

    def __init__(self, pool: GraphPool) -> None:
        self._pool = pool
        self._caller: StreamKey = (0, 0, 0)
        self._device = 0

    def __enter__(self) -> "_EagerScope":
        pool = self._pool
        pool.lock.acquire()
        try:
            self._device = torch._C._cuda_getDevice()
            self._caller = pool.current()
            pool.hand_in(self._caller)
            torch.cuda.set_stream(pool.stream)  # changes the current device, too
            try:
                pool.begin()
                try:
                    pool.warm_libraries()
                except BaseException:
                    pool.end()
                    raise
            except BaseException:
                self._restore()
                raise
        except BaseException:
            pool.lock.release()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pool = self._pool
        try:
            pool.end()
            if error is None:
                pool.unchecked = True
            else:  # its traceback holds intermediates, which nobody will read
                pool.remember_live()
            if isinstance(error, torch.OutOfMemoryError):
                # Inside a pool the allocator does not empty its other caches before it gives up.
                pool.eager_fits = False
                torch.cuda.empty_cache()
        finally:
            try:
                self._restore()
                pool.hand_back(self._caller)
            finally:
                pool.lock.release()

    def _restore(self) -> None:
        pool = self._pool
        torch.cuda.set_stream(pool.stream_of(self._caller))
        if self._device != pool.index:
            torch.cuda.set_device(self._device)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory of the caller, outside the pool, usable on both streams."""
        pool = self._pool
        caller = pool.stream_of(self._caller)
        pool.end()
        try:
            torch.cuda.set_stream(caller)
            try:
                memory = torch.empty(shape, dtype=dtype, device=pool.device)
                # Another thread may have freed this block after our step began: its last use is
                # queued on the caller's stream, so the capture stream waits once more.
                pool.hand_in(self._caller)
            finally:
                torch.cuda.set_stream(pool.stream)
        finally:
            pool.begin()
        return memory


class _PlainScope:
    """The caller's stream as it is: eager calls where no pool can be used."""

    __slots__ = ("_device",)

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> "_PlainScope":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory on the caller's stream."""
        return torch.empty(shape, dtype=dtype, device=self._device)


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
            self.close()


def step(
    kind: StepKind, graph: CapturedGraph | None, inputs: Mapping[str, torch.Tensor]
) -> _ReplayScope | _EagerScope | _PlainScope | None:
    """Scope of one replay or eager call; None where a replay may not happen now."""
    outer = torch._C._cuda_isCurrentStreamCapturing()
    if kind == "replay":
        if graph is None or outer:
            return None
        pool: GraphPool = graph.pool
        if pool.unchecked:
            with pool.lock:
                pool.look_for_leftovers()
        return None if pool.leaked else pool.replay_scope
    device = next((tensor.device for tensor in inputs.values()), None)
    if device is None or device.index is None:
        device = torch.device("cuda", torch._C._cuda_getDevice())
    found = None if outer else _pool_on(device.index)
    if found is None:
        return _PlainScope(device)
    if found.unchecked:
        with found.lock:
            found.look_for_leftovers()
    return found.eager_scope if found.shared else _PlainScope(device)


def _pool_on(index: int) -> GraphPool | None:
    """The pool on this device with the most graphs: the one whose memory is worth sharing."""
    pools = [pool for pool in _pools if pool.index == index and pool.graphs > 0 and pool.shared]
    return max(pools, key=lambda pool: pool.graphs, default=None)


def replay(graph: CapturedGraph) -> None:
    """Launch a graph on the current stream.

    Raises:
        ReplayError: it was released, or the device refused.
    """
    try:
        graph.handle.launch()
    except AttributeError as error:
        raise ReplayError(f"{graph.key} was released; capture it again") from error
    except RuntimeError as error:
        raise ReplayError(f"{graph.key}: the device refused the launch: {error}") from error


def update_boundaries(graph: CapturedGraph, update: HostUpdate) -> None:
    """Queue the one copy that carries boundaries and all other host metadata.

    From pinned memory it does not wait; PyTorch's host allocator keeps the block until the copy,
    recorded on the current stream, has run.
    """
    packed, block = graph.request.packed, update.block
    size = block.numel()
    (packed if packed.numel() == size else packed[:size]).copy_(block, non_blocking=True)


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
    pool = request.pool or GraphPool(request.device)
    with _capturing, pool.lock, torch.cuda.device(pool.index):
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
        caller = pool.current()
        pool.open()
        pool.hand_in(caller)
        try:
            with torch.cuda.stream(pool.stream):
                return _capture_here(request, pool, error_mode, check_replay)
        finally:
            with contextlib.suppress(RuntimeError) if pool.broken else contextlib.nullcontext():
                pool.hand_back(caller)
            pool.shut_if_empty()


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
        with torch.no_grad():
            for _ in range(request.warmups):
                request.forward()
        torch.cuda.synchronize(pool.index)
    except Exception as error:  # a forward may raise anything; its inputs then run eagerly
        raise _explained(request.key, error, "warm-up") from error
    transient = max(0, torch.cuda.memory_reserved(pool.index) - before)
    _settle(pool)
    reserved, free = torch.cuda.memory_reserved(pool.index), torch.cuda.mem_get_info(pool.index)[0]
    recording = Recording(_record(request, pool, error_mode), pool, transient)
    try:
        _first_replay(request, recording, check_replay)
    except BaseException:
        recording.close()
        raise
    _settle(pool)
    grown = max(0, torch.cuda.memory_reserved(pool.index) - reserved)
    taken = free - torch.cuda.mem_get_info(pool.index)[0]
    pool.remember_live()
    return CapturedGraph(
        request=request,
        handle=recording,
        pool=pool,
        num_bytes=grown + min(max(0, taken - grown), _EXEC_BYTES),
        poison=pool.poison if pool.shared else None,
    )


def _settle(pool: GraphPool) -> None:
    """Nothing runs and nothing is cached, so that free memory can be compared."""
    torch.cuda.synchronize(pool.index)
    torch.cuda.empty_cache()


def _record(request: CaptureRequest, pool: GraphPool, error_mode: ErrorMode) -> Any:
    """Capture on the current stream; a graph, or an error with everything put back."""
    graph = torch.cuda.CUDAGraph()
    failure: BaseException | None = None
    unclean = False
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
            graph.capture_end()
        except RuntimeError as error:
            unclean = True
            failure = failure or error
    except RuntimeError as error:
        unclean, failure = True, error
    finally:
        if collecting:
            gc.enable()
    if failure is None:
        return graph
    if unclean:
        _mend(graph, pool)
    else:
        graph.reset()
    if not isinstance(failure, Exception):
        raise failure
    raise _explained(request.key, failure, "capture") from failure


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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "The CUDA Graph is empty"
            try:
                graph.capture_end()
            except RuntimeError:
                helper.capture_end()
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
        raise _explained(request.key, error, "first replay") from error
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


_CAUSES: tuple[tuple[tuple[str, ...], type[CaptureError], str], ...] = (
    (
        ("out of memory", "memory allocation failure"),
        ResourceExhaustedError,
        "the device is out of memory. Lower memory_limit, max_tokens or the token budgets",
    ),
    (
        ("cpu tensor is pinned", "copy between cpu and cuda tensors during"),
        UnsupportedOperationError,
        "it copies from unpinned host memory. Move the tensor to the device before, or pin it",
    ),
    (
        ("unjoined", "uncaptured work in another stream", "last recorded in a capturing stream"),
        UnsupportedOperationError,
        "it uses another stream and does not join it. Let the streams wait for each other",
    ),
    (
        ("legacy stream", "capture sequence was not initiated", "would merge two independent"),
        UnsupportedOperationError,
        "it mixes streams that are not part of this capture. Stay on the current stream",
    ),
    (
        ("not permitted when stream is capturing", "streamcaptureunsupported"),
        HostReadError,
        "it waits for a device value (.item(), .tolist(), bool(), …); use host integers instead",
    ),
    (
        ("previous error during capture", "streamcaptureinvalidated", "invalid capture"),
        UnsupportedOperationError,
        "something that a graph cannot hold ended the capture, and the code went on",
    ),
)


def _explained(key: GraphKey, error: BaseException, phase: str) -> CaptureError:
    """The error of a phase in words, with the line to blame; frees what its frames hold."""
    text = str(error).lower()
    where = _site(error)
    traceback.clear_frames(error.__traceback__)
    summary = str(error).strip().splitlines()[0][:300] if str(error).strip() else ""
    if isinstance(error, CaptureError):
        return type(error)(f"{key}: {phase} failed{where}: {summary}")
    for marks, kind, cause in _CAUSES:
        if any(mark in text for mark in marks):
            return kind(f"{key}: {phase} failed{where}: {cause}. [{summary}]")
    return CaptureError(f"{key}: {phase} failed{where}: {type(error).__name__}: {summary}")


def _site(error: BaseException) -> str:
    """` at FILE:LINE `code`` of the innermost frame outside PyTorch; empty if there is none."""
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if module != __name__ and module.partition(".")[0] != "torch":
            name = frame.f_code.co_filename
            found = f" at {name}:{line} `{linecache.getline(name, line).strip()}`"
    return found


def release(graphs: Sequence[CapturedGraph]) -> None:
    """Destroy graphs and, with the last one of a pool, give its memory back. Safe twice."""
    recordings: list[Recording] = []
    for graph in graphs:
        recording, graph.handle = graph.handle, None
        if recording is not None:
            recordings.append(recording)
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


atexit.register(release_all)


def profile(
    requests: Sequence[CaptureRequest], capture_one: Callable[[CaptureRequest], CapturedGraph]
) -> MemoryProfile:
    """Bytes that capturing these requests in this order takes; keeps nothing.

    Graphs of one path share their memory, so the first ones decide; the largest two and the
    smallest of each path are captured and the others are interpolated by size.
    """
    pool: Any = None
    graphs: list[CapturedGraph] = []
    measured: dict[int, int] = {}
    settled = need = 0
    try:
        for index in _sample([request.key for request in requests]):
            try:
                graph = capture_one(replace(requests[index], pool=pool))
            except ResourceExhaustedError as error:
                log.warning("memory profile stops: %s", error)
                break
            except CaptureError as error:
                log.info("memory profile leaves one out: %s", error)
                measured[index] = 0
                continue
            graphs.append(graph)
            pool = graph.pool
            measured[index] = graph.num_bytes
            need = max(need, settled + graph.handle.transient_bytes)
            settled += graph.num_bytes
    finally:
        release(graphs)
    sizes = _interpolated([request.key for request in requests], measured)
    total = sum(sizes)
    per_graph = {request.key: size for request, size in zip(requests, sizes, strict=True)}
    return MemoryProfile(total, max(0, need - total), per_graph)


def _path(key: GraphKey) -> tuple[str, str]:
    return key.adapter, key.path


def _sample(keys: Sequence[GraphKey]) -> list[int]:
    """Indices, in order: of every path the first two and the last."""
    of_path: dict[tuple[str, str], list[int]] = {}
    for index, key in enumerate(keys):
        of_path.setdefault(_path(key), []).append(index)
    return sorted({i for indices in of_path.values() for i in (*indices[:2], indices[-1])})


def _interpolated(keys: Sequence[GraphKey], measured: Mapping[int, int]) -> list[int]:
    """Bytes of every key: measured, or linear in size between its path's measured neighbours.

    The first of a path brings the memory that the others share, so it is no neighbour.
    """
    result = []
    firsts: dict[tuple[str, str], int] = {}
    for index, key in enumerate(keys):
        firsts.setdefault(_path(key), index)
        if index in measured:
            result.append(measured[index])
            continue
        known = sorted(
            (keys[i].size, size)
            for i, size in measured.items()
            if _path(keys[i]) == _path(key) and i != firsts[_path(key)]
        )
        sizes, amounts = zip(*known, strict=True) if known else ((0,), (0,))
        result.append(round(float(np.interp(key.size, sizes, amounts))))
    return result


def _is_live(block: Mapping[str, Any]) -> bool:
    return bool(block["state"] == "active_allocated")
