"""Packed attention by a mask, in PyTorch's own operators, for what a platform's kernel refuses."""

import torch
from torch.nn import functional


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention within each sequence of the packed rows, for any floating dtype and width.

    Reads nothing on the host. Its mask takes rows × rows bytes: for parity tests and small towers.
    A sequence with a value that is not finite comes out as NaN, and no other is touched by it.

    Args:
        query: (rows, heads, head_dim).
        key: (rows, key heads, head_dim); key heads divide heads.
        value: (rows, key heads, value dim).
        cu_seqlens: int32, n+1 entries, leading zero, never falling. Rows past the last end are a
            sequence of their own.
        scale: factor of the scores.

    Returns:
        (rows, heads, value dim), of the same dtype.
    """
    rows = torch.arange(query.shape[0], dtype=cu_seqlens.dtype, device=query.device)
    owner = torch.searchsorted(cu_seqlens[1:], rows, right=True)
    within = owner[:, None] == owner[None, :]
    # A mask is added to the scores, and weights of 0 are multiplied: NaN would pass through both.
    spoilt = torch.stack([~x.flatten(1).isfinite().all(1) for x in (query, key, value)]).any(0)
    query, key, value = (x.masked_fill(spoilt[:, None, None], 0) for x in (query, key, value))
    output = functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=within,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    spoilt = (within & spoilt[None, :]).any(1)
    return output[0].transpose(0, 1).masked_fill(spoilt[:, None, None], float("nan"))
