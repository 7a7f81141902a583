"""Two tensor-parallel ranks of real vLLM on a CPU: data-parallel encoders, and split weights."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

RANK = """
import json, os, sys
import torch
if "+cpu" in torch.__version__:
    import torchvision_schemas
rank, folder = int(sys.argv[1]), sys.argv[2]
import vllm_on_cpu as on_cpu
from graphhal.vllm_worker import plugin
plugin.register()

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

for mode in ("data", "weights"):
    print("RESULT", json.dumps({"mode": mode, **serve(mode)}), flush=True)
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float]]]:
    """Results of both ranks, by mode."""
    folder = tmp_path_factory.mktemp("ranks")
    script = folder / "rank.py"
    script.write_text(RANK)
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(folder)],
            env=os.environ.copy(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    results: dict[str, list[dict[str, float]]] = {}
    try:
        for process in processes:
            out, error = process.communicate(timeout=500)
            assert process.returncode == 0, error[-3000:]
            for line in out.splitlines():
                if line.startswith("RESULT"):
                    found = json.loads(line.removeprefix("RESULT "))
                    results.setdefault(found["mode"], []).append(found)
    finally:
        for process in processes:
            process.kill()
    return results


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


@pytest.mark.parametrize(("tower", "shares"), [("qwen3_vl", True), ("qwen3_omni", False)])
def test_only_whole_towers_share_items(
    engine: Any, tower: str, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thinker's are split over ranks whatever the mode: ranks with different items would wait
    for each other inside, or mix their rows."""
    import types

    import vllm_on_cpu as on_cpu
    from vllm.distributed import parallel_state

    from graphhal.vllm_worker import executor

    two = types.SimpleNamespace(world_size=2, device_group="items", cpu_group="decisions")
    model = getattr(on_cpu, tower)(engine)
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: two)
    monkeypatch.setattr(executor, "DistributedPeers", lambda group: group)
    engine.model_config.multimodal_config.mm_encoder_tp_mode = "data"
    peers, group = executor._ranks(engine, model)
    assert group == ("items" if shares else None)
    assert (peers == "decisions") is not shares
    engine.model_config.multimodal_config.mm_encoder_tp_mode = "weights"
    assert executor._ranks(engine, model) == ("decisions", None)
