"""vLLM's towers look rotary embeddings up in a table; a place beyond it ends a CUDA process."""

from typing import Any

import pytest

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("make", ["qwen3_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("items", [1, 4])
def test_nothing_is_looked_up_beyond_the_table(
    engine: Any, make: str, items: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """61 tokens are as square as they can be in a row; a picture of so many patches is refused."""
    import vllm_on_cpu as on_cpu

    model = getattr(on_cpu, make)(engine)
    rotary = model.visual.rotary_pos_emb
    # vLLM keeps one for all models of a process.
    monkeypatch.setitem(rotary._buffers, "cos_sin_cache", rotary.cos_sin_cache[:64])
    engine.compilation_config.encoder_cudagraph_token_budgets = [61, 62]
    engine.compilation_config.encoder_cudagraph_max_vision_items_per_batch = items
    engine.additional_config["graphhal"]["self_check"] = "full"
    manager = on_cpu.make_manager(engine, model)
    manager.capture(graph_pool=None)
    stats = manager.stats()
    assert stats["dropped"] == []
    assert stats["graph_count"] >= 2
    (graphs,) = manager._graphs()
    for capacity in graphs.ladder():
        cases = list(graphs.adapter.worst_cases(capacity))
        most = max(sum(item.tokens for item in case) for case in cases)
        assert most == sum(item.tokens for item in cases[0]), "the fullest comes first"
        assert most == capacity.tokens or items == 1
        assert all(graphs.adapter.refusal(case) is None for case in cases)

    assert manager.execute(on_cpu.image_group(model, [[1, 2, 122]])) is None
    assert manager.execute(on_cpu.image_group(model, [[1, 2, 64]])) is not None
    assert manager.stats()["misses"] == {"image": {"the adapter does not replay such a group": 1}}

    monkeypatch.setitem(rotary._buffers, "cos_sin_cache", rotary.cos_sin_cache[:32])
    manager.capture(graph_pool=None)
    assert manager.execute(on_cpu.image_group(model, [[1, 2, 64]])) is None
    assert manager.execute(on_cpu.image_group(model, [[1, 2, 32]])) is not None
