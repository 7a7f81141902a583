"""Packed attention in modules of transformers: what it computes, and what it refuses."""

from itertools import accumulate
from typing import ClassVar

import pytest
import torch
from torch import nn
from transformers import PixtralVisionConfig, PixtralVisionModel, PreTrainedConfig

from graphhal.adapters.transformers_attention import packed_attention_of, use_packed_attention
from graphhal.errors import AdapterError

WIDTH, HEADS = 32, 4
LENGTHS = (3, 1, 5)
ROWS = sum(LENGTHS)


def config() -> PixtralVisionConfig:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2}
    return PixtralVisionConfig(**sizes, num_attention_heads=HEADS, image_size=64, patch_size=16)


def layers(own: PixtralVisionConfig | None = None) -> nn.Module:
    """They hand keywords that they do not know on to their attention."""
    torch.manual_seed(0)
    tower = PixtralVisionModel._from_config(own or config(), attn_implementation="sdpa")
    return tower.eval().transformer


def encode(tower: nn.Module, rows: torch.Tensor, **keywords) -> torch.Tensor:
    angles = torch.linspace(0, 1, WIDTH // HEADS).expand(1, rows.shape[1], -1)
    mask = keywords.pop("attention_mask", None)
    return tower(rows, mask, (angles.cos(), angles.sin()), **keywords).last_hidden_state


def rows(batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def packed(tower: nn.Module, batch: int = 1, **keywords) -> torch.Tensor:
    ends = torch.tensor((0, *accumulate(LENGTHS)), dtype=torch.int32)
    boundaries = {"cu_seq_lens_q": ends, "max_length_q": max(LENGTHS)}
    return encode(tower, rows(batch), **{**boundaries, **keywords})


def one_by_one(tower: nn.Module) -> torch.Tensor:
    return torch.cat([encode(tower, part) for part in rows().split(LENGTHS, dim=1)], dim=1)


@pytest.mark.parametrize("scaling", [0.1, None])
def test_every_sequence_is_attended_to_alone(platform_stub, scaling):
    tower = layers()
    for layer in tower.layers:
        layer.attention.scaling = scaling
    expected = one_by_one(tower)
    use_packed_attention(tower, platform_stub.info.attention)
    torch.testing.assert_close(packed(tower), expected)


def test_every_module_has_the_attention_that_it_was_given(platform_stub):
    def other(*arguments: object) -> torch.Tensor:
        raise AssertionError("of another module")

    first, second = layers(), layers()
    use_packed_attention(first, platform_stub.info.attention)
    use_packed_attention(second, other)
    found = [packed_attention_of(tower) for tower in (first, second, layers())]
    assert found == [platform_stub.info.attention, other, None]


@pytest.mark.parametrize(
    "asked",
    [
        {"attention_mask": torch.ones(1, 1, ROWS, ROWS, dtype=torch.bool)},
        {"is_causal": True},
        {"sliding_window": 2},
        {"softcap": 30.0},
        {"s_aux": torch.zeros(HEADS)},
        {"position_bias": torch.zeros(1, HEADS, ROWS, ROWS)},
        {"cu_seq_lens_q": None},
        {"max_length_q": None},
        {"batch": 2},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_a_layer_that_asks_for_something_else_is_refused_by_name(platform_stub, asked):
    tower = layers()
    use_packed_attention(tower, platform_stub.info.attention)
    with pytest.raises(AdapterError, match=f"^PixtralAttention .*{next(iter(asked))}"):
        packed(tower, **asked)


def test_a_causal_layer_and_one_with_dropout_are_refused(platform_stub):
    tower = layers()
    use_packed_attention(tower, platform_stub.info.attention)
    attention = tower.layers[1].attention
    attention.is_causal = True
    with pytest.raises(AdapterError, match="asks for is_causal, which"):
        packed(tower)
    attention.is_causal, attention.dropout = False, 0.1
    torch.testing.assert_close(packed(tower), packed(tower))
    tower.train()
    with pytest.raises(AdapterError, match="asks for dropout, which"):
        packed(tower)


class PairConfig(PreTrainedConfig):
    sub_configs: ClassVar = {"vision_config": PixtralVisionConfig}


class Pair(nn.Module):
    """A module whose configuration holds that of its layers."""

    def __init__(self, own: PairConfig) -> None:
        super().__init__()
        self.config, self.layers = own, layers(own.vision_config)


def test_layers_with_a_configuration_within_another_are_changed_too(platform_stub):
    own = PairConfig(vision_config=config())
    pair, other = Pair(own), Pair(own)
    expected = one_by_one(pair.layers)
    use_packed_attention(pair, platform_stub.info.attention)
    torch.testing.assert_close(packed(pair.layers), expected)
    assert pair.layers.config is pair.config.vision_config
    torch.testing.assert_close(one_by_one(other.layers), expected)
