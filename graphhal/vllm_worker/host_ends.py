"""Attention sequences by the sizes that the host has, where kernels take boundaries from there.

vLLM's protocol prepares `cu_seqlens` on the device, and reading it back would cost a wait for each
request. The sizes that it is made of come on the host. Whether a model makes of them what is made
here is asked of its own code at start-up; there reading back costs nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import torch

from graphhal.boundaries import Boundaries
from graphhal.vllm_worker.grid_requests import (
    PIXELS,
    TILE_COUNTS,
    TILES,
    GridRequests,
    PictureRequests,
)

ENDS = "cu_seqlens"
"""The buffer whose sequences are known here: one for each frame, or tile."""
GRIDS = ("image_grid_thw", "video_grid_thw", "image_grid_hws")
"""Sizes of pictures and films: frames, where they are named, rows and columns of patches."""
PICTURES = ((1,), (6,), (2, 1, 6, 4))
"""Tokens of the pictures that a model is asked about, group by group."""
FILMS = (((2, 6),), ((3, 2), (1, 4), (2, 6)))
"""Frames of the films, and tokens of each frame."""


def lengths_of(mm_kwargs: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Rows of the attention sequences of each item.

    Raises:
        ValueError: there are no sizes of a known kind, or some belong to no item.
    """
    if mm_kwargs.get(TILES) is not None:
        rows = [height * width for height, width in _numbers(mm_kwargs[TILES])]
        ends = list(accumulate(_numbers(mm_kwargs[TILE_COUNTS]), initial=0))
        if ends[-1] != len(rows):
            raise ValueError(f"{ends[-1]} tiles are told of, {len(rows)} came")
        return [tuple(rows[first:end]) for first, end in pairwise(ends)]
    for name in GRIDS:
        if mm_kwargs.get(name) is not None:
            grids = _numbers(mm_kwargs[name])
            return [(height * width,) * sum(frames or [1]) for *frames, height, width in grids]
    raise ValueError(f"none of {', '.join((*GRIDS, TILES))} came")


def _numbers(sizes: Any) -> list[Any]:
    return sizes if isinstance(sizes, list) else list(sizes.tolist())


def problem(
    requests: PictureRequests | None,
    films: bool,
    device: torch.device,
    prepared: Callable[[dict[str, Any]], Mapping[str, torch.Tensor | None]],
) -> str | None:
    """Why a model's boundaries cannot be had from the host's sizes, or None.

    Args:
        requests: writes pictures for it.
        films: whether it takes films.
        device: of their pixels.
        prepared: its own buffers for a request.
    """
    if requests is None or (films and not _writes_films(requests)):
        return "its inputs are of no known kind"
    for request in _asked(requests, films, device):
        expected = tuple(accumulate(chain(*lengths_of(request))))
        made = prepared(request).get(ENDS)
        found = None if made is None else Boundaries.from_cu_seqlens(made.tolist()).ends
        if found != expected:
            return f"its boundaries are {found}, its inputs' sizes make {expected}"
    return None


def _writes_films(requests: PictureRequests) -> bool:
    return isinstance(requests, GridRequests) and requests.grids == GRIDS[0]


def _asked(
    requests: PictureRequests, films: bool, device: torch.device
) -> Iterator[dict[str, Any]]:
    for tokens in PICTURES:
        yield requests.request(tokens, 0, device)
    for group in FILMS if films else ():
        yield _of_frames(requests, group, device)


def _of_frames(
    requests: PictureRequests, films: Sequence[tuple[int, int]], device: torch.device
) -> dict[str, Any]:
    every = [tokens for count, tokens in films for _ in range(count)]
    grids = requests.sizes([tokens for _, tokens in films])[GRIDS[0]]
    grids[:, 0] = torch.tensor([count for count, _ in films])
    return {f"{PIXELS}_videos": requests.request(every, 0, device)[PIXELS], GRIDS[1]: grids}
