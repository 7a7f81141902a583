"""A failure at every runtime call: the process serves on, eagerly where it must, and rightly."""

import ctypes
import gc
import re
import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch_npu

from graphhal.errors import (
    CaptureError,
    HostReadError,
    ReplayError,
    ResourceExhaustedError,
    UnsupportedOperationError,
)
from graphhal.npu import acl_errors, plugin, recording
from graphhal.platform import CapturedGraph, CaptureRequest, HostUpdate, Platform, Unavailable
from graphhal.runner import EncoderGraphs
from tests.ascend_simulated import simulator
from tests.ascend_simulated.direct_request import a_request
from tests.ascend_simulated.encoders import Twins, assert_equal, serves, twins
from tests.ascend_simulated.processes import Processes
from tests.toy_encoder import images

REQUEST = images(2, 3)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(acl_errors, "WAIT_SECONDS", 3.0)
    yield
    simulator.arm()
    torch.npu.synchronize()


def calls_of(action: Callable[[], Any]) -> dict[str, int]:
    """Runtime calls of an action that goes well."""
    torch.npu.synchronize()
    simulator.arm()
    action()
    torch.npu.synchronize()
    return simulator.calls()


def places(count: int) -> list[int]:
    """First, middle and last of a call's occurrences."""
    return sorted({1, (count + 1) // 2, count})


class FirstCapture:
    """Arms a fault for the first capture of a ladder, and counts the runtime calls of that one."""

    def __init__(self, platform: Platform) -> None:
        self.platform = replace(platform, capture=self.capture)
        self._capture = platform.capture
        self.fault: str | None = None
        self.calls: dict[str, int] = {}

    def capture(self, request: CaptureRequest) -> CapturedGraph:
        fault, self.fault = self.fault, None
        if fault is None:
            return self._capture(request)
        torch.npu.synchronize()
        simulator.arm(fault)
        try:
            return self._capture(request)
        finally:
            self.calls = simulator.calls()
            simulator.arm()


@pytest.mark.timeout(900)
def test_a_failure_at_every_call_of_a_capture_leaves_a_serving_process(platform: Platform) -> None:
    first = FirstCapture(platform)
    tower = twins("toy", first.platform, self_check="off")
    first.fault = ""
    assert not tower.graphs.capture().dropped
    calls = first.calls
    assert {"aclmdlRICaptureBegin", "aclmdlRICaptureTaskGrpEnd", "aclrtValueWait"} <= set(calls)
    stream = torch.npu.current_stream()
    dropped = 0
    for name, count in calls.items():
        for nth in places(count):
            first.fault = f"{name}:{nth}"
            report = tower.graphs.capture()
            dropped += bool(report.dropped)
            assert torch.npu.current_stream() == stream, name
            assert torch._C._len_torch_dispatch_stack() == 0, name
            serves(tower, 1)
    assert dropped > len(calls) / 2
    assert not tower.graphs.capture().dropped
    serves(tower)
    assert sum(tower.graphs.stats()["hits"].values()) > 0


@pytest.mark.timeout(600)
def test_a_failure_at_every_call_of_a_replay_is_served_eagerly(platform: Platform) -> None:
    tower = twins("toy", platform, self_check="off")
    tower.graphs.capture()
    expected = tower.expected(REQUEST)
    tower.graphs.run(REQUEST)
    calls = calls_of(lambda: tower.graphs.run(REQUEST))
    assert {"aclmdlRIExecuteAsync", "aclmdlRICaptureTaskUpdateBegin", "aclrtValueWrite"} <= set(
        calls
    )
    for name, count in calls.items():
        for nth in places(count):
            if len(tower.graphs.keys()) < 6:
                tower.graphs.capture()
            torch.npu.synchronize()
            simulator.arm(f"{name}:{nth}")
            outputs = tower.graphs.run(REQUEST)
            simulator.arm()
            assert_equal(outputs, expected, torch.float32)
            serves(tower, 1)


def test_a_graph_whose_launch_was_refused_replays_again(
    platform: Platform, trace: "simulator.Trace", schedule: str
) -> None:
    """As where the costs of graphs are measured: it is not dropped there."""
    tower = twins("toy", platform, self_check="off")
    tower.graphs.capture()
    graph, request = a_graph(tower), a_graph(tower).request
    update = HostUpdate(request.boundaries, torch.zeros_like(request.packed).cpu())
    for fault in ("aclmdlRIExecuteAsync:1", ""):
        torch.npu.synchronize()
        simulator.arm(fault)
        with (
            pytest.raises(ReplayError) if fault else nullcontext(),
            platform.step("replay", graph, request.inputs, update.boundaries),
        ):
            platform.update_boundaries(graph, update)
            platform.replay(graph)
    torch.npu.synchronize()
    serves(tower)
    tower.graphs.clear()
    assert trace.hazards() == []


def test_a_second_failure_while_the_first_is_served_eagerly_is_that_requests_alone(
    platform: Platform,
) -> None:
    """torch_npu's queue would keep it to itself, and every later kernel with it."""
    usual = torch_npu._C._npu_get_task_queue_enable()
    assert usual != 0
    tower = twins("toy", platform, self_check="off")
    for second in ("aclnnAddmm:1", "aclnnMuls:1"):
        tower.graphs.capture()
        torch.npu.synchronize()
        simulator.arm(f"aclmdlRIExecuteAsync:1;{second}")
        with pytest.raises(RuntimeError, match="507"):
            tower.graphs.run(REQUEST)
        simulator.arm()
        serves(tower)
    with platform.step("eager", None, a_graph(tower).request.inputs, {}):
        assert torch_npu._C._npu_get_task_queue_enable() == usual
    tower.graphs.clear()


def test_what_the_runtime_refuses_within_a_step_is_typed_by_the_step(platform: Platform) -> None:
    tower = twins("toy", platform, self_check="off")
    tower.graphs.capture()
    graph, request = a_graph(tower), a_graph(tower).request
    update = HostUpdate(request.boundaries, torch.zeros_like(request.packed).cpu())
    torch.npu.synchronize()
    with platform.step("replay", graph, request.inputs, update.boundaries):
        platform.update_boundaries(graph, update)
    simulator.arm("aclmdlRIExecuteAsync:1:507011")
    with (
        pytest.raises(ReplayError, match=rf"^{re.escape(str(graph.key))}: replay failed: .*507011"),
        platform.step("replay", graph, request.inputs, update.boundaries),
    ):
        platform.replay(graph)
    simulator.arm("aclrtSynchronizeStreamWithTimeout:2:507011")
    with (
        pytest.raises(CaptureError, match=r"^eager reference failed: .*507011"),
        platform.step("reference", None, request.inputs, {}),
    ):
        request.output.fill_(0)
    simulator.arm()
    serves(tower)
    tower.graphs.clear()


@pytest.mark.parametrize(
    ("owner", "call", "asked"),
    [
        (torch.npu.NPUGraph, "capture_begin", "capture"),
        (torch.npu.NPUGraph, "capture_end", "capture"),
        (torch.npu, "graph_task_group_begin", "capture"),
        (torch.npu, "graph_task_update_begin", "run"),
        (torch.npu, "graph_task_update_end", "run"),
        (torch.npu.ExternalEvent, "record", "run"),
        (torch.npu.NPUGraph, "replay", "run"),
    ],
)
@pytest.mark.parametrize("happened", [False, True])
def test_an_interrupt_right_before_or_after_a_call_leaves_nothing_open_and_no_flag_out(
    platform: Platform,
    monkeypatch: pytest.MonkeyPatch,
    schedule: str,
    owner: Any,
    call: str,
    asked: str,
    happened: bool,
) -> None:
    """Ctrl-C in a notebook: nobody was told whether what was called has happened."""
    tower = twins("toy", platform, self_check="off")
    expected, usual = tower.expected(REQUEST), getattr(owner, call)
    tower.graphs.capture()
    tower.graphs.run(REQUEST)
    stream = torch.npu.current_stream()

    def interrupted(*arguments: Any, **options: Any) -> None:
        monkeypatch.setattr(owner, call, usual)
        if happened:
            usual(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, call, interrupted)
    with pytest.raises(KeyboardInterrupt):
        tower.graphs.capture() if asked == "capture" else tower.graphs.run(REQUEST)
    assert torch.npu.current_stream() == stream
    if asked == "capture":
        assert not tower.graphs.capture().dropped
    hits = sum(tower.graphs.stats()["hits"].values())
    for _ in range(2):
        assert_equal(tower.graphs.run(REQUEST), expected, torch.float32)
    assert sum(tower.graphs.stats()["hits"].values()) == hits + 2 * len(expected)
    tower.graphs.clear()


def test_exhausted_streams_stop_the_growth_and_keep_what_is_captured(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower = twins("toy", platform)
    simulator.arm("aclmdlRICaptureBegin:3:207008;aclmdlRICaptureBegin:4:207008")
    report = tower.graphs.capture()
    simulator.arm()
    assert len(tower.graphs.keys()) == 2
    assert any("out of streams or events" in str(dropped.reason) for dropped in report.dropped)
    serves(tower, 10)
    assert sum(tower.graphs.stats()["hits"].values()) > 0
    tower.graphs.clear()


def test_where_no_stream_can_be_had_eager_calls_run_on_their_callers(processes: Processes) -> None:
    program = """
        import warnings; warnings.simplefilter("ignore")
        import tempfile
        from pathlib import Path
        import torch
        from tests.ascend_simulated import simulator
        from tests.ascend_simulated.faults import serve, tower_of_this_process
        tower = tower_of_this_process()
        torch.npu.synchronize()
        simulator.arm(";".join(f"aclrtCreateStreamWithConfig:{n}" for n in range(1, 200)))
        with tempfile.TemporaryDirectory() as folder:
            with simulator.traced(Path(folder) / "t") as trace:
                (torch.ones(2, device="npu") * torch.ones(2, device="npu")).cpu()
                serve(tower)
                print(*{line.split("stream=")[1] for line in trace.matching("^run aclnnMul")})
                print(*{line.split("stream=")[1] for line in trace.matching("^run aclnnFused")})
        print(tower.graphs.capture().dropped[0].reason.split(".")[0])
        serve(tower)
        simulator.arm()
        assert not tower.graphs.capture().dropped
        serve(tower)
        print(tower.graphs.stats()["hits"], tower.graphs.stats()["misses"])
    """
    done = processes.run(program)
    assert done.returncode == 0, done.stderr[-3000:]
    callers, ours, reason, served = done.stdout.splitlines()[-4:]
    assert callers == ours
    assert reason.endswith(
        "the device is out of streams or events, which every captured graph takes"
    )
    assert served == "{'image': 3} {'image': {'no graph is captured': 6}}"


@pytest.mark.parametrize("asked", ["capture(request)", "profile_memory([request])"])
def test_streams_that_cannot_be_had_are_typed_whatever_asks_for_them_first(
    processes: Processes, asked: str
) -> None:
    program = f"""
        import warnings; warnings.simplefilter("ignore")
        import torch
        from graphhal.discovery import bind
        from graphhal.errors import ResourceExhaustedError
        from graphhal.npu import plugin
        from tests.ascend_simulated import simulator
        from tests.ascend_simulated.direct_request import a_request
        platform = bind(plugin, plugin.graphhal_probe(), "npu")
        request = a_request(torch.device("npu:0"), lambda x, out: out.copy_(x))
        torch.npu.synchronize()
        simulator.arm("aclrtCreateStreamWithConfig:1")
        try:
            platform.{asked}
        except ResourceExhaustedError as error:
            print(str(error).split(".")[0])
        platform.{asked}
    """
    done = processes.run(program)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the device is out of streams or events" in done.stdout.splitlines()[-1]


def test_a_process_forked_while_another_thread_captures_neither_hangs_nor_frees(
    processes: Processes,
) -> None:
    """Its graphs and its device are the parent's."""
    program = """
        import warnings; warnings.simplefilter("ignore")
        import gc, multiprocessing, signal, threading
        from graphhal.errors import CaptureError
        from graphhal.npu import plugin, recording
        from graphhal.npu.task_update import TASK_UPDATE
        from tests.ascend_simulated.faults import serve, tower_of_this_process
        tower = tower_of_this_process()
        assert not tower.graphs.capture().dropped
        serve(tower)
        def child(asked):
            global tower
            signal.alarm(20)
            graph, said = next(iter(tower.graphs._graphs.entries.values())).graph, ""
            try:
                if asked == "capture":
                    tower.graphs.platform.capture(graph.request)
                if asked == "release":
                    tower.graphs.platform.release([graph])
                if asked == "clear":
                    tower.graphs.clear()
                if asked == "drop":
                    tower = graph = None
                    gc.collect()
            except CaptureError as error:
                said = str(error)
            assert (asked == "capture") == ("this process was forked from" in said), said
            assert (asked != "capture") == bool(recording._kept)
        held, go_on = threading.Event(), threading.Event()
        def hold():
            with TASK_UPDATE:
                held.set()
                go_on.wait()
        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        for asked in ("capture", "release", "clear", "drop"):
            process = multiprocessing.get_context("fork").Process(target=child, args=[asked])
            process.start()
            process.join()
            print(process.exitcode)
        go_on.set()
        thread.join()
        serve(tower)
    """
    done = processes.run(program)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-4:] == ["0"] * 4, done.stderr[-3000:]
    assert "Exception ignored" not in done.stderr


def test_free_memory_that_cannot_be_read_costs_graphs_alone(platform: Platform) -> None:
    usual = twins("toy", platform, self_check="off")
    half = usual.graphs.settings.model_copy(update={"memory_limit": 0.5})
    tower = Twins(EncoderGraphs(usual.graphs.adapter, platform, half), usual.reference)
    torch.npu.synchronize()
    simulator.arm("aclrtGetMemInfo:1")
    report = tower.graphs.capture()
    simulator.arm()
    assert not tower.graphs.keys()
    assert all("memory" in str(dropped.reason) for dropped in report.dropped)
    serves(tower)
    assert not tower.graphs.capture().dropped
    serves(tower)
    tower.graphs.clear()


def _item(x: torch.Tensor, out: torch.Tensor) -> None:
    if torch.npu.is_current_stream_capturing():
        x.sum().item()
    out.copy_(x)


def _masked(x: torch.Tensor, out: torch.Tensor) -> None:
    if torch.npu.is_current_stream_capturing():
        x[x[:, 0] == 0]
    out.copy_(x)


def _unjoined(x: torch.Tensor, out: torch.Tensor) -> None:
    side = torch.npu.Stream()
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        out.copy_(x)


def _outside_event(x: torch.Tensor, out: torch.Tensor) -> None:
    if torch.npu.is_current_stream_capturing():
        _event.wait()
    out.copy_(x)


def _nested(x: torch.Tensor, out: torch.Tensor) -> None:
    if torch.npu.is_current_stream_capturing():
        inner = torch.npu.NPUGraph()
        with torch.npu.graph(inner, auto_dispatch_capture=True):
            out.copy_(x)
    out.copy_(x)


def _left_behind(x: torch.Tensor, out: torch.Tensor) -> None:
    if torch.npu.is_current_stream_capturing():
        for _ in range(2):
            torch.npu.NPUGraph().graph_dispatch_mode.__enter__()
        torch.npu.set_stream(torch.npu.Stream())
        raise ValueError("the tower broke")
    out.copy_(x)


def _elsewhere(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x)
    if torch.npu.is_current_stream_capturing():
        torch.npu.set_stream(torch.npu.Stream())


def _too_much(x: torch.Tensor, out: torch.Tensor) -> None:
    if torch.npu.is_current_stream_capturing():
        torch.empty(2**40, device=x.device)
    out.copy_(x)


def _foreign_boundaries(x: torch.Tensor, out: torch.Tensor) -> None:
    from graphhal.npu.attention import attention

    heads = x.reshape(8, 1, 2)
    ends = torch.tensor([0, 8], dtype=torch.int32).to(x.device) if not _cached else _cached[0]
    _cached[:] = [ends]
    out.copy_(attention(heads, heads, heads, ends, 8, 1.0).reshape(8, 2))


_event: Any = None
_cached: list[torch.Tensor] = []


@pytest.mark.parametrize(
    ("forward", "kind", "words"),
    [
        (_item, HostReadError, "waits for the device"),
        (_masked, HostReadError, "waits for the device"),
        (_unjoined, UnsupportedOperationError, "does not join it"),
        (_outside_event, UnsupportedOperationError, "queued outside the capture"),
        (_nested, CaptureError, "capture failed"),
        (_left_behind, CaptureError, "ValueError: the tower broke"),
        (_too_much, ResourceExhaustedError, "out of memory"),
        (_foreign_boundaries, HostReadError, "none of the graph's boundary buffers"),
    ],
)
def test_what_a_graph_cannot_hold_is_named_and_leaves_the_process_as_it_was(
    platform: Platform,
    device: torch.device,
    forward: Callable[..., Any],
    kind: type[CaptureError],
    words: str,
) -> None:
    global _event
    _event = torch.npu.Event()
    _event.record()
    _cached.clear()
    stream = torch.npu.current_stream()
    options = compile_options()
    with pytest.raises(kind, match=words):
        platform.capture(a_request(device, forward))
    assert torch.npu.current_stream() == stream
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not torch.npu.is_current_stream_capturing()
    assert compile_options() == options
    good = a_request(device, lambda x, out: out.copy_(x + 1))
    graph = platform.capture(good)
    platform.release([graph])


def _run_with_moved_weights(tower: Twins, request: dict[str, Any]) -> None:
    module = next(iter(tower.graphs.adapter.modules()))
    module.embed.weight = torch.nn.Parameter(module.embed.weight.detach().clone())
    tower.graphs.run(request)
    assert not tower.graphs.keys()


def a_graph(tower: Twins) -> CapturedGraph:
    return next(iter(tower.graphs._graphs.entries.values())).graph


WITHIN: dict[str, Callable[[Twins, dict[str, Any]], Any]] = {
    "capture": lambda tower, _: tower.graphs.capture().dropped[0].reason,
    "profile": lambda tower, _: tower.graphs.profile_memory(),
    "capture of one": lambda tower, _: tower.graphs.platform.capture(a_graph(tower).request),
    "profile of one": lambda tower, _: tower.graphs.platform.profile_memory(
        [a_graph(tower).request]
    ),
    "release": lambda tower, _: tower.graphs.clear(),
    "last reference": lambda tower, _: tower.graphs._graphs.entries.clear(),
    "moved weights": _run_with_moved_weights,
}


@pytest.mark.parametrize("asked", WITHIN)
def test_what_is_asked_within_a_capture_of_the_callers_leaves_that_capture_alone(
    platform: Platform, device: torch.device, asked: str
) -> None:
    tower = twins("toy", platform, self_check="off")
    assert not tower.graphs.capture().dropped
    x, outer, said = torch.zeros(4, device=device), torch.npu.NPUGraph(), None
    request = {**REQUEST, "pixels": REQUEST["pixels"].npu()}
    torch.npu.synchronize()
    with torch.npu.graph(outer):
        y = x + 1
        try:
            said = WITHIN[asked](tower, request)
        except CaptureError as error:
            said = str(error)
        y = y * 2
    if "capture" in asked or "profile" in asked:
        assert "another capture runs on the current stream" in said
    else:
        assert said is None
        assert recording._kept != []
    x.fill_(3)
    outer.replay()
    torch.npu.synchronize()
    assert y.tolist() == [8.0] * 4
    assert not tower.graphs.capture().dropped
    assert recording._kept == []
    serves(tower)
    tower.graphs.clear()


@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_while_a_graph_is_captured(
    platform: Platform, device: torch.device, collects: bool, fails: bool
) -> None:
    """A graph that dies during a capture would end it."""
    seen = []

    def forward(x: torch.Tensor, out: torch.Tensor) -> None:
        seen.append(gc.isenabled())
        out.copy_(x)
        if fails and torch.npu.is_current_stream_capturing():
            raise ValueError("no")

    if not collects:
        gc.disable()
    try:
        with pytest.raises(CaptureError) if fails else nullcontext():
            platform.release([platform.capture(a_request(device, forward))])
        assert gc.isenabled() == collects
    finally:
        gc.enable()
    assert set(seen) == {False}


def test_a_capture_is_the_threads_own(
    platform: Platform, device: torch.device, trace: "simulator.Trace"
) -> None:
    """What other threads do on streams of theirs must not end it."""
    request = a_request(device, lambda x, out: out.copy_(x))
    platform.release([platform.capture(request)])
    thread_local = 1
    assert len(trace.matching(f"^capture begin .* mode={thread_local}$")) == 1


def test_a_forward_that_leaves_another_stream_current_is_captured(
    platform: Platform, device: torch.device
) -> None:
    stream = torch.npu.current_stream()
    platform.release([platform.capture(a_request(device, _elsewhere))])
    assert torch.npu.current_stream() == stream


def test_the_caller_goes_on_behind_what_a_failed_capture_queued(
    platform: Platform, device: torch.device, schedule: str
) -> None:
    def forward(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x)
        raise ValueError("no")

    request = a_request(device, forward)
    torch.npu.synchronize()
    with pytest.raises(CaptureError):
        platform.capture(request)
    request.output.fill_(7)
    torch.npu.synchronize()
    assert bool((request.output.cpu() == 7).all())


@pytest.mark.parametrize("where", ["forward", "first replay"])
def test_what_a_failed_capture_took_is_free_while_its_error_is_held(
    platform: Platform, device: torch.device, where: str
) -> None:
    size = 2**26

    def forward(x: torch.Tensor, out: torch.Tensor) -> None:
        if torch.npu.is_current_stream_capturing():
            out.copy_(x + torch.empty(size, dtype=torch.uint8, device=x.device)[0])
            if where == "forward":
                raise ValueError("no")
        else:
            out.copy_(x)

    request = a_request(device, forward)
    torch.npu.synchronize()
    torch.npu.empty_cache()
    before = torch.npu.memory_reserved()
    simulator.arm("aclmdlRIExecuteAsync:1")
    with pytest.raises(CaptureError) as caught:
        platform.capture(request)
    simulator.arm()
    torch.npu.empty_cache()
    assert torch.npu.memory_reserved() < before + size
    assert caught.value.__traceback__ is not None


def test_a_failure_at_every_call_of_a_release_costs_nothing(platform: Platform) -> None:
    tower = twins("toy", platform, self_check="off")

    def captured() -> list[CapturedGraph]:
        assert not tower.graphs.capture().dropped
        tower.graphs.run(REQUEST)
        torch.npu.synchronize()
        return [entry.graph for entry in tower.graphs._graphs.entries.values()]

    graphs = captured()
    calls = calls_of(lambda: platform.release(graphs))
    assert "aclmdlRIDestroy" in calls, calls
    for name, count in calls.items():
        for nth in places(count):
            graphs = captured()
            simulator.arm(f"{name}:{nth}")
            platform.release(graphs)
            simulator.arm()
            serves(tower, 1)
    captured()
    tower.graphs.clear()
    assert recording._kept == []


def test_a_failure_at_every_call_of_a_profile_is_typed_and_leaves_a_process_that_computes(
    platform: Platform, device: torch.device
) -> None:
    request, stream = a_request(device, lambda x, out: out.copy_(x + 1)), torch.npu.current_stream()
    ones, failed = torch.ones(2, device=device), 0

    def profile() -> None:
        torch.npu.empty_cache()
        platform.profile_memory([request])

    calls = calls_of(profile)
    assert {"aclrtGetMemInfo", "aclrtSynchronizeDeviceWithTimeout", "aclrtRecordEvent"} <= set(
        calls
    )
    for name, count in calls.items():
        for nth in range(1, count + 1):
            torch.npu.synchronize()
            torch.npu.empty_cache()
            simulator.arm(f"{name}:{nth}")
            try:
                platform.profile_memory([request])
            except CaptureError:
                failed += 1
            simulator.arm()
            assert torch.npu.current_stream() == stream, name
            assert (ones * 2).tolist() == [2.0, 2.0], name
    assert failed > len(calls) / 2
    profile()


def test_whatever_fails_the_current_device_stays(processes: Processes) -> None:
    """Giving cached memory back goes over the devices; torch_npu stays at the one that fails."""
    program = """
        import warnings; warnings.simplefilter("ignore")
        import torch
        from graphhal.errors import CaptureError
        from tests.ascend_simulated import simulator
        from tests.ascend_simulated.faults import serve, tower_of_this_process
        tower = tower_of_this_process("npu:1")
        graphs, moved = tower.graphs, []
        torch.zeros(1, device="npu:0")
        torch.npu.set_device(1)
        waits = "aclrtSynchronizeDeviceWithTimeout"
        for asked in (graphs.capture, graphs.clear, graphs.profile_memory):
            graphs.capture()
            simulator.arm()
            asked()
            for nth in range(1, simulator.calls()[waits] + 1):
                graphs.capture()
                simulator.arm(f"{waits}:{nth}")
                try:
                    asked()
                except CaptureError:
                    pass
                simulator.arm()
                moved += [(asked.__name__, nth)] if torch.npu.current_device() != 1 else []
                torch.npu.set_device(1)
        serve(tower)
        print(moved)
    """
    done = processes.run(program, CANN_SIM_DEVICES="2")
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stdout + done.stderr[-3000:]


def torch_option(name: str) -> bytes:
    return torch_npu._C._npu_getOption(name)


def compile_options() -> tuple[bool, bytes]:
    """Whether kernels are compiled offline only, and whether internal formats are allowed."""
    return torch.npu.is_jit_compile_false(), torch_option("ALLOW_INTERNAL_FORMAT")


@pytest.mark.parametrize("fails", [False, True])
def test_capture_turns_off_internal_formats_and_puts_the_setting_back(
    platform: Platform, device: torch.device, fails: bool
) -> None:
    seen = []

    def forward(x: torch.Tensor, out: torch.Tensor) -> None:
        seen.append((torch_option("ALLOW_INTERNAL_FORMAT"), torch_option("jitCompile")))
        out.copy_(x)
        if fails and torch.npu.is_current_stream_capturing():
            raise ValueError("no")

    request = a_request(device, forward)
    torch.npu.config.allow_internal_format = True
    torch.npu.set_compile_mode(jit_compile=True)
    try:
        if fails:
            with pytest.raises(CaptureError):
                platform.capture(request)
        else:
            platform.release([platform.capture(request)])
        assert set(seen) == {(b"disable", b"disable")}
        assert torch_option("ALLOW_INTERNAL_FORMAT") == b"enable"
        assert torch_option("jitCompile") == b"enable"
    finally:
        torch.npu.config.allow_internal_format = False
        torch.npu.set_compile_mode(jit_compile=False)


def test_capture_leaves_what_cann_does_by_itself_where_nobody_set_an_option(
    processes: Processes,
) -> None:
    program = """
        import warnings; warnings.simplefilter("ignore")
        import ctypes
        ACL_OP_JIT_COMPILE = 10
        ctypes.CDLL("libascendcl.so").aclSetCompileopt(ACL_OP_JIT_COMPILE, b"enable")
        import torch
        from graphhal.npu.capture_state import capture_options
        seen = [torch.npu.is_jit_compile_false()]
        with capture_options():
            seen.append(torch.npu.is_jit_compile_false())
        print(*seen, torch.npu.is_jit_compile_false())
    """
    done = processes.run(program)
    assert done.stdout.splitlines()[-1:] == ["False True False"], done.stdout + done.stderr[-3000:]


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("aclmdlRICaptureBegin:1:207005", ResourceExhaustedError),
        ("aclrtCreateEventExWithFlag:1:207007", ResourceExhaustedError),
        ("aclmdlRICaptureBegin:1:207008", ResourceExhaustedError),
        ("aclmdlRICaptureEnd:1:107025", UnsupportedOperationError),
        ("aclrtValueWait:1:107033", CaptureError),
        ("aclrtSynchronizeStreamWithTimeout:1:507011", CaptureError),
    ],
)
def test_codes_of_the_runtime_become_typed_errors(
    platform: Platform, device: torch.device, fault: str, kind: type[CaptureError]
) -> None:
    def forward(x: torch.Tensor, out: torch.Tensor) -> None:
        if torch.npu.is_current_stream_capturing():
            torch.npu.ExternalEvent().wait(torch.npu.current_stream())
        out.copy_(x)

    request = a_request(device, forward)
    torch.npu.synchronize()
    torch.npu.empty_cache()
    simulator.arm(fault)
    with pytest.raises(CaptureError) as caught:
        platform.capture(request)
    simulator.arm()
    assert type(caught.value) is kind
    assert str(caught.value).startswith("direct/")
    platform.release([platform.capture(a_request(device, lambda x, out: out.copy_(x)))])


def test_probe_refuses_310_series_and_a_runtime_without_value_flags(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(torch.npu, "get_device_name", lambda index: "Ascend310P3")
        found = plugin.graphhal_probe()
    assert isinstance(found, Unavailable)
    assert found.reason.startswith("Ascend310P3: ")
    old = types.SimpleNamespace(aclrtValueWrite=1)
    with monkeypatch.context() as patched:
        patched.setattr(ctypes, "CDLL", lambda name: old)
        found = plugin.graphhal_probe()
    assert isinstance(found, Unavailable)
    assert "lacks aclrtValueWait" in found.reason


def test_release_is_safe_twice_and_after_the_graph_is_gone(
    platform: Platform, device: torch.device
) -> None:
    graph = platform.capture(a_request(device, lambda x, out: out.copy_(x)))
    platform.release([graph])
    platform.release([graph])
    assert graph.handle is None


def test_a_release_gives_the_memory_of_its_graphs_back(
    platform: Platform, device: torch.device
) -> None:
    size = 2**26

    def forward(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x + torch.empty(size, dtype=torch.uint8, device=x.device)[0])

    graph = platform.capture(a_request(device, forward))
    taken = torch.npu.memory_reserved()
    platform.release([graph])
    assert torch.npu.memory_reserved() <= taken - size


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("phase", "occurrences", "lazy"),
    [("capture", "first", "0"), ("capture", "first", "1"), ("replay", "all", "0"),
     ("replay", "all", "1")],
)  # fmt: skip
def test_a_process_serves_on_and_exits_with_0_whichever_call_fails(
    processes: Processes, phase: str, occurrences: str, lazy: str
) -> None:
    """A process for each call. By hand: `faults.py PHASE all`, for each occurrence of each call."""
    program = f"""
        from tests.ascend_simulated import faults
        faults.main({phase!r}, {occurrences!r})
    """
    done = processes.run(program, seconds=590, CANN_SIM_LAZY=lazy)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert re.search(rf"{phase}: \d\d+ failures in \d\d+ calls, 0 not survived", done.stdout)
