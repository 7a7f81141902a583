"""`Boundaries` against a slow, obvious model, and what it must refuse."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphhal.boundaries import Boundaries
from graphhal.errors import BoundariesError

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def owners(bounds: Boundaries) -> list[int]:
    """The obvious model: for every row, the sequence it belongs to."""
    return [n for n, length in enumerate(bounds.lengths) for _ in range(length)]


@given(lengths)
def test_both_spellings_say_the_same(given_lengths):
    bounds = Boundaries.from_lengths(given_lengths)
    assert list(bounds.lengths) == given_lengths
    assert bounds.rows == sum(given_lengths)
    assert bounds.max_seqlen == max(given_lengths)
    assert bounds.actual_seq_lengths == [
        sum(given_lengths[: n + 1]) for n in range(len(given_lengths))
    ]
    assert bounds.cu_seqlens.tolist() == [0, *bounds.actual_seq_lengths]
    assert bounds.cu_seqlens.dtype == np.int32


def test_several_images_give_cumulative_ends_not_lengths():
    assert Boundaries.from_lengths([3, 5]).actual_seq_lengths == [3, 8]
    assert Boundaries.from_lengths([4, 4, 4]).cu_seqlens.tolist() == [0, 4, 8, 12]


@given(lengths, st.integers(0, 50))
def test_slack_is_one_isolated_sequence(given_lengths, slack):
    bounds = Boundaries.from_lengths(given_lengths)
    padded = bounds.padded_to(bounds.rows + slack)
    assert list(padded.lengths) == given_lengths + ([slack] if slack else [])


@given(lengths, st.integers(0, 50), st.integers(0, 12), st.integers(1, 60), st.booleans())
def test_padding_keeps_real_sequences_and_respects_bound_and_slots(
    given_lengths, slack, more_slots, longest, allow_empty
):
    bounds = Boundaries.from_lengths(given_lengths)
    rows, slots = bounds.rows + slack, len(given_lengths) + more_slots
    dummies_at_least = -(-slack // longest)
    possible = dummies_at_least <= more_slots and (allow_empty or more_slots <= slack)
    if not possible:
        with pytest.raises(BoundariesError):
            bounds.padded_to(rows, slots, longest, allow_empty)
        return
    padded = bounds.padded_to(rows, slots, longest, allow_empty)
    assert padded.rows == rows
    assert list(padded.lengths[: len(given_lengths)]) == given_lengths
    dummies = padded.lengths[len(given_lengths) :]
    assert sum(dummies) == slack
    assert all(0 < length <= longest for length in dummies)
    assert len(padded.ends) + padded.spare_slots == slots
    assert len(padded.cu_seqlens) == slots + 1
    assert padded.cu_seqlens[-1] == rows
    assert all(a <= b for a, b in pairwise(padded.cu_seqlens.tolist()))
    assert owners(padded)[: bounds.rows] == owners(bounds)
    if not allow_empty:
        assert padded.spare_slots == 0
    elif dummies:
        assert len(dummies) == dummies_at_least


@given(lengths, st.integers(0, 3), st.integers(0, 3), st.integers(0, 20))
def test_foreign_padding_of_cu_seqlens_is_dropped(given_lengths, zeros, repeats, slack):
    bounds = Boundaries.from_lengths(given_lengths)
    foreign = [*bounds.cu_seqlens.tolist(), *[bounds.rows] * repeats, *[0] * zeros]
    assert Boundaries.from_cu_seqlens(foreign) == bounds
    rows = bounds.rows + slack
    assert Boundaries.from_cu_seqlens(foreign, rows) == bounds.padded_to(rows)


def test_zero_tail_of_16_rows_means_4_8_16():
    assert Boundaries.from_cu_seqlens([0, 4, 8, 0, 0], rows=16).ends == (4, 8, 16)


def test_65_rows_in_72_end_at_72():
    assert Boundaries.from_lengths([65]).padded_to(72).ends == (65, 72)


def test_full_bucket_with_spare_slots_repeats_the_end():
    padded = Boundaries.from_lengths([4, 4]).padded_to(8, slots=4)
    assert padded.cu_seqlens.tolist() == [0, 4, 8, 8, 8]
    assert padded.actual_seq_lengths == [4, 8]
    with pytest.raises(BoundariesError, match=r"^2 sequences and 0 padding rows leave one of 4"):
        Boundaries.from_lengths([4, 4]).padded_to(8, slots=4, allow_empty=False)


def test_slots_without_empty_sequences_under_a_short_bound():
    # Cutting one-row dummies first once left the rest too few sequences for the slots.
    padded = Boundaries.from_lengths([2]).padded_to(7, slots=4, longest=4, allow_empty=False)
    assert len(padded.ends) == 4
    assert max(padded.lengths) <= 4


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ((), "^boundaries need at least one end"),
        ((0,), "^ends must be strictly increasing"),
        ((-1, 4), "^ends must be strictly increasing"),
        ((4, 4), "^ends must be strictly increasing"),
        ((8, 4), "^ends must be strictly increasing"),
        ((4.0,), "^end 0 must be a host integer"),
        (("4",), "^end 0 must be a host integer"),
        ((True, 4), "^end 0 must be a host integer"),
        ((np.bool_(True),), "^end 0 must be a host integer"),
        ((None,), "^end 0 must be a host integer"),
        ((2**31,), "^ends must fit"),
    ],
)
def test_ends_that_describe_no_rows_are_refused(ends, message):
    with pytest.raises(BoundariesError, match=message):
        Boundaries(ends)


@pytest.mark.parametrize("spare", [-1, 1.0, True, None])
def test_spare_slots_are_a_count(spare):
    with pytest.raises(BoundariesError, match=r"^spare_slots must be"):
        Boundaries((4,), spare)


def test_counts_of_any_integer_kind_are_kept_as_host_ints():
    found = Boundaries(np.array([4, 9], np.int32), np.uint8(2))
    assert list(map(type, (*found.ends, found.spare_slots))) == [int] * 3


@pytest.mark.parametrize("bad", [0, -3])
def test_lengths_below_one_are_refused(bad):
    with pytest.raises(BoundariesError, match=rf"^length 1 is {bad}; a sequence has 1 row or more"):
        Boundaries.from_lengths([2, bad])


@pytest.mark.parametrize("cu_seqlens", [[], [1, 2], [0], [0, 0, 0], [0, 4, 2, 6]])
def test_cu_seqlens_that_describe_no_rows_are_refused(cu_seqlens):
    with pytest.raises(BoundariesError):
        Boundaries.from_cu_seqlens(cu_seqlens)


def test_rows_past_the_buffer_are_refused():
    with pytest.raises(BoundariesError, match=r"^9 rows of sequences do not fit a buffer of 8"):
        Boundaries.from_lengths([9]).padded_to(8)
    with pytest.raises(BoundariesError, match=r"^2 sequences and 1 of padding do not fit 2 slots"):
        Boundaries.from_lengths([3, 3]).padded_to(8, slots=2)
    with pytest.raises(BoundariesError, match=r"^longest must be 1 or more, not 0"):
        Boundaries.from_lengths([3]).padded_to(8, slots=2, longest=0)


def test_numpy_integers_are_host_integers():
    assert Boundaries(tuple(np.array([3, 8], dtype=np.int64))).ends == (3, 8)
    assert all(type(end) is int for end in Boundaries(tuple(np.array([3, 8]))).ends)


def test_a_tensor_is_refused_since_reading_it_could_wait_for_a_device():
    for make in (Boundaries, Boundaries.from_lengths, Boundaries.from_cu_seqlens):
        with pytest.raises(BoundariesError, match="must be a host integer"):
            make(tuple(torch.tensor([3, 8])))


def test_cu_seqlens_cannot_be_written():
    with pytest.raises(ValueError, match="read-only"):
        Boundaries((4,)).cu_seqlens[0] = 1


def test_long_boundaries_are_shortened_in_messages():
    with pytest.raises(BoundariesError) as caught:
        Boundaries((*range(1, 1000), 999))
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("value", [None, 5, 2.5])
def test_what_is_no_list_is_refused(value):
    with pytest.raises(BoundariesError, match=r"^boundaries are a list of host integers, got "):
        Boundaries(value)


@pytest.mark.parametrize(("at", "name"), [(0, "rows"), (1, "slots"), (2, "longest")])
@pytest.mark.parametrize("value", [10.0, "10", True, torch.tensor(10)])
def test_room_is_counted_in_host_integers(at, name, value):
    room = [10, 10, 10]
    room[at] = value
    with pytest.raises(BoundariesError, match=rf"^{name} must be a host integer, got "):
        Boundaries((3,)).padded_to(*room)
