"""What a model prepared, copied into a graph's buffers, or refused; no vLLM needed."""

import gc

import pytest
import torch

from graphhal.errors import RefusedError
from graphhal.vllm_worker.protocol_staging import KEPT_VIEWS, Captured, Padding, copies

NAN = float("nan")


def captured(**options) -> Captured:
    return Captured(1, 4, 4, 4, {}, options.get("constants", {}), options.get("ends", {}))


def padding(bound: int) -> Padding:
    """Of a buffer with five sequence slots, sixteen rows in all."""
    return Padding(16, bound, torch.arange(1, 6, dtype=torch.int32) * bound)


@pytest.mark.parametrize("rows", [0, 1, 4, 6])
def test_rows_are_copied_and_the_rest_zeroed(rows):
    target = torch.full((6, 3), NAN)
    copy = copies(captured(), {"pixels": target}, {})
    for seed in range(2):
        source = torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed))
        target.fill_(NAN)
        copy({"pixels": source, "unused": None})
        assert torch.equal(target[:rows], source)
        assert torch.equal(target[rows:], torch.zeros(6 - rows, 3))


def test_other_row_counts_than_the_first_are_right_too():
    target = torch.full((30, 2), NAN)
    copy = copies(captured(), {"pixels": target}, {})
    for rows in [*range(1, 2 * KEPT_VIEWS), 3, 30, 1]:
        target.fill_(NAN)
        copy({"pixels": torch.ones(rows, 2)})
        assert target.sum() == 2 * rows


def test_views_of_many_sizes_do_not_pile_up():
    pixels, ends = torch.zeros(60, 2), torch.zeros(60, dtype=torch.int32)
    steps = Padding(99, 99, torch.arange(1, 60, dtype=torch.int32) * 99)
    buffers = {"pixels": pixels, "cu_seqlens": ends}
    copy = copies(captured(ends={"cu_seqlens": steps}), buffers, {})
    for rows in range(1, 50):
        copy({"pixels": torch.ones(rows, 2), "cu_seqlens": torch.arange(rows, dtype=torch.int32)})
    tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    for target, kinds in ((pixels, 2), (ends, 3)):
        assert 0 < sum(each._base is target for each in tensors) <= kinds * KEPT_VIEWS


def test_buffers_of_several_dtypes_keep_their_own():
    kinds = {"pixels": torch.bfloat16, "cos": torch.float32, "ids": torch.int64}
    inputs = {name: torch.full((5, 2), 7, dtype=dtype) for name, dtype in kinds.items()}
    rows = {"pixels": 3, "cos": 5, "ids": 0}
    given = {"pixels": torch.float64, "cos": torch.float64, "ids": torch.int32}
    sources = {name: torch.ones(count, 2, dtype=given[name]) for name, count in rows.items()}
    copies(captured(), inputs, {})(sources)
    for name, target in inputs.items():
        assert target.dtype == kinds[name]
        assert target.sum() == 2 * rows[name]


@pytest.mark.parametrize("shape", [(7, 3), (2, 1), (2, 4), (6,), (), (2, 3, 1)])
def test_what_does_not_fit_is_refused(shape):
    copy = copies(captured(), {"pixels": torch.zeros(6, 3)}, {})
    with pytest.raises(RefusedError, match="pixels is"):
        copy({"pixels": torch.zeros(shape)})


@pytest.mark.parametrize("takes_raw", [False, True])
@pytest.mark.parametrize(
    ("given", "kept"), [(torch.uint8, torch.bfloat16), (torch.float32, torch.uint8)]
)
def test_raw_pixels_and_normalised_ones_are_not_mixed_up(given, kept, takes_raw):
    """Only a forward that normalises them takes raw ones, as floating-point numbers too."""
    target = torch.zeros(6, 3, dtype=kept)
    copy = copies(captured(), {"pixels": target}, {}, takes_raw)
    if takes_raw and given is torch.uint8:
        copy({"pixels": torch.full((6, 3), 255, dtype=given)})
        assert (target == 255).all()
        return
    with pytest.raises(RefusedError, match=f"pixels is {given}, the graph's buffer is {kept}"):
        copy({"pixels": torch.ones(6, 3, dtype=given)})


@pytest.mark.parametrize("values", [{}, {"pixels": None}])
def test_what_the_model_did_not_prepare_is_refused(values):
    copy = copies(captured(), {"pixels": torch.zeros(6, 3)}, {})
    with pytest.raises(RefusedError, match="no value for its buffer 'pixels'"):
        copy(values)


def test_a_scalar_is_copied():
    target = torch.tensor(0.0)
    copies(captured(), {"scale": target}, {})({"scale": torch.tensor(3.0)})
    assert target == 3.0


def test_the_models_own_padding_is_used_and_still_has_to_fit():
    target = torch.zeros(4, 2)

    def pad(into, source):
        into.fill_(-1)
        into[: len(source)].copy_(source)

    copy = copies(captured(), {"pixels": target}, {"pixels": pad})
    copy({"pixels": torch.ones(1, 2)})
    assert target.tolist() == [[1, 1], [-1, -1], [-1, -1], [-1, -1]]
    with pytest.raises(RefusedError, match="pixels is"):
        copy({"pixels": torch.ones(5, 2)})
    with pytest.raises(RefusedError, match="pixels is"):
        copy({"pixels": torch.ones(2)})  # it would be broadcast


@pytest.mark.parametrize(
    ("bound", "source", "expected"),
    [
        (4, [0, 5], [0, 5, 9, 13, 16, 16]),
        (4, [0, 5, 16], [0, 5, 16, 16, 16, 16]),
        (4, [0, 2, 4], [0, 2, 4, 8, 12, 16]),
        (4, [0, 1, 2, 3, 4, 16], [0, 1, 2, 3, 4, 16]),
        (15, [0, 1], [0, 1, 16, 16, 16, 16]),
        (15, [0], [0, 15, 16, 16, 16, 16]),
        (16, [0, 5], [0, 5, 16, 16, 16, 16]),
        (16, [0], [0, 16, 16, 16, 16, 16]),
        (40, [0, 1, 2], [0, 1, 2, 16, 16, 16]),
    ],
)
def test_padding_rows_are_sequences_no_longer_than_the_bound(bound, source, expected):
    target = torch.full((6,), -7, dtype=torch.int32)
    copy = copies(captured(ends={"cu_seqlens": padding(bound)}), {"cu_seqlens": target}, {})
    for _ in range(2):
        target.fill_(-7)
        copy({"cu_seqlens": torch.tensor(source, dtype=torch.int32)})
        assert target.tolist() == expected


@pytest.mark.parametrize("source", [[], list(range(7)), [[0, 1]]])
def test_boundaries_that_do_not_fit_are_refused(source):
    target = torch.zeros(6, dtype=torch.int32)
    copy = copies(captured(ends={"cu_seqlens": padding(4)}), {"cu_seqlens": target}, {})
    with pytest.raises(RefusedError, match="cu_seqlens is"):
        copy({"cu_seqlens": torch.tensor(source, dtype=torch.int32)})


@pytest.mark.parametrize(
    ("constant", "value", "words"),
    [
        (16, 17, "above the 16 baked"),
        ([16, 4], [16, 5], "above the"),
        (16, [16], "cannot be replaced"),
        ([16, 4], [16], "cannot be replaced"),
    ],
)
def test_a_baked_scalar_is_a_guard(constant, value, words):
    copy = copies(captured(constants={"max_seqlen": torch.tensor(constant)}), {}, {})
    copy({})
    copy({"max_seqlen": None})
    copy({"max_seqlen": torch.tensor(constant) - 1})
    copy({"max_seqlen": torch.tensor(constant)})
    with pytest.raises(RefusedError, match=words):
        copy({"max_seqlen": torch.tensor(value)})
    with pytest.raises(RefusedError, match="cannot be replaced"):
        copy({"max_seqlen": torch.tensor(constant, device="meta")})  # reading it would wait
