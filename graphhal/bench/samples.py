"""What the bench encodes: files one by one, smaller copies of the first, and groups."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import soundfile

from graphhal.adapters.sample_files import is_film, read_image, read_sound

PHOTOGRAPH_SIDES = (224, 320)
"""Longest sides of the smaller copies, in pixels."""
THINNEST = 16
"""Pixels across a copy, at least: scaled to less, a banner would become another shape."""
CLIP_SECONDS = (1.0, 3.0)
"""Lengths of the shorter copies."""
CLIP_RATE = 16_000
"""Hertz of the copies."""
LABEL_LENGTH = 12
"""Characters of a file's name in a label, at most."""


@dataclass(frozen=True, slots=True)
class BenchInput:
    """One request of the bench.

    Attributes:
        label: what the table calls it.
        files: decoded together, as one group.
    """

    label: str
    files: tuple[Path, ...]


def image_inputs(files: Sequence[Path], scratch: Path) -> list[BenchInput]:
    """The pictures one by one, smaller copies of the first, and groups.

    Args:
        files: pictures or films, at least one.
        scratch: folder for the copies.

    Raises:
        InputError: a picture cannot be decoded; names the file.
    """
    pictures = {
        path: read_image(path, index) for index, path in enumerate(files) if not is_film(path)
    }
    copies: list[tuple[str, Path]] = []
    for path, first in list(pictures.items())[:1]:
        for side in (side for side in PHOTOGRAPH_SIDES if side < max(first.size)):
            scale = side / max(first.size)
            width, height = (round(length * scale) for length in first.size)
            if min(width, height) < THINNEST:
                continue
            copies.append((f"{_name(path)} {width}×{height}", scratch / f"{width}x{height}.png"))
            first.resize((width, height)).save(copies[-1][1])
    inputs = [BenchInput(label, (path,)) for label, path in copies]
    for path in files:
        size = "×".join(map(str, pictures[path].size)) if path in pictures else "film"
        inputs.append(BenchInput(f"{_name(path)} {size}", (path,)))
    kinds = ["pictures"] * bool(pictures) + ["films"] * (len(pictures) < len(files))
    return inputs + _groups(" and ".join(kinds), inputs)


def clip_inputs(files: Sequence[Path], scratch: Path) -> list[BenchInput]:
    """The clips one by one, their first seconds, and groups.

    Args:
        files: clips, at least one.
        scratch: folder for the copies.

    Raises:
        InputError: a clip cannot be decoded; names the file.
    """
    clips = [read_sound(path, index, CLIP_RATE) for index, path in enumerate(files)]
    copies = []
    for seconds in CLIP_SECONDS:
        length = int(seconds * CLIP_RATE)
        if length < len(clips[0]):
            copies.append((seconds, scratch / f"first-{seconds:g}s.wav"))
            soundfile.write(copies[-1][1], clips[0][:length], CLIP_RATE)
    inputs = [BenchInput(f"{_name(files[0])} first {s:g} s", (path,)) for s, path in copies]
    inputs += [
        BenchInput(f"{_name(path)} {len(clip) / CLIP_RATE:.1f} s", (path,))
        for path, clip in zip(files, clips, strict=True)
    ]
    return inputs + _groups("clips", inputs)


def _name(path: Path) -> str:
    """The file's name, short enough for a table; bytes of it that are no text become `?`."""
    name = path.stem.encode(errors="replace").decode()
    return name if len(name) <= LABEL_LENGTH else name[: LABEL_LENGTH - 1] + "…"


def _groups(what: str, inputs: Sequence[BenchInput]) -> list[BenchInput]:
    """Several files in one request: the first one repeatedly, and all of them."""
    groups = [BenchInput(f"4 × {inputs[0].label}", inputs[0].files * 4)]
    if len(inputs) > 1:
        different = tuple(path for each in inputs for path in each.files)
        groups.append(BenchInput(f"{len(different)} different {what}", different))
    return groups
