"""Layers of Qwen3-Omni's vision encoder that compute the same in fewer and faster kernels.

As transformers ships them, more than half of a replay's kernels turn queries and keys by their
positions, and the convolution of the patches takes up to fifteen times as long as the matrix
product that it is: `docs/benchmarks.md`, "Layers".
"""

from typing import Any

import torch
from torch.nn import functional
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeVisionAttention,
    Qwen3OmniMoeVisionEncoder,
)

from graphhal.adapters.exchanged_layers import exchange_layers
from graphhal.adapters.transformers_attention import packed_attention_of


def use_fewer_kernels(encoder: Qwen3OmniMoeVisionEncoder) -> None:
    """Make the layers of `encoder` compute as the classes below; see `exchange_layers`."""
    exchange_layers(encoder.modules(), {Qwen3OmniMoeVisionAttention: VisionAttention})
    exchange_layers([encoder.patch_embed.proj], {torch.nn.Conv3d: PatchProjection})


class PatchProjection(torch.nn.Conv3d):
    """A convolution whose kernel covers its whole input, as one matrix product."""

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """(patches, channels, frames, height, width) to (patches, hidden, 1, 1, 1)."""
        hidden = functional.linear(patches.flatten(1), self.weight.flatten(1), self.bias)
        return hidden[:, :, None, None, None]


class VisionAttention(Qwen3OmniMoeVisionAttention):  # type: ignore[misc]  # untyped base
    """Packed attention that turns queries and keys together."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        position_embeddings: Any = None,
        max_seqlen: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """(rows, hidden) to the same; as transformers does it where attention is not packed."""
        attention = packed_attention_of(self)
        if attention is None or max_seqlen is None:
            ordinary: torch.Tensor = super().forward(
                hidden_states, cu_seqlens, position_embeddings, max_seqlen, **kwargs
            )
            return ordinary
        rows = len(hidden_states)
        packed = self.qkv(hidden_states).view(rows, 3, self.num_heads, -1)
        query, key = turned(packed[:, :2], *position_embeddings).unbind(1)
        output = attention(query, key, packed[:, 2], cu_seqlens, max_seqlen, self.scaling)
        projected: torch.Tensor = self.proj(output.reshape(rows, -1))
        return projected


def turned(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions: dims that are half a head apart, turned by the angle of their row.

    Computed in float32, as transformers does, in four kernels.

    Args:
        states: (rows, 2, heads, head_dim), of any dtype.
        cos: of the angles, (rows, head_dim) float32.
        sin: of the angles.

    Returns:
        A contiguous tensor like `states`.
    """
    half = states.shape[-1] // 2
    cos, sin = cos[:, None, None], sin[:, None, None]
    output = states * cos
    output[..., :half].addcmul_(states[..., half:], sin[..., :half], value=-1)
    output[..., half:].addcmul_(states[..., :half], sin[..., half:])
    return output.to(states.dtype)
