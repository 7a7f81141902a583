"""Towers with seeded random weights, built without computing the library's own initialisation."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import nn

from graphhal.errors import SettingsError

Preset = TypeVar("Preset")
Tower = TypeVar("Tower", bound=nn.Module)


def chosen_preset(presets: Mapping[str, Preset], name: str) -> Preset:
    """The preset of this name.

    Raises:
        SettingsError: no such preset.
    """
    if name not in presets:
        raise SettingsError(f"unknown preset {name!r}; presets: {', '.join(presets)}")
    return presets[name]


def with_seeded_weights(
    build: Callable[[], Tower], device: torch.device, dtype: torch.dtype, seed: int
) -> Tower:
    """Build a module on the meta device and fill its parameters on `device`.

    Matrices keep the variance of their input, norms stay near one, and biases and embeddings are
    large enough that a wrong row, position or neighbour shows in the output. Buffers come back
    uninitialised: their values are the family's, not random.
    """
    with torch.device("meta"):
        module = build()
    module = module.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    generator = torch.Generator(device=device).manual_seed(seed)
    for part in module.modules():
        norm = isinstance(part, nn.LayerNorm)
        for name, tensor in part.named_parameters(recurse=False):
            if isinstance(part, nn.Embedding):
                tensor.normal_(0.0, 0.5, generator=generator)
            elif tensor.dim() > 1:
                fan_in = tensor[0].numel()
                tensor.normal_(0.0, fan_in**-0.5, generator=generator)
            else:
                centre = 1.0 if norm and name == "weight" else 0.0
                tensor.normal_(centre, 0.1, generator=generator)
    return module
