"""What must never be replayed inside vLLM, whatever was captured: found at start-up, or by what a
request holds."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from graphhal.settings import Settings
from graphhal.vllm_worker.touched import INTERFACES, PROTOCOL

KNOWN_MODALITIES = ("audio", "image", "video", "vision_chunk")
"""What vLLM's runners call the modality of a group."""
SIGHT_KEYS = ("pixel_values", "pixel_values_videos")
"""Keys that carry pictures and films; a group of a runner's has one of them."""
AUDIO_KEYS = ("input_audio_features", "audio_features", "input_features", "input_features_padded")
"""Keys that carry sound; films may have others with `audio` in their names."""
PIXEL_PART, FILM_PART = "pixel_values", "video"
"""Part of what models call the pixels of pictures and films, and of what they call those of films
alone."""
SIZES_BY_SLICE = ("tgt_sizes", "video_tgt_sizes")
"""Rows and columns of patches of each slice, where a capture axis is a grid of them (MiniCPM-V)."""
EAGER_STEPS = (
    "embed_multimodal",
    "_parse_and_validate_multimodal_inputs",
    *(f"_parse_and_validate_{each}_input" for each in ("image", "video", "audio")),
    *(f"_process_{each}_input" for each in ("image", "video", "audio")),
)
"""Methods through which vLLM's models encode eagerly, and which graphs go past."""
UNKNOWN = " is unknown"
"""How a reason ends where a configuration lacks what says whether graphs may be captured."""
PARSES_ALL = "_parse_and_validate_multimodal_inputs"
"""The one of them that vLLM's own derived models override to take a further modality."""


def engine_refusal(vllm_config: Any, model: Any, is_first_stage: bool) -> str | None:
    """Why no encoder graph may be captured in this worker, or None.

    Args:
        vllm_config: the engine's configuration.
        model: the model, unwrapped.
        is_first_stage: whether this is the pipeline's first rank, the only one that encodes.
    """
    model_config = vllm_config.model_config
    lora: Any = getattr(vllm_config, "lora_config", ())  # without the field: unknown, as below
    told = [(vllm_config.compilation_config, "cudagraph_mode"), (model_config, "enforce_eager")]
    if lora is not None:
        told.append((lora, "enable_tower_connector_lora"))
    for owner, name in told:
        if getattr(owner, name, None) is None:
            return f"{name}{UNKNOWN}"
    mode = vllm_config.compilation_config.cudagraph_mode
    if getattr(mode, "name", mode) == "NONE":
        return "cudagraph_mode is NONE"
    if model_config.enforce_eager:
        return "enforce_eager is on"
    if not is_first_stage:
        return "only the first pipeline rank encodes"
    if lora is not None and lora.enable_tower_connector_lora:
        return "LoRA is enabled for towers and connectors: their weights change by request"
    multimodal = getattr(model_config, "multimodal_config", None)
    if getattr(model, "is_multimodal_pruning_enabled", False):
        return "multimodal pruning is enabled: token counts depend on the data"
    if _has_dynamic_scales(model):
        return (
            "encoder attention in fp8 has dynamic scales, which change on the host; "
            "set mm_encoder_fp8_scale_path"
        )
    if getattr(getattr(model, "input_norm", None), "is_identity", True) is False:  # 0.28, 0.29
        return (
            "pixels are normalised before the model's code for graphs; "
            "set mm_device_do_normalize to false"
        )
    if multimodal is None:
        return "the model has no multimodal configuration"
    return _outgrown(type(model))


def _outgrown(model_class: type) -> str | None:
    """Why a model's code for graphs is not that of its eager encoding, or None: a class that was
    derived changed how it encodes, and inherited how graphs are fed."""
    names = {name.rpartition(".")[2] for name in PROTOCOL if "." in name.partition(":")[2]}
    classes = model_class.__mro__
    aware = next((n for n, each in enumerate(classes) if names & vars(each).keys()), 0)
    for step in EAGER_STEPS:
        owner = next((each for each in classes[:aware] if step in vars(each)), None)
        if step == PARSES_ALL and owner is not None and owner.__module__.startswith("vllm."):
            continue  # MiniCPM-o's, for sound; vLLM ships its code for graphs with it
        theirs = getattr(classes[aware], step, None)
        # A mixin that has code for graphs alone inherits at most the stub of vLLM's interface.
        if owner is not None and theirs is not None and theirs.__module__ != INTERFACES:
            return (
                f"{owner.__name__}.{step} is its own, but its code for graphs that of "
                f"{classes[aware].__name__}"
            )
    return None


def _has_dynamic_scales(model: Any) -> bool:
    if not isinstance(model, torch.nn.Module):
        return False
    return any(getattr(module, "_fp8_dynamic_scale", False) for module in model.modules())


def enabled_modalities(
    names: tuple[str, ...], vllm_config: Any, settings: Settings
) -> tuple[str, ...]:
    """The modalities that graphs may serve: those that the engine does not limit to 0, and films
    where their frames are not."""
    multimodal = vllm_config.model_config.multimodal_config
    return tuple(
        name
        for name in names
        if multimodal.get_limit_per_prompt(name) != 0
        and (name != "video" or settings.max_frames > 0)
    )


def misnamed(names: tuple[str, ...]) -> str | None:
    """A modality that no runner asks for: every group of it would run eagerly in silence."""
    for name in names:
        if name not in KNOWN_MODALITIES:
            return (
                f"the modality is called {name!r}, but vLLM asks for one of "
                f"{', '.join(KNOWN_MODALITIES)}: no group would ever be replayed"
            )
    return None


def own_code_fails(error: Exception) -> str:
    """Why a model whose own code for graphs raised this runs eagerly."""
    return f"its own code for graphs fails: {error!r}"


def request_refusal(mm_kwargs: Mapping[str, Any]) -> str | None:
    """Why this group must run eagerly whatever its sizes, or None."""
    for key, value in mm_kwargs.items():
        if value is not None and key.endswith(("_embeds", "_embedding")):
            return "pre-computed embeddings"
    return None


def mixes_pictures_and_films(mm_kwargs: Mapping[str, Any]) -> bool:
    """Whether a group has both, which no runner makes: a model's code for graphs takes one kind."""
    pixels = [key for key, value in mm_kwargs.items() if PIXEL_PART in key and value is not None]
    return 0 < sum(FILM_PART in key for key in pixels) < len(pixels)


def outgrows(mm_kwargs: Mapping[str, Any], axes: Sequence[Hashable]) -> bool:
    """Whether a slice has more rows or columns of patches than the grid that its group resolved to:
    MiniCPM-V takes its largest where none is large enough, as for a long banner, and the patches
    outside would have the places of others."""
    grids = [axis for axis in axes if isinstance(axis, tuple) and len(axis) == 2]
    given = [mm_kwargs[key] for key in SIZES_BY_SLICE if grids and mm_kwargs.get(key) is not None]
    parts = [part for each in given for part in (each if isinstance(each, list) else [each])]
    sizes = [part.reshape(-1, 2).amax(0).tolist() for part in parts if part.numel()]
    return any(rows > h or columns > w for rows, columns in sizes for h, w in grids)
