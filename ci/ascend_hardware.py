"""Platform npu on an Ascend chip: equality, back-to-back replays, memory pressure, times.

python ci/ascend_hardware.py [--tower NAME ...] [--groups N] [--replays N] [--json FILE]

Needs graphhal's test extra and a usable platform npu. Exits with 1 if anything disagrees.
"""

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# This folder has modules with the names of packages.
sys.path[:] = [str(ROOT), *(path for path in sys.path if Path(path).resolve() != ROOT / "ci")]

import torch  # noqa: E402

from graphhal.discovery import open_platform  # noqa: E402
from tests.ascend_simulated.encoders import (  # noqa: E402
    Twins,
    assert_equal,
    in_bfloat16,
    random_request,
    twins,
    without_onednn,
)

TOWERS = ("qwen3_omni_vision", "qwen3_omni_audio", "covo_audio", "toy")


def milliseconds(action: Any, rounds: int = 20) -> float:
    """Median time of an action with the device idle before and after."""
    times = []
    for _ in range(rounds):
        torch.npu.synchronize()
        start = time.perf_counter()
        action()
        torch.npu.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def check(tower: Twins, groups: int, replays: int) -> dict[str, Any]:
    """Everything about one tower, as plain data; raises AssertionError where it disagrees."""
    report = tower.graphs.capture()
    found: dict[str, Any] = {
        "graphs": len(tower.graphs.keys()),
        "asked_for": len(tower.graphs.ladder()),
        "dropped": [str(dropped) for dropped in report.dropped],
        "bytes": report.num_bytes,
    }
    chooser = random.Random(1)  # noqa: S311
    requests = [in_bfloat16(random_request(tower.graphs.adapter, chooser)) for _ in range(groups)]
    with without_onednn():
        expected = [tower.expected(request) for request in requests]
    for request, reference in zip(requests, expected, strict=True):
        assert_equal(tower.graphs.run(request), reference, torch.bfloat16)
    found["equal"] = groups
    kept = [tower.graphs.run(requests[number % groups]) for number in range(replays)]
    pressure = [torch.full((2**20,), 7.0, device="npu") for _ in range(64)]
    for number, outputs in enumerate(kept):
        assert_equal(outputs, expected[number % groups], torch.bfloat16)
    assert all(bool((block == 7).all()) for block in pressure), "a replay wrote foreign memory"
    found["back_to_back"] = len(kept)
    found["graph_ms"] = milliseconds(lambda: tower.graphs.run(requests[0]))
    found["eager_ms"] = milliseconds(lambda: tower.graphs.run_eager(requests[0]))
    found["stats"] = tower.graphs.stats()
    tower.graphs.clear()
    return found


def main() -> int:
    """Command line; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tower", action="append", choices=TOWERS)
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--replays", type=int, default=500, help="in a row")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    platform = open_platform("npu")
    results: dict[str, Any] = {"versions": dict(platform.info.versions), "towers": {}}
    failed = False
    for name in options.tower or TOWERS:
        try:
            results["towers"][name] = check(
                twins(name, platform, torch.bfloat16), options.groups, options.replays
            )
        except AssertionError as error:
            failed = True
            results["towers"][name] = {"disagrees": str(error)}
        print(name, json.dumps(results["towers"][name], default=str))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2, default=str))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
