"""vLLM's Qwen vision blocks, called part by part: queries and keys stay where they were projected.

The blocks copy queries and keys together before they rotate them: a pass over two thirds of the
projection in every layer. The rotary embedding and the attention kernels take strided rows as
well, with the same result, bit by bit. On an H200 a replay of the full-size tower takes 3 to 5 %
less (`docs/benchmarks.md`).
"""

from collections.abc import Mapping
from typing import Any

import torch


def through_parts(
    block: Any, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **boundaries: Any
) -> torch.Tensor:
    """What `block(hidden, ...)` computes.

    Args:
        block: `Qwen3_VisionBlock` of vLLM or vLLM-Omni.
        hidden: (rows, 1, width).
        cos: (rows, half of a head's width), of the rows' places.
        sin: as `cos`.
        boundaries: `cu_seqlens`, `max_seqlen` and `sequence_lengths`, as the block takes them.
    """
    hidden = hidden + _attended(block.attn, block.norm1(hidden), cos, sin, boundaries)
    mixed: torch.Tensor = hidden + block.mlp(block.norm2(hidden))
    return mixed


def _attended(
    attention: Any,
    hidden: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    boundaries: Mapping[str, Any],
) -> torch.Tensor:
    """A function of its own: what it holds is free again before the MLP takes its share."""
    rows, heads = len(hidden), attention.num_attention_heads_per_partition
    projected = linear(attention.qkv, hidden).view(rows, 3, heads, -1)
    rotated = attention.apply_rotary_emb(projected[:, :2].transpose(0, 1), cos, sin)
    mixed = attention.attn(
        query=rotated[:1], key=rotated[1:], value=projected[:, 2].unsqueeze(0), **boundaries
    )
    return linear(attention.proj, mixed.reshape(rows, 1, -1))


def linear(layer: Any, rows: torch.Tensor) -> torch.Tensor:
    """A linear layer's output, which some layers give with a bias beside it."""
    output = layer(rows)
    result: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return result
