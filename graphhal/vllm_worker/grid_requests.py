"""Real requests for models whose pictures are rows of patches beside the sizes of their grids."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isqrt, prod
from typing import Any

import torch

log = logging.getLogger(__name__)

PIXELS = "pixel_values"
GRIDS = (("image_grid_thw", 3), ("grid_thws", 3), ("image_grid_hws", 2))
"""Names under which models take grids, and how many numbers one has."""


@dataclass(frozen=True, slots=True)
class GridRequests:
    """Writes requests for one model, and knows what its graph makes of a token.

    Attributes:
        grids: name of the grids.
        numbers: of one grid.
        merge: side of the square of patches that becomes one token.
        patch: shape of a patch.
        dtype: of the pixels.
        rows: of the graph's output for each token: more than one where the model merges them in its
            `postprocess_encoder_output` (Ernie 4.5 VL).
    """

    grids: str
    numbers: int
    merge: int
    patch: tuple[int, ...]
    dtype: torch.dtype
    rows: int = 1

    def request(self, tokens: Sequence[int], seed: int, device: torch.device) -> dict[str, Any]:
        """Pictures of so many tokens each."""
        generator = torch.Generator(device=device).manual_seed(seed)
        sizes = [self._grid(each) for each in tokens]
        shape = (sum(map(prod, sizes)), *self.patch)
        dtype = self.dtype if self.dtype.is_floating_point else torch.float32
        pixels = torch.randn(shape, generator=generator, dtype=dtype, device=device)
        if not self.dtype.is_floating_point:
            pixels = (pixels * 48 + 128).clamp(0, 255).to(self.dtype)
        numbers = [size[-self.numbers :] for size in sizes]
        return {PIXELS: pixels, self.grids: torch.tensor(numbers)}

    def patches(self, tokens: int) -> int:
        """Rows of pixels of so many tokens."""
        return tokens * self.merge**2

    def _grid(self, tokens: int) -> list[int]:
        """The squarest picture of this many tokens."""
        side = next(side for side in range(isqrt(tokens), 0, -1) if tokens % side == 0)
        return [1, side * self.merge, tokens // side * self.merge]


def find(model: Any, budget: int, inputs: Mapping[str, torch.Tensor | None]) -> GridRequests | None:
    """How to write requests for a model; None where it takes none of a known kind.

    Args:
        model: with the protocol, of one path.
        budget: of some graph.
        inputs: the model's own capture inputs for that graph.
    """
    pixels = inputs.get(PIXELS)
    if pixels is None or pixels.dim() < 2:
        return None
    merge = isqrt(len(pixels) // budget)
    for name, numbers in GRIDS:
        candidate = GridRequests(name, numbers, merge, tuple(pixels.shape[1:]), pixels.dtype)
        try:
            request = candidate.request([budget], 0, pixels.device)
            specs = model.get_encoder_cudagraph_item_specs(request)
            if [spec.output_tokens for spec in specs] != [budget]:
                continue
            if model.get_input_modality(request) != "image":
                continue
        except Exception:  # the model's own code: whatever it raises, it takes no such request
            log.debug("%s takes no %s", type(model).__name__, name, exc_info=True)
            continue
        return candidate
    return None
