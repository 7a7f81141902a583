"""Packed attention of the reference platform: by `cu_seqlens`, and as careless as a kernel."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from graphhal.boundaries import Boundaries
from graphhal.cpu import attention
from graphhal.cpu.attention import varlen_attention
from graphhal.errors import BoundariesError, ReplayError
from tests.platforms.cpu_case import Case


def packed(
    rows: int, dtype: torch.dtype = torch.float32, heads: int = 2, key_heads: int = 2, dim: int = 8
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return tuple(  # type: ignore[return-value]
        torch.randn(rows, count, dim, generator=generator).to(dtype)
        for count in (heads, key_heads, key_heads)
    )


def by_sequence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], scale: float
) -> torch.Tensor:
    """The slow, obvious model: each sequence alone, in double precision, softmax spelt out."""
    results = []
    for qs, ks, vs in zip(*(x.double().split(lengths) for x in (q, k, v)), strict=True):
        scores = torch.einsum("qhd,khd->hqk", qs, ks) * scale
        results.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), vs))
    return torch.cat(results)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: list[int], longest: int = 99
) -> torch.Tensor:
    return varlen_attention(q, k, v, torch.tensor(ends, dtype=torch.int32), longest, 0.3)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_equals_each_sequence_alone(lengths: list[int]) -> None:
    q, k, v = packed(sum(lengths))
    result = attend(q, k, v, Boundaries.from_lengths(lengths).cu_seqlens.tolist())
    torch.testing.assert_close(
        result.double(), by_sequence(q, k, v, lengths, 0.3), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(("dtype", "close"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_other_dtypes(dtype: torch.dtype, close: float) -> None:
    q, k, v = packed(9, dtype)
    result = attend(q, k, v, [0, 4, 9])
    assert result.dtype == dtype
    torch.testing.assert_close(
        result.double(), by_sequence(q, k, v, [4, 5], 0.3), rtol=close, atol=close
    )


def test_a_sequence_does_not_see_its_neighbours_bit_for_bit() -> None:
    q, k, v = packed(12)
    whole = attend(q, k, v, [0, 5, 12])
    assert torch.equal(whole[:5], attend(q[:5], k[:5], v[:5], [0, 5]))
    dense = F.scaled_dot_product_attention(
        *(x[5:].transpose(0, 1)[None] for x in (q, k, v)), scale=0.3
    )
    assert torch.equal(whole[5:], dense[0].transpose(0, 1))


def test_rows_past_the_last_end_are_never_read_and_left_unwritten() -> None:
    q, k, v = packed(8)
    for tensor in (q, k, v):
        tensor[6:] = float("nan")
    result = attend(q, k, v, [0, 2, 6])
    assert result[:6].isfinite().all()
    assert result[6:].isnan().all()


def test_max_seqlen_baked_too_small_bites() -> None:
    q, k, v = packed(10)
    result = attend(q, k, v, [0, 7, 10], longest=4)
    torch.testing.assert_close(
        result[:4].double(), by_sequence(q[:4], k[:4], v[:4], [4], 0.3), rtol=1e-6, atol=1e-6
    )
    assert result[4:7].isnan().all()
    assert result[7:].isfinite().all()


def test_zero_length_sequences_do_nothing() -> None:
    q, k, v = packed(6)
    spare = Boundaries.from_lengths([2, 4]).padded_to(6, slots=5).cu_seqlens.tolist()
    assert spare == [0, 2, 6, 6, 6, 6]
    assert torch.equal(attend(q, k, v, spare), attend(q, k, v, [0, 2, 6]))
    assert torch.equal(attend(q, k, v, [0, 0, 2, 2, 6]), attend(q, k, v, [0, 2, 6]))


def test_spare_slots_cost_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def counted(q: torch.Tensor, *rest: torch.Tensor, **options: object) -> torch.Tensor:
        lengths.append(q.shape[2])
        return F.scaled_dot_product_attention(q, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "scaled_dot_product_attention", counted)
    attend(*packed(6), [0, 0, 2, 6, 6, 6])
    assert lengths == [2, 4]


@pytest.mark.parametrize("ends", [[0, 4, 2, 6], [1, 6], [0, 4, 8, 0, 0], [0, 7], [0, -1, 6], []])
def test_ends_that_fall_or_leave_the_rows_raise(ends: list[int]) -> None:
    with pytest.raises(BoundariesError, match=r"^cu_seqlens must start with 0, never fall"):
        attend(*packed(6), ends)


def test_grouped_keys_and_another_value_width() -> None:
    q, k, v = packed(6, heads=4, key_heads=2)
    result = attend(q, k, v[..., :5], [0, 6])
    wide = (x.repeat_interleave(2, dim=1) for x in (k, v[..., :5]))
    torch.testing.assert_close(
        result.double(), by_sequence(q, *wide, [6], 0.3), rtol=1e-6, atol=1e-6
    )


def test_strided_operands_give_the_same() -> None:
    q, k, v = packed(6)
    qkv = torch.stack([q, k, v], dim=1)
    assert torch.equal(attend(*qkv.unbind(1), [0, 2, 6]), attend(q, k, v, [0, 2, 6]))


def test_replay_reads_the_boundaries_that_the_buffer_holds_then() -> None:
    q, k, v = packed(8)
    ends = torch.tensor([0, 4, 8], dtype=torch.int32)
    case = Case(lambda q, ends: varlen_attention(q, k, v, ends, 8, 0.3), q, ends)
    for other in ([0, 7, 8], [0, 3, 3], [0, 1, 6]):
        result = case.replay(q, torch.tensor(other, dtype=torch.int32))[0]
        expected = attend(q, k, v, other)
        assert torch.equal(result.nan_to_num(9.0), expected.nan_to_num(9.0))
    with pytest.raises(ReplayError, match=r"^graphhal\.varlen_attention.* BoundariesError"):
        case.replay(q, torch.tensor([0, 5, 4], dtype=torch.int32))


def test_shape_is_known_without_running() -> None:
    q, k, v = (x.to("meta") for x in packed(6, torch.bfloat16))
    result = varlen_attention(q, k, v[..., :5], torch.zeros(3, device="meta"), 6, 1.0)
    assert result.shape == (6, 2, 5)
    assert result.dtype == torch.bfloat16
