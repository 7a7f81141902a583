"""Checks of platform cuda (and of rocm's code) that need a real NVIDIA GPU.

    python benchmarks/device_checks.py [--only NAME ...] [--all-in-processes] [--list]

Prints a line per check, then a table; exit code 1 if any failed. `--all-in-processes` gives each
check a process of its own, several at a time, and those that measure the device to themselves, so
that a crash costs one check and the end of every process is checked, too.

Needs torch, numpy, pluggy, pydantic and pydantic-settings, and nothing of pytest. Checks of rocm
run its code through PyTorch's shared API on NVIDIA with AITER replaced by a strict stand-in, and
say so.
"""

import argparse
import contextlib
import gc
import logging
import os
import random
import re
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.rocm_stand_in import StrictAiter
from graphhal import stream_capture
from graphhal.boundaries import Boundaries
from graphhal.errors import (
    CaptureError,
    HostReadError,
    ReplayError,
    ResourceExhaustedError,
    UnsupportedOperationError,
)
from graphhal.plan import GraphKey
from graphhal.platform import CapturedGraph, CaptureRequest, HostUpdate
from graphhal.stream_capture import recording

DEVICE = torch.device("cuda", 0)
MIB = 2**20
HEADS, HEAD_DIM, LAYERS = 8, 72, 4
WIDTH = HEADS * HEAD_DIM
CHECKS: dict[str, Callable[[], str]] = {}
ALONE: set[str] = set()
PROCESS_SECONDS = 90


def check(function: Callable[[], str]) -> Callable[[], str]:
    CHECKS[function.__name__] = function
    return function


def alone(function: Callable[[], str]) -> Callable[[], str]:
    """Measures time or the device's free memory: no other process may use the device meanwhile."""
    ALONE.add(function.__name__)
    return function


class CheckFailedError(Exception):
    """A check saw something wrong."""


def expect(condition: bool, message: str) -> None:
    if not condition:
        raise CheckFailedError(message)


# --- a small encoder, a ladder of it, and a plugin under test ------------------------------------


class Tower:
    """Attention and feed-forward layers over packed rows, with fixed random weights."""

    def __init__(self, attention: Any, dtype: torch.dtype = torch.bfloat16) -> None:
        generator = torch.Generator(device=DEVICE).manual_seed(0)

        def weights(*shape: int) -> torch.Tensor:
            values = torch.randn(shape, generator=generator, device=DEVICE)
            return (values / shape[-1] ** 0.5).to(dtype)

        self.attention = attention
        self.layers = [
            (weights(3 * WIDTH, WIDTH), weights(4 * WIDTH, WIDTH), weights(WIDTH, 4 * WIDTH))
            for _ in range(LAYERS)
        ]
        self.bias = torch.zeros(4 * WIDTH, dtype=dtype, device=DEVICE)

    def __call__(self, rows: torch.Tensor, cu_seqlens: torch.Tensor, longest: int) -> torch.Tensor:
        for qkv, up, down in self.layers:
            packed = (rows @ qkv.t()).view(len(rows), 3, HEADS, HEAD_DIM)
            mixed = self.attention(*packed.unbind(1), cu_seqlens, longest, HEAD_DIM**-0.5)
            rows = torch.nn.functional.layer_norm(rows + mixed.flatten(1), (WIDTH,))
            hidden = torch.nn.functional.gelu(torch.nn.functional.linear(rows, up, self.bias))
            rows = torch.nn.functional.layer_norm(rows + hidden @ down.t(), (WIDTH,))
        return rows


class Ladder:
    """Graphs of a tower over one input, packed buffer and output, as the engine makes them."""

    def __init__(self, plugin: ModuleType, tower: Any, largest: int, slots: int = 8) -> None:
        dtype = torch.bfloat16
        self.plugin, self.tower, self.slots = plugin, tower, slots
        self.input = random_rows(largest, 7)  # of zeros, every wrong graph makes the right zeros
        self.output = torch.zeros((largest, WIDTH), dtype=dtype, device=DEVICE)
        self.packed = torch.zeros(4 * (slots + 1), dtype=torch.uint8, device=DEVICE)
        self.cu_seqlens = self.packed.view(torch.int32)
        self.pool: Any = None
        self.graphs: dict[int, CapturedGraph] = {}

    def request(self, rows: int, forward: Callable[[], None] | None = None) -> CaptureRequest:
        source, target = self.input[:rows], self.output[:rows]

        def encode() -> None:
            target.copy_(self.tower(source, self.cu_seqlens, rows))

        bounds = Boundaries.from_lengths([rows]).padded_to(rows, self.slots)
        self.cu_seqlens.copy_(torch.from_numpy(bounds.cu_seqlens.copy()))
        return CaptureRequest(
            key=GraphKey("checks", "rows", rows),
            forward=forward or encode,
            inputs={"rows": source, "cu_seqlens": self.cu_seqlens},
            packed=self.packed,
            output=target,
            boundaries={"cu_seqlens": bounds},
            warmups=2,
            pool=self.pool,
            device=DEVICE,
        )

    def capture(self, rows: int, forward: Callable[[], None] | None = None) -> CapturedGraph:
        graph: CapturedGraph = self.plugin.graphhal_capture(self.request(rows, forward))
        self.pool = graph.pool
        self.graphs[rows] = graph
        return graph

    def update(self, rows: int, lengths: list[int]) -> HostUpdate:
        bounds = Boundaries.from_lengths(lengths).padded_to(rows, self.slots)
        block = torch.from_numpy(bounds.cu_seqlens.copy()).view(torch.uint8).pin_memory()
        return HostUpdate({"cu_seqlens": bounds}, block)

    def run(self, rows: int, data: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        graph, count = self.graphs[rows], len(data)
        update = self.update(rows, lengths)
        scope = self.plugin.graphhal_step("replay", graph, graph.request.inputs, {})
        expect(scope is not None, "step refused a replay")
        with scope as entered:
            self.input[:count].copy_(data)
            self.input[count:rows].zero_()
            self.plugin.graphhal_update_boundaries(graph, update)
            self.plugin.graphhal_replay(graph)
            result = entered.empty((count, WIDTH), torch.bfloat16)
            result.copy_(graph.request.output[:count])
        return result

    def eager(
        self,
        data: torch.Tensor,
        lengths: list[int],
        kept: list[Any] | None = None,
        kind: str = "eager",
    ) -> Any:
        bounds = Boundaries.from_lengths(lengths)
        with self.plugin.graphhal_step(kind, None, {}, {}) as entered, torch.no_grad():
            ends = torch.from_numpy(bounds.cu_seqlens.copy()).to(DEVICE)
            rows = self.tower(data, ends, max(lengths))
            if kept is not None:
                kept.append(rows)
            result = entered.empty(tuple(rows.shape), rows.dtype)
            result.copy_(rows)
        return result

    def close(self) -> None:
        self.plugin.graphhal_release(list(self.graphs.values()))
        self.graphs.clear()


def cuda_plugin() -> ModuleType:
    from graphhal.cuda import plugin

    return plugin


def cuda_attention() -> Any:
    from graphhal.cuda.attention import bind_attention

    return bind_attention(torch.cuda.get_device_capability(DEVICE))


@contextlib.contextmanager
def ladder(*sizes: int, largest: int | None = None) -> Iterator[Ladder]:
    made = Ladder(cuda_plugin(), Tower(cuda_attention()), largest or max(sizes))
    try:
        with torch.no_grad():
            for size in sizes:
                made.capture(size)
            yield made
    finally:
        made.close()
        del made
        gc.collect()
        torch.cuda.empty_cache()


def random_rows(rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return torch.randn((rows, WIDTH), generator=generator, device=DEVICE).to(torch.bfloat16)


def distance(value: torch.Tensor, reference: torch.Tensor) -> float:
    if not bool(value.isfinite().all()):
        return float("inf")
    difference = (value.double() - reference.double()).norm()
    return float(difference / reference.double().norm())


def plain(made: Ladder, data: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """The eager result, nothing of graphhal involved."""
    ends = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32, device=DEVICE)
    with torch.no_grad():
        result: torch.Tensor = made.tower(data, ends, max(lengths))
    return result


def warm(*sizes: int) -> None:
    """Pay what a process pays once: kernels, handles and workspaces, loaded on first use."""
    with ladder(*sizes) as made:
        for size in sizes:
            data = random_rows(size, size)
            got = made.run(size, data, [size])
            expect(distance(got, plain(made, data, [size])) < 1e-2, f"{size} rows are wrong")


def settled_free() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(DEVICE)[0])


def split(rows: int, parts: int, rng: random.Random) -> list[int]:
    cuts = sorted(rng.sample(range(1, rows), parts - 1))
    return [end - start for start, end in zip([0, *cuts], [*cuts, rows], strict=True)]


# --- checks of platform cuda ---------------------------------------------------------------------


@check
def probe() -> str:
    info = cuda_plugin().graphhal_probe()
    expect(hasattr(info, "versions"), f"not usable: {info}")
    expect(info.free_bytes() > 0, "free_bytes is 0")
    versions = " ".join(f"{name}={value}" for name, value in info.versions.items())
    return f"{versions}; {', '.join(sorted(info.capabilities))}"


@check
def attention_against_a_loop() -> str:
    from graphhal.cuda.attention import PackedAttention
    from graphhal.cuda.kernels import flash_kernel, wrapped_kernel

    worst: dict[str, float] = {}
    lengths, spare = [5, 1, 130, 64], 3
    rows = sum(lengths)
    ends = Boundaries.from_lengths(lengths).padded_to(rows, len(lengths) + spare).cu_seqlens
    cu_seqlens = torch.from_numpy(ends.copy()).to(DEVICE)
    for name, kernel in (("operator", flash_kernel()), ("wrapper", wrapped_kernel())):
        attention = PackedAttention(kernel)
        for dtype, bound in ((torch.bfloat16, 1e-2), (torch.float16, 2e-3), (torch.float32, 1e-5)):
            for width in (20, 64, 72, 80, 128, 288):
                torch.manual_seed(width)
                shape = (rows, 4, width)
                q, k, v = (torch.randn(shape, device=DEVICE).to(dtype) for _ in range(3))
                got = attention(q, k, v, cu_seqlens, max(lengths), width**-0.5)
                parts = []
                for start, size in zip(np.cumsum([0, *lengths[:-1]]), lengths, strict=True):
                    one = [t[start : start + size].double().transpose(0, 1) for t in (q, k, v)]
                    scores = one[0] @ one[1].transpose(1, 2) * width**-0.5
                    parts.append((scores.softmax(-1) @ one[2]).transpose(0, 1))
                error = distance(got, torch.cat(parts))
                label = f"{name}/{str(dtype).removeprefix('torch.')}"
                worst[label] = max(worst.get(label, 0.0), error)
                expect(error < bound, f"{label} width {width}: relative error {error:.1e}")
    return ", ".join(f"{label} {error:.0e}" for label, error in worst.items())


@check
def a_lone_sequence_against_flash_attention() -> str:
    """cuDNN's dense kernel with the boundary in head dims, in one graph with changing ends."""
    from graphhal.cuda.attention import LONE_SEQUENCE_FROM, PackedAttention
    from graphhal.cuda.kernels import cudnn_kernel, flash_kernel

    dense = cudnn_kernel()
    expect(dense is not None, "this PyTorch has no such kernel under the known arguments")
    lone, flash = PackedAttention(flash_kernel(), dense), PackedAttention(flash_kernel())
    rows, worst = LONE_SEQUENCE_FROM + 100, 0.0
    for dtype in (torch.bfloat16, torch.float16):
        torch.manual_seed(1)
        q, k, v = (torch.randn((rows, 16, 72), device=DEVICE).to(dtype) for _ in range(3))
        ends = torch.tensor([0, rows, rows], dtype=torch.int32, device=DEVICE)
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            lone(q, k, v, ends, rows, 72**-0.5)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            output = lone(q, k, v, ends, rows, 72**-0.5)
        for used in (rows, rows - 1, rows // 2, LONE_SEQUENCE_FROM, 1, rows):
            ends[1] = used
            graph.replay()
            error = distance(output, flash(q, k, v, ends, rows, 72**-0.5))
            expect(error < 1e-2, f"{dtype}, {used} rows: relative error {error:.1e}")
            worst = max(worst, error)
            if used >= LONE_SEQUENCE_FROM:
                part = [tensor[:used] for tensor in (q, k, v)]
                alone = lone(*part, ends[:2].contiguous(), used, 72**-0.5)
                expect(torch.equal(output[:used], alone), f"{dtype}, {used} rows: other bits")
    expect(lone.lone_sequence_from is not None, "cuDNN's kernel failed, see the log")
    return f"worst {worst:.0e}; the bits of a sequence without padding"


@check
def replay_equals_eager() -> str:
    rng, worst, exact = random.Random(0), 0.0, 0
    with ladder(2048, 1024, 512, 64) as made:
        for size in (64, 2048, 512, 1024, 64, 512):
            for used in (size, size - 1, size // 3 + 1):
                lengths = split(used, 5, rng)
                data = random_rows(used, seed=used)
                got = made.run(size, data, lengths)
                want = plain(made, data, lengths)
                error = distance(got, want)
                worst = max(worst, error)
                exact += used == size and torch.equal(got, want)
                expect(error < 1e-2, f"{used} rows in {size}: relative error {error:.1e}")
        first = made.run(64, random_rows(64, 1), [64])
        kept = first.clone()
        made.run(64, random_rows(64, 2), [64])
        torch.cuda.synchronize()
        expect(torch.equal(first, kept), "an output was overwritten by the next replay")
        one = made.run(64, random_rows(64, 1), [64])
        two = made.run(64, random_rows(64, 1), [32, 32])
        expect(distance(two, one) > 1e-3, "the boundary update changed nothing")
    return f"worst relative error {worst:.1e}, bit-equal at {exact} of 6 exactly full replays"


@alone
@check
def memory_largest_first() -> str:
    sizes = [4096 - 128 * step for step in range(24)]
    warm(*sizes)
    totals = {}
    for name, order in (("largest first", sizes), ("smallest first", sizes[::-1])):
        before = settled_free()
        with ladder(*order, largest=sizes[0]) as made:
            told = [made.graphs[size].num_bytes for size in order]
            static = (
                made.input.nbytes
                + made.output.nbytes
                + sum(t.nbytes for layer in made.tower.layers for t in layer)
            )
            totals[name] = (sum(told), before - settled_free() - static, told[0])
    told, measured, first = totals["largest first"]
    expect(
        told <= 1.1 * first + 8 * MIB, f"24 graphs take {told / MIB:.0f}, one {first / MIB:.0f} MiB"
    )
    expect(abs(told - measured) < 0.15 * measured + 48 * MIB, f"told {told}, measured {measured}")
    return "; ".join(
        f"{name}: {told / MIB:.0f} MiB told, {real / MIB:.0f} measured, first {one / MIB:.0f}"
        for name, (told, real, one) in totals.items()
    )


def _storm(made: Ladder, rounds: int, seed: int) -> int:
    """Replays and eager calls from several streams, some of them delayed; wrong results."""
    rng = random.Random(seed)
    streams = [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(3))]
    cases = [(size, random_rows(size, size + n)) for size in made.graphs for n in range(3)]
    wanted = [plain(made, data, [size]) for size, data in cases]
    torch.cuda.synchronize()
    results = []
    for _ in range(rounds):
        number = rng.randrange(len(cases))
        size, data = cases[number]
        with torch.cuda.stream(rng.choice(streams)):
            if rng.random() < 0.3:
                torch.cuda._sleep(2_000_000)
            if rng.random() < 0.2:
                results.append((number, made.eager(data, [size])))
            else:
                results.append((number, made.run(size, data, [size])))
            if rng.random() < 0.3:
                torch.empty(size * WIDTH, dtype=torch.bfloat16, device=DEVICE).fill_(float("nan"))
    torch.cuda.synchronize()
    return sum(distance(got, wanted[number]) > 1e-2 for number, got in results)


def storm_without_waits() -> int:
    """Wrong results where nothing orders the uses of a pool; the process may not survive it."""
    with ladder(1024, 256, 64) as made:
        stream_capture.GraphPool.wait_for_last_use = lambda self, key: None  # type: ignore[method-assign]
        return _storm(made, 300, seed=1)


@check
def hand_over_across_streams() -> str:
    with ladder(1024, 256, 64) as made:
        wrong = _storm(made, 300, seed=1)
        expect(wrong == 0, f"{wrong} of 300 results are wrong")
    control = python("print('wrong:', checks.storm_without_waits(), flush=True)")
    output = finished(control, 45)
    seen = re.search(r"wrong: (\d+)", output)
    return "300 replays and eager calls on 4 streams right (control without waits: " + (
        f"{seen[1]} wrong)" if seen else f"exit code {control.returncode})"
    )


@check
def two_threads_replay() -> str:
    with ladder(512, 64) as made:
        wrong: list[str] = []

        def work(seed: int) -> None:
            rng = random.Random(seed)
            try:
                with torch.cuda.stream(torch.cuda.Stream()):
                    for turn in range(150):
                        size = rng.choice((512, 64))
                        data = random_rows(size, seed * 1000 + turn)
                        calls = made.eager if rng.random() < 0.1 else None
                        got = calls(data, [size]) if calls else made.run(size, data, [size])
                        want = plain(made, data, [size])
                        torch.cuda.current_stream().synchronize()
                        if distance(got, want) > 1e-2:
                            wrong.append(f"thread {seed} turn {turn}")
            except Exception:  # noqa: BLE001  (reported below)
                wrong.append(traceback.format_exc(limit=3))

        threads = [threading.Thread(target=work, args=(n,)) for n in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        expect(not wrong, f"{len(wrong)} wrong: {wrong[:1]}")
        expect(not made.pool.leaked, "a second thread's workspace was taken for a leftover")
    return "2 × 150 calls right"


def _usable(made: Ladder, streams: tuple[Any, Any]) -> None:
    """After a failed capture everything is as it was, and the pool goes on."""
    expect(not torch.cuda.is_current_stream_capturing(), "still capturing")
    expect(torch.cuda.current_stream() == streams[0], "the current stream was not restored")
    expect(gc.isenabled(), "garbage collection was left off")
    torch.cuda.synchronize()
    torch.rand(4, device=DEVICE).sum().item()
    torch.randn(4, device=DEVICE).sum().item()
    pinned = torch.empty(MIB, dtype=torch.uint8).pin_memory()
    pinned.to(DEVICE, non_blocking=True)
    torch.empty(64 * MIB, dtype=torch.uint8, device=DEVICE).fill_(1)
    torch.cuda.empty_cache()
    expect(not made.pool.broken, "the failed capture could not be ended cleanly")
    data = random_rows(512, 9)
    expect(distance(made.run(512, data, [512]), plain(made, data, [512])) < 1e-2, "old graph wrong")
    made.capture(128)
    data = random_rows(128, 9)
    expect(distance(made.run(128, data, [128]), plain(made, data, [128])) < 1e-2, "new graph wrong")
    made.plugin.graphhal_release([made.graphs.pop(128)])


def _failures(made: Ladder) -> dict[str, tuple[Callable[[], None], type[CaptureError]]]:
    source, target = made.input[:256], made.output[:256]
    side = torch.cuda.Stream()
    host = torch.ones(4)

    def encode() -> None:
        target.copy_(made.tower(source, made.cu_seqlens, 256))

    def capturing() -> bool:
        return torch.cuda.is_current_stream_capturing()

    def item() -> None:
        encode()
        if float(target.float().sum().item()) == 3.5:
            target.zero_()

    def tolist() -> None:
        made.cu_seqlens.tolist()
        encode()

    def nonzero() -> None:
        encode()
        target.nonzero()

    def swallowed() -> None:
        encode()
        with contextlib.suppress(RuntimeError):
            target.float().sum().item()
        encode()

    def synchronizes() -> None:
        encode()
        torch.cuda.synchronize()

    def unpinned() -> None:
        encode()
        target[0, :4].copy_(host.to(target.dtype))

    def unjoined() -> None:
        encode()
        if capturing():
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                target.add_(1)

    def out_of_memory_warming() -> None:
        torch.empty(2**45, dtype=torch.uint8, device=DEVICE)

    def out_of_memory_capturing() -> None:
        held = made.tower(source, made.cu_seqlens, 256)
        if capturing():
            torch.empty(2**45, dtype=torch.uint8, device=DEVICE)
        target.copy_(held)

    def plain_bug() -> None:
        encode()
        if capturing():
            raise KeyError("the model's own mistake")

    return {
        ".item()": (item, HostReadError),
        ".tolist()": (tolist, HostReadError),
        "nonzero()": (nonzero, HostReadError),
        "swallowed .item()": (swallowed, UnsupportedOperationError),
        "synchronize()": (synchronizes, HostReadError),
        "unpinned copy": (unpinned, UnsupportedOperationError),
        "unjoined stream": (unjoined, UnsupportedOperationError),
        "no memory in warm-up": (out_of_memory_warming, ResourceExhaustedError),
        "no memory in capture": (out_of_memory_capturing, ResourceExhaustedError),
        "exception in capture": (plain_bug, CaptureError),
    }


@check
def failed_captures_recover() -> str:
    seen, problems = [], []
    with ladder(512) as made:
        streams = (torch.cuda.current_stream(), None)
        for name, (forward, kind) in _failures(made).items():
            before = torch.cuda.memory_allocated()
            try:
                made.capture(256, forward)
            except CaptureError as error:
                print(f"    {name}: {type(error).__name__}: {str(error)[:230]}")
                if not isinstance(error, kind):
                    problems.append(f"{name}: {type(error).__name__}, expected {kind.__name__}")
                if error.__cause__ is None and kind is not CaptureError:
                    problems.append(f"{name}: no cause")
                grown = torch.cuda.memory_allocated() - before
                if grown > 64 * MIB:
                    problems.append(f"{name}: {grown / MIB:.0f} MiB stay allocated")
            else:
                problems.append(f"{name}: captured")
                made.plugin.graphhal_release([made.graphs.pop(256)])
            try:
                _usable(made, streams)
            except Exception as error:  # noqa: BLE001  (every case must be tried)
                problems.append(f"after {name}: {type(error).__name__}: {str(error)[:200]}")
            seen.append(name)
    expect(not problems, "; ".join(problems))
    return f"{len(seen)} kinds; {len(recording._abandoned)} ends had to be mended"


@alone
@check
def failed_first_capture() -> str:
    made = Ladder(cuda_plugin(), Tower(cuda_attention()), 512)
    left = 0
    for _ in range(2):  # the first round pays what the process pays once
        before = settled_free()
        for name, (forward, _kind) in _failures(made).items():
            made.pool = None
            with contextlib.suppress(CaptureError):
                made.plugin.graphhal_release([made.capture(256, forward)])
                made.graphs.clear()
            expect(not torch.cuda.is_current_stream_capturing(), f"capturing after {name}")
        made.capture(512)
        data = random_rows(512, 3)
        expect(
            distance(made.run(512, data, [512]), plain(made, data, [512])) < 1e-2, "wrong result"
        )
        made.close()
        del data
        left = before - settled_free()
    expect(left < 48 * MIB, f"{left / MIB:.0f} MiB are gone")
    return f"{left / MIB:.0f} MiB left behind after all kinds without any graph"


@check
def dropping_a_graph_keeps_the_others_right() -> str:
    with ladder(1024, 512, 256, 64) as made:
        for size in (512, 64, 1024):
            made.plugin.graphhal_release([made.graphs.pop(size)])
            torch.cuda.empty_cache()
            with torch.cuda.stream(made.pool.stream):
                junk = torch.full((256 * MIB,), 0xFF, dtype=torch.uint8, device=DEVICE)
            torch.cuda.synchronize()
            for left in made.graphs:
                data = random_rows(left, left)
                error = distance(made.run(left, data, [left]), plain(made, data, [left]))
                expect(error < 1e-2, f"graph {left} after dropping {size}: {error:.1e}")
            expect(int(junk.min()) == 0xFF, "a replay wrote into memory that is not its own")
            del junk
    return "workspaces survive the release of other graphs"


@alone
@check
def pool_is_reused_after_clear() -> str:
    warm(1024, 64)
    made = Ladder(cuda_plugin(), Tower(cuda_attention()), 1024)
    made.capture(1024)
    made.close()
    base = settled_free()
    pool = made.pool
    for turn in range(4):
        if turn >= 2:
            made.pool = None  # as another owner
        made.capture(1024)
        made.capture(64)
        expect(made.pool is pool, "another pool came back")
        data = random_rows(64, 5)
        expect(distance(made.run(64, data, [64]), plain(made, data, [64])) < 1e-2, "wrong result")
        graphs = list(made.graphs.values())
        made.close()
        made.plugin.graphhal_release(graphs)
        try:
            made.plugin.graphhal_replay(graphs[0])
        except ReplayError:
            pass
        else:
            raise CheckFailedError("a released graph was replayed")
        del graphs, data
    left = base - settled_free()
    expect(left < 8 * MIB, f"{left / MIB:.1f} MiB stay after release")
    return f"4 rounds; {left / MIB:.1f} MiB left behind; release twice is harmless"


@check
def poison_shows_unwritten_memory() -> str:
    with ladder(1024, 256) as made:
        target = made.output[:128]
        scratch: list[torch.Tensor] = []

        def reads_garbage() -> None:
            scratch[:] = [torch.empty((128, WIDTH), dtype=torch.bfloat16, device=DEVICE)]
            target.copy_(scratch[0])
            scratch.clear()

        made.capture(128, reads_garbage)
        held = torch.cuda.memory_reserved()
        for graph in made.graphs.values():
            expect(graph.poison is not None, "no poison")
        made.graphs[1024].poison()
        grown = torch.cuda.memory_reserved() - held
        garbage = made.run(128, random_rows(128, 1), [128])
        share = float(garbage.isnan().float().mean())
        expect(share > 0.99, f"only {share:.0%} of unwritten memory was poisoned")
        data = random_rows(256, 4)
        made.graphs[256].poison()
        expect(
            distance(made.run(256, data, [256]), plain(made, data, [256])) < 1e-2, "wrong result"
        )
        started = time.perf_counter()
        made.graphs[256].poison()
        torch.cuda.synchronize()
        spent = 1e3 * (time.perf_counter() - started)
    expect(grown <= 4 * MIB, f"poison grew the pool by {grown} bytes")
    return f"{share:.0%} NaN, pool grew {grown / MIB:.1f} MiB, {spent:.2f} ms"


def _microseconds(work: Callable[[], Any], count: int = 3000) -> float:
    for _ in range(200):
        work()
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(count // 5):
            work()
        best = min(best, (time.perf_counter() - started) / (count // 5))
        torch.cuda.synchronize()
    return 1e6 * best


@alone
@check
def step_host_cost() -> str:
    with ladder(64) as made:
        plugin, graph = made.plugin, made.graphs[64]
        update = made.update(64, [64])
        raw = torch.cuda.CUDAGraph()
        cell = torch.zeros(1, device=DEVICE)
        with torch.cuda.graph(raw):
            cell.add_(1)
        nothing = graph.handle.launch
        inputs = graph.request.inputs

        def step() -> None:
            with plugin.graphhal_step("replay", graph, inputs, {}):
                pass

        def allocate() -> None:
            with plugin.graphhal_step("replay", graph, inputs, {}) as scope:
                scope.empty((64, WIDTH), torch.bfloat16)

        costs = {
            "step": _microseconds(step),
            "step+empty": _microseconds(allocate),
            "update": _microseconds(lambda: plugin.graphhal_update_boundaries(graph, update)),
            "replay": _microseconds(lambda: plugin.graphhal_replay(graph), 500),
            "bare launch": _microseconds(nothing, 500),
            "one-kernel graph": _microseconds(raw.replay),
        }
        del raw
    expect(costs["step"] <= 15.0, f"a step costs {costs['step']:.1f} µs: does it wait?")
    return ", ".join(f"{name} {cost:.1f}" for name, cost in costs.items()) + " µs"


@check
def eager_reuses_the_graphs_memory() -> str:
    data = random_rows(4096, 1)
    grown = {}
    warm(4096, 512)
    for kind in ("eager", "reference"):
        with ladder(4096, 512) as made:
            settled_free()
            before = torch.cuda.memory_reserved()
            pool_bytes = sum(s["total_size"] for s in made.pool._mem.snapshot())
            got = made.eager(data, [4096], kind=kind)
            torch.cuda.synchronize()
            segments = made.pool._mem.snapshot()
            more = sum(s["total_size"] for s in segments) - pool_bytes
            expect(kind == "eager" or more == 0, f"a reference made the pool grow by {more} bytes")
            start = got.data_ptr()
            inside = any(s["address"] <= start < s["address"] + s["total_size"] for s in segments)
            expect(not inside, "the output lies in the pool")
            grown[kind] = torch.cuda.memory_reserved() - before
            expect(distance(got, plain(made, data, [4096])) < 1e-2, "wrong result")
            small = random_rows(512, 3)
            expect(
                distance(made.run(512, small, [512]), plain(made, small, [512])) < 1e-2, "replay"
            )
            expect(not made.pool.leaked, "a leftover was seen where there is none")
            del got, segments
    expect(grown["eager"] < 0.5 * grown["reference"], f"grown {grown}")
    return ", ".join(f"{kind}: {size / MIB:.0f} MiB more" for kind, size in grown.items())


@check
def leftovers_stop_replays() -> str:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("graphhal.stream_capture").addHandler(handler)
    try:
        with ladder(512) as made:
            kept: list[Any] = []
            made.eager(random_rows(512, 1), [512], kept)
            graph = made.graphs[512]
            scope = made.plugin.graphhal_step("replay", graph, graph.request.inputs, {})
            expect(scope is None, "a replay may overwrite what an eager call kept")
            expect(any("kept 1 tensors" in text for text in records), f"log: {records}")
            made.close()
            made.capture(512)
            made.run(512, random_rows(512, 1), [512])
            cost = _microseconds(made.pool.look_for_leftovers, 500)
            kept.clear()
    finally:
        logging.getLogger("graphhal.stream_capture").removeHandler(handler)
    return f"refused, logged, and right again after recapture; the look costs {cost:.1f} µs"


@check
def outer_capture() -> str:
    with ladder(64) as made:
        graph = made.graphs[64]
        outer = torch.cuda.CUDAGraph()
        cell = torch.zeros(4, device=DEVICE)
        answers = []
        with torch.cuda.graph(outer, capture_error_mode="thread_local"):
            cell.add_(1)
            answers.append(made.plugin.graphhal_step("replay", graph, graph.request.inputs, {}))
            scope = made.plugin.graphhal_step("eager", None, {}, {})
            answers.append(type(scope).__name__)
            with scope as entered:
                entered.empty((4,), torch.float32).copy_(cell)
        outer.replay()
        expect(answers == [None, "PlainScope"], f"step answered {answers}")
        data = random_rows(64, 5)
        expect(distance(made.run(64, data, [64]), plain(made, data, [64])) < 1e-2, "wrong after")
        del outer
    return "no replay inside another capture; eager stays on its stream"


@check
def outer_capture_survives_a_release() -> str:
    with ladder(64) as made:
        data = random_rows(64, 5)
        made.run(64, data, [64])
        outer, cell = torch.cuda.CUDAGraph(), torch.zeros(4, device=DEVICE)
        with torch.cuda.graph(outer, capture_error_mode="thread_local"):
            cell.add_(1)
            made.plugin.graphhal_release(list(made.graphs.values()))
            gc.collect()
            cell.add_(1)
        outer.replay()
        torch.cuda.synchronize()
        expect(cell.tolist() == [2.0] * 4, f"the outer graph computed {cell.tolist()}")
        del outer
    with ladder(64) as again:  # what was kept is destroyed here
        error = distance(again.run(64, data, [64]), plain(again, data, [64]))
    expect(error < 1e-2, f"relative error {error:.1e} after it")
    return "graphs that are released within another capture are destroyed later"


@check
def captures_while_another_thread_copies() -> str:
    stop, copies, errors = threading.Event(), [0], []

    def copier() -> None:
        pinned = torch.ones(4 * MIB, dtype=torch.uint8).pin_memory()
        pageable = torch.ones(MIB, dtype=torch.uint8)
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                while not stop.is_set():
                    one, two = pinned.to(DEVICE, non_blocking=True), pageable.to(DEVICE)
                    torch.cuda.current_stream().synchronize()
                    copies[0] += int(one[0]) + int(two[0])
        except Exception as error:  # noqa: BLE001  (reported below)
            errors.append(error)

    thread = threading.Thread(target=copier)
    thread.start()
    try:
        with ladder(*(1024 - 64 * n for n in range(8))) as made:
            data = random_rows(1024, 6)
            error = distance(made.run(1024, data, [1024]), plain(made, data, [1024]))
    finally:
        stop.set()
        thread.join()
    expect(not errors, f"the other thread failed: {errors}")
    expect(error < 1e-2, f"relative error {error:.1e}")
    expect(copies[0] > 0, "the other thread copied nothing")
    return f"8 graphs beside {copies[0]} copies"


@alone
@check
def memory_profile_predicts() -> str:
    sizes = [4096 - 256 * step for step in range(16)]
    warm(*sizes)
    made = Ladder(cuda_plugin(), Tower(cuda_attention()), sizes[0])
    before = settled_free()
    started = time.perf_counter()
    profile = made.plugin.graphhal_profile_memory([made.request(size) for size in sizes])
    spent = time.perf_counter() - started
    kept = before - settled_free()
    real = sum(made.capture(size).num_bytes for size in sizes)
    made.close()
    expect(kept < 16 * MIB, f"the profile kept {kept / MIB:.0f} MiB")
    expect(abs(profile.settled_bytes - real) < 0.1 * real + 16 * MIB, f"{profile} against {real}")
    expect(set(profile.per_graph) == {GraphKey("checks", "rows", size) for size in sizes}, "keys")
    return (
        f"{profile.settled_bytes / MIB:.0f} MiB predicted, {real / MIB:.0f} taken; transient "
        f"{profile.transient_bytes / MIB:.0f}; {spent:.2f} s; {kept / MIB:.0f} MiB kept"
    )


@check
def eager_out_of_memory_leaves_the_pool() -> str:
    with ladder(512) as made:
        try:
            with made.plugin.graphhal_step("eager", None, {}, {}):
                torch.empty(2**45, dtype=torch.uint8, device=DEVICE)
        except torch.OutOfMemoryError:
            pass
        kind = type(made.plugin.graphhal_step("eager", None, {}, {})).__name__
        expect(kind == "PlainScope", f"the next eager call runs in {kind}")
        data = random_rows(512, 7)
        expect(
            distance(made.run(512, data, [512]), plain(made, data, [512])) < 1e-2, "replay wrong"
        )
    return "the next eager call runs outside, with the whole device to allocate from"


@check
def other_device() -> str:
    if torch.cuda.device_count() < 2:
        return "skipped: one device"
    global DEVICE
    kept, DEVICE = DEVICE, torch.device("cuda", 1)
    try:
        with ladder(512, 64) as made:
            data = random_rows(512, 2)
            got = made.run(512, data, [512])
            error = distance(got, plain(made, data, [512]))
            expect(torch.cuda.current_device() == 0, "the current device changed")
            expect(error < 1e-2, f"relative error {error:.1e}")
            with torch.cuda.device(1):
                expect(distance(made.eager(data, [512]), got) < 1e-2, "eager wrong")
            expect(torch.cuda.current_device() == 0, "the current device changed")
    finally:
        DEVICE = kept
    return "captured and replayed on device 1 while device 0 is current"


PRELUDE = """
import sys; sys.path[:0] = {paths!r}
import device_checks as checks, torch
"""
EXIT = """
made = checks.Ladder(checks.cuda_plugin(), checks.Tower(checks.cuda_attention()), 512)
with torch.no_grad():
    made.capture(512); made.capture(64)
made.eager(checks.random_rows(512, 1), [512])
"""
FAILS_AND_LEAVES_A_CYCLE = """
try: made.capture(256, lambda: made.output.sum().item())
except checks.CaptureError: pass
made.me = made; del made
"""


def python(code: str) -> "subprocess.Popen[str]":
    """Another interpreter that runs this, with the checks imported; both outputs in one."""
    here = Path(__file__).resolve().parent
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE.format(paths=[str(here), str(here.parent)]) + code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(process: "subprocess.Popen[str]", seconds: float) -> str:
    """Output of an interpreter; one that takes longer is killed."""
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]


@check
def clean_interpreter_exit() -> str:
    tails = {"held": "", "failed capture and cycle": FAILS_AND_LEAVES_A_CYCLE}
    running = {name: python(EXIT + tail) for name, tail in tails.items()}
    for name, process in running.items():
        output = finished(process, 60)
        expect(process.returncode == 0, f"{name}: exit code {process.returncode}: {output[-400:]}")
        noise = [line for line in output.splitlines() if "rror" in line or "terminate" in line]
        expect(not noise, f"{name}: {noise[:3]}")
    return f"{len(tails)} ways to end a process: exit code 0, quiet"


@alone
@check
def attention_operator_against_wrapper() -> str:
    from graphhal.cuda.attention import PackedAttention
    from graphhal.cuda.kernels import flash_kernel, wrapped_kernel

    times = {}
    for name, kernel in (("operator", flash_kernel()), ("wrapper", wrapped_kernel())):
        made = Ladder(cuda_plugin(), Tower(PackedAttention(kernel)), 64)
        with torch.no_grad():
            made.capture(64)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(20):
            made.graphs[64].handle.launch()
        begin.record()
        for _ in range(200):
            made.graphs[64].handle.launch()
        end.record()
        end.synchronize()
        times[name] = begin.elapsed_time(end) / 200 * 1e3 / LAYERS
        made.close()
    return ", ".join(f"{name} {spent:.2f} µs a layer" for name, spent in times.items())


# --- rocm's code on NVIDIA, AITER replaced by a strict stand-in -----------------------------------


class RocmLadder(Ladder):
    """As `Ladder`, without empty sequences."""

    def request(self, rows: int, forward: Callable[[], None] | None = None) -> CaptureRequest:
        made = super().request(rows, forward)
        update = self.update(rows, [1] * (self.slots - 1) + [rows - self.slots + 1])
        self.packed.copy_(update.block)
        return made

    def update(self, rows: int, lengths: list[int]) -> HostUpdate:
        bounds = Boundaries.from_lengths(lengths).padded_to(rows, self.slots, allow_empty=False)
        block = torch.from_numpy(bounds.cu_seqlens.copy()).view(torch.uint8).pin_memory()
        return HostUpdate({"cu_seqlens": bounds}, block)


@contextlib.contextmanager
def rocm_ladder(*sizes: int) -> Iterator[RocmLadder]:
    from graphhal.rocm import plugin
    from graphhal.rocm.attention import PackedAttention

    made = RocmLadder(plugin, Tower(PackedAttention(StrictAiter())), max(sizes))
    try:
        for size in sizes:
            made.capture(size)
        yield made
    finally:
        made.close()


@check
def rocm_code_replays_equal_eager() -> str:
    rng, worst = random.Random(3), 0.0
    with rocm_ladder(1024, 256, 64) as made:
        for size in (64, 1024, 256, 64):
            for used in (size, size - 1, size // 2):
                parts = made.slots if used == size else rng.randint(1, made.slots - 2)
                lengths = split(used, parts, rng)
                if size - used + len(lengths) < made.slots:
                    lengths = split(used, made.slots - 1, rng)
                data = random_rows(used, used)
                made.graphs[size].poison()
                error = distance(made.run(size, data, lengths), plain(made, data, lengths))
                worst = max(worst, error)
                expect(error < 1e-2, f"{used} rows in {size}: relative error {error:.1e}")
        wrong = 0
        for seed in range(40):
            with torch.cuda.stream(torch.cuda.Stream()):
                lengths = split(64, made.slots, rng)
                data = random_rows(64, seed)
                got = made.run(64, data, lengths) if seed % 5 else made.eager(data, lengths)
                wrong += distance(got, plain(made, data, lengths)) > 1e-2
        expect(wrong == 0, f"{wrong} of 40 calls on new streams are wrong")
    return f"worst relative error {worst:.1e}; 40 calls on other streams right (AITER stand-in)"


@check
def rocm_code_needs_its_precautions() -> str:
    from graphhal.rocm.attention import PackedAttention

    attention = PackedAttention(StrictAiter())
    query = torch.randn((16, 2, 64), device=DEVICE).to(torch.bfloat16)
    covered = torch.tensor([0, 4, 8], dtype=torch.int32, device=DEVICE)
    got = attention(query, query, query, covered, 8, 0.1)
    expect(bool(got.isfinite().all()) and float(got[8:].abs().sum()) == 0.0, "rows unwritten")
    empty = torch.tensor([0, 16, 16], dtype=torch.int32, device=DEVICE)
    try:
        attention(query, query, query, empty, 16, 0.1)
    except ValueError:
        pass
    else:
        raise CheckFailedError("the stand-in takes empty sequences")
    cold = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(cold, stream=torch.cuda.Stream()):
            attention(query, query, query, covered, 8, 0.1)
    except RuntimeError as error:
        expect("never ran" in str(error), f"another error: {error}")
    else:
        raise CheckFailedError("the stand-in captures on a stream that it never ran on")
    torch.cuda.synchronize()
    return "the stand-in is strict: unwritten rows, empty sequences, cold streams (AITER stand-in)"


@check
def rocm_code_catches_what_the_runtime_swallows() -> str:
    with rocm_ladder(256) as made:
        source, target = made.input[:128], made.output[:128]

        def swallowed() -> None:
            rows = made.tower(source, made.cu_seqlens, 128)
            if torch.cuda.is_current_stream_capturing():
                rows = torch.zeros_like(rows)
            target.copy_(rows)

        try:
            made.capture(128, swallowed)
        except UnsupportedOperationError as error:
            said = str(error)[:90]
        else:
            raise CheckFailedError("a graph that does not repeat its warm-up was kept")
        try:
            made.capture(128, lambda: target.sum().item())
        except HostReadError:
            pass
        else:
            raise CheckFailedError("a host read was captured")
        lengths = [32] * 8
        data = random_rows(256, 1)
        error = distance(made.run(256, data, lengths), plain(made, data, lengths))
        expect(error < 1e-2, f"the graph captured before: relative error {error:.1e}")
    return f"refused: {said}… (AITER stand-in)"


@check
def rocm_code_releases_before_the_process_group_ends() -> str:
    from torch import distributed

    if not distributed.is_available():
        return "skipped: torch.distributed is not built"
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    with rocm_ladder(64) as made:
        graph, pool = made.graphs[64], made.pool
        distributed.destroy_process_group()
        expect(pool.id is None, "the pool is still there")
        try:
            made.plugin.graphhal_replay(graph)
        except ReplayError:
            pass
        else:
            raise CheckFailedError("the graph is still there")
    return "graphs and pool were gone first (AITER stand-in)"


def in_processes(names: list[str]) -> int:
    """Every check in a process of its own; one line each as they end, then one table."""

    def one(name: str) -> tuple[str, int, float, str]:
        started = time.perf_counter()
        with subprocess.Popen(
            [sys.executable, __file__, "--only", name],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            output = finished(process, PROCESS_SECONDS)
            code = process.returncode
        spent = time.perf_counter() - started
        told = re.search(rf"^(?:ok|FAILED) +{name} \([^)]*\): (.*)$", output, re.MULTILINE)
        crash = re.search(r"what\(\): *(.*)|^([\w.]*Error: .*)", output, re.MULTILINE)
        end = crash[0].strip() if crash else (output.strip().splitlines() or ["no output"])[-1]
        note = told[1] if told else end
        if told and code and told[0].startswith("ok"):
            note = f"died after it had passed: {end}"
        print(f"{'ok' if code == 0 else 'FAILED':6} {name} (exit code {code}, {spent:.1f} s)")
        if code:
            print("\n".join(f"    | {line[:200]}" for line in output.splitlines()[-30:]))
        sys.stdout.flush()
        return name, code, spent, note

    workers = max(1, min(8, (os.cpu_count() or 2) // 2))
    with ThreadPoolExecutor(workers) as pool:
        rows = list(pool.map(one, [name for name in names if name not in ALONE]))
    rows += [one(name) for name in names if name in ALONE]
    width = max(len(name) for name, *_ in rows)
    print(f"\n{'check':{width}}  exit  seconds  message")
    for name, code, spent, note in sorted(rows, key=lambda row: names.index(row[0])):
        print(f"{name:{width}}  {code:4}  {spent:7.1f}  {note[:300]}")
    failed = sum(code != 0 for _, code, *_ in rows)
    print(f"{len(rows) - failed} of {len(rows)} checks passed")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="*", choices=list(CHECKS), metavar="NAME", help="some checks"
    )
    parser.add_argument("--all-in-processes", action="store_true", help="one process per check")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    if options.list:
        print("\n".join(CHECKS))
        return 0
    if options.all_in_processes:
        return in_processes([name for name in CHECKS if not options.only or name in options.only])
    if not torch.cuda.is_available():
        print("no CUDA device is visible; nothing was checked")
        return 1
    torch.cuda.set_device(DEVICE)
    torch.zeros(1, device=DEVICE)
    rows = []
    for name, function in CHECKS.items():
        if options.only and name not in options.only:
            continue
        started = time.perf_counter()
        try:
            verdict, note = "ok", function()
        except CheckFailedError as error:
            verdict, note = "FAILED", str(error)
        except Exception as error:  # noqa: BLE001  (one broken check must not hide the others)
            verdict, note = "FAILED", f"{type(error).__name__}: {error}"
            traceback.print_exc()
        rows.append((name, verdict, time.perf_counter() - started, note))
        print(f"{verdict:6} {name} ({rows[-1][2]:.1f} s): {note}", flush=True)
        gc.collect()
    width = max(len(name) for name, *_ in rows)
    print(f"\n{'check':{width}}  result  seconds")
    for name, verdict, seconds, _ in rows:
        print(f"{name:{width}}  {verdict:6}  {seconds:7.1f}")
    failed = [name for name, verdict, *_ in rows if verdict != "ok"]
    print(f"{len(rows) - len(failed)} of {len(rows)} checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
