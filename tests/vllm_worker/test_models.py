"""vLLM's own classes with the protocol, small, that have no adapter of graphhal's own."""

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphhal.vllm_worker import compatibility

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        not compatibility.installed_version().startswith("0.31."),
        reason="what these models' classes want beside their towers was read in vLLM 0.31",
    ),
]

Made = tuple[Any, list[dict[str, Any]]]


def around(engine: Any, model_class: type, **attributes: Any) -> Any:
    """The model around small encoders; the text model is left out."""
    import vllm_on_cpu as on_cpu

    model = model_class.__new__(model_class)
    torch.nn.Module.__init__(model)
    model.vllm_config = engine
    model.multimodal_config = engine.model_config.multimodal_config
    model.use_data_parallel = False
    for name, value in attributes.items():
        setattr(model, name, value)
    return on_cpu.filled(model)


def kimi_vl(engine: Any) -> Made:
    """Bakes a bound of tokens where sequences are of patches."""
    from vllm.model_executor.models import kimi_vl as kimi
    from vllm.transformers_utils.configs.moonvit import MoonViTConfig

    vision = MoonViTConfig(
        patch_size=4, init_pos_emb_height=8, init_pos_emb_width=8, num_attention_heads=4,
        num_hidden_layers=2, hidden_size=64, intermediate_size=64,
    )  # fmt: skip
    config = types.SimpleNamespace(
        vision_config=vision, text_config=types.SimpleNamespace(hidden_size=48)
    )
    model = around(
        engine,
        kimi.KimiVLForConditionalGeneration,
        config=config,
        hidden_size=48,
        model_config=engine.model_config,
        vision_tower=kimi.MoonVitPretrainedModel(vision),
        multi_modal_projector=kimi.KimiVLMultiModalProjector(config),
    )

    def pictures(*sizes: tuple[int, int]) -> dict[str, Any]:
        rows = sum(h * w for h, w in sizes)
        return {
            "pixel_values": torch.randn(rows, 3, 4, 4),
            "image_grid_hws": torch.tensor(sizes),
        }

    return model, [pictures((8, 8)), pictures((4, 6), (8, 12)), pictures(*[(8, 4)] * 3)]


def lfm2_vl(engine: Any) -> Made:
    """Tiles in a padded batch, packed by the model's own code."""
    from transformers.models.siglip2.configuration_siglip2 import Siglip2VisionConfig
    from vllm.model_executor.models import lfm2_vl as lfm2

    vision = Siglip2VisionConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        patch_size=4, num_patches=16,
    )  # fmt: skip
    config = types.SimpleNamespace(
        vision_config=vision, text_config=types.SimpleNamespace(hidden_size=48),
        downsample_factor=2, min_image_tokens=4, projector_use_layernorm=True,
        projector_hidden_size=64, projector_bias=True, projector_hidden_act="gelu",
    )  # fmt: skip
    model = around(
        engine,
        lfm2.Lfm2VLForConditionalGeneration,
        config=config,
        model_config=engine.model_config,
        vision_tower=lfm2.Siglip2Model(config=vision),
        multi_modal_projector=lfm2.Lfm2VLMultiModalProjector(config),
    )

    def pictures(tiles: list[list[int]], counts: list[int]) -> dict[str, Any]:
        rows = max(h * w for h, w in tiles)
        return {
            "pixel_values": torch.randn(len(tiles), rows, 48),
            "spatial_shapes": torch.tensor(tiles),
            "num_patches": torch.tensor(counts),
        }

    return model, [
        pictures([[8, 8]], [1]),
        pictures([[8, 8], [4, 6]], [1, 1]),
        pictures([[8, 8], [4, 4], [4, 4]], [2, 1]),
    ]


def served(engine: Any, model: Any, most: int = 64) -> Any:
    from graphhal.vllm_worker import executor

    engine.compilation_config.encoder_cudagraph_token_budgets = []
    engine.scheduler_config.max_num_batched_tokens = 512
    engine.model_config.max_model_len = 512
    engine.additional_config["graphhal"] = {"max_tokens": most}
    made = executor.build(engine, torch.device("cpu"), torch.float32, model)
    made.capture(None)
    return made


@pytest.mark.parametrize("make", [kimi_vl, lfm2_vl])
def test_replays_equal_the_models_own_code(engine: Any, make: Callable[[Any], Made]) -> None:
    model, groups = make(engine)
    manager = served(engine, model)
    assert manager.stats()["dropped"] == []
    for group in groups:
        expected = model.embed_multimodal(**group)
        ours = manager.execute(dict(group))
        assert ours is not None, manager.stats()["misses"]
        for one, other in zip(ours, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert manager.stats()["graph_misses"] == 0


def test_gemma_4_films_are_never_answered_wrongly(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.31 gathers a film's tokens as if a graph's slots were of the film's own size."""
    import transformers.masking_utils
    from transformers import AutoModel
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig, Gemma4VisionConfig
    from vllm.model_executor.models import gemma4_mm

    # As while a device records: transformers reads a mask on the host otherwise.
    monkeypatch.setattr(transformers.masking_utils, "is_tracing", lambda *_: True)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda *_: (10**9, 10**9))
    vision = Gemma4VisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=8, patch_size=4, pooling_kernel_size=3,
        position_embedding_size=64,
    )  # fmt: skip
    vision._attn_implementation = "sdpa"
    text = Gemma4TextConfig(hidden_size=48)
    model = around(
        engine,
        gemma4_mm.Gemma4ForConditionalGeneration,
        vision_tower=AutoModel.from_config(vision),
        embed_vision=gemma4_mm.Gemma4MultimodalEmbedder(vision, text),
        config=types.SimpleNamespace(vision_config=vision, text_config=text),
        model_dtype=torch.float32,
        _enable_mm_lora=False,
    )
    model.get_encoder_cudagraph_budget_range = lambda _: (70, 280)
    manager = served(engine, model, most=280)
    for _ in range(2):
        for frames in (1, 2):
            places = torch.cartesian_prod(torch.arange(21), torch.arange(30)).flip(-1)
            group = {
                "pixel_values_videos": torch.rand(frames, 630, 48),
                "pixel_position_ids_videos": places.expand(frames, -1, -1).contiguous(),
                "video_frame_counts": torch.tensor([frames]),
            }
            ours = manager.execute(dict(group))
            if ours is not None:
                torch.testing.assert_close(ours[0], model.embed_multimodal(**group)[0])
    stats = manager.stats()
    assert stats["graph_count"] > 0
    assert stats["misses"] == {"video": {"the adapter does not replay such a group": 2}}
