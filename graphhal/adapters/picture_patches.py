"""Pictures and films from files, cut into patches as Qwen3-Omni's published processor does."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image
from transformers import Qwen2VLImageProcessorPil

from graphhal.adapters.sample_files import read_film, read_image
from graphhal.errors import InputError

PATCH_SIDE, FRAMES_OF_A_PATCH, MERGE = 16, 2, 2
"""What the published processor configuration cuts pictures into."""
MIN_IMAGE_PIXELS = 56 * 56
MAX_IMAGE_PIXELS = 4096 * (PATCH_SIDE * MERGE) ** 2
"""Larger pictures are scaled down on loading: 4096 tokens, the top of the default ladder."""
MAX_FILM_FRAME_PIXELS = 256 * (PATCH_SIDE * MERGE) ** 2
MAX_FILM_FRAMES = 768
FILM_FRAMES_PER_SECOND = 2.0

Patches = tuple[npt.NDArray[np.float32], list[int]]
"""(patches, width) float32, and the grid [t, h, w]."""


def picture_patches(path: Path, item: int) -> Patches:
    """Patches of a picture.

    Raises:
        InputError: the file cannot be decoded, or the picture not be cut.
    """
    return _cut(read_image(path, item), MAX_IMAGE_PIXELS, path, item)


def film_patches(path: Path, item: int) -> Patches:
    """Patches of a film, sampled at `FILM_FRAMES_PER_SECOND`, its frames in pairs.

    Frames go through the image processor, because transformers' video processor needs torchvision.

    Raises:
        InputError: the file cannot be decoded, or its frames not be cut.
    """
    frames = read_film(path, item, FILM_FRAMES_PER_SECOND, MAX_FILM_FRAMES)
    frames += frames[-1:] * (len(frames) % FRAMES_OF_A_PATCH)
    patched = [_cut(frame, MAX_FILM_FRAME_PIXELS, path, item) for frame in frames]
    (_, h, w) = patched[0][1]
    # A still picture fills a patch with copies of itself: (rows, channels, frames, side, side).
    stills = np.stack([pixels for pixels, _ in patched])
    shape = (len(frames) // FRAMES_OF_A_PATCH, FRAMES_OF_A_PATCH, h * w, -1)
    cut = stills.reshape(*shape[:3], 3, FRAMES_OF_A_PATCH, PATCH_SIDE**2)
    pairs = np.stack([cut[:, n, :, :, n] for n in range(FRAMES_OF_A_PATCH)], axis=3)
    return pairs.reshape(shape[0] * h * w, -1), [shape[0], h, w]


def _cut(image: Image.Image, most_pixels: int, path: Path, item: int) -> Patches:
    processor = Qwen2VLImageProcessorPil(
        patch_size=PATCH_SIDE,
        temporal_patch_size=FRAMES_OF_A_PATCH,
        merge_size=MERGE,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
        min_pixels=MIN_IMAGE_PIXELS,
        max_pixels=most_pixels,
    )
    try:
        out = processor(images=image, return_tensors="np")
    except ValueError as error:
        raise InputError(
            f"{path} cannot be cut into patches ({error}); crop or pad it", item
        ) from error
    return out["pixel_values"].astype(np.float32), out["image_grid_thw"][0].tolist()
