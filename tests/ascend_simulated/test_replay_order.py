"""What a replay asks of the runtime: order, once per flag, and no wait on the host."""

import gc
import random
import re
import sys
import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch

from graphhal.boundaries import Boundaries
from graphhal.errors import ReplayError
from graphhal.npu import recording
from graphhal.npu.capture_state import direct_launches
from graphhal.npu.task_update import TASK_UPDATE
from graphhal.platform import HostUpdate, Platform
from graphhal.settings import Settings
from tests.ascend_simulated import simulator
from tests.ascend_simulated.direct_request import a_request
from tests.ascend_simulated.encoders import (
    Twins,
    assert_equal,
    random_request,
    toy_twins,
    twins,
)
from tests.toy_encoder import FULL, WINDOWED
from tests.toy_encoder import images as images_on_host

BLOCKS = 2
"""Attention layers of the toy encoder: one full, one windowed."""


def images(*tokens: int) -> dict[str, Any]:
    """Images whose pixels are on the device, as a host hands them over."""
    request = images_on_host(*tokens)
    return {**request, "pixels": request["pixels"].npu()}


@pytest.fixture(scope="module")
def tower(platform: Platform) -> Twins:
    found = twins("toy", platform)
    assert not found.graphs.capture().dropped
    return found


def one_replay(tower: Twins, trace: "simulator.Trace", *tokens: int) -> list[str]:
    """As `one_request`, for one that a graph serves."""
    hits = tower.graphs.stats()["hits"]
    lines = one_request(tower, trace, *tokens)
    assert tower.graphs.stats()["hits"] != hits
    return lines


def one_request(tower: Twins, trace: "simulator.Trace", *tokens: int) -> list[str]:
    """The runtime's lines from the start of a request until the device finished it."""
    request = images(*tokens)
    torch.npu.synchronize()
    simulator.mark("begin")
    outputs = tower.graphs.run(request)
    torch.npu.current_stream().npu_stream  # noqa: B018  (flushes torch_npu's queue)
    simulator.mark("end")
    torch.npu.synchronize()
    simulator.mark("finished")
    assert_equal(outputs, tower.expected(images_on_host(*tokens)), torch.float32)
    return trace.between("begin", "finished")


def test_every_flag_is_set_once_a_replay_after_its_update(
    tower: Twins, trace: "simulator.Trace", schedule: str
) -> None:
    lines = one_replay(tower, trace, 2, 3)
    sets = Counter(re.findall(r"run VALUE_WRITE (\S+)=1 ", "\n".join(lines)))
    waits = Counter(re.findall(r"waited VALUE_WAIT (\S+)=1 ", "\n".join(lines)))
    clears = Counter(re.findall(r"run VALUE_WRITE (\S+)=0 ", "\n".join(lines)))
    assert sets == waits == clears
    assert len(sets) == BLOCKS
    assert set(sets.values()) == {1}
    updates = [line for line in lines if line.startswith("update group=")]
    assert len({re.search(r"group=\d+", line)[0] for line in updates}) == len(updates) == BLOCKS
    steps = [
        index
        for index, line in enumerate(lines)
        if line.startswith("update group=") or re.search(r"VALUE_WRITE \S+=1", line)
    ]
    kinds = ["update" if lines[i].startswith("update") else "set" for i in steps]
    assert kinds == ["update", "set"] * BLOCKS


def test_windowed_and_full_layers_get_their_own_ends(
    tower: Twins, trace: "simulator.Trace"
) -> None:
    lines = one_replay(tower, trace, 3, 5)
    ends = [re.search(r"\[q=(\S+) kv", line) for line in lines if "FusedInferAttention" in line]
    found = [match[1] for match in ends if match]
    assert found == ["6,16", "4,6,10,14,16"]


def test_ends_are_made_once_a_replay_and_shared_by_the_layers_that_read_them(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = toy_twins(platform, Settings(self_check="off"), sets=(FULL, WINDOWED) * 2)
    assert not layers.graphs.capture().dropped
    made: list[Boundaries] = []

    def actual_seq_lengths(bounds: Boundaries) -> list[int]:
        made.append(bounds)
        return list(bounds.ends)

    with monkeypatch.context() as patched:
        patched.setattr(Boundaries, "actual_seq_lengths", property(actual_seq_lengths))
        outputs = layers.graphs.run(images(3, 5))
    assert_equal(outputs, layers.expected(images_on_host(3, 5)), torch.float32)
    assert layers.graphs.stats()["hits"] == {"image": 2}
    assert sorted(bounds.ends[:2] for bounds in made) == [(4, 6), (6, 16)]
    layers.graphs.clear()


@pytest.mark.parametrize("tokens", [(4, 4), (30,)], ids=["replayed", "eager"])
def test_the_request_path_waits_for_nothing_on_the_host(
    tower: Twins, trace: "simulator.Trace", schedule: str, tokens: tuple[int, ...]
) -> None:
    one_request(tower, trace, *tokens)
    on_host = trace.between("begin", "end")
    assert [line for line in on_host if line.startswith("sync")] == []
    if schedule != "eager":
        assert [line for line in on_host if re.match("exec|run", line)] == []


@pytest.mark.parametrize("tokens", [(2, 3), (30,)], ids=["replayed", "eager"])
def test_a_request_comes_after_its_callers_work_and_before_what_the_caller_does_next(
    tower: Twins, schedule: str, tokens: tuple[int, ...]
) -> None:
    """Pixels that are still computed when they are handed in, and overwritten right after."""
    expected, pixels = tower.expected(images_on_host(*tokens)), images(*tokens)["pixels"]
    for stream in [torch.npu.current_stream(), *(torch.npu.Stream() for _ in range(4))]:
        late = torch.zeros_like(pixels)
        torch.npu.synchronize()
        with torch.npu.stream(stream):
            late.copy_(pixels)
            outputs = tower.graphs.run({**images_on_host(*tokens), "pixels": late})
            late.zero_()
            doubled = [output * 2 for output in outputs]
        torch.npu.synchronize()
        assert_equal([each / 2 for each in doubled], expected, torch.float32)


def test_an_output_that_one_caller_lets_go_of_is_not_where_anothers_is_written(
    tower: Twins, schedule: str
) -> None:
    """It is memory of its caller's stream, which has not read it yet."""
    expected, request, other = tower.expected(images_on_host(2, 3)), images(2, 3), images(3, 2)
    mine, theirs, blocker = torch.npu.Stream(), torch.npu.Stream(), torch.npu.ExternalEvent()
    torch.npu.synchronize()
    with torch.npu.stream(mine):
        outputs = tower.graphs.run(request)
        blocker.wait(mine)
        doubled = [output * 2 for output in outputs]
        del outputs
    with torch.npu.stream(theirs):
        kept = tower.graphs.run(other)
        theirs.synchronize()
    blocker.record(theirs)
    torch.npu.synchronize()
    assert len(kept) == 2
    assert_equal([each / 2 for each in doubled], expected, torch.float32)


def test_no_stream_and_no_event_is_made_on_the_request_path(
    tower: Twins, trace: "simulator.Trace"
) -> None:
    one_replay(tower, trace, 4, 4)
    one_replay(tower, trace, 4, 3)
    lines = trace.lines[len(trace.lines) // 2 :]
    assert [line for line in lines if line.startswith("stream create")] == []


def test_one_update_stream_serves_every_graph(tower: Twins, trace: "simulator.Trace") -> None:
    for tokens in ((2, 2), (8,), (20,), (3, 5)):
        one_replay(tower, trace, *tokens)
    streams = set(re.findall(r"update group=\d+ model=\d+ stream=(\d+)", "\n".join(trace.lines)))
    replays = set(re.findall(r"replay model=\d+ stream=(\d+)", "\n".join(trace.lines)))
    assert len(streams) == len(replays) == 1
    assert streams != replays


@pytest.mark.timeout(600)
def test_500_replays_back_to_back_without_a_host_wait(
    tower: Twins, trace: "simulator.Trace", schedule: str
) -> None:
    chooser = random.Random(11)
    sizes = [chooser.choices(range(1, 7), k=chooser.randint(1, 4)) for _ in range(20)]
    requests = [images(*tokens) for tokens in sizes]
    expected = [tower.expected(images_on_host(*tokens)) for tokens in sizes]
    torch.npu.synchronize()
    simulator.mark("begin")
    outputs = [tower.graphs.run(requests[number % 20]) for number in range(500)]
    torch.npu.current_stream().npu_stream  # noqa: B018
    simulator.mark("end")
    for number, output in enumerate(outputs):
        assert_equal(output, expected[number % 20], torch.float32)
    assert trace.hazards() == []
    between = trace.between("begin", "end")
    assert [line for line in between if line.startswith("sync")] == []
    assert len([line for line in between if line.startswith("replay")]) == 500


def test_one_graph_takes_other_boundaries_in_every_replay(
    tower: Twins, trace: "simulator.Trace", schedule: str
) -> None:
    """Groups of eight tokens each, split in seven ways, one right after another."""
    splits = [(8,), (3, 5), (5, 3), (4, 4), (2, 6), (1, 3, 4), (2, 2, 2, 2)]
    requests = [images(*tokens) for tokens in splits]
    torch.npu.synchronize()
    simulator.mark("begin")
    outputs = [tower.graphs.run(request) for request in requests]
    torch.npu.synchronize()
    simulator.mark("end")
    for tokens, output in zip(splits, outputs, strict=True):
        assert_equal(output, tower.expected(images_on_host(*tokens)), torch.float32)
    lines = "\n".join(trace.between("begin", "end"))
    assert len(set(re.findall(r"replay model=(\d+)", lines))) == 1
    full = re.findall(r"\[q=(\S+) kv", lines)[::BLOCKS]
    assert len(set(full)) == len(splits)


def a_graph(tower: Twins) -> "tuple[object, HostUpdate]":
    graph = tower.graphs._graphs.entries[tower.graphs.keys()[0]].graph
    return graph, HostUpdate(graph.request.boundaries, torch.zeros_like(graph.request.packed).cpu())


def test_a_replay_without_an_update_is_refused_instead_of_hanging(tower: Twins) -> None:
    graph, update = a_graph(tower)
    platform = tower.graphs.platform
    with (
        pytest.raises(ReplayError, match="update its boundaries before every replay"),
        platform.step("replay", graph, graph.request.inputs, update.boundaries),
    ):
        platform.replay(graph)


@pytest.mark.parametrize("fault", ["missing set", "too few rows", "too many rows", "short block"])
def test_an_update_is_checked_before_anything_is_queued(
    tower: Twins, trace: "simulator.Trace", fault: str
) -> None:
    graph, update = a_graph(tower)
    platform = tower.graphs.platform
    rows = graph.request.boundaries["cu_seqlens"].rows
    bad = {
        "missing set": {"cu_seqlens": graph.request.boundaries["cu_seqlens"]},
        "too few rows": {**update.boundaries, "cu_seqlens": Boundaries((rows - 1,))},
        "too many rows": {**update.boundaries, "cu_seqlens": Boundaries((rows + 1,))},
        "short block": update.boundaries,
    }[fault]
    block = update.block[:-1] if fault == "short block" else update.block
    torch.npu.synchronize()
    simulator.mark("begin")
    with (
        pytest.raises(ReplayError, match=r"^toy/"),
        platform.step("replay", graph, graph.request.inputs, update.boundaries),
    ):
        platform.update_boundaries(graph, HostUpdate(bad, block))
    torch.npu.synchronize()
    simulator.mark("end")
    touched = [line for line in trace.between("begin", "end") if re.match(r"update|run", line)]
    assert touched == []


def test_a_second_update_before_the_replay_costs_nothing(
    tower: Twins, trace: "simulator.Trace", schedule: str
) -> None:
    """A request that fails between update and replay leaves flags set: none may be lost."""
    graph, update = a_graph(tower)
    platform = tower.graphs.platform
    with platform.step("replay", graph, graph.request.inputs, update.boundaries):
        platform.update_boundaries(graph, update)
    outputs = tower.graphs.run(images(2))
    assert_equal(outputs, tower.expected(images_on_host(2)), torch.float32)
    assert trace.hazards() == []


def test_a_tower_works_after_every_order_test(tower: Twins) -> None:
    chooser = random.Random(12)
    for _ in range(10):
        request = random_request(tower.graphs.adapter, chooser)
        assert_equal(tower.graphs.run(request), tower.expected(request), torch.float32)


def test_threads_that_encode_at_once_do_not_disturb_each_other(
    platform: Platform, trace: "simulator.Trace"
) -> None:
    towers = [twins("toy", platform) for _ in range(2)]
    for tower in towers:
        assert not tower.graphs.capture().dropped
    sizes = [(2,), (1, 3), (5, 6), (4,)]
    failures: list[BaseException] = []

    def encode(tower: Twins) -> None:
        try:
            with torch.npu.stream(torch.npu.Stream()):
                for number in range(40):
                    tokens = sizes[number % len(sizes)]
                    outputs = tower.graphs.run(images(*tokens))
                    assert_equal(outputs, tower.expected(images_on_host(*tokens)), torch.float32)
        except BaseException as error:  # noqa: BLE001  (handed to the main thread)
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=encode, args=(tower,)) for tower in towers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failures == []
    for tower in towers:
        assert tower.graphs.stats()["misses"] == {}, tower.graphs.stats()
        tower.graphs.clear()
    assert trace.hazards() == []


@pytest.mark.parametrize("how", ["dropped", "cleared"])
def test_graphs_that_still_run_are_not_freed(
    platform: Platform, trace: "simulator.Trace", schedule: str, how: str
) -> None:
    gone = twins("toy", platform)
    assert not gone.graphs.capture().dropped
    expected = [gone.expected(images_on_host(*tokens)) for tokens in ((2, 3), (8,), (1,))]
    requests = [images(*tokens) for tokens in ((2, 3), (8,), (1,))]
    torch.npu.synchronize()
    outputs = [gone.graphs.run(request) for request in requests]
    if how == "cleared":
        gone.graphs.clear()
    else:
        del gone
        gc.collect()
        assert bool(recording._kept) == (schedule != "eager")
    for output, reference in zip(outputs, expected, strict=True):
        assert_equal(output, reference, torch.float32)
    later = twins("toy", platform)
    assert not later.graphs.capture().dropped
    later.graphs.clear()
    assert recording._kept == []
    assert trace.hazards() == []


def test_graphs_are_captured_anew_and_released_while_others_encode(
    platform: Platform, trace: "simulator.Trace", schedule: str
) -> None:
    towers = [twins("toy", platform, self_check="off") for _ in range(2)]
    sizes = [(2,), (1, 3), (5, 6), (30,)]
    expected = [towers[0].expected(images_on_host(*tokens)) for tokens in sizes]
    failures: list[BaseException] = []
    stop = threading.Event()

    def encode(tower: Twins) -> None:
        try:
            with torch.npu.stream(torch.npu.Stream()):
                while not stop.is_set():
                    for tokens, reference in zip(sizes, expected, strict=True):
                        outputs = tower.graphs.run(images_on_host(*tokens))
                        with TASK_UPDATE:  # reading them would end a capture of the other thread
                            assert_equal(outputs, reference, torch.float32)
        except BaseException as error:  # noqa: BLE001  (handed to the main thread)
            failures.append(error)

    threads = [threading.Thread(target=encode, args=(tower,)) for tower in towers]
    for thread in threads:
        thread.start()
    try:
        for tower in towers * 3:
            assert not tower.graphs.capture().dropped
            tower.graphs.profile_memory()
            tower.graphs.clear()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert trace.hazards() == []


def test_a_release_by_another_thread_waits_until_a_capture_is_over(
    platform: Platform, device: torch.device, trace: "simulator.Trace"
) -> None:
    """Giving memory back waits for the device, which ends any capture that runs."""
    there = platform.capture(a_request(device, lambda x, out: out.copy_(x)))
    other = threading.Thread(target=platform.release, args=([there],))

    def forward(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x)
        if torch.npu.is_current_stream_capturing():
            other.start()
            other.join(0.3)

    graph = platform.capture(a_request(device, forward))
    other.join()
    assert there.handle is None
    platform.release([graph])
    assert trace.hazards() == []


@pytest.mark.parametrize(
    ("owner", "call", "asked"),
    [
        (torch.npu, "reset_peak_memory_stats", "profile"),
        (torch.accelerator, "synchronize", "costs"),
    ],
)
def test_nobody_captures_while_the_device_is_measured(
    platform: Platform, monkeypatch: pytest.MonkeyPatch, owner: Any, call: str, asked: str
) -> None:
    """Measuring waits for the device, and what others take meanwhile would count."""
    tower = twins("toy", platform, self_check="off", policy="measured")
    usual, seen = getattr(owner, call), set()

    def look() -> None:
        free = TASK_UPDATE.acquire(timeout=0)
        if free:
            TASK_UPDATE.release()
        seen.add("free" if free else "held")

    def watched(*arguments: Any) -> None:
        usual(*arguments)
        other = threading.Thread(target=look)
        other.start()
        other.join()

    monkeypatch.setattr(owner, call, watched)
    tower.graphs.profile_memory() if asked == "profile" else tower.graphs.capture()
    assert seen == {"held"}
    tower.graphs.clear()


def test_updates_of_others_that_hold_the_lock_do_no_harm(
    tower: Twins, device: torch.device, trace: "simulator.Trace"
) -> None:
    """Another owner of task groups in the process, which leaves its update open for a while."""
    graph, handles, stream = torch.npu.NPUGraph(), [], torch.npu.Stream()
    x = torch.ones(4, device=device)
    with TASK_UPDATE, torch.npu.graph(graph):
        here = torch.npu.current_stream()
        torch.npu.graph_task_group_begin(here)
        x.mul_(1)
        handles.append(torch.npu.graph_task_group_end(here))
    stop = threading.Event()
    failures: list[BaseException] = []

    def update() -> None:
        try:
            while not stop.is_set():
                with TASK_UPDATE, torch.npu.stream(stream), direct_launches():
                    torch.npu.graph_task_update_begin(stream, handles[0])
                    x.mul_(1)
                    time.sleep(0.001)
                    torch.npu.graph_task_update_end(stream)
                time.sleep(0.0005)
        except BaseException as error:  # noqa: BLE001  (handed to the main thread)
            failures.append(error)

    misses = tower.graphs.stats()["misses"]
    other = threading.Thread(target=update)
    other.start()
    try:
        for number in range(60):
            tokens = (1 + number % 5, 3)
            outputs = tower.graphs.run(images(*tokens))
            assert_equal(outputs, tower.expected(images_on_host(*tokens)), torch.float32)
    finally:
        stop.set()
        other.join()
    assert failures == []
    assert tower.graphs.stats()["misses"] == misses
    assert trace.hazards() == []
