"""Packed attention by `cu_seqlens` as one operator, careless about padding like a device kernel."""

from itertools import pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention

from graphhal.errors import BoundariesError

_NAME = "graphhal::varlen_attention"

torch.library.define(
    _NAME,
    "(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens, int max_seqlen, float scale)"
    " -> Tensor",
)


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
) -> torch.Tensor:
    """Attention within each sequence of the packed rows.

    Args:
        query: (rows, heads, head_dim), floating point.
        key: (rows, key heads, head_dim); key heads divide heads.
        value: (rows, key heads, value dim).
        cu_seqlens: int32, n+1 entries, leading zero, never falling; a repeated end is an empty
            sequence. Read by the kernel, never by the caller.
        max_seqlen: host bound, baked at capture. Of a longer sequence only the first
            `max_seqlen` rows are read and written.
        scale: factor of the scores.

    Returns:
        (rows, heads, value dim). Rows past the last end, and past the bound, hold NaN: a device
        kernel leaves them unwritten.

    Raises:
        BoundariesError: `cu_seqlens` does not start with 0, falls, or ends past the rows.
    """
    result: torch.Tensor = torch.ops.graphhal.varlen_attention(
        query, key, value, cu_seqlens, max_seqlen, scale
    )
    return result


@torch.library.impl(_NAME, "cpu")  # type: ignore[untyped-decorator, unused-ignore]
def _kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
) -> torch.Tensor:
    rows, heads = query.shape[:2]
    ends = cu_seqlens.tolist()
    if not ends or ends[0] != 0 or ends[-1] > rows or any(b < a for a, b in pairwise(ends)):
        raise BoundariesError(
            f"cu_seqlens must start with 0, never fall and end within the {rows} rows, got "
            f"{ends[:12]}{'…' if len(ends) > 12 else ''}"
        )
    grouped = key.shape[1] != heads
    output = query.new_full((rows, heads, value.shape[-1]), float("nan"))
    # (rows, heads, dim) -> (1, heads, rows, dim), as the dense kernel wants it.
    batched = [x.transpose(0, 1).unsqueeze(0) for x in (query, key, value, output)]
    for start, end in pairwise(ends):
        length = min(end - start, max_seqlen)
        if length > 0:
            q, k, v, out = (x.narrow(2, start, length) for x in batched)
            out.copy_(scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=grouped))
    return output


@torch.library.register_fake(_NAME)  # type: ignore[untyped-decorator, unused-ignore]
def _fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
) -> torch.Tensor:
    return query.new_empty((query.shape[0], query.shape[1], value.shape[-1]))
