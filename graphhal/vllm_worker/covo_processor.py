"""vLLM-Omni's processor of CoVo-Audio, with its limit checked.

Left alone it drops what is beyond 30 s in silence, and from 30.1 s on it announces a token more
than the stage makes, which ends the engine instead of the request.
"""

import inspect
import logging
from collections.abc import Mapping
from functools import wraps
from types import ModuleType
from typing import Any

from graphhal.adapters.covo_audio import refuse_length

log = logging.getLogger(__name__)

PROCESSOR, METHOD = "CovoAudioMultiModalProcessor", "_call_hf_processor"
TAKES = ("self", "prompt", "mm_data")
"""First arguments of the method; the others are handed on."""
CLIPS = ("audios", "audio")


def refuse_long_clips(module: ModuleType) -> None:
    """Let the processor refuse clips that do not fit, each request by itself. Idempotent.

    A processor that has changed is left alone, with one loud line.

    Args:
        module: vLLM-Omni's, of the pipeline's class.
    """
    processor = getattr(module, PROCESSOR, None)
    own = getattr(processor, METHOD, None)
    if getattr(own, "refuses_long_clips", False):
        return
    found = tuple(inspect.signature(own).parameters)[: len(TAKES)] if callable(own) else ()
    if found != TAKES:
        log.warning(
            "graphhal: clips longer than CoVo-Audio's window are not refused: %s.%s was expected "
            "to take %s, found %s",
            PROCESSOR,
            METHOD,
            ", ".join(TAKES),
            ", ".join(found) or "nothing",
        )
        return
    setattr(processor, METHOD, _checking(own))


def _checking(own: Any) -> Any:
    @wraps(own)
    def checked(
        self: Any, prompt: Any, mm_data: Mapping[str, Any], *rest: Any, **named: Any
    ) -> Any:
        extractor = self.info.get_feature_extractor()
        for item, clip in enumerate(next((mm_data[key] for key in CLIPS if mm_data.get(key)), ())):
            samples = clip[0] if isinstance(clip, tuple) else clip
            refuse_length(len(samples), extractor.n_samples, extractor.sampling_rate, item)
        return own(self, prompt, mm_data, *rest, **named)

    checked.refuses_long_clips = True  # type: ignore[attr-defined]
    return checked
