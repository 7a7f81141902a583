"""Every name of vLLM that this package relies on, and how a signature is spelled for comparison.

`signatures.json` holds, per supported release, the spelling of each; `ci/vllm_signatures.py` wrote
it from the released wheels. `docs/vllm.md` says what each is used for.
"""

import inspect
from dataclasses import fields, is_dataclass
from typing import Any

ENCODER_CUDAGRAPH = "vllm.v1.worker.encoder_cudagraph"
DEFINITIONS = "vllm.v1.worker.encoder_cudagraph_defs"
INTERFACES = "vllm.model_executor.models.interfaces"

MANAGER = (
    f"{ENCODER_CUDAGRAPH}:EncoderCudaGraphManager.__init__",
    f"{ENCODER_CUDAGRAPH}:EncoderCudaGraphManager.supports_modality",
    f"{ENCODER_CUDAGRAPH}:EncoderCudaGraphManager.capture",
    f"{ENCODER_CUDAGRAPH}:EncoderCudaGraphManager.clear",
    f"{ENCODER_CUDAGRAPH}:EncoderCudaGraphManager.execute",
    f"{ENCODER_CUDAGRAPH}:EncoderCudaGraphManager.get_num_graphs_to_capture",
    f"{ENCODER_CUDAGRAPH}:EncoderCudaGraphManager.get_cumulative_stats",
)
"""What is replaced: its constructor's arguments, and what runners call on it."""

PROTOCOL = (
    f"{DEFINITIONS}:EncoderItemSpec",
    f"{DEFINITIONS}:EncoderCudaGraphConfig",
    f"{DEFINITIONS}:EncoderCudaGraphCaptureInputs",
    f"{DEFINITIONS}:EncoderCudaGraphReplayBuffers",
    f"{INTERFACES}:SupportsEncoderCudaGraph.get_encoder_cudagraph_config",
    f"{INTERFACES}:SupportsEncoderCudaGraph.get_encoder_cudagraph_budget_range",
    f"{INTERFACES}:SupportsEncoderCudaGraph.get_encoder_cudagraph_item_specs",
    f"{INTERFACES}:SupportsEncoderCudaGraph.select_encoder_cudagraph_items",
    f"{INTERFACES}:SupportsEncoderCudaGraph.postprocess_encoder_output",
    f"{INTERFACES}:SupportsEncoderCudaGraph.prepare_encoder_cudagraph_capture_inputs",
    f"{INTERFACES}:SupportsEncoderCudaGraph.prepare_encoder_cudagraph_replay_buffers",
    f"{INTERFACES}:SupportsEncoderCudaGraph.encoder_cudagraph_forward",
    f"{INTERFACES}:SupportsEncoderCudaGraph.encoder_eager_forward",
)
"""What the model's own code is asked for."""

_MODELS = "vllm.model_executor.models"
QWEN3_VL = (
    f"{_MODELS}.qwen3_vl:Qwen3_VisionTransformer.forward",
    f"{_MODELS}.qwen3_vl:Qwen3_VisionTransformer.prepare_encoder_metadata",
)
QWEN2_5_VL = (
    f"{_MODELS}.qwen2_5_vl:Qwen2_5_VisionTransformer.forward",
    f"{_MODELS}.qwen2_5_vl:Qwen2_5_VisionTransformer.prepare_encoder_metadata",
)
QWEN3_OMNI = (
    f"{_MODELS}.qwen3_omni_moe_thinker:Qwen3Omni_VisionTransformer.forward",
    f"{_MODELS}.qwen3_omni_moe_thinker:Qwen3_VisionBlock.forward",
    f"{_MODELS}.qwen3_omni_moe_thinker:Qwen3OmniMoeAudioEncoder.forward",
    f"{_MODELS}.qwen3_omni_moe_thinker:Qwen3OmniMoeAudioEncoderLayer.forward",
)
"""Towers that have an adapter of graphhal's own."""

ALL = (*MANAGER, *PROTOCOL, *QWEN3_VL, *QWEN2_5_VL, *QWEN3_OMNI)

_MARKS: dict[object, str] = {
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}


def spelled(target: Any) -> str:
    """The argument names of a function, or the field names of a dataclass.

    Keyword-only arguments follow a `*`; an argument that has a default ends in `=`. Annotations
    and the values of defaults do not count.
    """
    if is_dataclass(target):
        return "fields: " + ", ".join(field.name for field in fields(target))
    parts: list[str] = []
    starred = False
    for parameter in inspect.signature(target).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            starred = True
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        default = "" if parameter.default is inspect.Parameter.empty else "="
        parts.append(_MARKS.get(parameter.kind, "") + parameter.name + default)
    return f"({', '.join(parts)})"
