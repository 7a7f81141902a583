"""A device that waits for something that never comes: given up, served without graphs, used again
once it goes on."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import pytest
import torch

from graphhal.discovery import bind
from graphhal.errors import CaptureError, ReplayError
from graphhal.npu import acl_errors, plugin, recording
from graphhal.npu.task_update import lane_of
from graphhal.platform import CapturedGraph, HostUpdate, Platform
from tests.ascend_simulated import simulator
from tests.ascend_simulated.direct_request import a_request
from tests.ascend_simulated.encoders import Twins, serves, twins
from tests.toy_encoder import images

WAIT = 0.3
GIVEN_UP = f"the device did not finish within {WAIT} s"
REFUSED = "work that was queued before never ends on this device"


def a_stream() -> Any:
    """One of torch_npu's pool, which hands them out in turn, that is not the lane's."""
    lane = lane_of(torch.device("npu:0"))
    found = torch.npu.Stream()
    return a_stream() if found in (lane.replay, lane.update) else found


class Flags:
    """External events that forwards wait for; sets what is missing when the test ends."""

    def __init__(self) -> None:
        self._unset: list[Any] = []
        self._stream = a_stream()

    def wait(self, ready: int = 0) -> None:
        """The current stream waits for a new flag; where a capture runs, its first `ready` replays
        find it set."""
        flag = torch.npu.ExternalEvent()
        for _ in range(ready):
            flag.record(self._stream)
        stream = torch.npu.current_stream()
        flag.wait(stream)
        if torch.npu.is_current_stream_capturing():
            flag.reset(stream)
        self._unset.append(flag)

    def go_on(self) -> None:
        """Nothing that waits now waits any longer."""
        for flag in self._unset:
            flag.record(self._stream)
        self._unset.clear()
        torch.npu.synchronize()


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch, schedule: str) -> Iterator[Flags]:
    monkeypatch.setattr(acl_errors, "WAIT_SECONDS", WAIT)
    found = Flags()
    yield found
    found.go_on()
    assert not lane_of(torch.device("npu:0")).hangs


def capturing() -> bool:
    found: bool = torch.npu.is_current_stream_capturing()
    return found


WHERE: dict[str, Callable[[Flags, int], None]] = {
    "first output": lambda flags, call: flags.wait() if call == 1 else None,
    "warm-up": lambda flags, call: flags.wait() if call == 2 else None,
    "first replay": lambda flags, call: flags.wait() if capturing() else None,
    "later replay": lambda flags, call: flags.wait(ready=1) if capturing() else None,
}
"""What a forward does, by the number of its call, to hang there."""


def hang_at(where: str, tower: Twins, flags: Flags, patched: pytest.MonkeyPatch) -> None:
    adapter, usual, calls = tower.graphs.adapter, tower.graphs.adapter.forward, 0

    def forward(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        WHERE[where](flags, calls)
        return usual(*arguments)

    patched.setattr(adapter, "forward", forward)


def misses_of(tower: Twins) -> set[str]:
    return {reason for path in tower.graphs.stats()["misses"].values() for reason in path}


@pytest.mark.parametrize("where", WHERE)
def test_a_ladder_that_hangs_is_given_up_once_and_served_eagerly(
    platform: Platform,
    flags: Flags,
    monkeypatch: pytest.MonkeyPatch,
    trace: "simulator.Trace",
    where: str,
) -> None:
    tower, other = twins("toy", platform), twins("toy", platform)
    assert not other.graphs.capture().dropped
    with monkeypatch.context() as patched:
        hang_at(where, tower, flags, patched)
        report = tower.graphs.capture()
    reasons = [dropped.reason for dropped in report.dropped]
    assert not tower.graphs.keys()
    assert GIVEN_UP in reasons[0]
    assert all(REFUSED in reason or GIVEN_UP in reason for reason in reasons)
    for each in (tower, other):
        serves(each)
    tower.graphs.clear()
    assert tower.graphs.stats()["hits"] == other.graphs.stats()["hits"] == {}
    assert misses_of(tower) == {"no graph is captured"}
    assert "the replay failed" in misses_of(other)
    flags.go_on()
    assert not tower.graphs.capture().dropped
    serves(tower)
    assert tower.graphs.stats()["hits"] != {}
    assert recording._kept == []
    for each in (tower, other):
        each.graphs.clear()
    assert trace.hazards() == []  # among them any wait that the runtime had to end


@pytest.mark.parametrize("where", WHERE)
def test_memory_that_a_hanging_device_still_writes_to_is_nobody_elses(
    platform: Platform,
    device: torch.device,
    flags: Flags,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    tower = twins("toy", platform)
    with monkeypatch.context() as patched:
        hang_at(where, tower, flags, patched)
        tower.graphs.capture()
    tower.graphs.clear()
    gc.collect()
    ours = [torch.full((size,), 7.0, device=device) for size in (4, 20, 40, 130, 500) * 40]
    torch.npu.current_stream().synchronize()
    flags.go_on()
    assert all(bool((each.cpu() == 7).all()) for each in ours)


@pytest.mark.parametrize("phase", ["warm-up", "first replay"])
def test_a_capture_that_hangs_is_given_up_after_a_bounded_wait(
    platform: Platform,
    device: torch.device,
    flags: Flags,
    trace: "simulator.Trace",
    phase: str,
) -> None:
    def forward(x: torch.Tensor, out: torch.Tensor) -> None:
        if capturing() == (phase == "first replay"):
            flags.wait()
        out.copy_(x)

    runs: list[torch.Tensor] = []
    served = platform.capture(a_request(device, lambda x, out: out.copy_(x)))

    def counted(x: torch.Tensor, out: torch.Tensor) -> None:
        runs.append(out.copy_(x))

    good = a_request(device, counted)
    with pytest.raises(CaptureError, match=f"{phase}: {GIVEN_UP}"):
        platform.capture(a_request(device, forward))
    for refused in (lambda: platform.capture(good), lambda: platform.profile_memory([good])):
        with pytest.raises(CaptureError, match=REFUSED):
            refused()
    with (
        pytest.raises(ReplayError, match=REFUSED),
        platform.step("replay", served, served.request.inputs, served.request.boundaries),
    ):
        runs.append(served.request.output)
    with (
        pytest.raises(CaptureError, match=REFUSED),
        platform.step("reference", None, good.inputs, {}),
    ):
        runs.append(good.output)
    assert runs == []
    torch.npu.current_stream().synchronize()
    flags.go_on()
    graph = platform.capture(good)
    assert recording._kept == []
    platform.release([graph, served])
    assert trace.hazards() == []


@pytest.mark.parametrize("asked", ["capture", "profile"])
def test_work_of_the_caller_that_hangs_is_waited_for_no_longer(
    platform: Platform,
    device: torch.device,
    flags: Flags,
    trace: "simulator.Trace",
    asked: str,
) -> None:
    request = a_request(device, lambda x, out: out.copy_(x))
    ask = platform.capture if asked == "capture" else lambda each: platform.profile_memory([each])
    torch.npu.synchronize()
    with torch.npu.stream(a_stream()):
        flags.wait()
        with pytest.raises(CaptureError, match=GIVEN_UP):
            ask(request)
    flags.go_on()
    platform.release([platform.capture(request)])
    assert trace.hazards() == []


def a_replay_that_hangs(platform: Platform, device: torch.device, flags: Flags) -> CapturedGraph:
    """A graph whose second replay is queued, and does not end."""

    def forward(x: torch.Tensor, out: torch.Tensor) -> None:
        if capturing():
            flags.wait(ready=1)
        out.copy_(x + 1)

    request = a_request(device, forward)
    graph = platform.capture(request)
    update = HostUpdate(request.boundaries, torch.zeros_like(request.packed).cpu())
    with (
        torch.npu.stream(a_stream()),
        platform.step("replay", graph, request.inputs, update.boundaries),
    ):
        platform.update_boundaries(graph, update)
        platform.replay(graph)
    return graph


def test_a_graph_that_hangs_when_it_is_released_is_kept_until_it_ends(
    platform: Platform, device: torch.device, flags: Flags, trace: "simulator.Trace"
) -> None:
    graph = a_replay_that_hangs(platform, device, flags)
    platform.release([graph])
    assert len(recording._kept) == 1
    with torch.npu.stream(a_stream()):  # the one of the replay waits for it
        serves(twins("toy", platform))
    flags.go_on()
    later = platform.capture(a_request(device, lambda x, out: out.copy_(x)))
    assert recording._kept == []
    platform.release([later])
    assert trace.hazards() == []


def test_what_a_graph_writes_that_hangs_when_it_is_released_is_nobody_elses(
    platform: Platform, device: torch.device, flags: Flags
) -> None:
    graph = a_replay_that_hangs(platform, device, flags)
    platform.release([graph])
    del graph
    gc.collect()
    ours = [torch.full((8, 2), 7.0, device=device) for _ in range(200)]
    torch.npu.current_stream().synchronize()
    flags.go_on()
    assert all(bool((each.cpu() == 7).all()) for each in ours)


def test_a_capture_does_not_wait_for_a_replay_that_hangs(
    platform: Platform, device: torch.device, flags: Flags, trace: "simulator.Trace"
) -> None:
    tower = twins("toy", platform)
    graph = a_replay_that_hangs(platform, device, flags)
    with torch.npu.stream(a_stream()):
        report = tower.graphs.capture()
        assert GIVEN_UP in report.dropped[0].reason
        serves(tower)
    flags.go_on()
    platform.release([graph])
    assert trace.hazards() == []


def waits_for_a_request_that_hangs() -> None:
    """A process of its own, whose first replay while serving does not end; ends with the wait."""
    info = plugin.graphhal_probe()
    tower = twins("toy", bind(plugin, info, "npu"), self_check="off")
    with pytest.MonkeyPatch.context() as patched:
        hang_at("later replay", tower, Flags(), patched)
        tower.graphs.capture()
    tower.graphs.run(images(2, 3))
    assert tower.graphs.stats()["hits"] == {"image": 2}
    began = monotonic()
    with pytest.raises(RuntimeError, match="507046"):
        torch.npu.current_stream().synchronize()
    print(f"{monotonic() - began:.1f} s", flush=True)
    os._exit(0)  # an ordinary end waits for the device


def test_an_option_of_torch_npu_bounds_the_wait_for_a_stream_whose_replay_hangs() -> None:
    program = (
        "from tests.ascend_simulated import test_hangs as t; t.waits_for_a_request_that_hangs()"
    )
    options = {"ACL_STREAM_TIMEOUT": "700", "CANN_SIM_TIMEOUT_MS": "20000", "CANN_SIM_LAZY": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True, text=True, timeout=200, check=False, env={**os.environ, **options},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "0.7 s"
