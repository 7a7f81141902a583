"""`ItemSpec.chunk`: runs of whole frames tile a video."""

from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphhal.errors import AdapterError
from graphhal.items import ItemSpec
from tests.toy_encoder import FULL, MERGE, WINDOWED, ToyEncoder

TOY = ToyEncoder()
cuts = st.lists(st.integers(1, 5), min_size=1, max_size=6)


@given(cuts, st.integers(1, 9), st.integers(0, 40))
def test_chunks_tile_the_video(cut, pairs, offset):
    frames, rows = sum(cut), pairs * MERGE
    video = TOY.item(3, frames, rows, "video", offset)
    chunks, first = [], 0
    for take in cut:
        chunks.append(video.chunk(first, take))
        first += take
    row, token = offset, 0
    for chunk, take in zip(chunks, cut, strict=True):
        assert (chunk.index, chunk.modality, chunk.signature) == (3, "video", video.signature)
        assert (chunk.frames, chunk.rows, chunk.tokens) == (take, take * rows, take * pairs)
        assert (chunk.row_offset, chunk.token_offset) == (row, token)
        row, token = row + chunk.rows, token + chunk.tokens
    for name in (FULL, WINDOWED):
        together = [length for chunk in chunks for length in chunk.sequences[name]]
        assert together == list(video.sequences[name])
    assert (row, token) == (offset + video.rows, video.tokens)


@given(st.integers(2, 8), st.integers(1, 5), st.data())
def test_a_chunk_of_a_chunk_is_a_chunk(frames, pairs, data):
    video = TOY.item(0, frames, pairs * MERGE, "video", 12)
    first = data.draw(st.integers(0, frames - 1))
    outer = video.chunk(first, frames - first)
    inner = data.draw(st.integers(0, outer.frames - 1))
    assert outer.chunk(inner, 1) == video.chunk(first + inner, 1)


def test_the_whole_video_is_its_own_chunk():
    video = TOY.item(0, 3, 8, "video")
    assert video.chunk(0, 3) == video


@pytest.mark.parametrize(("first", "frames"), [(-1, 1), (0, 0), (2, 2), (3, 1), (0, -1)])
def test_frames_that_are_not_there_are_refused(first, frames):
    with pytest.raises(AdapterError, match=r"^item 1: frames .* of 3 do not exist"):
        TOY.item(1, 3, 8, "video").chunk(first, frames)


def test_frames_that_are_not_equal_are_refused():
    uneven = ItemSpec(0, "video", 7, 3, {FULL: (7,)}, signature=7, frames=2)
    with pytest.raises(
        AdapterError, match=r"^item 0: 7 rows, 3 tokens and its sequences are not 2"
    ):
        uneven.chunk(0, 1)


def test_items_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        TOY.item(0, 1, 8).rows = 9
