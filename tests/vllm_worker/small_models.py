"""Small ones of vLLM's own models with the protocol that have no adapter of graphhal's own."""

import types
from typing import Any
from unittest import mock

import torch

from tests.vllm_worker import vllm_on_cpu

Group = dict[str, Any]
Made = tuple[Any, list[Group]]
"""A model, and groups of its pictures."""


def around(engine: Any, model_class: type, **attributes: Any) -> Any:
    """The model around small encoders; the text model is left out."""
    model = model_class.__new__(model_class)
    torch.nn.Module.__init__(model)
    model.vllm_config = engine
    model.model_config = engine.model_config
    model.multimodal_config = engine.model_config.multimodal_config
    model.use_data_parallel = False
    for name, value in attributes.items():
        setattr(model, name, value)
    return vllm_on_cpu.filled(model)


def qwen2_vl(engine: Any) -> Made:
    """Full attention within each frame."""
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
    from vllm.model_executor.models import qwen2_vl as qwen2

    vision = Qwen2VLVisionConfig(
        depth=2, embed_dim=64, hidden_size=48, num_heads=4, mlp_ratio=2, patch_size=4
    )
    # vLLM's kernels, which its activation looks up, are not installed; a CPU does not call them.
    with mock.patch.object(torch.ops._C, "gelu_quick", None, create=True):
        visual = qwen2.Qwen2VisionTransformer(vision)
    model = around(
        engine,
        qwen2.Qwen2VLForConditionalGeneration,
        visual=visual,
        get_max_frames_per_video=lambda: 8,
    )
    return model, pictures_and_films(model)


def glm4_1v(engine: Any) -> Made:
    """Interpolates its positions on the device."""
    from transformers.models.glm4v.configuration_glm4v import Glm4vVisionConfig
    from vllm.model_executor.models import glm4_1v as glm

    vision = Glm4vVisionConfig(
        depth=2, hidden_size=64, num_heads=4, image_size=32, patch_size=4, out_hidden_size=48,
        intermediate_size=96,
    )  # fmt: skip
    model = around(
        engine,
        glm.Glm4vForConditionalGeneration,
        visual=glm.Glm4vVisionTransformer(None, vision),
        is_multimodal_pruning_enabled=False,
        get_max_frames_per_video=lambda: 8,
    )
    return model, pictures_and_films(model)


def pictures_and_films(model: Any) -> list[Group]:
    grids: list[list[list[int]]] = [[[1, 8, 8]], [[1, 4, 6], [1, 8, 12]], [[1, 8, 4]] * 3]
    films: list[list[list[int]]] = [[[2, 4, 8]], [[3, 4, 4], [2, 4, 6]]]
    return [
        *(vllm_on_cpu.image_group(model, each, seed) for seed, each in enumerate(grids)),
        *(vllm_on_cpu.video_group(model, each, seed) for seed, each in enumerate(films)),
    ]


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
        vision_tower=kimi.MoonVitPretrainedModel(vision),
        multi_modal_projector=kimi.KimiVLMultiModalProjector(config),
    )

    def pictures(*sizes: tuple[int, int]) -> Group:
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
        vision_tower=lfm2.Siglip2Model(config=vision),
        multi_modal_projector=lfm2.Lfm2VLMultiModalProjector(config),
    )

    def pictures(tiles: list[list[int]], counts: list[int]) -> Group:
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


WITH_BOUNDARIES = (qwen2_vl, glm4_1v, kimi_vl, lfm2_vl)
"""Those whose attention sequences are of frames, pictures or tiles."""
