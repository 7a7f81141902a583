"""SigLIP's vision tower from transformers, the example of `docs/adapters.md`.

All images have one size, so there is one graph for each count, and nothing to pack.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import SiglipImageProcessorPil, SiglipVisionConfig, SiglipVisionModel

from graphhal.adapter import BufferSpec, EncoderAdapter
from graphhal.adapters.request_tensors import refuse_unreadable
from graphhal.adapters.sample_files import read_image, sample_photograph
from graphhal.adapters.seeded_weights import chosen_preset, with_seeded_weights
from graphhal.errors import InputError
from graphhal.items import ItemSpec
from graphhal.plan import Capacity, GraphKey
from graphhal.settings import Settings

PIXELS = "pixel_values"
Inputs = Mapping[str, torch.Tensor]
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
PRESETS: dict[str, dict[str, int]] = {"tiny": TINY | {"num_attention_heads": 4}, "full": {}}


class Siglip(EncoderAdapter):
    """Rows are images, tokens are patches; requests are `pixel_values` (images, 3, side, side)."""

    name = "siglip"
    modalities = ("image",)

    def __init__(self, tower: SiglipVisionModel) -> None:
        self.tower, parts = tower, tower.embeddings
        self.image = (tower.config.num_channels, parts.image_size, parts.image_size)
        self.tokens = int(parts.num_patches)
        self.device, self.dtype = tower.device, tower.dtype

    def modules(self) -> Iterable[torch.nn.Module]:
        """The tower."""
        return (self.tower,)

    def item_specs(self, mm_kwargs: Mapping[str, Any]) -> tuple[ItemSpec, ...]:
        """One item for each image."""
        pixels = mm_kwargs.get(PIXELS)
        if not isinstance(pixels, torch.Tensor) or not pixels.dtype.is_floating_point:
            raise InputError(f"{PIXELS} must be one floating-point tensor of normalised images")
        refuse_unreadable(pixels, PIXELS, self.device)
        if pixels.dim() == 0 or len(pixels) == 0 or tuple(pixels.shape[1:]) != self.image:
            shape = tuple(pixels.shape)
            raise InputError(f"{PIXELS} must be images of {self.image}, got {shape}; resize them")
        return self._specs(len(pixels))

    def _specs(self, images: int) -> tuple[ItemSpec, ...]:
        one = ItemSpec(0, "image", rows=1, tokens=self.tokens, sequences={}, signature=None)
        return tuple(replace(one, index=n, row_offset=n) for n in range(images))

    def capacities(self, settings: Settings) -> tuple[Capacity, ...]:
        """One graph for each count of images."""
        keys = [GraphKey(self.name, "image", n) for n in range(1, settings.max_items + 1)]
        return tuple(Capacity(k, k.size, k.size * self.tokens, k.size, {}) for k in keys)

    def buffers(self, capacity: Capacity) -> Mapping[str, BufferSpec]:
        """The images, in the tower's dtype."""
        return {PIXELS: BufferSpec((capacity.rows, *self.image), self.tower.dtype)}

    def metadata(self, items: Sequence[ItemSpec]) -> dict[str, Any]:
        """None: sizes never change."""
        return {}

    def stage(
        self, mm_kwargs: Mapping[str, Any], items: Sequence[ItemSpec], inputs: Inputs
    ) -> None:
        """One copy for each image."""
        for place, item in enumerate(items):
            inputs[PIXELS][place].copy_(mm_kwargs[PIXELS][item.row_offset])
        inputs[PIXELS][len(items) :].zero_()

    def forward(self, inputs: Inputs, max_seqlen: Mapping[str, int]) -> torch.Tensor:
        """Features (images x patches, hidden)."""
        features: torch.Tensor = self.tower(inputs[PIXELS]).last_hidden_state
        return features.flatten(0, 1)

    def example(self, items: Sequence[ItemSpec], seed: int) -> dict[str, Any]:
        """Normally distributed pixels."""
        seeded = torch.Generator(device=self.device).manual_seed(seed)
        return {PIXELS: torch.randn(len(items), *self.image, generator=seeded, device=self.device)}

    def worst_cases(self, capacity: Capacity) -> Iterable[tuple[ItemSpec, ...]]:
        """Full, and one image short."""
        return [self._specs(images) for images in range(capacity.rows, 0, -1)][:2]


class SiglipFactory:
    """Finds, builds and feeds `Siglip`."""

    name = "siglip"
    modality = "image"

    def wrap(self, module: torch.nn.Module) -> Siglip | None:
        """An adapter for transformers' tower; None for any other module."""
        return Siglip(module) if isinstance(module, SiglipVisionModel) else None

    def build(self, preset: str, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Siglip:
        """The tower with seeded random weights; `full` is siglip-base-patch16-224."""
        config = SiglipVisionConfig(**chosen_preset(PRESETS, preset), vision_use_head=False)
        tower = with_seeded_weights(lambda: SiglipVisionModel(config), device, dtype, seed)
        tower.embeddings.position_ids = torch.arange(tower.embeddings.num_positions, device=device)
        return Siglip(tower)

    def load(self, adapter: Any, files: Sequence[Path]) -> dict[str, Any]:
        """Pictures through transformers' own image processor, or a sample."""
        images = [read_image(p, n) for n, p in enumerate(list(files) or [sample_photograph()])]
        pixels = SiglipImageProcessorPil()(images, return_tensors="pt")[PIXELS]
        return {PIXELS: pixels.to(adapter.device, adapter.dtype)}
