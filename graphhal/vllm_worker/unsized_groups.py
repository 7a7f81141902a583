"""What the keys of a group tell where no adapter looked at it: its misses are counted as well."""

from collections.abc import Mapping
from typing import Any

import torch

MARKS = (
    ("video", "video"),
    ("image", "image"),
    ("pixel", "image"),
    ("audio", "audio"),
    ("input_features", "audio"),
)
"""What parts of keys tell of a group's modality, the telling ones first."""

PER_ITEM = (
    "grid_thw", "grid_thws", "grid_hws", "lengths", "num_tokens", "num_patches",
    "patches_per_image", "spatial_crop", "frame_counts",
)  # fmt: skip
"""How keys end that have one entry for each item of a group."""


def modality_of(mm_kwargs: Mapping[str, Any]) -> str:
    """What vLLM's runners call it; `unknown` where no key tells."""
    names = " ".join(name for name, value in mm_kwargs.items() if value is not None)
    return next((kind for mark, kind in MARKS if mark in names), "unknown")


def count_items(mm_kwargs: Mapping[str, Any]) -> int:
    """The length of what has an entry for each item, else 1."""
    for key, value in mm_kwargs.items():
        if key.endswith(PER_ITEM) and hasattr(value, "__len__") and getattr(value, "ndim", 1) != 0:
            return len(value)
    for value in mm_kwargs.values():
        whole = isinstance(value, torch.Tensor) and value.dim() == 3
        if whole or isinstance(value, list | tuple):
            return len(value)
    return 1
