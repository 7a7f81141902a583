"""Layers of transformers' Whisper encoder that compute the same without copying so often.

As transformers ships it, the convolutions leave their output transposed, which every sum of the
residual stream keeps and every layer copies twice; and queries, keys, values and results are each
copied from one layout to another: `docs/benchmarks.md`, "Layers".
"""

from typing import Any

import torch
from torch.nn import functional
from transformers.models.whisper.modeling_whisper import WhisperAttention, WhisperEncoder

from graphhal.adapters.exchanged_layers import exchange_layers


def use_fewer_copies(encoder: WhisperEncoder) -> None:
    """Make the layers of `encoder` compute as the classes below; see `exchange_layers`."""
    exchange_layers(encoder.modules(), {WhisperAttention: EncoderAttention})
    exchange_layers([encoder.conv2], {torch.nn.Conv1d: ChannelsLastConvolution})


class ChannelsLastConvolution(torch.nn.Conv1d):
    """A convolution whose output has the channels of a place side by side."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(clips, channels, places) to the same."""
        return super().forward(features).mT.contiguous().mT


class EncoderAttention(WhisperAttention):  # type: ignore[misc]  # untyped base
    """Attention of whole clips by `sdpa`, which takes heads where the projections put them."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: torch.Tensor | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        """(clips, places, width) to the same; as transformers does it where more is asked for."""
        more = (key_value_states, past_key_values, attention_mask, output_attentions or None)
        plain = all(asked is None for asked in more) and not self.training
        if not plain or self.config._attn_implementation != "sdpa":
            ordinary: tuple[torch.Tensor, Any] = super().forward(
                hidden_states, *more[:3], output_attentions, **kwargs
            )
            return ordinary
        shape = (*hidden_states.shape[:-1], self.num_heads, self.head_dim)
        query, key, value = (
            projected.view(shape).transpose(1, 2)
            for projected in (
                self.q_proj(hidden_states) * self.scaling,
                self.k_proj(hidden_states),
                self.v_proj(hidden_states),
            )
        )
        output = functional.scaled_dot_product_attention(query, key, value, scale=1.0)
        return self.out_proj(output.transpose(1, 2).flatten(2)), None
