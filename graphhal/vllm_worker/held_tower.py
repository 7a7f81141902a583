"""What graphhal's adapters of vLLM's own Qwen towers share, whatever they encode."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from graphhal.adapter import Place
from graphhal.errors import AdapterError
from graphhal.items import ItemSpec
from graphhal.platform import Platform

EAGER = "eager_request"
"""The input that tells `forward` to run the tower's own eager code."""
PACKED_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "TORCH_SDPA", "ROCM_AITER_FA")
"""Attention of vLLM that reads boundaries as row numbers."""


class HeldTower:
    """The tower, where the model keeps it, and the items of the eager call that is under way.

    Args:
        tower: of vLLM or vLLM-Omni.
        kept: where the model keeps the tower, and what holds it.
    """

    name: str

    def __init__(self, tower: Any, kept: Sequence[Place]) -> None:
        self.tower = tower
        self.kept = kept
        self._eager_items: tuple[ItemSpec, ...] | None = None

    def prepare(self, platform: Platform) -> None:
        """Nothing to take: the tower brings vLLM's attention, which must read row numbers."""
        check_backend(self.tower, platform)

    def modules(self) -> Iterable[torch.nn.Module]:
        """The tower."""
        return (self.tower,)

    def places(self) -> Sequence[Place]:
        """Where the model keeps it."""
        return self.kept

    def _take_eager_items(self) -> tuple[ItemSpec, ...]:
        """What `eager_inputs` left for the tower's own eager code; once."""
        items, self._eager_items = self._eager_items, None
        if items is None:
            raise AdapterError(f"{self.name}: an eager forward needs a request")
        return items


def backend_of(tower: torch.nn.Module) -> str:
    """The name of the attention backend that vLLM chose for a tower."""
    return str(getattr(getattr(tower, "attn_backend", None), "name", "unknown"))


def check_backend(tower: torch.nn.Module, platform: Platform) -> None:
    """Raise `AdapterError` where boundaries cannot reach the tower's attention."""
    if backend_of(tower) not in PACKED_BACKENDS:
        raise AdapterError(f"attention {backend_of(tower)} reads boundaries in another way")
    if platform.info.boundary_order == "after":
        raise AdapterError(
            f"platform {platform.info.name} hands boundaries to the attention kernel itself; "
            "vLLM's towers read them from a buffer"
        )
