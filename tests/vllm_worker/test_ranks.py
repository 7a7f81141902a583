"""Two tensor-parallel ranks of real vLLM on a CPU: data-parallel encoders, and split weights."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

RANKS = """
import contextlib, json, os, sys
import torch
if "+cpu" in torch.__version__:
    import torchvision_schemas
folder = sys.argv[1]
import vllm_on_cpu as on_cpu
from graphhal.vllm_worker import plugin
plugin.register()
import vllm.v1.worker.gpu_model_runner  # once for both ranks
import vllm.model_executor.models.qwen3_vl
other = os.fork()
rank = 0 if other else 1

def serve(mode):
    os.makedirs(f"{folder}/{mode}", exist_ok=True)
    with on_cpu.engine_context(
        world_size=2, rank=rank, folder=f"{folder}/{mode}", mode=mode,
        encoder_cudagraph_token_budgets=[16, 32, 64],
        encoder_cudagraph_max_vision_items_per_batch=4,
    ) as config:
        config.parallel_config.tensor_parallel_size = 2
        config.additional_config = {"graphhal": {"self_check": "quick"}}
        model = on_cpu.qwen3_vl(config)
        model.use_data_parallel = mode == "data"
        manager = on_cpu.make_manager(config, model)
        manager.capture(graph_pool=None)
        worst = 0.0
        for grids in (
            [[1, 8, 8], [1, 4, 8], [1, 4, 4]], [[1, 4, 4]], [[1, 8, 8], [1, 18, 18]]
        ):
            group = on_cpu.image_group(model, grids)
            eager = model.embed_multimodal(**group)
            got = manager.execute(group)
            if got is None:
                got = eager
            worst = max([worst, *(float((a - b).norm() / b.norm()) for a, b in zip(got, eager))])
        stats = manager.get_cumulative_stats()
        manager.clear()
        return {"worst": worst, "hits": stats["graph_hits"], "misses": stats["graph_misses"],
                "graphs": stats["graph_count"]}

def differ(mode, name):
    # Rank 1 alone fails in a function of the worker's.
    import time
    from unittest import mock
    from graphhal.vllm_worker import executor, plugin, towers
    os.makedirs(f"{folder}/{name}", exist_ok=True)
    failing = mock.Mock(side_effect=ERRORS[name]("this card is ill"))
    places = {"encoder": (towers, "_own_vision"), "platform": (executor, "open_platform"),
              "options": (executor, "merged")}
    with on_cpu.engine_context(
        world_size=2, rank=rank, folder=f"{folder}/{name}", mode=mode,
        encoder_cudagraph_token_budgets=[16, 32, 64],
    ) as config:
        config.parallel_config.tensor_parallel_size = 2
        model = on_cpu.qwen3_vl(config)
        started = time.perf_counter()
        said, manager = None, None
        with mock.patch.object(*places[name], failing) if rank else contextlib.nullcontext():
            try:
                manager = executor.build(config, torch.device("cpu"), torch.float32, model)
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
        if manager is not None:
            manager.capture(graph_pool=None)
            assert manager.execute(on_cpu.image_group(model, [[1, 8, 8], [1, 4, 8]])) is None
            ((said, count),) = manager.stats()["misses"]["image"].items()
            assert (manager.is_captured(), count) == (True, 2)
        return {"said": said, "served": manager is not None,
                "seconds": time.perf_counter() - started}

from graphhal.errors import SettingsError
ERRORS = {"encoder": RuntimeError, "platform": RuntimeError, "options": SettingsError}

def tell(mode, found):
    line = json.dumps({"rank": rank, "mode": mode, **found})
    os.write(1, f"RESULT {line}\\n".encode())  # at once: both ranks write

for mode in ("data", "weights"):
    tell(mode, serve(mode))
for mode, name in (("data", "encoder"), ("weights", "platform"), ("data", "options")):
    tell(name, differ(mode, name))
if rank == 0:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Results of both ranks, by mode."""
    folder = tmp_path_factory.mktemp("ranks")
    script = folder / "ranks.py"
    script.write_text(RANKS)
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(script), str(folder)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out, error = process.communicate(timeout=500)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, error[-3000:]
    results: dict[str, list[dict[str, Any]]] = {}
    for line in out.splitlines():
        if line.startswith("RESULT"):
            found = json.loads(line.removeprefix("RESULT "))
            results.setdefault(found["mode"], []).append(found)
    return {mode: sorted(found, key=lambda each: each["rank"]) for mode, found in results.items()}


@pytest.mark.timeout(600)
def test_data_parallel_encoding_shares_items_and_gathers(ranks: Any) -> None:
    one, two = ranks["data"]
    assert max(one["worst"], two["worst"]) < 1e-5
    # 6 items over both ranks; the large one runs eagerly on its rank, and nobody waits for it.
    assert one["hits"] + two["hits"] == 5
    assert one["misses"] + two["misses"] == 1


@pytest.mark.timeout(600)
def test_split_weights_replay_or_not_together(ranks: Any) -> None:
    one, two = ranks["weights"]
    assert max(one["worst"], two["worst"]) < 1e-5
    assert one["graphs"] == two["graphs"] > 0
    assert (one["hits"], one["misses"]) == (two["hits"], two["misses"]) == (4, 2)


@pytest.mark.timeout(600)
def test_a_rank_that_cannot_serve_keeps_the_others_from_it(ranks: Any) -> None:
    """Alone it would encode eagerly, and gather, as vLLM does it, beside ranks that replay."""
    for own in ranks["encoder"]:
        assert own["served"]
        assert own["said"] == (
            "ranks differ: rank 0: serves vllm_qwen3_vl_vision; "
            "rank 1: its own code for graphs fails: RuntimeError('this card is ill')"
        )
    assert [own["served"] for own in ranks["platform"]] == [False, False]  # vLLM's own manager
    one, two = ranks["options"]
    assert (one["said"], two["said"]) == (None, "SettingsError: this card is ill")
    assert not one["served"]
    assert all(own["seconds"] < 100 for name in ("encoder", "platform") for own in ranks[name])


@pytest.mark.parametrize(("tower", "shares"), [("qwen3_vl", True), ("qwen3_omni", False)])
def test_only_whole_towers_share_items(
    engine: Any, tower: str, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thinker's are split over ranks whatever the mode: ranks with different items would wait
    for each other inside, or mix their rows."""
    import types

    import vllm_on_cpu as on_cpu
    from vllm.distributed import parallel_state

    from graphhal.vllm_worker import ranks

    two = types.SimpleNamespace(world_size=2, device_group="items", cpu_group="decisions")
    model = getattr(on_cpu, tower)(engine)
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: two)
    decisions = types.SimpleNamespace(size=2)
    monkeypatch.setattr(ranks, "DistributedPeers", lambda group: decisions)
    engine.model_config.multimodal_config.mm_encoder_tp_mode = "data"
    peers, group = ranks.sharing(engine, model)
    assert group == ("items" if shares else None)
    assert (peers is decisions) is not shares
    engine.model_config.multimodal_config.mm_encoder_tp_mode = "weights"
    assert ranks.sharing(engine, model) == (decisions, None)


def test_one_rank_alone_agrees_with_nobody(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of one would cost a barrier at start-up, and a gather for each request."""
    import vllm_on_cpu as on_cpu
    from vllm.distributed import parallel_state

    from graphhal.peers import Peers
    from graphhal.vllm_worker import ranks

    engine.model_config.multimodal_config.mm_encoder_tp_mode = "data"
    peers, group = ranks.sharing(engine, on_cpu.qwen3_vl(engine))
    assert (type(peers), group) == (Peers, None)

    def no_group() -> Any:
        raise AssertionError("there is none")

    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: False)
    monkeypatch.setattr(parallel_state, "get_tp_group", no_group)
    monkeypatch.setattr(parallel_state, "get_pp_group", no_group)
    assert ranks.is_first_stage()
    assert type(ranks.tensor_parallel()) is Peers


def test_ranks_that_have_nothing_to_say_are_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from graphhal.peers import Peers
    from graphhal.vllm_worker import ranks

    monkeypatch.setattr(Peers, "exchange", lambda self, what, own: ["no platform", None])
    assert ranks.in_one_voice(Peers(), "options", None) == "rank 0: no platform"
