"""Real vLLM without a GPU: small towers of its own classes, runners, a peer manager."""

import contextlib
import gc
import logging
import tempfile
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch


@contextlib.contextmanager
def engine_context(
    world_size: int = 1,
    rank: int = 0,
    folder: str | None = None,
    mode: str = "weights",
    **compilation: Any,
) -> Iterator[Any]:
    """vLLM with a configuration that serves a multimodal model; by default on one rank."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.config.multimodal import MultiModalConfig
    from vllm.distributed import parallel_state
    from vllm.forward_context import set_forward_context

    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    config.model_config = types.SimpleNamespace(
        multimodal_config=MultiModalConfig(
            limit_per_prompt={"image": 8, "video": 2, "audio": 8}, mm_encoder_tp_mode=mode
        ),
        dtype=torch.float32,
        max_model_len=4096,
        is_multimodal_model=True,
        enforce_eager=False,
        hf_config=None,
        is_moe=False,
        quantization=None,
    )
    config.compilation_config.cudagraph_mm_encoder = True
    from vllm.config.compilation import CUDAGraphMode

    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    for name, value in compilation.items():
        setattr(config.compilation_config, name, value)
    with (
        tempfile.TemporaryDirectory() as own_folder,
        set_current_vllm_config(config),
        set_forward_context(None, config),
        torch.inference_mode(),
    ):
        parallel_state.init_distributed_environment(
            world_size=world_size,
            rank=rank,
            local_rank=rank,
            backend="gloo",
            distributed_init_method=f"file://{folder or own_folder}/rendezvous",
        )
        parallel_state.initialize_model_parallel(world_size, 1)
        # Captures collect garbage, and looking through all that vLLM has imported takes 0.3 s.
        gc.freeze()
        try:
            yield config
        finally:
            # Not `cleanup_dist_env_and_memory`, which unfreezes everything.
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
            gc.collect()


def filled(module: Any, seed: int = 0) -> Any:
    """Seeded weights, as after vLLM's loader."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            values = torch.randn(parameter.shape, generator=generator) * 0.05
            parameter.copy_(values.to(parameter.dtype))
    from vllm.model_executor.layers import utils

    # Machines with AMX would call vLLM's CPU kernels, which are not installed.
    with mock.patch.object(utils, "check_cpu_sgl_kernel", return_value=False):
        for part in module.modules():
            if hasattr(part, "quant_method"):
                part.quant_method.process_weights_after_loading(part)
    return module.eval()


@contextlib.contextmanager
def log_of(name: str, caplog: Any) -> Iterator[None]:
    """Lets `caplog` see a logger that hangs below vLLM's, which does not propagate."""
    logger = logging.getLogger(name)
    level, propagates = logger.level, logger.propagate
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(caplog.handler)
        logger.setLevel(level)
        logger.propagate = propagates


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    old = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(old)


VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "patch_size": 4,
    "out_hidden_size": 48,
}


def qwen3_vl(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """vLLM's Qwen3-VL model around a small tower; the text model is left out."""
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from vllm.model_executor.models.qwen3_vl import (
        Qwen3_VisionTransformer,
        Qwen3VLForConditionalGeneration,
    )

    vision = Qwen3VLVisionConfig(
        depth=3, num_position_embeddings=64, deepstack_visual_indexes=[0, 1], **VISION
    )
    with default_dtype(dtype):
        return _light(
            Qwen3VLForConditionalGeneration, filled(Qwen3_VisionTransformer(vision)), config
        )


def qwen2_5_vl(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """vLLM's Qwen2.5-VL model around a small tower with windows of 2 x 2 tokens."""
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from vllm.model_executor.models.qwen2_5_vl import (
        Qwen2_5_VisionTransformer,
        Qwen2_5_VLForConditionalGeneration,
    )

    vision = Qwen2_5_VLVisionConfig(depth=3, window_size=16, fullatt_block_indexes=[1], **VISION)
    with default_dtype(dtype):
        return _light(
            Qwen2_5_VLForConditionalGeneration, filled(Qwen2_5_VisionTransformer(vision)), config
        )


def qwen3_omni(
    config: Any, dtype: torch.dtype = torch.float32, thinker: types.ModuleType | None = None
) -> Any:
    """A Qwen3-Omni thinker around small vision and audio towers: vLLM's, or another module's."""
    from transformers.models.qwen3_omni_moe import configuration_qwen3_omni_moe as configs

    if thinker is None:
        from vllm.model_executor.models import qwen3_omni_moe_thinker as thinker

    vision = configs.Qwen3OmniMoeVisionEncoderConfig(
        depth=3, num_position_embeddings=64, deepstack_visual_indexes=[0, 1], **VISION
    )
    vision.image_size = 32
    vision.apply_vit_abs_pos_embed = True
    audio = configs.Qwen3OmniMoeAudioEncoderConfig(
        encoder_layers=2,
        d_model=64,
        encoder_attention_heads=4,
        encoder_ffn_dim=128,
        num_mel_bins=32,
        output_dim=48,
        downsample_hidden_size=16,
        n_window=50,
        n_window_infer=400,
    )
    with default_dtype(dtype):
        visual = filled(thinker.Qwen3Omni_VisionTransformer(vision))
        audio_tower = filled(thinker.Qwen3OmniMoeAudioEncoder(audio), seed=1)
        model = _light(thinker.Qwen3OmniMoeThinkerForConditionalGeneration, visual, config)
    model.audio_tower = audio_tower
    model.vllm_config = config
    return model


def _light(model_class: type, visual: Any, config: Any) -> Any:
    model = model_class.__new__(model_class)
    torch.nn.Module.__init__(model)
    model.visual = visual
    model.is_multimodal_pruning_enabled = False
    model.use_data_parallel = False
    model.model_config = config.model_config
    model.multimodal_config = config.model_config.multimodal_config
    model.get_max_frames_per_video = lambda: 8
    return model


def patches_width(model: Any) -> int:
    weight = model.visual.patch_embed.proj.weight
    return int(weight[0].numel())


def image_group(model: Any, grids: list[list[int]], seed: int = 1) -> dict[str, Any]:
    """The batched kwargs of an image group."""
    rows = sum(t * h * w for t, h, w in grids)
    generator = torch.Generator().manual_seed(seed)
    return {
        "pixel_values": torch.randn(rows, patches_width(model), generator=generator),
        "image_grid_thw": torch.tensor(grids),
    }


def video_group(model: Any, grids: list[list[int]], seed: int = 1) -> dict[str, Any]:
    group = image_group(model, grids, seed)
    return {
        "pixel_values_videos": group["pixel_values"],
        "video_grid_thw": group["image_grid_thw"],
    }


def audio_group(model: Any, lengths: list[int], seed: int = 2) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    mel = model.audio_tower.num_mel_bins
    return {
        "input_audio_features": torch.randn(mel, sum(lengths), generator=generator),
        "audio_feature_lengths": torch.tensor(lengths),
        "feature_attention_mask": torch.ones(len(lengths), max(lengths), dtype=torch.long),
    }


def as_items(modality: str, group: dict[str, Any]) -> list[Any]:
    """The items of a group, as vLLM's processors hand them to a runner."""
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

    if "num_patches" in group:  # pictures in one or more crops, of one size or of several
        sizes = group["num_patches"]
        fields = {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes(modality, sizes),
            "num_patches": MultiModalFieldConfig.batched(modality, keep_on_cpu=True),
        }
        if "spatial_shapes" in group:
            fields["spatial_shapes"] = MultiModalFieldConfig.flat_from_sizes(
                modality, sizes, keep_on_cpu=True
            )
    elif "audio_num_tokens" in group:
        fields = {name: MultiModalFieldConfig.batched(modality) for name in group}
    elif modality == "audio":
        lengths = group["audio_feature_lengths"]
        fields = {
            "input_audio_features": MultiModalFieldConfig.flat_from_sizes("audio", lengths, dim=1),
            "audio_feature_lengths": MultiModalFieldConfig.batched("audio"),
            "feature_attention_mask": MultiModalFieldConfig.batched("audio"),
        }
    else:
        pixels = "pixel_values" if modality == "image" else "pixel_values_videos"
        grid = next(name for name in group if "_grid_" in name)
        fields = {
            pixels: MultiModalFieldConfig.flat_from_sizes(modality, group[grid].prod(-1)),
            grid: MultiModalFieldConfig.batched(modality, keep_on_cpu=True),
        }
    return list(MultiModalKwargsItems.from_hf_inputs(group, fields)[modality])


def run_v1(
    model: Any,
    config: Any,
    manager: Any,
    groups: list[tuple[str, dict[str, Any]]],
    runner_class: type | None = None,
    device: str = "cpu",
) -> list[torch.Tensor]:
    """`_execute_mm_encoder` on a `GPUModelRunner`, or a subclass, that was not constructed."""
    from vllm.multimodal.inputs import PlaceholderRange
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    runner_class = runner_class or GPUModelRunner

    items = [(modality, item) for modality, group in groups for item in as_items(modality, group)]
    features = [
        types.SimpleNamespace(
            identifier=f"{modality}{number}",
            modality=modality,
            data=item,
            mm_position=PlaceholderRange(offset=0, length=1),
        )
        for number, (modality, item) in enumerate(items)
    ]
    runner: Any = runner_class.__new__(runner_class)
    runner.__dict__.update(
        requests={"r0": types.SimpleNamespace(mm_features=features)},
        model=model,
        device=torch.device(device),
        lora_config=None,
        observability_config=None,
        is_multimodal_pruning_enabled=False,
        requires_sequential_video_encoding=False,
        encoder_cudagraph_manager=manager,
        encoder_cache={},
        vllm_config=config,
    )
    scheduled = types.SimpleNamespace(
        scheduled_encoder_inputs={"r0": list(range(len(features)))},
        ec_manager_metadata=None,
        ec_connector_metadata=None,
        free_encoder_mm_hashes=[],
    )
    outputs: list[torch.Tensor] = runner._execute_mm_encoder(scheduled)
    return outputs


def run_v2(
    model: Any, manager: Any, groups: list[tuple[str, dict[str, Any]]]
) -> list[torch.Tensor]:
    """`execute_mm_encoder` of a constructed V2 `EncoderRunner`."""
    from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
    from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner

    items = [(modality, item) for modality, group in groups for item in as_items(modality, group)]
    runner = EncoderRunner(
        model,
        32,
        144,
        EncoderCache(),
        torch.float32,
        torch.device("cpu"),
        cudagraph_manager=manager,
    )
    outputs: list[torch.Tensor] = runner.execute_mm_encoder(items)
    return outputs


def make_manager(
    config: Any, model: Any, runner_class: type | None = None, device: str = "cpu"
) -> Any:
    """As V1's `GPUModelRunner`, or a subclass, makes its manager."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    runner_class = runner_class or GPUModelRunner
    runner: Any = runner_class.__new__(runner_class)
    runner.__dict__.update(
        compilation_config=config.compilation_config,
        supports_mm_inputs=True,
        vllm_config=config,
        device=torch.device(device),
        dtype=torch.float32,
        model=model,
    )
    return runner._create_encoder_cudagraph_manager()


class StandInGraph:
    """Replays by calling the captured function again, as a device graph re-runs its kernels."""

    def bind(self, model: Any, metadata: Any) -> None:
        self.replay = lambda: metadata.output_buffer.copy_(
            model.encoder_cudagraph_forward(dict(metadata.input_buffers))
        )


def peer_manager(config: Any, model: Any, monkeypatch: Any) -> Any:
    """vLLM's own manager, captured, with a stand-in for the device graph."""
    from vllm.model_executor.layers.attention import mm_encoder_attention
    from vllm.v1.attention.ops.vit_attn_wrappers import apply_sdpa
    from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

    def sdpa_with_tail(
        q: Any, k: Any, v: Any, scale: Any = None, cu_seqlens: Any = None, enable_gqa: bool = False
    ) -> torch.Tensor:
        """vLLM's CPU attention refuses the rows past the last end that its manager leaves there."""
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
        lengths.append(q.shape[1] - sum(lengths))
        parts = zip(*(x.split(lengths, dim=1) for x in (q, k, v)), strict=True)
        done = [apply_sdpa(*part, scale=scale, enable_gqa=enable_gqa) for part in parts]
        return torch.cat(done, dim=1)

    monkeypatch.setattr(mm_encoder_attention, "vit_torch_sdpa_wrapper", sdpa_with_tail)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", StandInGraph)
    monkeypatch.setattr(torch.cuda, "graph", lambda *a, **k: contextlib.nullcontext())
    manager = object.__new__(EncoderCudaGraphManager)
    manager.__init__(config, torch.device("cpu"), torch.float32, model)
    manager.capture(None)
    for graphs in manager.budget_graphs.values():
        for metadata in graphs.values():
            metadata.graph.bind(model, metadata)
    return manager


def covo_stage(config: Any) -> Any:
    """vLLM-Omni's CoVo-Audio stage 0 around a small Whisper encoder, twelve tokens a clip; the text
    model is left out."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder
    from vllm_omni.model_executor.models.covo_audio import covo_audio_llm

    whisper = WhisperConfig(
        d_model=32,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=64,
        num_mel_bins=16,
        max_source_positions=96,
    )
    model_class = covo_audio_llm.CovoAudioLLMForConditionalGeneration
    model = model_class.__new__(model_class)
    torch.nn.Module.__init__(model)
    model.encoder = filled(WhisperEncoder(whisper))
    model.audio_adapter = filled(covo_audio_llm.AudioAdapter(32, 24, 8), seed=1)
    model.vllm_config = config
    return model
