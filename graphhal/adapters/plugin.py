"""The adapters that graphhal ships, as its own plugin registers them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphhal.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphhal.adapter import AdapterFactory


@hookimpl
def graphhal_adapters() -> Sequence[AdapterFactory]:
    """Every family of `graphhal.adapters`; PyTorch is imported only now."""
    from graphhal.adapters.covo_audio import CovoAudioFactory
    from graphhal.adapters.qwen3_omni_audio import Qwen3OmniAudioFactory
    from graphhal.adapters.qwen3_omni_vision import Qwen3OmniVisionFactory
    from graphhal.adapters.siglip import SiglipFactory

    return (
        Qwen3OmniVisionFactory(),
        Qwen3OmniAudioFactory(),
        CovoAudioFactory(),
        SiglipFactory(),
    )
