"""The one switch of encoder graphs, and the configuration that has it."""

import sys
from types import FrameType
from typing import Any


def config_in_sight() -> Any | None:
    """The vLLM configuration of the code that is running, from its frames; None where none is."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        names = frame.f_locals
        owner = names.get("self")
        owned = getattr(owner, "__dict__", {}).get("vllm_config")
        for candidate in (names.get("vllm_config"), owned):
            if hasattr(candidate, "compilation_config"):
                return candidate
        frame = frame.f_back
    return None


def wants_encoder_graphs(vllm_config: Any) -> bool:
    """Whether the one flag is on. A configuration without the field never turns anything on."""
    compilation = getattr(vllm_config, "compilation_config", None)
    return getattr(compilation, "cudagraph_mm_encoder", False) is True
