"""Platform npu without torch_npu: refusals, meanings of errors, order of an update. Tier: pure."""

import ctypes
import importlib
import importlib.util
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from time import sleep
from typing import Any

import pytest
import torch

from graphhal.boundaries import Boundaries
from graphhal.errors import (
    BoundariesError,
    CaptureError,
    HostReadError,
    ReplayError,
    ResourceExhaustedError,
    UnsupportedOperationError,
)
from graphhal.npu import plugin
from graphhal.platform import Unavailable

MODULES = ("acl_errors", "fused_attention", "attention", "lane", "pool", "task_update")


class Npu:
    """`torch_npu.npu` that writes down what is asked of it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.refuse_at = ""
        self.error: BaseException = RuntimeError(
            "NPU function error: injected, error code is 107033"
        )
        self.capturing = False

    def say(self, what: str) -> None:
        self.log.append(what)
        if self.refuse_at and what.startswith(self.refuse_at):
            raise self.error

    def graph_task_update_begin(self, stream: Any, handle: str) -> None:
        self.say(f"begin {handle}")

    def graph_task_update_end(self, stream: Any) -> None:
        self.say("end")

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def stream(self, stream: Any) -> "Npu":
        return self

    def device(self, index: int) -> "Npu":
        return self

    def current_device(self) -> int:
        return 0

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def Stream(self) -> "Stream":
        return Stream(self)

    def Event(self) -> "Event":
        return Event(self)


class Stream:
    def __init__(self, npu: Npu) -> None:
        self.npu = npu
        self.idle = False

    def wait_event(self, event: "Event") -> None:
        self.npu.say("wait")

    def wait_stream(self, stream: "Stream") -> None:
        self.npu.say("wait for stream")

    def query(self) -> bool:
        return self.idle


class Event:
    def __init__(self, npu: Npu) -> None:
        self.npu = npu

    def record(self, stream: Stream) -> None:
        self.npu.say("record")

    def query(self) -> bool:
        return False


class Graph:
    def __init__(self, npu: Npu) -> None:
        self.npu = npu

    def replay(self) -> None:
        self.npu.say("replay")


class Task:
    def __init__(self, npu: Npu, name: str, boundary_set: str) -> None:
        self.npu, self.handle, self.boundary_set = npu, name, boundary_set
        self.flag = types.SimpleNamespace(record=lambda _: npu.say(f"set {name}"))

    def issue(self, ends: list[int]) -> None:
        self.npu.say(f"issue {self.handle} {ends}")


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Npu]:
    """The platform's modules, loaded anew over a fake torch_npu."""
    fake, package = Npu(), types.ModuleType("torch_npu")
    package.npu = fake
    monkeypatch.setitem(sys.modules, "torch_npu", package)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, f"graphhal.npu.{name}", raising=False)
    yield fake
    for name in MODULES:
        sys.modules.pop(f"graphhal.npu.{name}", None)


def load(name: str) -> Any:
    return importlib.import_module(f"graphhal.npu.{name}")


def test_probe_says_that_the_package_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = plugin.graphhal_probe()
    assert found == Unavailable("the package torch_npu is not installed", absent=True)


@pytest.mark.parametrize("kind", [ImportError, OSError, RuntimeError])
def test_probe_names_the_library_that_cann_lacks(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def lacks(name: str) -> Any:
        raise kind("libhccl.so: cannot open shared object file")

    broken = types.ModuleType("torch_npu")
    broken.__getattr__ = lacks
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "torch_npu", broken)
    found = plugin.graphhal_probe()
    assert isinstance(found, Unavailable)
    assert not found.absent
    assert "cannot be imported: libhccl.so: cannot open" in found.reason
    assert "set_env.sh" in found.reason


class Wheel(types.ModuleType):
    """A torch_npu with a device, whose parts tests take away."""

    def __init__(self) -> None:
        super().__init__("torch_npu")
        self.__version__ = "2.11.0"
        self.npu = types.ModuleType("torch_npu.npu")
        self.npu.is_available = lambda: True
        self.npu.current_device = lambda: 0
        self.npu.get_device_name = lambda index: "Ascend910B1"
        self.npu.graph_task_update_begin = lambda *_: None


def fails(*_: Any) -> Any:
    raise RuntimeError("Cannot re-initialize NPU\nin a line of its own")


@pytest.mark.parametrize(
    ("part", "instead", "reason"),
    [
        ("is_available", lambda: False, "no Ascend device is visible; look at npu-smi"),
        ("current_device", fails, "the Ascend device cannot be opened: Cannot re-initialize NPU"),
        ("graph_task_update_begin", None, "torch_npu 2.11.0 has no graph task update; install"),
        ("", None, "torch_npu 2.11.0 has no fused inference attention that a graph can update"),
    ],
)
def test_probe_says_what_a_wheel_or_its_device_lacks(
    npu: Npu, monkeypatch: pytest.MonkeyPatch, part: str, instead: Any, reason: str
) -> None:
    wheel = Wheel()
    if instead is not None:
        setattr(wheel.npu, part, instead)
    elif part:
        delattr(wheel.npu, part)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "torch_npu", wheel)
    complete = types.SimpleNamespace(aclrtValueWait=1, aclrtValueWrite=1)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: complete)
    found = plugin.graphhal_probe()
    assert isinstance(found, Unavailable)
    assert not found.absent
    assert found.reason.startswith(reason)
    assert "in a line of its own" not in found.reason


@pytest.mark.parametrize("soc", ["Ascend310P3", "Ascend310B1"])
def test_310_series_is_refused_with_its_reason(soc: str) -> None:
    problem = plugin.soc_problem(soc)
    assert problem is not None
    assert problem.startswith(f"{soc}: ")
    assert plugin.soc_problem("Ascend910B1") is None
    assert plugin.soc_problem("Ascend910_9391") is None


def test_a_runtime_without_value_flags_is_refused() -> None:
    complete = types.SimpleNamespace(aclrtValueWait=1, aclrtValueWrite=1)
    assert plugin.runtime_problem(complete) is None
    problem = plugin.runtime_problem(types.SimpleNamespace(aclrtValueWrite=1))
    assert problem is not None
    assert "lacks aclrtValueWait, so" in problem


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (207001, ResourceExhaustedError),
        (207005, ResourceExhaustedError),
        (207007, ResourceExhaustedError),
        (207008, ResourceExhaustedError),
        (207009, ResourceExhaustedError),
        (107027, HostReadError),
        (107030, HostReadError),
        (107024, UnsupportedOperationError),
        (107025, UnsupportedOperationError),
        (107031, UnsupportedOperationError),
        (107033, CaptureError),
        (107034, CaptureError),
        (507011, CaptureError),
        (507046, CaptureError),
        (507903, CaptureError),
    ],
)
def test_codes_become_typed_errors_with_a_way_out(
    npu: Npu, code: int, kind: type[CaptureError]
) -> None:
    errors = load("acl_errors")
    error = RuntimeError(f"capture_begin:x.cpp:1 NPU function error: begin, error code is {code}")
    found = errors.capture_error(error, "k: capture")
    assert type(found) is kind
    assert str(found).startswith("k: capture failed: ")
    assert f"[{code}: capture_begin" in str(found)
    replay = errors.replay_error(error, "k: replay")
    assert type(replay) is ReplayError
    assert f"[{code}: " in str(replay)


def test_the_first_error_of_a_chain_decides(npu: Npu) -> None:
    errors = load("acl_errors")
    last = RuntimeError("NPU function error: end, error code is 507903")
    last.__context__ = RuntimeError("NPU function error: sync, error code is 107027")
    assert type(errors.capture_error(last, "k")) is HostReadError


def test_code_that_was_called_wrongly_is_no_error_of_the_runtime(npu: Npu) -> None:
    errors = load("acl_errors")
    assert not errors.is_runtime_error(ValueError("error code is 107027"))
    for mistake in ("shapes do not match", "found two devices, npu:0 and cpu!", "no oracle"):
        assert not errors.is_runtime_error(RuntimeError(mistake))
    for failure in (
        "x, error code is 507011",
        "External NPU stream is not supported",
        "ACL stream synchronize failed.",
        "Alloc aclrtMallocHost error",
        "The Inner error is reported as above.\nERR00100 PTA call acl api failed.",
        "CANN Inner Error.",
    ):
        assert errors.is_runtime_error(RuntimeError(failure)), failure
    assert errors.is_runtime_error(torch.OutOfMemoryError("no"))


class Waited:
    """What a wait is for: an event, or updates."""

    over = fails = False

    def query(self) -> bool:
        return self.failed() if self.fails else self.over

    @staticmethod
    def failed() -> bool:
        raise RuntimeError("NPU function error, error code is 507011")


def a_lane(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = load("lane")
    monkeypatch.setattr(load("acl_errors"), "WAIT_SECONDS", 0.01)
    return module.Lane(0)


def test_waits_are_bounded_and_a_lane_that_was_given_up_refuses_until_it_goes_on(
    npu: Npu, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane, waited = a_lane(monkeypatch), Waited()
    lane.refuse("capture")
    assert not lane.hangs
    with pytest.raises(CaptureError, match=r"^warm-up: the device did not finish within 0.01 s"):
        lane.wait_for(waited, "warm-up")
    assert lane.hangs
    for later in (lambda: lane.wait_for(waited, "capture"), lambda: lane.settle("capture")):
        npu.log.clear()
        with pytest.raises(CaptureError, match=r"^capture: work that was queued before never ends"):
            later()
        assert npu.log == []
    waited.fails = True
    assert lane.hangs
    waited.fails, waited.over = False, True
    assert not lane.hangs
    lane.wait_for(waited, "capture")


def test_what_the_device_reached_is_no_wait_on_a_lane_that_hangs(
    npu: Npu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that is done is freed, whatever else hangs."""
    lane, done = a_lane(monkeypatch), Waited()
    done.over = True
    with pytest.raises(CaptureError):
        lane.wait_for(Waited(), "warm-up")
    lane.wait_for(done, "release")
    assert lane.hangs


def test_what_a_lane_reads_or_writes_is_held_for_as_long_as_it_hangs(
    npu: Npu, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane, waited = a_lane(monkeypatch), Waited()
    read = torch.zeros(2)
    gone = weakref.ref(read)
    lane.hold(read)
    del read
    assert gone() is None
    read = torch.zeros(2)
    gone = weakref.ref(read)
    with pytest.raises(CaptureError):
        lane.wait_for(waited, "warm-up")
    lane.hold(read)
    del read
    assert lane.hangs
    assert gone() is not None
    waited.over = True
    assert not lane.hangs
    assert gone() is None


def an_update(npu: Npu, *sets: str) -> Any:
    module = load("task_update")
    lane = types.SimpleNamespace(replay=npu.Stream(), update=npu.Stream())
    tasks = [Task(npu, f"t{number}", name) for number, name in enumerate(sets)]
    return module.TaskUpdates(lane, tasks)


def in_another_thread(action: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as other:
        return other.submit(action).result()


def test_a_lane_is_made_once_whoever_asks_first(npu: Npu, monkeypatch: pytest.MonkeyPatch) -> None:
    module, device = load("task_update"), types.SimpleNamespace(index=None)
    usual = npu.Stream

    def slow() -> Stream:
        sleep(0.01)
        return usual()

    monkeypatch.setattr(npu, "Stream", slow)
    monkeypatch.setattr(npu, "current_device", lambda: 3)
    with ThreadPoolExecutor(2) as threads:
        lanes = list(threads.map(module.lane_of, [device, device]))
    assert lanes[0] is lanes[1]
    assert lanes[0].index == 3
    assert module.lane_of(types.SimpleNamespace(index=3)) is lanes[0]


def test_an_update_is_its_threads_own(npu: Npu, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, seen = load("task_update").TASK_UPDATE, []
    monkeypatch.setattr(
        Task, "issue", lambda *_: seen.append(in_another_thread(lambda: lock.acquire(timeout=0)))
    )
    an_update(npu, "full").queue({"full": [8]})
    assert seen == [False]


def test_each_task_is_rewritten_and_then_its_flag_set_once(npu: Npu) -> None:
    updates = an_update(npu, "full", "window")
    updates.queue({"full": [8], "window": [4, 8]})
    assert npu.log == [
        "begin t0", "issue t0 [8]", "end", "set t0",
        "begin t1", "issue t1 [4, 8]", "end", "set t1",
        "record", "wait",
    ]  # fmt: skip
    assert updates.armed


def test_an_update_waits_for_the_replay_before_it(npu: Npu) -> None:
    updates = an_update(npu, "full")
    updates.queue({"full": [8]})
    updates.launch(Graph(npu))
    assert not updates.armed
    npu.log.clear()
    updates.queue({"full": [3, 8]})
    assert npu.log[:3] == ["wait", "begin t0", "issue t0 [3, 8]"]


def test_an_update_that_fails_is_closed_and_the_next_one_sets_the_flags_left(npu: Npu) -> None:
    updates = an_update(npu, "full", "full")
    npu.refuse_at = "issue t1"
    with pytest.raises(RuntimeError, match="107033"):
        updates.queue({"full": [8]})
    assert npu.log[-3:] == ["begin t1", "issue t1 [8]", "end"]
    assert not updates.armed
    npu.refuse_at = ""
    npu.log.clear()
    updates.queue({"full": [8]})
    assert npu.log == [
        "wait for stream",
        "begin t0", "issue t0 [8]", "end",
        "begin t1", "issue t1 [8]", "end", "set t1",
        "record", "wait",
    ]  # fmt: skip


def test_two_updates_before_one_replay_set_each_flag_once(npu: Npu) -> None:
    updates = an_update(npu, "full")
    updates.queue({"full": [8]})
    updates.queue({"full": [3, 8]})
    assert npu.log.count("set t0") == 1
    updates.launch(Graph(npu))
    updates.queue({"full": [8]})
    assert npu.log.count("set t0") == 2


def test_an_update_that_no_replay_followed_keeps_its_graph(
    npu: Npu, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = an_update(npu, "full")
    assert updates.is_done()
    updates.queue({"full": [8]})
    assert not updates.is_done()
    updates._lane.replay.idle = True
    assert not updates.is_done()
    updates._lane.update.idle = True
    assert updates.is_done()
    monkeypatch.setattr(updates._lane.update, "query", Waited.failed)
    assert not updates.is_done()


def test_a_replay_whose_end_cannot_be_recorded_is_waited_for_all_the_same(npu: Npu) -> None:
    updates = an_update(npu, "full")
    updates.queue({"full": [8]})
    npu.refuse_at = "record"
    with pytest.raises(RuntimeError, match="107033"):
        updates.launch(Graph(npu))
    updates._lane.update.idle = True
    assert not updates.is_done()
    npu.refuse_at = ""
    npu.log.clear()
    updates.queue({"full": [3, 8]})
    assert npu.log[:4] == ["wait for stream", "begin t0", "issue t0 [3, 8]", "end"]
    assert npu.log.count("set t0") == 1


@pytest.mark.parametrize("at", ["replay", "record"])
def test_after_a_launch_that_was_interrupted_every_flag_is_set_again(npu: Npu, at: str) -> None:
    """It may be queued, and clear the flags: one that nobody sets again is a hang."""
    updates = an_update(npu, "full", "full")
    updates.queue({"full": [8]})
    npu.refuse_at, npu.error = at, KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        updates.launch(Graph(npu))
    assert not updates.armed
    npu.refuse_at = ""
    npu.log.clear()
    updates.queue({"full": [8]})
    assert npu.log[0] == "wait for stream"
    assert [said for said in npu.log if said.startswith("set")] == ["set t0", "set t1"]


def test_a_launch_that_the_runtime_refused_leaves_the_flags_set(npu: Npu) -> None:
    updates = an_update(npu, "full", "full")
    updates.queue({"full": [8]})
    npu.refuse_at = "replay"
    with pytest.raises(RuntimeError, match="107033"):
        updates.launch(Graph(npu))
    assert not updates.armed
    npu.refuse_at = ""
    npu.log.clear()
    updates.queue({"full": [3, 8]})
    assert [said for said in npu.log if said.startswith(("wait", "issue", "set"))] == [
        "wait for stream", "issue t0 [3, 8]", "issue t1 [3, 8]", "wait",
    ]  # fmt: skip


def test_an_update_that_is_interrupted_right_after_it_began_is_closed(npu: Npu) -> None:
    updates = an_update(npu, "full")
    npu.refuse_at, npu.error = "begin", KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        updates.queue({"full": [8]})
    assert npu.log == ["begin t0", "end"]


def test_an_update_that_cannot_be_closed_says_what_came_first(
    npu: Npu, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = an_update(npu, "full")
    npu.refuse_at, npu.error = "issue", KeyboardInterrupt()

    def end(stream: Any) -> None:
        raise RuntimeError("no update is open")

    monkeypatch.setattr(npu, "graph_task_update_end", end)
    with pytest.raises(KeyboardInterrupt):
        updates.queue({"full": [8]})


def test_a_graph_without_attention_needs_its_update_all_the_same(npu: Npu) -> None:
    updates = an_update(npu)
    assert not updates.armed
    updates.queue({})
    assert updates.armed


def serving(npu: Npu, **buffers: torch.Tensor) -> Any:
    module = load("attention")
    bounds = {name: Boundaries((3, 8)) for name in buffers}
    return module, module.Serving(buffers, bounds)


def test_a_boundary_set_is_found_by_its_buffer(npu: Npu) -> None:
    full, window = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    module, found = serving(npu, full=full, window=window)
    assert found.set_of(window) == "window"
    assert found.set_of(full[:2]) == "full"
    assert found.set_of(full.clone()) is None
    hosts_alone = module.Serving({"full": full}, {"host": Boundaries((8,)), **found.boundaries})
    assert hosts_alone.set_of(full) == "full"


def test_ends_are_known_within_their_forward_alone(npu: Npu) -> None:
    ends, others = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    module, found = serving(npu, cu_seqlens=ends)
    with module.serve(found):
        assert module.ends_are_known(ends)
        assert not module.ends_are_known(others)
        with module.serve(serving(npu, cu_seqlens=others)[1]):
            assert not module.ends_are_known(ends)
        assert module.ends_are_known(ends)
    assert not module.ends_are_known(ends)


def test_foreign_boundaries_are_refused_under_capture_and_read_otherwise(npu: Npu) -> None:
    module = load("attention")
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    assert module._read_back(ends, 10).ends == (3, 8, 10)
    npu.capturing = True
    with pytest.raises(HostReadError, match="none of the graph's boundary buffers"):
        module._read_back(ends, 10)


def test_boundaries_that_do_not_cover_the_rows_are_refused(npu: Npu) -> None:
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    module, found = serving(npu, cu_seqlens=ends)
    rows = torch.zeros(9, 2, 16)
    with (
        module.serve(found),
        pytest.raises(BoundariesError, match=r"^cu_seqlens covers 8 rows; .* have 9, 9, 9"),
    ):
        module.attention(rows, rows, rows, ends, 8, 1.0)


@pytest.mark.parametrize(("keys", "values"), [(6, 6), (8, 12)])
def test_keys_and_values_of_other_lengths_than_queries_are_refused(
    npu: Npu, keys: int, values: int
) -> None:
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    module, found = serving(npu, cu_seqlens=ends)
    tensors = [torch.zeros(rows, 2, 16) for rows in (8, keys, values)]
    with (
        module.serve(found),
        pytest.raises(BoundariesError, match=rf"queries, keys and values have 8, {keys}, {values}"),
    ):
        module.attention(*tensors, ends, 8, 1.0)


@pytest.mark.parametrize(("dim", "padded"), [(16, 64), (64, 64), (72, 128), (80, 128), (129, 192)])
def test_head_dims_are_padded_to_what_the_kernel_takes(npu: Npu, dim: int, padded: int) -> None:
    assert load("attention")._padded_dim(dim) == padded


def test_a_head_dim_beyond_the_kernel_is_refused(npu: Npu) -> None:
    with pytest.raises(UnsupportedOperationError, match="head dim 257"):
        load("attention")._padded_dim(257)
