"""Real requests for models whose pictures are rows of patches beside the sizes of their grids."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any

import torch

log = logging.getLogger(__name__)

PIXELS = "pixel_values"
GRIDS = (("image_grid_thw", 3), ("grid_thws", 3), ("image_grid_hws", 2))
"""Names under which models take grids, and how many numbers one has."""
PACKED = "pixel_values_packed"
TILES, TILE_COUNTS = "spatial_shapes", "num_patches"
"""Sizes of the tiles of all pictures (LFM2-VL), and how many of them each picture has."""

LONGEST = 4
"""Width of a picture in heights, at most."""


@dataclass(frozen=True, slots=True)
class GridRequests:
    """Writes requests for one model whose pictures' patches follow one another.

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

    def sizes(self, tokens: Sequence[int]) -> dict[str, torch.Tensor]:
        """What the host knows of pictures of so many tokens each: grids as square as can be."""
        grids = [[1, *_squarest(each, self.merge)][-self.numbers :] for each in tokens]
        return {self.grids: torch.tensor(grids)}

    def request(self, tokens: Sequence[int], seed: int, device: torch.device) -> dict[str, Any]:
        """Pictures of so many tokens each."""
        shape = (self.patches(sum(tokens)), *self.patch)
        return {PIXELS: _noise(shape, self.dtype, seed, device)} | self.sizes(tokens)

    def patches(self, tokens: int) -> int:
        """Rows of pixels of so many tokens."""
        return tokens * self.merge**2


@dataclass(frozen=True, slots=True)
class TileRequests:
    """The same for a model whose pictures come in tiles, one row of a padded batch each.

    Attributes:
        merge: side of the square of patches that becomes one token.
        width: numbers of a patch.
        dtype: of the pixels.
        rows: of the graph's output for each token.
    """

    merge: int
    width: int
    dtype: torch.dtype
    rows: int = 1

    def sizes(self, tokens: Sequence[int]) -> dict[str, torch.Tensor]:
        """One tile for each picture; the first of several pictures has two."""
        cut = tokens[0] // 2 if len(tokens) > 1 else 0
        parts = [cut, tokens[0] - cut, *tokens[1:]] if cut else tokens
        counts = [2 if cut else 1, *[1] * (len(tokens) - 1)]
        tiles = [_squarest(each, self.merge) for each in parts]
        return {TILES: torch.tensor(tiles), TILE_COUNTS: torch.tensor(counts)}

    def request(self, tokens: Sequence[int], seed: int, device: torch.device) -> dict[str, Any]:
        """Pictures of so many tokens each."""
        sizes = self.sizes(tokens)
        shape = (len(sizes[TILES]), int(sizes[TILES].prod(1).max()), self.width)
        return {PIXELS: _noise(shape, self.dtype, seed, device)} | sizes

    def patches(self, tokens: int) -> int:
        """Rows of pixels of so many tokens."""
        return tokens * self.merge**2


PictureRequests = GridRequests | TileRequests


def find(
    model: Any, budget: int, inputs: Mapping[str, torch.Tensor | None]
) -> PictureRequests | None:
    """How to write requests for a model; None where it takes none of a known kind.

    Args:
        model: with the protocol, of one path.
        budget: of some graph.
        inputs: the model's own capture inputs for that graph.
    """
    for candidate, device in _candidates(budget, inputs):
        try:
            request = candidate.request([budget], 0, device)
            specs = model.get_encoder_cudagraph_item_specs(request)
            if [spec.output_tokens for spec in specs] != [budget]:
                continue
            if model.get_input_modality(request) != "image":
                continue
        except Exception:  # the model's own code: whatever it raises, it takes no such request
            log.debug("%s takes no %s", type(model).__name__, candidate, exc_info=True)
            continue
        return candidate
    return None


def _candidates(
    budget: int, inputs: Mapping[str, torch.Tensor | None]
) -> Iterator[tuple[PictureRequests, torch.device]]:
    """What may be, and where the pixels lie."""
    pixels, packed = inputs.get(PIXELS), inputs.get(PACKED)
    if pixels is not None and pixels.dim() >= 2:
        merge, patch = isqrt(len(pixels) // budget), tuple(pixels.shape[1:])
        for name, numbers in GRIDS:
            yield GridRequests(name, numbers, merge, patch, pixels.dtype), pixels.device
    elif packed is not None and packed.dim() == 2:
        merge = isqrt(len(packed) // budget)
        yield TileRequests(merge, packed.shape[1], packed.dtype), packed.device


def _noise(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: torch.device
) -> torch.Tensor:
    generator = torch.Generator(device=device).manual_seed(seed)
    floating = dtype if dtype.is_floating_point else torch.float32
    pixels = torch.randn(shape, generator=generator, dtype=floating, device=device)
    return pixels if dtype.is_floating_point else (pixels * 48 + 128).clamp(0, 255).to(dtype)


def pictures_of(tokens: int, most: int) -> tuple[int, ...]:
    """Tokens of pictures that make as many together, as few as can be, and `most` at most; fewer
    tokens where those do not do. None is a long strip, as one of 383 tokens would be: towers'
    tables of positions end (at 512 patches, Kimi's)."""
    first = next(n for n in range(tokens, 0, -1) if _is_no_strip(n))
    if first == tokens or most == 1:
        return (first,)
    return (first, *pictures_of(tokens - first, most - 1))


def _is_no_strip(tokens: int) -> bool:
    height, width = _squarest(tokens, 1)
    return width <= LONGEST * height


def _squarest(tokens: int, merge: int) -> tuple[int, int]:
    """Height and width of the squarest picture of this many tokens, in patches."""
    side = next(side for side in range(isqrt(tokens), 0, -1) if tokens % side == 0)
    return side * merge, tokens // side * merge
