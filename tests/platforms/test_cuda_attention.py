"""Packed attention of platform cuda: what can be shown without a device."""

import pytest
import torch

from graphhal.boundaries import Boundaries
from graphhal.cuda import attention, kernels


def looped(query, key, value, lengths, scale):
    """One sequence after another, in double precision."""
    parts, start = [], 0
    for length in lengths:
        q, k, v = (t[start : start + length].double() for t in (query, key, value))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
        start += length
    return torch.cat(parts)


def assert_near(got, want, tolerance=1e-5):
    torch.testing.assert_close(got.double(), want.double(), atol=tolerance, rtol=tolerance)


def tensors(rows, width, dtype=torch.float32):
    torch.manual_seed(rows * width)
    return [torch.randn(rows, 2, width).to(dtype) for _ in range(3)]


def ends(lengths, slots=None):
    bounds = Boundaries.from_lengths(lengths).padded_to(sum(lengths), slots)
    return torch.from_numpy(bounds.cu_seqlens.copy())


@pytest.mark.parametrize("slots", [None, 7])
@pytest.mark.parametrize("lengths", [(6,), (1, 4, 1), (2, 2, 2)])
def test_the_masked_path_attends_within_sequences_and_ignores_spare_slots(lengths, slots):
    query, key, value = tensors(6, 16)
    got = attention.masked_attention(query, key, value, ends(lengths, slots), 0.3)
    assert_near(got, looped(query, key, value, lengths, 0.3))


def test_the_masked_path_reads_nothing_on_the_host():
    query, key, value = (t.to("meta") for t in tensors(6, 16))
    got = attention.masked_attention(query, key, value, ends((6,)).to("meta"), 0.3)
    assert got.shape == (6, 2, 16)


def test_rows_past_the_last_end_stay_finite_on_the_masked_path():
    query, key, value = tensors(6, 16)
    got = attention.masked_attention(query, key, value, ends((2, 2)), 0.3)
    assert bool(got.isfinite().all())
    assert_near(got[:4], looped(query[:4], key[:4], value[:4], (2, 2), 0.3))


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_sequence_that_is_not_finite_spoils_no_other_on_the_masked_path(which, number):
    of_all = tensors(6, 16)
    want = looped(*of_all, (2, 3, 1), 0.3)
    of_all[which][3, 1, 4] = number
    got = attention.masked_attention(*of_all, ends((2, 3, 1)), 0.3)
    assert bool(got[2:5].isnan().all())
    assert_near(torch.cat((got[:2], got[5:])), torch.cat((want[:2], want[5:])))


class Kernel:
    """Records what it is given and answers like FlashAttention."""

    def __init__(self, lengths):
        self.lengths, self.calls = lengths, []

    def __call__(self, query, key, value, cu_seqlens, max_seqlen, scale):
        self.calls.append((query.dtype, query.shape[-1], max_seqlen, scale))
        assert query.shape[-1] % 8 == 0
        assert query.dtype in (torch.float16, torch.bfloat16)
        return looped(query, key, value, self.lengths, scale).to(query.dtype)


@pytest.mark.parametrize(("width", "given"), [(72, 72), (20, 24), (80, 80)])
def test_head_dims_are_padded_to_what_the_kernel_takes(width, given):
    query, key, value = tensors(6, width, torch.bfloat16)
    kernel = Kernel((2, 4))
    got = attention.PackedAttention(kernel)(query, key, value, ends((2, 4)), 4, 0.3)
    assert kernel.calls == [(torch.bfloat16, given, 4, 0.3)]
    assert got.shape == query.shape
    want = looped(query, key, value, (2, 4), 0.3)
    assert_near(got, want, 2e-2)


@pytest.mark.parametrize(
    ("width", "dtype"), [(72, torch.float32), (264, torch.bfloat16), (72, torch.float64)]
)
def test_what_the_kernel_does_not_take_goes_by_the_mask(width, dtype):
    query, key, value = tensors(6, width, dtype)
    kernel = Kernel((2, 4))
    got = attention.PackedAttention(kernel)(query, key, value, ends((2, 4)), 4, 0.3)
    assert kernel.calls == []
    want = looped(query, key, value, (2, 4), 0.3)
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5
    assert_near(got, want, tolerance)


def test_a_device_too_old_for_flash_attention_takes_the_mask():
    query, key, value = tensors(6, 16, torch.bfloat16)
    got = attention.bind_attention((7, 5))(query, key, value, ends((2, 4)), 4, 0.3)
    assert got.dtype is torch.bfloat16


class Dense:
    """Attends as cuDNN does, all rows to all, and records the shapes that it is given."""

    def __init__(self, error=None):
        self.error, self.calls = error, []

    def __call__(self, query, key, value, scale):
        if self.error is not None:
            raise self.error
        self.calls.append((query.shape[-1], key.shape[-1], value.shape[-1]))
        q, k, v = (t.double() for t in (query, key, value))
        scores = (q @ k.transpose(-1, -2) * scale).float()
        return (scores.softmax(-1).double() @ v).to(query.dtype)


@pytest.fixture
def short_ones(monkeypatch):
    monkeypatch.setattr(attention, "LONE_SEQUENCE_FROM", 6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("lengths", "slots"), [((6,), None), ((6,), 2), ((5, 1), None), ((1, 5), None), ((3, 3), None)]
)
def test_a_lone_sequence_and_its_padding_stay_apart(short_ones, lengths, slots, dtype):
    query, key, value = (16 * t for t in tensors(6, 72, dtype))  # scores in the hundreds
    dense, kernel = Dense(), Kernel(lengths)
    packed = attention.PackedAttention(kernel, dense)
    got = packed(query, key, value, ends(lengths, slots), 6, 72**-0.5)
    assert dense.calls == [(80, 80, 72)]
    assert kernel.calls == []
    want = looped(query, key, value, lengths, 72**-0.5)
    assert_near(got / 16, want / 16, 2e-2)


@pytest.mark.parametrize(("rows", "computed"), [(64, 64), (65, 68), (71, 72), (129, 136)])
def test_few_numbers_of_rows_reach_cudnn(short_ones, rows, computed):
    query, key, value = tensors(rows, 72, torch.bfloat16)
    dense, given = Dense(), []

    def count(query, *rest):
        given.append(query.shape[2])
        return dense(query, *rest)

    packed = attention.PackedAttention(Kernel(()), count)
    for lengths, slots in (((rows,), None), ((rows,), 2), ((rows - 9, 9), None)):
        got = packed(query, key, value, ends(lengths, slots), rows, 0.1)
        assert got.shape == query.shape
        assert_near(got, looped(query, key, value, lengths, 0.1), 2e-2)
    assert given == [computed] * 3


def test_padding_does_not_change_a_lone_sequences_bits(short_ones):
    query, key, value = tensors(8, 72, torch.bfloat16)
    packed = attention.PackedAttention(Kernel(()), Dense())
    alone = packed(*(t[:6] for t in (query, key, value)), ends((6,)), 6, 0.3)
    assert torch.equal(packed(query, key, value, ends((6, 2)), 8, 0.3)[:6], alone)


@pytest.mark.parametrize(
    ("case", "rows", "lengths", "slots", "bound", "width", "heads"),
    [
        ("short", 5, (5,), None, 5, 72, 2),
        ("other sequences may come", 6, (4, 2), 3, 6, 72, 2),
        ("no sequence takes all rows", 6, (4, 2), None, 5, 72, 2),
        ("a head dim that more dims make dearer", 6, (6,), None, 6, 64, 2),
        ("a head dim beyond cuDNN's", 6, (6,), None, 6, 128, 2),
        ("a head dim that is no step of 8", 6, (6,), None, 6, 76, 2),
        ("fewer heads of keys", 6, (6,), None, 6, 72, 1),
    ],
)
def test_what_is_not_lone_is_flash_attentions(
    short_ones, case, rows, lengths, slots, bound, width, heads
):
    query, key, value = tensors(rows, width, torch.bfloat16)
    dense, calls = Dense(), []

    def flash(query, *rest):
        calls.append(query.shape[-1])
        return query

    packed = attention.PackedAttention(flash, dense)
    packed(query, key[:, :heads], value[:, :heads], ends(lengths, slots), bound, 0.3)
    assert (len(calls), dense.calls) == (1, []), case


def test_flash_attention_takes_over_where_cudnn_fails(short_ones, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    query, key, value = tensors(6, 72, torch.bfloat16)
    dense, kernel = Dense(RuntimeError("cuDNN Frontend error: no plan")), Kernel((6,))
    packed = attention.PackedAttention(kernel, dense)
    for _ in range(2):
        packed(query, key, value, ends((6,)), 6, 0.3)
    assert len(kernel.calls) == 2
    assert caplog.text.count("no plan") == 1
    assert packed.lone_sequence_from is None


@pytest.mark.parametrize(
    ("error", "capturing"),
    [(torch.OutOfMemoryError("full"), False), (RuntimeError("operation not permitted"), True)],
)
def test_other_failures_are_not_hidden(short_ones, monkeypatch, error, capturing):
    """Out of memory, FlashAttention would not help; a capture that was ended must fail."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    query, key, value = tensors(6, 72, torch.bfloat16)
    packed = attention.PackedAttention(Kernel((6,)), Dense(error))
    with pytest.raises(type(error), match=str(error)):
        packed(query, key, value, ends((6,)), 6, 0.3)


def test_cudnn_is_left_alone_where_its_arguments_are_unknown(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    assert kernels.cudnn_kernel() is not None
    monkeypatch.setattr(kernels, "_DENSE_OPERATOR", ("another", "operator"))
    assert kernels.cudnn_kernel() is None


def test_the_operator_is_called_directly_where_its_arguments_are_known():
    assert kernels.flash_kernel().__name__ == "direct"


def test_the_wrapper_is_used_where_the_operators_arguments_are_unknown(monkeypatch):
    monkeypatch.setattr(kernels, "_VARLEN_OPERATOR", ("another", "operator"))
    assert kernels.flash_kernel().__name__ == "wrapped"


@pytest.mark.parametrize("takes_scale", [True, False])
def test_the_wrapper_scales_the_query_where_it_takes_no_scale(monkeypatch, takes_scale):
    from torch.nn.attention import varlen

    def with_scale(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=None):
        return looped(q, k, v, (2, 4), scale)

    def without(q, k, v, cu_q, cu_k, max_q, max_k, is_causal=False):
        return (looped(q, k, v, (2, 4), q.shape[-1] ** -0.5), None)

    monkeypatch.setattr(varlen, "varlen_attn", with_scale if takes_scale else without)
    query, key, value = tensors(6, 16)
    got = kernels.wrapped_kernel()(query, key, value, ends((2, 4)), 4, 0.3)
    assert_near(got, looped(query, key, value, (2, 4), 0.3))
