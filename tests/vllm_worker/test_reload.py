"""Weights that change while graphs are there: vLLM's own reload, and what sleeping may do."""

import types
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.vllm

GRID = [[1, 8, 8]]


def runner_of(model: Any, engine: Any) -> Any:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    runner = GPUModelRunner.__new__(GPUModelRunner)
    runner.__dict__.update(
        model=model,
        vllm_config=engine,
        lora_config=None,
        model_config=types.SimpleNamespace(quantization=None, dtype=torch.float32),
        reset_lora_state=lambda: None,
        reset_encoder_cache=lambda: None,
        reset_mm_cache=lambda: None,
    )
    return runner


def new_weights(model: Any) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(7)
    return {
        name: torch.randn(value.shape, generator=draw) * 0.05
        for name, value in model.named_parameters()
    }


@pytest.mark.parametrize("adapter", ["own", "protocol"])
def test_vllms_reload_in_kernel_format_keeps_graphs_right(engine: Any, adapter: str) -> None:
    import vllm_on_cpu as on_cpu

    engine.additional_config["graphhal"]["vllm_adapter"] = adapter
    model = on_cpu.qwen3_vl(engine)
    manager = on_cpu.make_manager(engine, model)
    manager.capture(graph_pool=None)
    group = on_cpu.image_group(model, GRID)
    before = manager.execute(group)[0].clone()
    weights = new_weights(model)
    runner_of(model, engine).reload_weights(iter(weights.items()), is_checkpoint_format=False)
    (ours,) = manager.execute(group)
    (eager,) = model.embed_multimodal(**group)
    assert torch.allclose(ours, eager, atol=1e-5)
    assert not torch.allclose(ours, before, atol=1e-3)
    assert manager.stats()["graph_misses"] == 0


@pytest.mark.parametrize("adapter", ["own", "protocol"])
def test_vllms_layerwise_reload_is_never_answered_from_old_weights(
    engine: Any, adapter: str
) -> None:
    import vllm_on_cpu as on_cpu
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    engine.additional_config["graphhal"]["vllm_adapter"] = adapter
    model = on_cpu.qwen3_vl(engine)
    record_metadata_for_reloading(model)
    manager = on_cpu.make_manager(engine, model)
    manager.capture(graph_pool=None)
    group = on_cpu.image_group(model, GRID)
    before = manager.execute(group)[0].clone()
    model.load_weights = lambda weights: model.visual.load_weights(
        (name.removeprefix("visual."), value) for name, value in weights
    )
    runner_of(model, engine).reload_weights(iter(new_weights(model).items()))
    (eager,) = on_cpu.run_v1(model, engine, manager, [("image", group)])
    (plain,) = model.embed_multimodal(**group)
    assert torch.allclose(eager, plain, atol=1e-5)
    assert not torch.allclose(eager, before, atol=1e-3)
    manager.check_weights()
    manager.capture(graph_pool=None)
    (ours,) = manager.execute(group)
    assert torch.allclose(ours, plain, atol=1e-5)


def test_memory_that_moved_while_asleep_is_noticed_by_the_next_request(engine: Any) -> None:
    """Nobody calls `check_weights`: waking up tells no plugin."""
    import vllm_on_cpu as on_cpu

    model = on_cpu.qwen3_vl(engine)
    manager = on_cpu.make_manager(engine, model)
    group = on_cpu.image_group(model, GRID)
    table = model.visual.pos_embed

    def data() -> None:
        table.weight.data = table.weight.data.clone()

    def parameter() -> None:
        table.weight = torch.nn.Parameter(table.weight.data.clone(), requires_grad=False)

    def module() -> None:
        model.visual.pos_embed = torch.nn.Embedding.from_pretrained(table.weight.data.clone())

    for number, move in enumerate((data, parameter, module), start=1):
        manager.capture(graph_pool=None)
        assert manager.execute(group) is not None, move
        move()
        for _ in range(40):  # a busy server checks some of the weights with every request
            if manager.execute(group) is None:
                break
        misses = manager.stats()["misses"]
        assert misses == {"image": {"weights were rebound after capture": 2 * number - 1}}, move
        assert manager.execute(group) is None, move
    manager.capture(graph_pool=None)
    assert manager.execute(group) is not None
