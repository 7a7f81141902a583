"""PyTorch's CUDA surface without a device: streams with vector clocks, graphs, a pool allocator.

`install` puts a `FakeTorch` in the place of the `torch` that `graphhal.stream_capture` sees. It
keeps the rules that matter there: work on two streams is ordered only through events and host
waits, a capture that did something forbidden fails when it ends, private pools count their users
and route allocations by thread, and a memory pool must not die before its graphs.
"""

import itertools
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from graphhal import workspaces
from graphhal.stream_capture import pool as pool_module
from graphhal.stream_capture import recording, steps

Clock = dict[int, int]


def install(monkeypatch: Any, cleans_up: bool = False) -> "FakeTorch":
    """Let the mechanism see a fresh fake device."""
    made = FakeTorch(cleans_up)
    for module in (pool_module, recording, steps, workspaces):
        monkeypatch.setattr(module, "torch", made)
    pools: list[Any] = []
    monkeypatch.setattr(pool_module, "pools", pools)
    monkeypatch.setattr(steps, "pools", pools)
    monkeypatch.setattr(recording, "_recordings", weakref.WeakSet())
    monkeypatch.setattr(recording, "_abandoned", [])
    return made


class FakeTorch:
    """One device.

    Args:
        cleans_up: whether a failed `capture_end` puts allocators and generator back, as PyTorch
            does from 2.14 on.
    """

    def __init__(self, cleans_up: bool = False) -> None:
        self.cleans_up = cleans_up
        self.log: list[str] = []
        self.ops: list[tuple[str, int, Clock]] = []
        self.pool_users: dict[tuple[int, int], int] = {}
        self.host_pools: set[tuple[int, int]] = set()
        self.routing: list[tuple[tuple[int, int], int | None]] = []
        self.live: dict[tuple[int, int], dict[int, int]] = {}
        self.free: dict[tuple[int, int], list[tuple[str, int]]] = {}
        self.generator_captures = False
        self.capturing: dict[int, FakeGraph] = {}
        self.reserved = self.cached = 0
        self.allocated = self.peak = 2**30
        self.max_split_size = -1
        self.free_bytes = 10 * 2**30
        self.device_gone = False
        self.replay_body: Callable[[], None] | None = None
        self._ids = itertools.count(1)
        self._clocks: dict[int, Clock] = {}
        self._current = threading.local()
        self._device = 0
        fake = self

        class Stream(FakeStream):
            def __init__(self, stream_id: int | None = None, **_: Any) -> None:
                super().__init__(fake, fake.new_id() if stream_id is None else stream_id)

        class Event(FakeEvent):
            def __init__(self) -> None:
                super().__init__(fake)

        class CUDAGraph(FakeGraph):
            def __init__(self) -> None:
                super().__init__(fake)

        class MemPool(FakeMemPool):
            def __init__(self) -> None:
                super().__init__(fake)

        self.Stream = Stream
        self.cuda = SimpleNamespace(
            current_device=lambda: fake._device,
            device=fake.device_guard,
            Stream=Stream,
            Event=Event,
            CUDAGraph=CUDAGraph,
            MemPool=MemPool,
            graph_pool_handle=lambda: (0, fake.new_id()),
            get_allocator_backend=lambda: "native",
            set_stream=fake.set_stream,
            set_device=fake.set_device,
            stream=fake.stream_context,
            current_stream=fake.current,
            synchronize=fake.synchronize,
            empty_cache=fake.empty_cache,
            memory_reserved=lambda _=None: fake.reserved + fake.cached,
            memory_allocated=lambda _=None: fake.allocated,
            max_memory_allocated=lambda _=None: fake.peak,
            reset_peak_memory_stats=fake.reset_peak,
            memory_stats=lambda _=None: {"max_split_size": fake.max_split_size},
            mem_get_info=lambda _=None: (fake.free_bytes, 80 * 2**30),
        )
        self._C = SimpleNamespace(
            _cuda_getCurrentStream=lambda _index: (fake.current().stream_id, 0, 1),
            _cuda_getDevice=lambda: fake._device,
            _cuda_isCurrentStreamCapturing=lambda: fake.current().stream_id in fake.capturing,
            _cuda_beginAllocateCurrentThreadToPool=fake.begin_routing,
            _cuda_endAllocateToPool=fake.end_routing,
            _cuda_releasePool=fake.release_pool,
            _cuda_checkPoolLiveAllocations=fake.check_live,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def new_id(self) -> int:
        return next(self._ids)

    # tensors: on the host, with a note of where the allocator would have put them

    def empty(self, shape: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
        self.allocate("empty", shape)
        return torch.empty(0 if isinstance(shape, int) else shape, dtype=dtype)

    def zeros(self, shape: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
        self.allocate("zeros")
        return torch.zeros(shape, dtype=dtype)

    def full(self, shape: Any, value: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
        self.log.append(f"full {shape[0]} pool={self.routed() is not None}")
        return torch.full((1,), value, dtype=dtype)

    def allocate(self, what: str, size: Any = None) -> None:
        place = f"pool={self.routed() is not None} stream={self.current().stream_id}"
        self.log.append(f"{what} {place}" + (f" bytes={size}" if isinstance(size, int) else ""))

    def routed(self) -> tuple[int, int] | None:
        for pool, thread in self.routing:
            if thread == threading.get_ident():
                return pool
        return None

    # streams

    def current(self) -> Any:
        stream = getattr(self._current, "stream", None)
        if stream is None:
            stream = self._current.stream = self.Stream(stream_id=0)
        return stream

    def set_stream(self, stream: Any) -> None:
        self._current.stream = stream

    def set_device(self, device: int) -> None:
        self._device = device

    @contextmanager
    def device_guard(self, index: int) -> Any:
        before, self._device = self._device, index
        yield
        self._device = before

    @contextmanager
    def stream_context(self, stream: Any) -> Any:
        before = self.current()
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)

    def clock(self, stream_id: int) -> Clock:
        return self._clocks.setdefault(stream_id, {})

    def work(self, name: str) -> None:
        """Queue an operation on the current stream."""
        stream = self.current().stream_id
        clock = self.clock(stream)
        clock[stream] = clock.get(stream, 0) + 1
        self.ops.append((name, stream, dict(clock)))

    def ordered(self, first: str, second: str) -> bool:
        """The last `second` can only run after the last `first` has."""
        ops = {name: (stream, clock) for name, stream, clock in self.ops}
        stream, clock = ops[first]
        return ops[second][1].get(stream, 0) >= clock[stream]

    def synchronize(self, _: Any = None) -> None:
        if self.device_gone:
            raise RuntimeError("CUDA error: device is gone")
        if self.current().stream_id in self.capturing:
            self.host_read()
        merged: Clock = {}
        for clock in self._clocks.values():
            for stream, count in clock.items():
                merged[stream] = max(merged.get(stream, 0), count)
        for clock in self._clocks.values():
            clock.update(merged)
        self.log.append("synchronize")

    def host_read(self) -> None:
        """`.item()` and its like: forbidden while the current stream captures."""
        graph = self.capturing.get(self.current().stream_id)
        if graph is not None:
            graph.invalid = True
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    # allocator

    def reset_peak(self, _: Any = None) -> None:
        self.peak = self.allocated

    def empty_cache(self) -> None:
        self.cached = 0
        self.log.append("empty_cache")

    def begin_routing(self, _index: int, pool: tuple[int, int]) -> None:
        self.pool_users[pool] = self.pool_users.get(pool, 0) + 1
        if any(known == pool for known, _ in self.routing):
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.routing.append((pool, threading.get_ident()))

    def end_routing(self, _index: int, pool: tuple[int, int]) -> None:
        for entry in self.routing:
            if entry[0] == pool:
                self.routing.remove(entry)
                return
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    def release_pool(self, _index: int, pool: tuple[int, int]) -> None:
        self.pool_users[pool] -= 1
        if self.pool_users[pool] < 0:
            raise RuntimeError("a pool was released more often than it was taken")

    def check_live(self, _index: int, pool: tuple[int, int], expected: set[int]) -> bool:
        return set(self.live.get(pool, {})) == expected


class FakeStream:
    device_index, device_type = 0, 1

    def __init__(self, fake: FakeTorch, stream_id: int) -> None:
        self.fake, self.stream_id = fake, stream_id
        self.cuda_stream = 1000 + stream_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeStream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return self.stream_id

    def wait_event(self, event: "FakeEvent") -> None:
        self.fake.log.append(f"wait {self.stream_id}")
        clock = self.fake.clock(self.stream_id)
        for stream, count in event.seen.items():
            clock[stream] = max(clock.get(stream, 0), count)


class FakeEvent:
    def __init__(self, fake: FakeTorch) -> None:
        self.fake = fake
        self.seen: Clock = {}

    def record(self, stream: FakeStream) -> None:
        self.seen = dict(self.fake.clock(stream.stream_id))


class FakeGraph:
    def __init__(self, fake: FakeTorch) -> None:
        self.fake = fake
        self.pool_id: tuple[int, int] | None = None
        self.stream: int | None = None
        self.invalid = self.ended = self.started = False
        self.name = f"graph{fake.new_id()}"

    def capture_begin(self, pool: tuple[int, int], capture_error_mode: str) -> None:
        fake = self.fake
        self.pool_id, self.stream = pool, fake.current().stream_id
        fake.log.append(f"begin {capture_error_mode}")
        fake.pool_users[pool] = fake.pool_users.get(pool, 0) + 1
        if any(known == pool for known, _ in fake.routing):
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        if pool in fake.host_pools:
            raise RuntimeError("beginAllocateToPool: already recording to pool_id")
        fake.routing.append((pool, None))
        fake.host_pools.add(pool)
        fake.capturing[self.stream] = self
        fake.generator_captures = self.started = True

    def _clean(self) -> None:
        assert self.pool_id is not None
        self.fake.end_routing(0, self.pool_id)
        self.fake.host_pools.discard(self.pool_id)
        self.fake.generator_captures = False
        self.ended = True

    def capture_end(self) -> None:
        fake = self.fake
        assert self.stream is not None
        if fake.cleans_up and (self.ended or not self.started):
            raise RuntimeError("capture_end() called before capture_begin()")
        running = fake.capturing.pop(self.stream, None)
        if running is None:
            raise RuntimeError("CUDA error: the stream is not capturing")
        if running.invalid and running is self:
            if fake.cleans_up:
                self._clean()
            raise RuntimeError(
                "CUDA error: operation failed due to a previous error during capture"
            )
        if not fake.ops:
            warnings.warn("The CUDA Graph is empty. Wrong device?", stacklevel=1)
        self._clean()

    def replay(self) -> None:
        if self.fake.device_gone:
            raise RuntimeError("CUDA error: device is gone")
        self.fake.work(self.name)
        if self.fake.replay_body is not None:
            self.fake.replay_body()

    def reset(self) -> None:
        fake = self.fake
        if self.ended and self.pool_id is not None:
            fake.log.append(f"reset {self.name}")
            fake.release_pool(0, self.pool_id)
            self.pool_id = None
        if fake.device_gone:
            raise RuntimeError("CUDA error: device is gone")


class FakeMemPool:
    def __init__(self, fake: FakeTorch) -> None:
        self.fake = fake
        self.id = (0, fake.new_id())
        fake.pool_users[self.id] = 1
        # The garbage collector does not track an array: like a C++ destructor, its end comes after
        # all finalizers of a cycle.
        self._memory = np.zeros(1)
        weakref.finalize(self._memory, _died, fake, self.id)

    def snapshot(self) -> list[dict[str, Any]]:
        live = [
            {"address": address, "size": size, "state": "active_allocated"}
            for address, size in self.fake.live.get(self.id, {}).items()
        ]
        segments = [
            {"address": 0, "stream": stream, "segment_type": kind, "blocks": [
                {"address": 0, "size": size, "state": "inactive"}
            ]}
            for kind, size, stream in self.fake.free.get(self.id, [])
        ]  # fmt: skip
        return [{"address": 0, "stream": 0, "segment_type": "large", "blocks": live}, *segments]


def _died(fake: FakeTorch, pool: tuple[int, int]) -> None:
    fake.log.append(f"pool died with {fake.pool_users[pool] - 1} users")
    fake.release_pool(0, pool)
