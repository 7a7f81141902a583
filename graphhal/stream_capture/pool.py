"""The memory, the stream and the order of use that graphs of one owner share."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from graphhal.workspaces import take_workspaces

log = logging.getLogger(__name__)

StreamKey = tuple[int, int, int]
"""Stream id, device index, device type: PyTorch's name of a stream, without a stream object."""

SPARES = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2)
"""Shares of a pool's first piece beyond what the largest graph holds at once: as a rule, and those
that are tried where its tensors do not fit the piece."""
SCATTER = 0.02
"""Share by which a graph's memory may differ from what the largest graph's tokens make expect."""
_SMALL_BLOCK = 2**20  # the allocator serves requests above this from another list of blocks
_LARGE_PIECE = 20 * 2**20  # the least that the allocator takes for one of them
pools: "list[GraphPool]" = []
"""Every pool of this process. An empty one waits here for the next owner."""


def pool_for(device: torch.device) -> "GraphPool":
    """An empty pool of this device, or a new one. Called with captures locked out.

    The BLAS workspace of a capture stream can outlive the stream's graphs, in memory that nothing
    else gets; a new stream for every owner would leave one more behind each time.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    for pool in pools:
        if pool.index == index and pool.graphs == 0:
            return pool
    pools.append(GraphPool(device))
    return pools[-1]


class GraphPool:
    """Memory, stream and order of use of the graphs of one owner.

    Attributes:
        device: the CUDA or HIP device, with its index.
        stream: where warm-up, capture and eager calls run.
        id: the allocator's name of the pool; None while nothing is captured.
        spare: share of the first piece beyond what the largest graph holds at once, and of every
            smaller graph's share of it.
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
        self._largest = (0, 0)
        self.spare = SPARES[0]
        self._taken = 0
        self._epoch = 0
        self._warm = threading.local()
        self._streams: dict[StreamKey, torch.cuda.Stream] = {self.stream_key: self.stream}
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._handed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._last: StreamKey | None = None
        self.replay_scope = ReplayScope(self)
        self.eager_scope = EagerScope(self)

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
            if self.broken and self in pools:  # its stream may capture still
                pools.remove(self)
            self._mem = self.id = None
            self._live = set()
            self.leaked = self.broken = self.unchecked = False
            self.eager_fits = True
            self.spare = SPARES[0]
            self._largest, self._taken = (0, 0), 0

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

    @contextlib.contextmanager
    def room_for(self, num_bytes: int, tokens: int) -> Iterator[None]:
        """For one capture on the current stream: one free piece of what the graph holds at once,
        and a share more.

        Left to itself the allocator takes a piece for each large tensor, and they fit later ones
        badly: the graphs of vLLM's full-size vision tower took 1,708 MiB, with this 1,224
        (`docs/benchmarks.md`). So the first graph, the largest, gets a new piece. Of it a graph
        whose memory grows with its tokens gets the share that it needs, and the rest is held
        meanwhile: the allocator cuts a piece with more room otherwise, and could lack one tensor's
        room in the end (7,680 tokens after 8,192: 254 MiB more). Others get all of it: what they
        take does not lie as the largest graph's does.

        Args:
            num_bytes: that the graph holds at once. A piece that is cut up as tightly as that can
                lack one tensor's room, and the next piece is as large as that tensor (1,480 MiB
                instead of 1,306 with a spare of 3 %).
            tokens: of the graph.
        """
        rest, held = 0, None
        room = num_bytes + int(self.spare * num_bytes)
        before: int | None = None
        if self.graphs == 0:
            self._largest, taken = (num_bytes, tokens), self._large_bytes()
            if self._hold(room) is not None:  # and given back at once
                before = taken
        elif self._mem is not None and self._in_proportion(num_bytes, tokens):
            rest = max(self._free_sizes(), default=0) - room
        if rest > _SMALL_BLOCK:
            held = self._hold(rest)
        try:
            yield
        finally:
            del held
        if before is not None:
            self._taken = self._large_bytes() - before

    def spares_to_try(self) -> list[float]:
        """After the first graph, where its tensors did not fit its piece, and left a part of it
        unused: shares to begin again with, until one fits. All are of less than it took; in the
        end, for a graph that fits none of them, comes the first one again.

        An audio tower's largest graph, which holds 475 MiB at once, lacked room for one tensor of
        242 in 504, and those of fewer clips lacked it in their shares.
        """
        num_bytes, _ = self._largest
        if self.fits():
            return []
        larger = [share for share in SPARES[1:] if (1 + share) * num_bytes < self._taken]
        return [*larger, SPARES[0]]

    def fits(self) -> bool:
        """Whether the first graph took no piece beside the one that was made for it."""
        num_bytes, _ = self._largest
        beside = self._taken - (1 + self.spare) * num_bytes
        return beside <= max(_LARGE_PIECE, SPARES[0] * num_bytes)

    def _in_proportion(self, num_bytes: int, tokens: int) -> bool:
        most_bytes, most_tokens = self._largest
        expected = most_bytes * tokens / max(1, most_tokens)
        return abs(num_bytes - expected) <= SCATTER * expected

    def _hold(self, num_bytes: int) -> torch.Tensor | None:
        """Memory of the pool, on the current stream; None where it cannot be had, or not cut."""
        largest_cut = torch.cuda.memory_stats(self.index).get("max_split_size", -1)
        if self._mem is None or 0 < largest_cut < num_bytes:
            return None
        self.begin()
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError:
            return None
        finally:
            self.end()

    def warm_libraries(self) -> None:
        """Let the BLAS libraries allocate their workspaces for this thread and stream, in the pool.

        Called on the capture stream between `begin` and `end`.
        """
        if getattr(self._warm, "epoch", None) == self._epoch:
            return
        take_workspaces(self.device)
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
        sizes = []
        for kind, state, size in self._sizes():
            if state != "inactive":
                continue
            if kind == "small":
                pieces, rest = divmod(size, _SMALL_BLOCK)
                sizes += [_SMALL_BLOCK] * pieces + ([rest] if rest else [])
            else:
                sizes.append(size)
        return sorted(sizes, reverse=True)

    def _large_bytes(self) -> int:
        if self._mem is None:
            return 0
        return sum(size for kind, _, size in self._sizes() if kind != "small")

    def _sizes(self) -> Iterator[tuple[Any, str, int]]:
        """(kind of segment, state, bytes) of every block that was taken on the pool's stream."""
        raw = self.stream.cuda_stream
        for segment, block in self._blocks():
            if segment.get("stream") == raw:
                yield segment.get("segment_type"), block["state"], block["size"]

    def _blocks(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """(segment, block) of the pool, each block with its address."""
        for segment in self._mem.snapshot():
            address = segment["address"]
            for block in segment["blocks"]:
                yield segment, {**block, "address": block.get("address", address)}
                address += block["size"]


class ReplayScope:
    """The caller's stream, after the pool's last use; entered once per replay.

    Its time is every request's: what it calls is bound once.
    """

    __slots__ = ("_acquire", "_caller", "_current", "_device", "_empty", "_pool", "_release")

    def __init__(self, pool: GraphPool) -> None:
        self._pool = pool
        self._device = pool.device
        self._caller: StreamKey = (0, 0, 0)
        self._acquire, self._release = pool.lock.acquire, pool.lock.release
        self._current: Callable[[int], StreamKey] = torch._C._cuda_getCurrentStream
        self._empty = torch.empty

    def __enter__(self) -> "ReplayScope":
        self._acquire()
        try:
            pool = self._pool
            self._caller = caller = self._current(pool.index)
            if caller != pool._last:
                pool.wait_for_last_use(caller)
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._pool.used_on(self._caller)
        finally:
            self._release()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory of the caller, outside the pool, on the caller's stream."""
        return self._empty(shape, dtype=dtype, device=self._device)


class EagerScope:
    """The capture stream inside the pool; the caller's stream waits for it afterwards.

    Tensors that a step reads and that were allocated before it must be kept until it ends.
    """

    __slots__ = ("_caller", "_device", "_pool")

    def __init__(self, pool: GraphPool) -> None:
        self._pool = pool
        self._caller: StreamKey = (0, 0, 0)
        self._device = 0

    def __enter__(self) -> "EagerScope":
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


class PlainScope:
    """The caller's stream as it is: eager calls where no pool can be used."""

    __slots__ = ("_device",)

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> "PlainScope":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory on the caller's stream."""
        return torch.empty(shape, dtype=dtype, device=self._device)


def _is_live(block: Mapping[str, Any]) -> bool:
    return bool(block["state"] == "active_allocated")
