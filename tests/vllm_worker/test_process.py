"""A whole worker process of real vLLM: entry point, serving, `/metrics`, an orderly end."""

import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

WORKER = """
import sys
import torch
if "+cpu" in torch.__version__:
    import torchvision_schemas
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging
from vllm.plugins import load_general_plugins
configure_logging(LoggingConfig())  # as vLLM's executor does in every worker
load_general_plugins()
import vllm_on_cpu as on_cpu
with on_cpu.engine_context(
    encoder_cudagraph_token_budgets=[16, 32],
    encoder_cudagraph_max_vision_items_per_batch=4,
) as config:
    own = {"self_check": "quick", "log_seconds": 0, "stats_file": sys.argv[1] + "/{pid}.json"}
    config.additional_config = {"graphhal": own}
    model = on_cpu.qwen3_vl(config)
    manager = on_cpu.make_manager(config, model)
    manager.capture(graph_pool=None)
    for grids in ([[1, 8, 8]], [[1, 4, 8], [1, 4, 4]], [[1, 18, 18]]):
        on_cpu.run_v1(model, config, manager, [("image", on_cpu.image_group(model, grids))])
    print("SERVED", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("worker")
    (folder / "metrics").mkdir()
    script = folder / "worker.py"
    script.write_text(WORKER)
    process = subprocess.Popen(
        [sys.executable, str(script), str(folder)],
        env={
            **os.environ,
            "PROMETHEUS_MULTIPROC_DIR": str(folder / "metrics"),
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_PLUGINS": "graphhal",
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    yield process, folder
    process.kill()
    process.communicate()


def served_metrics(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a client reads from `/metrics` of vLLM's own server application."""
    from fastapi import FastAPI
    from starlette.testclient import TestClient
    from vllm.entrypoints.serve.instrumentator.metrics import attach_router

    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(folder))
    application = FastAPI()
    attach_router(application)
    response = TestClient(application).get("/metrics")
    assert response.status_code == 200
    return str(response.text)


def counter(text: str, name: str, **labels: str) -> float | None:
    """The value of one counter of the model."""
    for found in re.finditer(rf"^{name}\{{([^}}]*)\}} (\S+)$", text, re.MULTILINE):
        if all(f'{key}="{value}"' in found[1] for key, value in labels.items()):
            return float(found[2])
    return None


@pytest.mark.timeout(300)
def test_counters_appear_while_the_worker_idles_and_it_ends_in_order(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, folder = worker
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("SERVED"):
            break
    log = "".join(lines)
    assert "graphhal: Qwen3VLForConditionalGeneration: 4 encoder graphs (image, video)" in log
    hits = None
    for _ in range(60):  # no further request comes
        text = served_metrics(folder / "metrics", monkeypatch)
        hits = counter(text, "graphhal_encoder_hits_total", modality="image")
        if hits is not None:
            break
        time.sleep(0.5)
    assert hits == 3
    reason = "more rows than the largest graph"
    assert counter(text, "graphhal_encoder_misses_total", modality="image", reason=reason) == 1
    assert counter(text, "graphhal_encoder_replays_total", graph="vllm_qwen3_vl_vision/image[16]")
    assert counter(text, "graphhal_encoder_graphs", model="Qwen3VLForConditionalGeneration") == 4
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0, rest
    summaries = [line for line in rest.splitlines() if "image 3 hits, 1 misses (1 " in line]
    assert len(summaries) == 1, rest
    (file,) = folder.glob("*.json")
    assert file.name == f"{process.pid}.json"
    stats = json.loads(file.read_text())
    assert (stats["graph_hits"], stats["graph_misses"]) == (3, 1)
    assert stats["hits"] == {"image": 3}


@pytest.mark.timeout(120)
def test_a_forked_worker_says_what_it_served_when_it_ends(engine: Any, tmp_path: Path) -> None:
    """vLLM's default way to start workers; such processes run no `atexit` functions."""
    import vllm_on_cpu as on_cpu

    file = tmp_path / "stats.json"
    engine.additional_config["graphhal"] |= {"stats_file": str(file), "log_seconds": 0}
    model = on_cpu.qwen3_vl(engine)

    def serve() -> None:
        manager = on_cpu.make_manager(engine, model)
        manager.capture(graph_pool=None)
        on_cpu.run_v2(model, manager, [("image", on_cpu.image_group(model, [[1, 8, 8]]))])
        assert json.loads(file.read_text())["graph_hits"] == 0
        kept.append(manager)

    kept: list[Any] = []
    child = multiprocessing.get_context("fork").Process(target=serve)
    child.start()
    child.join(timeout=100)
    assert child.exitcode == 0
    assert json.loads(file.read_text())["graph_hits"] == 1


@pytest.mark.parametrize("cycle", [False, True])
def test_an_executor_that_its_runner_drops_says_what_it_served(
    engine: Any, tmp_path: Path, cycle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """V1 runners clear no manager: on ROCm they drop it before distributed teardown, and in a
    process that goes on they are collected with it."""
    import gc

    import vllm_on_cpu as on_cpu

    file = tmp_path / "stats.json"
    engine.additional_config["graphhal"] |= {"stats_file": str(file), "log_seconds": 0}
    model = on_cpu.qwen3_vl(engine)
    manager = on_cpu.make_manager(engine, model)
    manager.capture(graph_pool=None)
    on_cpu.run_v2(model, manager, [("image", on_cpu.image_group(model, [[1, 8, 8]]))])
    held: list[tuple[int, int]] = []
    monkeypatch.setattr(manager._reporter._prometheus, "held", lambda *now: held.append(now))
    (graphs,) = manager._graphs()
    if cycle:
        manager.itself = manager
    del manager
    gc.collect()
    assert json.loads(file.read_text())["graph_hits"] == 1
    assert held[-1] == (0, 0)
    assert graphs.keys() == []
