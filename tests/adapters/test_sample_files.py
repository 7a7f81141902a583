"""Files from anywhere: each is read as it was meant, or refused by its name with the way out."""

import os
import struct
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile
from PIL import Image

from graphhal.adapters.qwen3_omni_vision import Qwen3OmniVisionFactory
from graphhal.adapters.sample_files import LOUDEST, read_film, read_image, read_sound
from graphhal.bench.samples import image_inputs
from graphhal.errors import InputError

TONE = np.sin(np.arange(4000) / 20).astype(np.float32) / 4


def sound(folder: Path, samples: np.ndarray, rate: int = 16_000) -> Path:
    soundfile.write(folder / "clip.wav", samples, rate, subtype="FLOAT")
    return folder / "clip.wav"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
def test_samples_that_make_no_finite_spectrum_are_refused(tmp_path: Path, value: float) -> None:
    samples = TONE.copy()
    samples[7] = value
    with pytest.raises(InputError, match=r"^item 3: .*clip.wav holds samples .* save it again"):
        read_sound(sound(tmp_path, samples), 3, 16_000)


def test_whole_numbers_saved_as_floats_are_loud_and_fine(tmp_path: Path) -> None:
    read = read_sound(sound(tmp_path, TONE * LOUDEST), 0, 16_000)
    assert np.array_equal(read, TONE * LOUDEST)


@pytest.mark.parametrize("rate", [1, 999, 768_001, 2**31 - 1])
def test_rates_that_no_sound_has_are_refused_before_they_take_all_memory(
    tmp_path: Path, rate: int
) -> None:
    with pytest.raises(InputError, match=rf"clip.wav has {rate} samples a second; 1000 to 768000"):
        read_sound(sound(tmp_path, TONE, rate), 0, 16_000)


@pytest.mark.parametrize(("rate", "length"), [(1_000, 64_000), (768_000, 84)])
def test_rates_at_the_ends_are_resampled(tmp_path: Path, rate: int, length: int) -> None:
    assert len(read_sound(sound(tmp_path, TONE, rate), 0, 16_000)) == length


def test_a_missing_clip_and_an_empty_one_are_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none.wav: no such file; name one"):
        read_sound(tmp_path / "none.wav", 0, 16_000)
    with pytest.raises(InputError, match=r" is a folder; name a file in it"):
        read_sound(tmp_path, 0, 16_000)
    with pytest.raises(InputError, match=r"x.wav cannot be read .* name another"):
        read_sound(tmp_path / ("y" * 300 + "x.wav"), 0, 16_000)
    with pytest.raises(InputError, match=r"clip.wav holds no sample; it is empty, or cut"):
        read_sound(sound(tmp_path, TONE[:0]), 0, 16_000)


def test_a_file_that_is_cut_off_is_told_as_such(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "half.jpg")
    soundfile.write(tmp_path / "half.flac", TONE, 16_000)
    write_film(tmp_path / "half.mp4", [0.0, 0.5, 1.0], [0, 100, 200])
    for name, read in (
        ("half.jpg", read_image),
        ("half.flac", partial(read_sound, rate=16_000)),
        ("half.mp4", partial(read_film, frames_per_second=2.0, most=8)),
    ):
        path = tmp_path / name
        whole = path.read_bytes()
        for size in (len(whole) // 50, len(whole) // 2):
            path.write_bytes(whole[:size])
            with pytest.raises(InputError, match=rf"^item 1: .*{name} cannot.* is cut off or"):
                read(path, item=1)


def test_a_file_that_may_not_be_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = sound(tmp_path, TONE)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may read everything
    with pytest.raises(InputError, match=r"clip.wav may not be read; change its permissions"):
        read_sound(path, 0, 16_000)


@pytest.mark.parametrize("name", ["clip.raw", "clip.png", "clip", "clip.mp3"])
def test_a_clip_is_what_its_bytes_say_whatever_its_name_says(tmp_path: Path, name: str) -> None:
    read = read_sound(sound(tmp_path, TONE).rename(tmp_path / name), 0, 16_000)
    assert np.array_equal(read, TONE)


def test_a_header_that_promises_more_samples_than_memory_holds_is_told(tmp_path: Path) -> None:
    path = tmp_path / "broken.flac"
    soundfile.write(path, TONE, 16_000)
    written = bytearray(path.read_bytes())
    written[21] |= 0x0F  # the count of samples: 36 bits
    written[22:26] = b"\xff" * 4
    path.write_bytes(written)
    with pytest.raises(InputError, match=r"^item 2: .*broken.flac .* 68719476735 samples, .* save"):
        read_sound(path, 2, 16_000)


def test_sixteen_bits_keep_their_greys(tmp_path: Path) -> None:
    grey = np.linspace(0, 65535, 48 * 64).reshape(48, 64).astype(np.uint16)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    read = np.asarray(read_image(tmp_path / "grey.png", 0))
    assert np.array_equal(read, np.repeat((grey >> 8)[:, :, None], 3, axis=2))


def test_a_photograph_that_was_held_upright_stands_upright(tmp_path: Path) -> None:
    lying = Image.new("RGB", (64, 48))
    lying.paste((255, 0, 0), (0, 0, 32, 48))
    exif = lying.getexif()
    exif[0x0112] = 6  # orientation: turn by 90 degrees to see it as it was taken
    lying.save(tmp_path / "phone.png", exif=exif)
    read = np.asarray(read_image(tmp_path / "phone.png", 0))
    assert read.shape == (64, 48, 3)
    assert (read[:32, :, 0] == 255).all()
    assert (read[32:, :, 0] == 0).all()


@pytest.mark.parametrize("kind", ["png", "tiff"])
def test_sixteen_bits_that_were_held_upright_stand_upright(tmp_path: Path, kind: str) -> None:
    grey = np.linspace(0, 65535, 48 * 64).reshape(48, 64).astype(np.uint16)
    lying = Image.fromarray(grey)
    exif = lying.getexif()
    exif[0x0112] = 6
    lying.save(tmp_path / f"scan.{kind}", exif=exif)
    read = np.asarray(read_image(tmp_path / f"scan.{kind}", 0))
    assert np.array_equal(read[:, :, 0], np.rot90(grey >> 8, -1))


@pytest.mark.parametrize("note", [b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12", b"no note at all"])
@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_a_broken_note_of_the_camera_spoils_no_picture(tmp_path: Path, note: bytes) -> None:
    picture = Image.new("RGB", (64, 48), (9, 8, 7))
    picture.save(tmp_path / "phone.png", exif=note)
    assert np.array_equal(read_image(tmp_path / "phone.png", 0), picture)


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_pictures_of_unknown_range_are_refused(tmp_path: Path, dtype: type[np.generic]) -> None:
    Image.fromarray(np.full((8, 8), 70_000, dtype=dtype)).save(tmp_path / "raw.tiff")
    with pytest.raises(InputError, match=r"raw.tiff holds numbers .* save it with 8 or 16 bits"):
        read_image(tmp_path / "raw.tiff", 0)


def test_a_picture_that_is_too_large_is_to_be_scaled_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("L", (30, 30)).save(tmp_path / "bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(InputError, match=r"bomb.png is too large .* scale it down"):
        read_image(tmp_path / "bomb.png", 0)


def test_a_film_of_sound_alone_is_told(tmp_path: Path) -> None:
    path = tmp_path / "sound.mp4"
    with av.open(str(path), "w") as film:
        stream = film.add_stream("aac", rate=16_000)
        frame = av.AudioFrame.from_ndarray(TONE[None], format="fltp", layout="mono")
        frame.rate = 16_000
        film.mux([*stream.encode(frame), *stream.encode(None)])
    with pytest.raises(InputError, match=r"sound.mp4 holds no frame; pass a film with pictures"):
        read_film(path, 0, 2.0, 8)
    path.write_bytes(b"no film")
    with pytest.raises(InputError, match=r"sound.mp4 cannot be decoded as a film .* as MP4, W"):
        read_film(path, 0, 2.0, 8)


def test_a_film_that_starts_late_is_sampled_as_evenly(tmp_path: Path) -> None:
    path = tmp_path / "cut.mkv"
    with av.open(str(path), "w") as film:
        stream = film.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 32
        for number in range(20):
            frame = av.VideoFrame(32, 32, "yuv420p")
            frame.pts = 100 + number
            film.mux(stream.encode(frame))
        film.mux(stream.encode(None))
    assert len(read_film(path, 0, 2.0, 100)) == 4


def write_film(path: Path, times: list[float], greys: list[int]) -> None:
    """A film 32 wide and 64 high, lighter to the right, whose frames come at these seconds."""
    with av.open(str(path), "w") as film:
        stream = film.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 32, 64, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1000)
        for time, grey in zip(times, greys, strict=True):
            picture = np.full((64, 32, 3), grey, np.uint8)
            picture[:, 16:] += 100
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = round(time * 1000), Fraction(1, 1000)
            film.mux(stream.encode(frame))
        film.mux(stream.encode(None))


def grey_of(picture: Image.Image) -> int:
    return round(np.asarray(picture)[:, :12].mean() / 10) * 10


@pytest.mark.parametrize(
    ("times", "shown"),
    [
        ([0.0, 0.5, 1.0, 1.5], [20, 40, 60, 80]),
        ([0.0, 0.1, 2.0, 2.1], [20, 40, 40, 40, 60]),
        ([0.0, 0.4, 0.6, 0.9], [20, 40]),
        ([3.0, 3.4, 3.6, 4.0], [20, 40, 80]),
        ([0.0, 0.1, 0.2, 9.0], [20, 60, 60, 60, 60, 60]),
    ],
)
def test_a_film_is_sampled_by_the_clock(
    tmp_path: Path, times: list[float], shown: list[int]
) -> None:
    path = tmp_path / "film.mkv"
    write_film(path, times, [20, 40, 60, 80])
    assert [grey_of(picture) for picture in read_film(path, 0, 2.0, 6)] == shown


@pytest.mark.parametrize(
    ("matrix", "size", "light"),
    [
        ((1, 0, 0, 1), (32, 64), "right"),
        ((0, 1, -1, 0), (64, 32), "bottom"),
        ((-1, 0, 0, -1), (32, 64), "left"),
        ((0, -1, 1, 0), (64, 32), "top"),
    ],
)
def test_a_film_that_was_held_upright_stands_upright(
    tmp_path: Path, matrix: tuple[int, ...], size: tuple[int, int], light: str
) -> None:
    path = tmp_path / "film.mp4"
    write_film(path, [0.0, 0.5], [20, 20])
    a, b, c, d = (value << 16 for value in matrix)
    plain = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    content = path.read_bytes()
    header = content.index(b"tkhd")  # of the track; the film's own has such a matrix, too
    at = content.index(plain, header)
    turned = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(content[:at] + turned + content[at + len(turned) :])
    picture = read_film(path, 0, 2.0, 1)[0]
    assert picture.size == size
    greys = np.asarray(picture.convert("L")).astype(int)
    half = {
        "right": greys[:, -12:],
        "left": greys[:, :12],
        "bottom": greys[-12:],
        "top": greys[:12],
    }
    assert max(half, key=lambda side: half[side].mean()) == light


@pytest.mark.parametrize("read", [read_image, partial(read_sound, rate=16_000)])
def test_a_pipe_is_refused_before_it_is_waited_for(tmp_path: Path, read: Any) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(InputError, match=r"is a pipe or a device; save what comes from it"):
        read(path, 0)


def test_a_film_that_changes_its_size_keeps_the_first_one(tmp_path: Path) -> None:
    path = tmp_path / "cut.m1v"
    for width, height in ((32, 64), (64, 32)):
        part = tmp_path / f"{width}.m1v"
        with av.open(str(part), "w", format="mpeg1video") as film:
            stream = film.add_stream("mpeg1video", rate=25)
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            frames = [av.VideoFrame(width, height, "yuv420p") for _ in range(20)]
            film.mux([packet for frame in (*frames, None) for packet in stream.encode(frame)])
        with path.open("ab") as whole:
            whole.write(part.read_bytes())
    with av.open(str(path)) as film:
        assert {(frame.width, frame.height) for frame in film.decode(video=0)} == {
            (32, 64),
            (64, 32),
        }
    assert {frame.size for frame in read_film(path, 0, 25.0, 100)} == {(32, 64)}


def test_a_banner_has_no_copies_of_another_shape(tmp_path: Path) -> None:
    banner = tmp_path / "banner.png"
    Image.new("RGB", (2000, 10)).save(banner)
    assert [entry.files for entry in image_inputs([banner], tmp_path)] == [(banner,), (banner,) * 4]


def test_a_picture_too_thin_for_the_processor_is_told_by_its_own_name(tmp_path: Path) -> None:
    factory = Qwen3OmniVisionFactory()
    path = tmp_path / "thin.png"
    Image.new("RGB", (2010, 10)).save(path)
    with pytest.raises(InputError, match=r"thin.png cannot be cut into patches .* crop or pad it"):
        factory.load(None, [path])  # type: ignore[arg-type]
