"""vLLM's configuration over the simulated runtime, and models that no other tests have."""

import tempfile
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.vllm_worker import vllm_on_cpu


class Sparse(types.SimpleNamespace):
    """A configuration of which most is unset."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


@contextmanager
def engine_on_device() -> Iterator[Any]:
    """vLLM's configuration on one rank of the simulated device, encoder graphs on."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.config.compilation import CUDAGraphMode
    from vllm.config.multimodal import MultiModalConfig
    from vllm.distributed import parallel_state
    from vllm_ascend.ascend_config import init_ascend_config
    from vllm_ascend.utils import register_ascend_customop

    from graphhal.vllm_worker import plugin

    plugin.register()
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    config.model_config = Sparse(
        multimodal_config=MultiModalConfig(limit_per_prompt={"image": 8, "video": 2, "audio": 8}),
        dtype=torch.float32,
        max_model_len=4096,
        is_multimodal_model=True,
        enforce_eager=False,
    )
    compilation = config.compilation_config
    compilation.cudagraph_mm_encoder = True
    compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    compilation.encoder_cudagraph_token_budgets = [16, 32, 64]
    compilation.encoder_cudagraph_max_vision_items_per_batch = 4
    with (
        tempfile.TemporaryDirectory() as folder,
        set_current_vllm_config(config),
        torch.inference_mode(),
    ):
        parallel_state.init_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            backend="gloo",
            distributed_init_method=f"file://{folder}/rendezvous",
        )
        parallel_state.initialize_model_parallel(1, 1)
        register_ascend_customop()
        init_ascend_config(config)
        yield config
        parallel_state.destroy_model_parallel()


def gemma3(config: Any) -> Any:
    """vLLM's Gemma 3 around a small tower: pictures of one size, no boundaries."""
    from transformers import SiglipVisionConfig
    from vllm.model_executor.models import gemma3_mm
    from vllm.model_executor.models.siglip import SiglipVisionModel

    vision = SiglipVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
    )
    text = types.SimpleNamespace(hidden_size=48)
    whole = gemma3_mm.Gemma3ForConditionalGeneration
    model = whole.__new__(whole)
    torch.nn.Module.__init__(model)
    model.config = types.SimpleNamespace(
        vision_config=vision, text_config=text, mm_tokens_per_image=4
    )
    model.model_config = config.model_config
    model.multimodal_config = config.model_config.multimodal_config
    model.vit_positions_per_patch = 16
    model.vision_tower = vllm_on_cpu.filled(SiglipVisionModel(vision, None))
    model.multi_modal_projector = vllm_on_cpu.filled(
        gemma3_mm.Gemma3MultiModalProjector(model.config), seed=1
    )
    norm = model.multi_modal_projector.mm_soft_emb_norm
    norm._forward_method = norm.forward_native  # vllm-ascend's is one of its compiled operators
    return model


def crops() -> list[dict[str, Any]]:
    """Groups of pictures for it, of one crop or more."""
    counts = ([1], [1, 1, 1], [2, 1])
    return [
        {"pixel_values": torch.randn(sum(n), 3, 16, 16), "num_patches": torch.tensor(n)}
        for n in counts
    ]
