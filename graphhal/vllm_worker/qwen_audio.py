"""The adapter for vLLM's own Qwen3-Omni audio tower, and vLLM-Omni's; see `qwen_towers`."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from graphhal.adapter import Place
from graphhal.adapters.qwen3_omni_audio import (
    Qwen3OmniAudio,
    after_convolutions,
    frames_of,
    width_of,
)
from graphhal.adapters.qwen3_omni_vision import BOUNDARIES, CACHED_GROUPS
from graphhal.errors import AdapterError
from graphhal.items import ItemSpec
from graphhal.vllm_worker.held_tower import EAGER, HeldTower
from graphhal.vllm_worker.qwen_blocks import linear


class VllmQwenAudio(HeldTower, Qwen3OmniAudio):
    """vLLM's Qwen3-Omni audio tower: one full-width graph for each chunk count.

    Args:
        tower: `Qwen3OmniMoeAudioEncoder` of vLLM or vLLM-Omni.
        kept: where the model keeps it, and what holds it.
    """

    name = "vllm_qwen3_omni_audio"

    def __init__(self, tower: Any, kept: Sequence[Place] = ()) -> None:
        HeldTower.__init__(self, tower, kept)
        self.width = 2 * int(tower.n_window)
        self.mel = int(tower.num_mel_bins)
        self.window_tokens = after_convolutions(self.width)
        self.attention_tokens = self.window_tokens * (int(tower.n_window_infer) // self.width)
        if self.attention_tokens < 1:
            raise AdapterError(f"{self.name}: n_window_infer is shorter than one window")
        self.device = self._weight().device
        self._specs = lru_cache(CACHED_GROUPS)(self._checked_specs)

    def _weight(self) -> torch.Tensor:
        return self.tower.conv2d1.weight  # type: ignore[no-any-return]

    def eager_inputs(
        self, mm_kwargs: Mapping[str, Any], items: Sequence[ItemSpec]
    ) -> dict[str, torch.Tensor]:
        """A mark for `forward` to run the tower's own eager code on these clips.

        The tower pads to the longest window of its call: where that clip is encoded elsewhere (by
        another rank), a silent window as wide comes last in its place.
        """
        features, _ = self._features(mm_kwargs)
        lengths = [frames_of(item) for item in items]
        parts = [
            features[:, item.row_offset : item.row_offset + length]
            for item, length in zip(items, lengths, strict=True)
        ]
        width = width_of(items)
        if sum(lengths) < features.shape[1] and max(lengths) < width:
            parts.append(features.new_zeros(self.mel, width))
        self._eager_items = tuple(items)
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return {EAGER: joined.to(self.device, self.dtype)}

    def forward(
        self, inputs: Mapping[str, torch.Tensor], max_seqlen: Mapping[str, int]
    ) -> torch.Tensor:
        """Features (tokens, output_dim)."""
        if EAGER in inputs:
            return self._eager_forward(inputs[EAGER])
        tower = self.tower
        embedded = self.windows(inputs).unsqueeze(1)
        parts = torch.split(embedded, tower.conv_chunksize)
        convolved = [self._convolved(part) for part in parts]
        embedded = convolved[0] if len(convolved) == 1 else torch.cat(convolved)
        count, channels, bands, places = embedded.shape
        hidden = linear(
            tower.conv_out,
            embedded.permute(0, 3, 1, 2).reshape(count, places, channels * bands),
        )
        table = tower.positional_embedding.positional_embedding[:places].to(hidden.dtype)
        hidden = (hidden + table).reshape(count * places, -1)
        hidden = hidden.index_select(0, inputs["valid_indices"])
        bound = torch.tensor(max_seqlen[BOUNDARIES], dtype=torch.int32)
        for layer in tower.layers:
            hidden = layer(hidden, inputs[BOUNDARIES], bound)
        hidden = tower.act(linear(tower.proj1, tower.ln_post(hidden)))
        return linear(tower.proj2, hidden)

    def _convolved(self, part: torch.Tensor) -> torch.Tensor:
        for convolution in (self.tower.conv2d1, self.tower.conv2d2, self.tower.conv2d3):
            part = torch.nn.functional.gelu(convolution(part))
        return part

    def _eager_forward(self, features: torch.Tensor) -> torch.Tensor:
        items = self._take_eager_items()
        lengths, tokens = [frames_of(item) for item in items], [item.tokens for item in items]
        own = sum(tokens)
        silence = features.shape[1] - sum(lengths)
        if silence:
            lengths.append(silence)
            tokens.append(after_convolutions(silence))
        output: torch.Tensor = self.tower(
            features,
            feature_lens=torch.tensor(lengths, device=self.device),
            aftercnn_lens=torch.tensor(tokens, device=self.device),
        )
        return output[:own] if silence else output
