"""Which encoders a vLLM model has, and the adapter of each.

A model with vLLM's protocol gets graphhal's own adapter where its tower is one that has been read,
else the generic one. Models without the protocol are served on opt-in (`vllm_models`) only.
"""

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch

from graphhal.adapter import EncoderAdapter, Place
from graphhal.errors import AdapterError, SettingsError
from graphhal.settings import ENV_PREFIX, Settings
from graphhal.vllm_worker import compatibility, touched
from graphhal.vllm_worker.held_tower import PACKED_BACKENDS, backend_of
from graphhal.vllm_worker.limits import Limits, limits_of
from graphhal.vllm_worker.protocol import Dialect, has_protocol
from graphhal.vllm_worker.protocol_adapter import ProtocolAdapter
from graphhal.vllm_worker.refusals import (
    EAGER_STEPS,
    KNOWN_MODALITIES,
    enabled_modalities,
    misnamed,
)
from graphhal.vllm_worker.vllms_log import warn_once

log = logging.getLogger(__name__)

OPTIONS = "graphhal"
"""Key of `additional_config`, which belongs to all plugins."""
_VLLM = "vllm.model_executor.models"
_OMNI = "vllm_omni.model_executor.models"
_COVO_PIPELINE = "CovoAudioForConditionalGeneration"
OPT_IN: Mapping[str, tuple[tuple[str, str], ...]] = {
    "qwen3_omni": (
        (f"{_VLLM}.qwen3_omni_moe_thinker", "Qwen3OmniMoeThinkerForConditionalGeneration"),
        (
            f"{_OMNI}.qwen3_omni.qwen3_omni_moe_thinker",
            "Qwen3OmniMoeThinkerForConditionalGeneration",
        ),
        (f"{_OMNI}.qwen3_omni.qwen3_omni", "Qwen3OmniMoeForConditionalGeneration"),
    ),
    "covo_audio": (
        (f"{_OMNI}.covo_audio.covo_audio", _COVO_PIPELINE),
        (f"{_OMNI}.covo_audio.covo_audio_llm", "CovoAudioLLMForConditionalGeneration"),
    ),
}
"""Classes of models that have no protocol, by the name that opts in."""

Combine = Callable[
    [Mapping[str, torch.Tensor], Sequence[int], Mapping[str, Any]], list[torch.Tensor]
]

_declared: set[type] = set()


@dataclass(frozen=True, slots=True)
class Encoder:
    """One encoder of a model: its adapters, by path.

    Attributes:
        name: for logs.
        modalities: that it serves.
        adapters: one for each path; several only for models whose items take several paths.
        raises: an `InputError` goes to the caller; else the model's own code judges the input.
        combine: makes the items' outputs from the paths' ones, with (paths, tokens, kwargs); None
            where an item's output is what its only path made.
        refusal: why it has no adapter; None where it has.
    """

    name: str
    modalities: tuple[str, ...]
    adapters: Mapping[str, EncoderAdapter]
    raises: bool = False
    combine: Combine | None = None
    refusal: str | None = None


def settings_of(vllm_config: Any) -> Settings:
    """graphhal's options of an engine: `additional_config["graphhal"]` and the environment.

    Raises:
        SettingsError: an option is unknown or invalid, both set it, differently, the key of the
            options is misspelt, or `vllm_models` names an unknown model.
    """
    additional = getattr(vllm_config, "additional_config", None)
    additional = additional if isinstance(additional, Mapping) else {}
    for key in additional:
        if key != OPTIONS and get_close_matches(str(key).lower(), [OPTIONS], cutoff=0.8):
            raise SettingsError(
                f"additional_config has {key!r}, which nothing reads; graphhal's options are those "
                f"of additional_config[{OPTIONS!r}]"
            )
    own = additional.get(OPTIONS, {})
    if not isinstance(own, Mapping):
        raise SettingsError(
            f"additional_config['graphhal'] must be a mapping of options to values, got {own!r}"
        )
    settings = Settings.from_mapping(own)
    environment = Settings()
    for name in sorted(environment.model_fields_set & own.keys()):
        ours, theirs = getattr(settings, name), getattr(environment, name)
        if ours != theirs:
            raise SettingsError(
                f"additional_config['graphhal'] sets {name} to {ours!r}, but the environment's "
                f"{ENV_PREFIX}{name.upper()} to {theirs!r}; set one of them, or both alike"
            )
    for name in settings.vllm_models:
        if name not in OPT_IN:
            raise SettingsError(
                f"option 'vllm_models': {name!r} is not known; known: {', '.join(OPT_IN)}"
            )
    return settings


def admit(vllm_config: Any) -> None:
    """Let vLLM see the protocol in the opted-in classes that are imported by now. Idempotent; where
    vLLM has changed they stay as they are, with one loud line."""
    for name in settings_of(vllm_config).vllm_models:
        for module_name, class_name in OPT_IN[name]:
            module = sys.modules.get(module_name)
            model_class = getattr(module, class_name, None)
            if model_class is not None:
                _declare(model_class)
            if module is not None and class_name == _COVO_PIPELINE:
                from graphhal.vllm_worker.covo_processor import refuse_long_clips

                refuse_long_clips(module)


def _declare(model_class: type) -> None:
    if model_class in _declared:
        return
    name = model_class.__qualname__
    problem = compatibility.problem((*touched.MANAGER, *touched.PROTOCOL))
    if problem is not None:
        warn_once(log, f"graphhal: {name} is not served, it runs eagerly", problem)
        return
    from vllm.model_executor.models.interfaces import SupportsEncoderCudaGraph

    _declared.add(model_class)
    SupportsEncoderCudaGraph.register(model_class)
    log.info("graphhal: %s gains encoder graphs (vllm_models)", name)


def encoders_of(
    model: Any, vllm_config: Any, settings: Settings, device: torch.device, dtype: torch.dtype
) -> list[Encoder]:
    """The encoders of a model that can have graphs.

    Args:
        model: unwrapped.
        vllm_config: the engine's configuration.
        settings: already merged with vLLM's options.
        device: of the graphs.
        dtype: of the protocol's floating-point buffers.
    """
    opted = _opted_in(model)
    if opted is not None:
        name, _ = opted
        if name not in settings.vllm_models:
            return []
        return _opt_in_encoders(name, model, vllm_config, settings)
    config = model.get_encoder_cudagraph_config()
    wrong = misnamed(tuple(config.modalities))
    if wrong is not None:
        log.warning("graphhal: %s: %s", type(model).__name__, wrong)
    known = tuple(name for name in config.modalities if name in KNOWN_MODALITIES)
    modalities = enabled_modalities(known, vllm_config, settings)
    if not modalities:
        return []
    limits = limits_of(settings, vllm_config, model)
    if settings.vllm_adapter == "own":
        own = _own_vision(model, modalities, settings.exact_only)
        if own is not None:
            return [Encoder(own.name, modalities, {"default": own})]
    return [_protocol_encoder(model, modalities, limits, settings, device, dtype)]


def _protocol_encoder(
    model: Any,
    modalities: tuple[str, ...],
    limits: Limits,
    settings: Settings,
    device: torch.device,
    dtype: torch.dtype,
) -> Encoder:
    dialect = Dialect(model)
    paths = dialect.paths(model.get_encoder_cudagraph_config())
    adapters = {
        path: ProtocolAdapter(model, dialect, path, rule, limits, settings, device, dtype)
        for path, rule in paths.items()
    }

    def combine(
        outputs: Mapping[str, torch.Tensor], tokens: Sequence[int], mm_kwargs: Mapping[str, Any]
    ) -> list[torch.Tensor]:
        whole = next(iter(adapters.values())).whole(mm_kwargs, len(tokens))
        return dialect.postprocess(outputs, tokens, whole)

    plain = len(paths) == 1 and dialect.scatters_only()
    return Encoder(type(model).__name__, modalities, adapters, combine=None if plain else combine)


def _own_vision(model: Any, modalities: tuple[str, ...], exact_only: bool) -> EncoderAdapter | None:
    """graphhal's own adapter of a model's tower, where model and tower are ones that were read."""
    candidates: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
        (
            "qwen3_vl",
            "Qwen3VLForConditionalGeneration",
            "Qwen3_VisionTransformer",
            touched.QWEN3_VL,
        ),
        (
            "qwen2_5_vl",
            "Qwen2_5_VLForConditionalGeneration",
            "Qwen2_5_VisionTransformer",
            touched.QWEN2_5_VL,
        ),
    )
    tower = getattr(model, "visual", None)
    for module_name, model_name, tower_name, names in candidates:
        module = sys.modules.get(f"{_VLLM}.{module_name}")
        if module is None or type(tower) is not getattr(module, tower_name, None):
            continue
        reference = getattr(module, model_name)
        if not _same_encoding(type(model), reference):
            continue
        drift = compatibility.drifts(names)
        if drift:
            log.warning("graphhal: the protocol is used instead of %s: %s", tower_name, drift[0])
            return None
        try:
            return _wrap_vision(model, modalities, module_name, exact_only)
        except AdapterError as error:
            log.info("graphhal: the protocol is used: %s", error)
            return None
    return None


def _same_encoding(model_class: type, reference: type) -> bool:
    """Whether a model encodes as the reference does: subclasses may have overridden a step."""
    steps = (
        "encoder_eager_forward",
        "encoder_cudagraph_forward",
        "postprocess_encoder_output",
        "_process_image_input",
        "_process_video_input",
    )
    return all(getattr(model_class, s, None) is getattr(reference, s, None) for s in steps)


def _kept(owner: torch.nn.Module, module: torch.nn.Module) -> tuple[Place, ...]:
    """Every name under which a module keeps another."""
    return tuple((owner, name, module) for name, held in owner._modules.items() if held is module)


def _wrap_vision(
    model: Any,
    modalities: tuple[str, ...],
    name: str,
    exact_only: bool,
    above: tuple[Place, ...] = (),
) -> EncoderAdapter:
    """graphhal's own adapter of a tower.

    Raises:
        AdapterError: it has none for such a tower.
    """
    tower = model.visual
    if backend_of(tower) not in PACKED_BACKENDS:
        raise AdapterError(f"attention {backend_of(tower)} reads boundaries in another way")
    try:
        from graphhal.vllm_worker.qwen_towers import VllmQwen25Vision, VllmQwenVision
    except ImportError as error:
        raise AdapterError(str(error)) from error
    kept = (*above, *_kept(model, tower))
    if name == "qwen2_5_vl":
        return VllmQwen25Vision(tower, modalities, f"vllm_{name}_vision", kept)
    if exact_only and getattr(tower, "apply_vit_abs_pos_embed", True):
        raise AdapterError(
            "exact_only is on, and positions that a graph interpolates round otherwise than the "
            "tower's"
        )
    takes_metadata = name == "qwen3_vl"
    return VllmQwenVision(tower, modalities, takes_metadata, f"vllm_{name}_vision", kept)


def _opted_in(model: Any) -> tuple[str, type] | None:
    """The opt-in name of a model without the protocol, and its class that was read; None for
    models with the protocol."""
    if has_protocol(model):
        return None
    for name, classes in OPT_IN.items():
        for module_name, class_name in classes:
            known = getattr(sys.modules.get(module_name), class_name, None)
            if known is not None and isinstance(model, known):
                return name, known
    return None


def _check_thinker(thinker: Any) -> None:
    """Raise `AdapterError` where a thinker's towers are not the ones that were read."""
    changed = compatibility.drifts(touched.QWEN3_OMNI)
    changed += compatibility.drifts(touched.QWEN3_OMNI, type(thinker).__module__)
    if changed:
        raise AdapterError(str(changed[0]))
    _check_encoding(thinker)


def _check_encoding(model: Any) -> None:
    """Raise `AdapterError` where graphs would leave out what a derived model does to encode."""
    opted = _opted_in(model)
    for step in EAGER_STEPS:
        own = getattr(type(model), step, None)
        if opted is not None and own is not getattr(opted[1], step, None):
            raise AdapterError(f"{type(model).__qualname__}.{step} is not the one that was read")


def _opt_in_encoders(name: str, model: Any, vllm_config: Any, settings: Settings) -> list[Encoder]:
    _check_encoding(model)
    if name == "covo_audio":
        return _covo_encoders(model, vllm_config, settings)
    inner: Any = model
    above: tuple[Place, ...] = ()
    while inner is not None and not hasattr(inner, "audio_tower"):
        owner, inner = inner, getattr(inner, "thinker", None)
        above = () if inner is None else (*above, *_kept(owner, inner))
    if inner is None:
        return []  # another stage of the pipeline: it encodes nothing
    _check_thinker(inner)
    encoders = []
    vision = enabled_modalities(("image", "video"), vllm_config, settings)
    if vision and hasattr(getattr(inner, "visual", None), "patch_embed"):
        encoders.append(
            _encoder_or_why(
                "vllm_qwen3_omni_vision",
                vision,
                lambda: _wrap_vision(inner, vision, "qwen3_omni", settings.exact_only, above),
            )
        )
    audio = enabled_modalities(("audio",), vllm_config, settings)
    if audio and hasattr(inner.audio_tower, "conv2d1"):
        from graphhal.vllm_worker.qwen_audio import VllmQwenAudio

        kept = (*above, *_kept(inner, inner.audio_tower))
        encoders.append(
            _encoder_or_why(
                VllmQwenAudio.name, audio, lambda: VllmQwenAudio(inner.audio_tower, kept)
            )
        )
    return encoders


def _encoder_or_why(
    name: str, modalities: tuple[str, ...], wrap: Callable[[], EncoderAdapter]
) -> Encoder:
    """The encoder of an adapter, or of none: each of a model's encoders for itself."""
    try:
        return Encoder(name, modalities, {"default": wrap()})
    except AdapterError as error:
        return Encoder(name, modalities, {}, refusal=str(error))


def _covo_encoders(model: Any, vllm_config: Any, settings: Settings) -> list[Encoder]:
    stage = getattr(model, "fused_thinker_talker", model)
    if not hasattr(stage, "audio_adapter"):
        return []  # another stage of the pipeline: it encodes nothing
    if not enabled_modalities(("audio",), vllm_config, settings):
        return []
    from graphhal.vllm_worker.covo_tower import VllmCovoAudio

    adapter = VllmCovoAudio(stage, () if stage is model else _kept(model, stage))
    return [Encoder(adapter.name, ("audio",), {"default": adapter}, raises=True)]
