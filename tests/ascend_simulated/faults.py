"""One process for each injected failure: it must serve, eagerly where it has to, and exit with 0.

python -m tests.ascend_simulated.faults {capture|replay} {first|all}

A failure at the first, or at every, occurrence of every runtime call that capturing a graph, or
replaying one, makes; with `CANN_SIM_LAZY=1` on a busy device. The device is opened only in the
processes, which are forked.
"""

import faulthandler
import gc
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import torch  # noqa: E402

from graphhal.discovery import bind  # noqa: E402
from graphhal.npu import acl_errors, plugin  # noqa: E402
from graphhal.platform import PlatformInfo  # noqa: E402
from graphhal.settings import Settings  # noqa: E402
from tests.ascend_simulated import simulator  # noqa: E402
from tests.ascend_simulated.encoders import Twins, assert_equal, toy_twins  # noqa: E402
from tests.toy_encoder import images  # noqa: E402

REQUESTS = ((2, 3), (5,))


def tower_of_this_process(device: str = "npu:0") -> Twins:
    """A small tower; opens the device."""
    info = plugin.graphhal_probe()
    assert isinstance(info, PlatformInfo), info
    settings = Settings(self_check="quick", max_items=3)
    return toy_twins(bind(plugin, info, "npu"), settings, device=device, budgets=(8,))


def serve(tower: Twins) -> None:
    """Encode every request, and compare it with the CPU."""
    for tokens in REQUESTS:
        request = images(*tokens)
        assert_equal(tower.graphs.run(request), tower.expected(request), torch.float32)


def failing(phase: str, fault: str) -> dict[str, int]:
    """Serve with one fault in the phase; runtime calls of the phase."""
    acl_errors.WAIT_SECONDS = 3.0
    tower = tower_of_this_process()
    if phase == "replay":
        tower.graphs.capture()
        serve(tower)
        tower.expected(images(*REQUESTS[0]))
    torch.npu.synchronize()
    stream = torch.npu.current_stream()
    simulator.arm(fault)
    if phase == "capture":
        tower.graphs.capture()
    else:
        request = images(*REQUESTS[0])
        outputs = tower.graphs.run(request)
    calls = simulator.calls()
    simulator.arm()
    if phase == "replay":
        assert_equal(outputs, tower.expected(request), torch.float32)
    assert torch.npu.current_stream() == stream
    assert torch._C._len_torch_dispatch_stack() == 0
    serve(tower)
    torch.npu.synchronize()
    return calls


def without_hazards(action: Callable[[], Any]) -> Any:
    """The action's result; nothing in the runtime's trace may be a hazard."""
    with tempfile.TemporaryDirectory() as folder, simulator.traced(Path(folder) / "t") as trace:
        result = action()
        found = trace.matching("HAZARD")
    assert found == [], found
    return result


def forked(action: Callable[[], Any]) -> tuple[int, Any]:
    """Exit status of a process that runs the action and ends as any does, and its result."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        result = without_hazards(action)
        with os.fdopen(writing, "w") as pipe:
            json.dump(result, pipe)
        sys.exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status, json.loads(text) if text else None


def main(phase: str, occurrences: str) -> None:
    """Ends the process; prints one line for each failure that was not survived, and a summary."""
    faulthandler.enable()
    status, calls = forked(lambda: failing(phase, ""))
    assert status == 0, "the process fails without a fault"
    gc.freeze()  # or each process copies all that was imported, to collect none of it at its end
    faults = [
        f"{name}:{nth}"
        for name, count in sorted(calls.items())
        for nth in range(1, (count if occurrences == "all" else 1) + 1)
    ]
    bad = 0
    for fault in faults:
        status, _ = forked(lambda fault=fault: failing(phase, fault))
        if status != 0:
            bad += 1
            print(f"{fault}: exit status {status}", flush=True)
    print(f"{phase}: {len(faults)} failures in {len(calls)} calls, {bad} not survived")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main(*sys.argv[1:])
