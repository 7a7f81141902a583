"""Towers that normalise raw pixels themselves: vLLM's default, in releases that can."""

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.vllm

GRIDS = [[1, 8, 8], [1, 4, 8]]


def normalising(engine: Any, tower: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Qwen2.5-VL's tower takes raw pixels in 0.31; Qwen3-VL's from 0.32 on, in the same way."""
    import vllm_on_cpu as on_cpu
    from vllm.model_executor.layers.fusion.mm_input_norm import FusedMMInputNorm
    from vllm.model_executor.models.qwen3_vl import Qwen3_VisionTransformer

    model = getattr(on_cpu, tower)(engine)
    takes_raw = hasattr(model.visual, "input_norm")
    model.visual.input_norm = FusedMMInputNorm([0.5, 0.4, 0.3], [0.2, 0.3, 0.4], 1 / 255)
    if not takes_raw:
        own = Qwen3_VisionTransformer.forward

        def forward(self: Any, x: Any, grid_thw: Any, *, encoder_metadata: Any = None) -> Any:
            pixels = self.input_norm(x, self.dtype)
            return own(self, pixels, grid_thw, encoder_metadata=encoder_metadata)

        monkeypatch.setattr(Qwen3_VisionTransformer, "forward", forward)
    return model


def raw(group: dict[str, Any]) -> dict[str, Any]:
    return {
        key: (value * 48 + 128).clamp(0, 255).to(torch.uint8)
        if value.is_floating_point()
        else value
        for key, value in group.items()
    }


@pytest.mark.parametrize("adapter", ["own", "protocol"])
@pytest.mark.parametrize("tower", ["qwen3_vl", "qwen2_5_vl"])
def test_raw_pixels_are_replayed(
    engine: Any, tower: str, adapter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm_on_cpu as on_cpu

    engine.additional_config["graphhal"]["vllm_adapter"] = adapter
    model = normalising(engine, tower, monkeypatch)
    manager = on_cpu.make_manager(engine, model)
    manager.capture(graph_pool=None)
    assert manager.stats()["dropped"] == []
    groups = [
        ("image", raw(on_cpu.image_group(model, GRIDS))),
        ("video", raw(on_cpu.video_group(model, [[2, 4, 8]]))),
    ]
    eager = on_cpu.run_v2(model, None, groups)
    ours = on_cpu.run_v2(model, manager, groups)
    for one, other in zip(ours, eager, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()
    assert manager.stats()["graph_hits"] == 3
    if adapter == "own":  # the pass that blocks as a whole make is saved here, too
        (graphs,) = manager._graphs()
        assert graphs.adapter._by_parts is (tower == "qwen3_vl")


@pytest.mark.parametrize("adapter", ["own", "protocol"])
def test_pixels_of_another_kind_are_for_the_models_own_code(
    engine: Any, adapter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Floating-point ones would lose all but their whole numbers, raw ones be taken for others."""
    import vllm_on_cpu as on_cpu

    engine.additional_config["graphhal"]["vllm_adapter"] = adapter
    for model, pixels in (
        (normalising(engine, "qwen2_5_vl", monkeypatch), lambda group: group),
        (on_cpu.qwen3_vl(engine), raw),
    ):
        manager = on_cpu.make_manager(engine, model)
        manager.capture(graph_pool=None)
        group = pixels(on_cpu.image_group(model, GRIDS))
        ours = manager.execute(group)
        # A tower that has a place for a norm, and none there, takes raw ones as numbers.
        as_numbers = adapter == "protocol" and pixels is raw and hasattr(model.visual, "input_norm")
        assert (ours is not None) == as_numbers
        for one, other in zip(ours or (), model.embed_multimodal(**group), strict=as_numbers):
            assert (one - other).norm() <= 1e-5 * other.norm()
