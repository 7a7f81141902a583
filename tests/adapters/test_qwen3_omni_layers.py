"""Hazards of the vision encoder's own layers: other results, hooks not run, copies that share."""

import copy
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeVisionAttention,
    apply_rotary_pos_emb_vision,
)

from graphhal.adapters.qwen3_omni_layers import (
    PatchProjection,
    VisionAttention,
    turned,
    use_fewer_kernels,
)
from graphhal.adapters.qwen3_omni_vision import Qwen3OmniVisionFactory
from graphhal.platform import Platform

FACTORY = Qwen3OmniVisionFactory()
GRID = [[1, 6, 10], [1, 4, 4]]


class Operators(TorchDispatchMode):
    """Collects the names of operators that compute, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def towers(platform_stub: Platform) -> tuple[Any, Any]:
    """The adapter with its own layers, and the encoder as it came."""
    adapter = FACTORY.build("tiny", torch.device("cpu"), torch.float32, seed=3)
    ordinary = copy.deepcopy(adapter.encoder)
    adapter.prepare(platform_stub)
    return adapter, ordinary


def request_of(adapter: Any) -> dict[str, Any]:
    items = adapter.item_specs(
        {"pixel_values": torch.zeros(76, adapter.patch_width), "image_grid_thw": GRID}
    )
    request: dict[str, Any] = adapter.example(items, 0)
    return request


def features(encoder: Any, request: dict[str, Any]) -> torch.Tensor:
    """What the encoder computes, called as its model calls it."""
    features: torch.Tensor = encoder(
        request["pixel_values"], torch.tensor(request["image_grid_thw"])
    ).pooler_output
    return features


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_turning_equals_what_transformers_does(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn((11, 3, 4, 36), generator=generator).to(dtype)
    angles = torch.randn((11, 18), generator=generator).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    wanted = apply_rotary_pos_emb_vision(packed[:, 0], packed[:, 1], cos, sin)
    found = turned(packed[:, :2], cos, sin)
    assert found.dtype == dtype
    step = torch.finfo(dtype).eps  # a product and a sum may be rounded at once
    torch.testing.assert_close(found, torch.stack(wanted, 1), rtol=step, atol=step)


def test_the_input_of_turning_is_left_as_it_is() -> None:
    states = torch.randn(5, 2, 2, 8)
    before = states.clone()
    turned(states, torch.ones(5, 8), torch.ones(5, 8))
    assert torch.equal(states, before)


def test_queries_and_keys_are_turned_in_four_kernels() -> None:
    states, angles = torch.randn(5, 3, 2, 8, dtype=torch.bfloat16), torch.ones(5, 8)
    with Operators() as operators:
        turned(states[:, :2], angles, angles)
    assert operators.names == ["mul", "addcmul_", "addcmul_", "_to_copy"]


def test_patches_are_one_matrix_product(towers: tuple[Any, Any]) -> None:
    adapter, ordinary = towers
    pixels = request_of(adapter)["pixel_values"]
    with Operators() as operators:
        found = adapter.encoder.patch_embed(pixels)
    assert [name for name in operators.names if name != "t"] == ["addmm"]
    torch.testing.assert_close(found, ordinary.patch_embed(pixels), rtol=1e-5, atol=1e-5)


def test_the_encoder_itself_still_equals_the_ordinary_one(towers: tuple[Any, Any]) -> None:
    """A host may call the tower by itself, and give it another attention later."""
    adapter, ordinary = towers
    request = request_of(adapter)
    wanted = features(ordinary, request)
    torch.testing.assert_close(features(adapter.encoder, request), wanted, rtol=1e-5, atol=1e-5)
    for part in adapter.encoder.modules():
        if hasattr(part, "config"):
            part.config._attn_implementation = "sdpa"
    torch.testing.assert_close(features(adapter.encoder, request), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("chosen", "bound", "fused"), [(None, 7, 2), (None, None, 0), ("sdpa", 7, 0)]
)
def test_only_packed_attention_with_a_bound_turns_together(
    towers: tuple[Any, Any], chosen: str | None, bound: int | None, fused: int
) -> None:
    adapter, ordinary = towers
    attention, theirs = adapter.encoder.blocks[0].attn, ordinary.blocks[0].attn
    attention.config._attn_implementation = chosen or attention.config._attn_implementation
    rows, angles = torch.randn(7, 64), torch.randn(7, 8).repeat(1, 2)
    call = torch.tensor([0, 3, 7], dtype=torch.int32), (angles.cos(), angles.sin())
    with Operators() as operators:
        found = attention(rows, *call, max_seqlen=bound)
    assert operators.names.count("addcmul_") == fused
    torch.testing.assert_close(found, theirs(rows, *call), rtol=1e-5, atol=1e-5)


def test_hooks_of_the_layers_run(towers: tuple[Any, Any]) -> None:
    adapter, _ = towers
    attention = adapter.encoder.blocks[0].attn
    called: list[str] = []
    for name, module in (
        ("attention", attention),
        ("qkv", attention.qkv),
        ("proj", attention.proj),
        ("patches", adapter.encoder.patch_embed.proj),
    ):
        module.register_forward_hook(lambda *_, name=name: called.append(name))
    request = request_of(adapter)
    features(adapter.encoder, request)
    assert called == ["patches", "qkv", "proj", "attention"]


def test_a_copy_of_the_tower_computes_with_its_own_weights(towers: tuple[Any, Any]) -> None:
    adapter, _ = towers
    request = request_of(adapter)
    before = features(adapter.encoder, request)
    other = copy.deepcopy(adapter.encoder)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert torch.equal(features(adapter.encoder, request), before)
    assert not features(other, request).any()


def test_layers_of_other_classes_are_left_alone() -> None:
    class Quantised(torch.nn.Conv3d):
        pass

    class Patched(Qwen3OmniMoeVisionAttention):
        pass

    encoder = FACTORY.build("tiny", torch.device("cpu"), torch.float32, seed=3).encoder
    encoder.patch_embed.proj.__class__ = Quantised
    encoder.blocks[0].attn.__class__ = Patched
    use_fewer_kernels(encoder)
    assert type(encoder.patch_embed.proj) is Quantised
    assert type(encoder.blocks[0].attn) is Patched
    assert type(encoder.blocks[1].attn) is VisionAttention


def test_preparing_twice_changes_nothing_more(towers: tuple[Any, Any]) -> None:
    adapter, _ = towers
    use_fewer_kernels(adapter.encoder)
    assert type(adapter.encoder.patch_embed.proj) is PatchProjection
    assert {type(block.attn) for block in adapter.encoder.blocks} == {VisionAttention}
