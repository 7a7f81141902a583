"""Every tower, graph against CPU: random groups, interleaved towers, retained outputs."""

import ctypes
import json
import os
import random
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from graphhal.boundaries import Boundaries
from graphhal.errors import CaptureError, ResourceExhaustedError
from graphhal.npu import attention, pool
from graphhal.npu import graph as npu_graph
from graphhal.npu import memory as npu_memory
from graphhal.npu.fused_attention import VERSIONS, FusedAttention
from graphhal.plan import GraphKey
from graphhal.platform import CapturedGraph, CaptureRequest, Platform
from tests.ascend_simulated import simulator
from tests.ascend_simulated.direct_request import a_request
from tests.ascend_simulated.encoders import (
    SHORT,
    Twins,
    assert_equal,
    in_bfloat16,
    random_request,
    twins,
    without_onednn,
)
from tests.ascend_simulated.processes import Processes

GROUPS = {"covo_audio": 5}
"""Random groups per tower and dtype, 200 where nothing is said: clips of 30 seconds take a CPU its
time, and those of 2 seconds meet the same code. `SIMULATED_GROUPS` sets one number for all."""
TOWERS = ["toy", "qwen3_omni_vision", "qwen3_omni_audio", f"covo_audio{SHORT}", "covo_audio"]


def groups_of(name: str) -> int:
    return int(os.environ.get("SIMULATED_GROUPS", GROUPS.get(name, 200)))


@pytest.fixture(scope="module", params=TOWERS)
def tower(request: pytest.FixtureRequest, platform: Platform) -> Any:
    found = twins(request.param, platform)
    report = found.graphs.capture()
    assert not report.dropped, [str(dropped) for dropped in report.dropped]
    yield request.param, found
    found.graphs.clear()


@pytest.mark.timeout(600)
def test_random_groups_equal_the_cpu_in_every_schedule(
    tower: tuple[str, Twins], trace: "simulator.Trace"
) -> None:
    name, tower = tower
    chooser = random.Random(5)
    groups = groups_of(name)
    for number in range(groups):
        if number % 5 == 0:
            torch.npu.synchronize()
            simulator.schedule(("eager", "lazy", "shuffled")[number // 5 % 3])
        request = random_request(tower.graphs.adapter, chooser)
        assert_equal(tower.graphs.run(request), tower.expected(request), torch.float32)
    torch.npu.synchronize()
    simulator.schedule("eager")
    assert trace.hazards() == []
    assert sum(tower.graphs.stats()["hits"].values()) > groups / 4


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TOWERS[1:])  # eight wide: the toy is all rounding
def test_random_groups_equal_the_cpu_in_bfloat16(name: str, platform: Platform) -> None:
    tower = twins(name, platform, torch.bfloat16)
    chooser = random.Random(6)
    short = name in ("qwen3_omni_audio", f"covo_audio{SHORT}")
    with without_onednn() if short else nullcontext():
        assert not tower.graphs.capture().dropped
        for _ in range(groups_of(name)):
            request = in_bfloat16(random_request(tower.graphs.adapter, chooser))
            assert_equal(tower.graphs.run(request), tower.expected(request), torch.bfloat16)
    tower.graphs.clear()


def test_version_2_of_the_operator_serves_as_well(
    platform: Platform, monkeypatch: pytest.MonkeyPatch, trace: "simulator.Trace", schedule: str
) -> None:
    monkeypatch.setattr(attention, "fused_attention", lambda: VERSIONS[1])
    tower = twins("toy", platform)
    assert not tower.graphs.capture().dropped
    chooser = random.Random(15)
    for _ in range(20):
        request = random_request(tower.graphs.adapter, chooser)
        assert_equal(tower.graphs.run(request), tower.expected(request), torch.float32)
    tower.graphs.clear()
    assert trace.hazards() == []
    kernels = set(re.findall(r"aclnnFusedInferAttentionScoreV\d", "\n".join(trace.lines)))
    assert kernels == {"aclnnFusedInferAttentionScoreV4"}


def test_audio_and_vision_graphs_interleave(
    platform: Platform, schedule: str, trace: "simulator.Trace"
) -> None:
    names = ("qwen3_omni_vision", "qwen3_omni_audio", f"covo_audio{SHORT}", "toy")
    towers = [twins(name, platform) for name in names]
    for tower in towers:
        assert not tower.graphs.capture().dropped
    chooser = random.Random(7)
    waiting = []
    for _ in range(9):
        for tower in towers:
            request = random_request(tower.graphs.adapter, chooser)
            waiting.append((tower.graphs.run(request), tower.expected(request)))
    for outputs, expected in waiting:
        assert_equal(outputs, expected, torch.float32)
    towers[1].graphs.clear()
    for tower in towers:
        request = random_request(tower.graphs.adapter, chooser)
        assert_equal(tower.graphs.run(request), tower.expected(request), torch.float32)
    assert trace.hazards() == []
    for tower in towers:
        tower.graphs.clear()


def test_images_videos_and_deepstack_levels_come_from_graphs(platform: Platform) -> None:
    tower = twins("qwen3_omni_vision", platform)
    assert not tower.graphs.capture().dropped
    chooser = random.Random(16)
    width = 0
    for _ in range(20):
        request = random_request(tower.graphs.adapter, chooser)
        outputs = tower.graphs.run(request)
        assert_equal(outputs, tower.expected(request), torch.float32)
        width = outputs[0].shape[1]
    assert {"image", "video"} <= set(tower.graphs.stats()["hits"])
    tower_module = next(iter(tower.graphs.adapter.modules()))
    levels = 1 + len(tower_module.config.deepstack_visual_indexes)
    assert levels > 1
    assert width == levels * tower_module.config.out_hidden_size
    tower.graphs.clear()


def test_audio_alone_is_captured_and_cleaned_up(platform: Platform, schedule: str) -> None:
    tower = twins("qwen3_omni_audio", platform)
    chooser = random.Random(17)
    requests = [random_request(tower.graphs.adapter, chooser) for _ in range(6)]
    torch.npu.empty_cache()
    reserved = []
    for _ in range(3):
        assert not tower.graphs.capture().dropped
        keys = tower.graphs.keys()
        assert {key.path for key in keys} == {"audio"}
        for request in requests:
            assert_equal(tower.graphs.run(request), tower.expected(request), torch.float32)
        hits = tower.graphs.stats()["hits"]["audio"]
        tower.graphs.clear()
        assert not tower.graphs.keys()
        for request in requests:
            assert_equal(tower.graphs.run(request), tower.expected(request), torch.float32)
        assert tower.graphs.stats()["hits"]["audio"] == hits
        torch.npu.synchronize()
        torch.npu.empty_cache()
        reserved.append(torch.npu.memory_reserved())
    assert reserved[1] == reserved[2]


def test_outputs_that_a_caller_keeps_survive_memory_pressure(
    platform: Platform, schedule: str
) -> None:
    tower = twins("toy", platform)
    tower.graphs.capture()
    chooser = random.Random(8)
    kept, others = [], []
    for number in range(60):
        request = random_request(tower.graphs.adapter, chooser)
        kept.append((tower.graphs.run(request), tower.expected(request)))
        others.append(torch.full((chooser.randint(1, 5000),), float(number), device="npu:0"))
        if number % 7 == 0:
            del others[:3]
            torch.npu.empty_cache()
    for outputs, expected in kept:
        assert_equal(outputs, expected, torch.float32)
    assert all(len(other.unique()) == 1 for other in [o.cpu() for o in others])
    tower.graphs.clear()


def test_recapture_serves_as_before(platform: Platform, schedule: str) -> None:
    tower = twins("toy", platform)
    chooser = random.Random(9)
    for _ in range(3):
        assert not tower.graphs.capture().dropped
        for _ in range(5):
            request = random_request(tower.graphs.adapter, chooser)
            assert_equal(tower.graphs.run(request), tower.expected(request), torch.float32)
    tower.graphs.clear()
    tower.graphs.clear()


def test_a_released_ladder_gives_its_memory_back(platform: Platform) -> None:
    tower = twins("toy", platform)
    tower.graphs.capture()
    tower.graphs.clear()
    torch.npu.synchronize()
    torch.npu.empty_cache()
    before = torch.npu.memory_reserved()
    for _ in range(3):
        tower.graphs.capture()
        tower.graphs.clear()
    torch.npu.synchronize()
    torch.npu.empty_cache()
    assert torch.npu.memory_reserved() == before


def test_a_profile_keeps_nothing_and_foretells_the_capture(platform: Platform) -> None:
    tower, size = twins("toy", platform), 2**26
    held = torch.empty(size, dtype=torch.uint8, device="npu:0")
    torch.empty(2 * size, dtype=torch.uint8, device="npu:0")
    torch.npu.empty_cache()
    free = torch.npu.mem_get_info()[0]
    profile = tower.graphs.profile_memory()
    assert profile.transient_bytes < size
    del held
    torch.npu.empty_cache()
    free += size
    torch.npu.synchronize()
    torch.npu.empty_cache()
    # torch_npu does not give back the word of an external event, 32 bytes.
    assert free - torch.npu.mem_get_info()[0] < 2**14
    report = tower.graphs.capture()
    assert profile.settled_bytes >= sum(profile.per_graph.values()) > 0
    assert set(profile.per_graph) == set(tower.graphs.keys())
    assert report.num_bytes <= profile.settled_bytes + profile.transient_bytes
    tower.graphs.clear()


def test_poison_reaches_the_memory_that_replays_leave_free(platform: Platform) -> None:
    """A row that a kernel leaves unwritten must show as NaN in the self-check."""
    tower = twins("toy", platform)
    tower.graphs.capture()
    entry = next(iter(tower.graphs._graphs.entries.values()))
    pool = entry.graph.pool
    addresses = [
        block["address"]
        for segment in torch.npu.memory_snapshot()
        if segment["segment_pool_id"] == pool
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]
    assert addresses
    for address in addresses:
        ctypes.memset(address, 0, 64)
    reserved = torch.npu.memory_reserved()
    entry.graph.poison()
    torch.npu.synchronize()
    assert torch.npu.memory_reserved() == reserved
    assert all(ctypes.string_at(address, 64) == b"\xff" * 64 for address in addresses)
    request = random_request(tower.graphs.adapter, random.Random(14))
    assert_equal(tower.graphs.run(request), tower.expected(request), torch.float32)
    tower.graphs.clear()


def test_poison_takes_no_reference_from_the_numbers_of_its_pool() -> None:
    """From the 257th pool of a process on they were freed under their owner: a crash, later on."""
    torch.ones(1, device="npu:0").cpu()
    number = int("1000007")
    before = sys.getrefcount(number)
    for _ in range(3):
        pool._free_sizes(0, (0, number))
    assert sys.getrefcount(number) == before


def test_a_graphs_memory_does_not_grow_with_its_layers(
    platform: Platform, device: torch.device
) -> None:
    """Updates must not keep the activations of every layer alive."""
    ends = Boundaries(tuple(range(128, 8193, 128)))
    rows = torch.zeros(ends.rows, 2, 16, device=device)
    out = torch.zeros_like(rows)
    packed = torch.from_numpy(ends.cu_seqlens.copy()).to(device).view(torch.uint8)

    def bytes_with(layers: int) -> int:
        def forward() -> None:
            mixed = rows
            for _ in range(layers):
                mixed = platform.info.attention(mixed, mixed, mixed, cu_seqlens, 128, 0.25)
            out.copy_(mixed)

        cu_seqlens = packed.view(torch.int32)
        graph = platform.capture(
            CaptureRequest(
                key=GraphKey("layers", "image", layers),
                forward=forward,
                inputs={"rows": rows, "cu_seqlens": cu_seqlens},
                packed=packed,
                output=out,
                boundaries={"cu_seqlens": ends},
                warmups=1,
                pool=None,
                device=device,
            )
        )
        platform.release([graph])
        return graph.num_bytes

    few = bytes_with(2)
    assert few > 0
    assert bytes_with(8) <= 1.1 * few


def test_layers_share_a_workspace_only_where_their_shapes_agree(
    platform: Platform, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is sized for a shape: of another layer's size, a kernel would write past its end."""
    ends, single, half = Boundaries((3, 8)), torch.float32, torch.bfloat16
    packed = torch.from_numpy(ends.cu_seqlens.copy()).to(device).view(torch.uint8)
    cu_seqlens, out = packed.view(torch.int32), torch.zeros(8, 4, 64, device=device)
    first = [(2, 2, single), (4, 2, single), (4, 4, single), (4, 4, half)]
    layers = [
        [torch.zeros(8, heads, 64, dtype=dtype, device=device) for heads in (queries, keys, keys)]
        for queries, keys, dtype in first * 2
    ]
    sized: list[Any] = []
    usual = FusedAttention.workspace

    def workspace(operator: Any, arguments: Any, at: list[int]) -> torch.Tensor:
        query, key = arguments["query"], arguments["key"]
        sized.append((query.shape[1], key.shape[1], query.dtype))
        return usual(operator, arguments, at)

    def forward() -> None:
        for layer in layers:
            mixed = platform.info.attention(*layer, cu_seqlens, 5, 0.25)
            out[:, : mixed.shape[1]].copy_(mixed)

    monkeypatch.setattr(FusedAttention, "workspace", workspace)
    key, given = GraphKey("layers", "image", 8), {"cu_seqlens": ends}
    graph = platform.capture(
        CaptureRequest(
            key, forward, {"cu_seqlens": cu_seqlens}, packed, out, given, 1, None, device
        )
    )
    places = [task._arguments["workspace"].data_ptr() for task in graph.handle.updates.tasks]
    platform.release([graph])
    assert sized == first
    assert places[: len(first)] == places[len(first) :]
    assert len(set(places)) == len(first)


def test_a_tower_lives_on_another_device_than_the_current_one(processes: Processes) -> None:
    program = """
        import warnings; warnings.simplefilter("ignore")
        import torch
        from tests.ascend_simulated import simulator
        from tests.ascend_simulated.encoders import assert_equal
        from tests.ascend_simulated.faults import tower_of_this_process
        from tests.toy_encoder import images
        tower = tower_of_this_process("npu:1")
        assert not tower.graphs.capture().dropped
        for schedule in simulator.SCHEDULES:
            simulator.schedule(schedule)
            for tokens in ((2, 3), (5,), (30,)):  # replayed, replayed, eager
                request = images(*tokens)
                outputs = tower.graphs.run(request)
                assert outputs[0].device == torch.device("npu:1"), outputs[0].device
                assert_equal(outputs, tower.expected(request), torch.float32)
        profile = tower.graphs.profile_memory()
        assert profile.settled_bytes >= sum(profile.per_graph.values()) > 0
        tower.graphs.clear()
        assert torch.npu.current_device() == 0
        print(torch.npu.memory_reserved(0), sum(tower.graphs.stats()["hits"].values()))
    """
    done = processes.run(program, CANN_SIM_DEVICES="2")
    assert done.stdout.splitlines()[-1:] == ["0 9"], done.stderr[-3000:]


@pytest.mark.parametrize("current", [0, 1])
def test_a_request_within_a_capture_on_the_towers_device_becomes_part_of_it(
    processes: Processes, current: int
) -> None:
    """Somebody captures the stream that is current on that device, whichever device is current."""
    program = f"""
        import warnings; warnings.simplefilter("ignore")
        import torch
        from tests.ascend_simulated.encoders import assert_equal
        from tests.ascend_simulated.faults import tower_of_this_process
        from tests.toy_encoder import images
        tower = tower_of_this_process("npu:1")
        assert not tower.graphs.capture().dropped
        request = images(2, 3)
        pixels = request["pixels"].to("npu:1")
        tower.graphs.run(images(2, 3))
        with torch.npu.device(1):
            torch.npu.set_stream(torch.npu.Stream())
            torch.npu.synchronize()
            outer = torch.npu.NPUGraph()
            outer.capture_begin()
        with torch.npu.device({current}):
            outputs = tower.graphs.run({{**request, "pixels": pixels}})
        with torch.npu.device(1):
            outer.capture_end()
            for seed in range(3):
                later = images(2, 3, seed=seed)
                pixels.copy_(later["pixels"])
                outer.replay()
                assert_equal(outputs, tower.expected(later), torch.float32)
        print(sum(sum(each.values()) for each in tower.graphs.stats()["misses"].values()))
    """
    done = processes.run(program, CANN_SIM_DEVICES="2")
    assert done.stdout.splitlines()[-1:] == ["2"], done.stdout + done.stderr[-3000:]


def test_a_share_of_free_memory_is_of_the_towers_own_device(processes: Processes) -> None:
    program = """
        import warnings; warnings.simplefilter("ignore")
        from dataclasses import replace
        import torch
        from graphhal.runner import EncoderGraphs
        from graphhal.settings import Settings
        from tests.ascend_simulated.faults import tower_of_this_process
        asked = []
        def free_bytes():
            asked.append(torch.npu.current_device())
            return 2**30
        usual = tower_of_this_process("npu:1").graphs
        info = replace(usual.platform.info, free_bytes=free_bytes)
        platform = replace(usual.platform, info=info)
        graphs = EncoderGraphs(usual.adapter, platform, Settings(memory_limit=0.5))
        graphs.profile_memory()
        assert not graphs.capture().dropped
        print(asked, torch.npu.current_device())
    """
    done = processes.run(program, CANN_SIM_DEVICES="2")
    assert done.stdout.splitlines()[-1:] == ["[1, 1] 0"], done.stdout + done.stderr[-3000:]


@pytest.mark.timeout(300)
def test_the_hardware_script_runs_here(processes: Processes, tmp_path: Path) -> None:
    """Nobody has run it on a chip; that it starts and finds agreement is known at least."""
    script = Path(__file__).parents[2] / "ci" / "ascend_hardware.py"
    report = tmp_path / "report.json"
    options = f"--tower qwen3_omni_audio --groups 3 --replays 20 --json {report}"
    program = f"""
        import runpy, sys
        sys.argv[1:] = {options.split()}
        runpy.run_path({str(script)!r}, run_name="__main__")
    """
    done = processes.run(program, seconds=290)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(report.read_text())["towers"]["qwen3_omni_audio"]
    assert found["graphs"] == found["asked_for"] == 3
    assert found["equal"] == 3
    assert found["back_to_back"] == 20


@pytest.mark.parametrize(
    ("failing", "error", "kept"),
    [
        (1, CaptureError("planted"), [0, 2]),
        (0, CaptureError("planted"), [1, 2]),
        (1, ResourceExhaustedError("planted"), [0]),
    ],
)
def test_a_profile_leaves_out_what_fails_and_stops_where_nothing_is_left(
    platform: Platform,
    monkeypatch: pytest.MonkeyPatch,
    failing: int,
    error: CaptureError,
    kept: list[int],
) -> None:
    captured: list[CapturedGraph] = []
    pools: list[Any] = []

    def capture(request: CaptureRequest) -> CapturedGraph:
        pools.append(request.pool)
        if request.key == requests[failing].key:
            raise error
        captured.append(npu_graph.capture(request))
        return captured[-1]

    monkeypatch.setattr(npu_memory, "capture", capture)
    device = torch.device("npu:0")
    requests = [
        replace(
            a_request(device, lambda x, out: out.copy_(x * 2)),
            key=GraphKey("direct", "image", size),
        )
        for size in (3, 2, 1)
    ]
    profile = platform.profile_memory(requests)
    assert list(profile.per_graph) == [requests[number].key for number in kept]
    assert [graph.handle for graph in captured] == [None] * len(kept)
    # The first of all, and what comes before one was captured, begins a pool; others share it.
    fresh = 1 + (failing == 0)
    assert pools[:fresh] == [None] * fresh
    assert all(each is captured[0].pool for each in pools[fresh:])
    assert len(pools) == (2 if isinstance(error, ResourceExhaustedError) else 3)
