"""Hazards of the Whisper encoder's own layers: other results, what was asked for ignored."""

import copy
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperAttention, WhisperEncoder

from graphhal.adapters.covo_audio import CovoAudioFactory
from graphhal.adapters.whisper_layers import (
    ChannelsLastConvolution,
    EncoderAttention,
    use_fewer_copies,
)
from graphhal.platform import Platform

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 3e-3}


class Copies(TorchDispatchMode):
    """Counts operators that only copy, and sums whose result lies transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.copied = self.transposed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.copied += name in ("clone", "copy_")
        if name in ("add", "native_layer_norm"):
            self.transposed += not args[0].is_contiguous()
        return result


def encoder_of(dtype: torch.dtype = torch.float32, attention: str = "sdpa") -> WhisperEncoder:
    config = WhisperConfig(
        num_mel_bins=16, d_model=32, encoder_layers=2, encoder_attention_heads=4,
        encoder_ffn_dim=64, max_source_positions=50,
    )  # fmt: skip
    config._attn_implementation = attention
    torch.manual_seed(0)
    encoder: WhisperEncoder = WhisperEncoder(config).to(dtype).eval()
    return encoder


def both(dtype: torch.dtype = torch.float32, attention: str = "sdpa") -> tuple[Any, Any]:
    """The encoder with its own layers, and as it came."""
    encoder = encoder_of(dtype, attention)
    ordinary = copy.deepcopy(encoder)
    use_fewer_copies(encoder)
    return encoder, ordinary


def clips(dtype: torch.dtype = torch.float32, count: int = 3) -> torch.Tensor:
    return torch.randn((count, 16, 100), generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_the_encoder_equals_the_ordinary_one(dtype: torch.dtype, attention: str) -> None:
    encoder, ordinary = both(dtype, attention)
    found, wanted = (e(clips(dtype)).last_hidden_state for e in (encoder, ordinary))
    assert found.dtype == dtype
    torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE[dtype])


def test_an_encoder_copies_once() -> None:
    encoder, ordinary = both()
    counts = []
    for each in (encoder, ordinary):
        with Copies() as copies:
            each(clips())
        counts.append((copies.copied, copies.transposed))
    assert counts[0] == (1, 0)
    assert counts[1][0] >= 8, "transformers copies less now; are these layers still worth it?"


def test_what_more_is_asked_of_attention_is_done() -> None:
    encoder, ordinary = both()
    ours, theirs = (e.layers[0].self_attn for e in (encoder, ordinary))
    states = torch.randn(2, 5, 32)
    mask = torch.zeros(2, 1, 5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), -1e9)
    for asked in ({"attention_mask": mask}, {"key_value_states": torch.randn(2, 7, 32)}):
        torch.testing.assert_close(ours(states, **asked)[0], theirs(states, **asked)[0])
    assert not torch.allclose(ours(states, attention_mask=mask)[0], ours(states)[0])


@pytest.mark.parametrize(
    ("attention", "asked"),
    [
        ("sdpa", {"key_value_states": torch.ones(1, 2, 8)}),
        ("sdpa", {"past_key_values": object()}),
        ("sdpa", {"attention_mask": torch.ones(1, 1, 2, 2)}),
        ("sdpa", {"output_attentions": True}),
        ("eager", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "and".join(value) or "nothing",
)
def test_what_is_more_is_handed_on_as_it_came(
    monkeypatch: pytest.MonkeyPatch, attention: str, asked: dict[str, Any]
) -> None:
    names = ("key_value_states", "past_key_values", "attention_mask", "output_attentions")
    came: list[Any] = []
    monkeypatch.setattr(WhisperAttention, "forward", lambda self, *a, **kw: came.append((a, kw)))
    config = WhisperConfig(d_model=8)
    config._attn_implementation = attention
    layer = EncoderAttention(8, 2, config=config).eval()
    states = torch.ones(1, 2, 8)
    layer(states, **asked, further=1)
    values = [asked.get(name, False if name == names[-1] else None) for name in names]
    ((given, keywords),) = came
    assert keywords == {"further": 1}
    assert all(one is other for one, other in zip(given, (states, *values), strict=True))


def test_dropout_of_training_is_left_to_transformers() -> None:
    encoder = encoder_of()
    use_fewer_copies(encoder)
    attention = encoder.layers[0].self_attn.train()
    attention.dropout = 0.5
    states = torch.randn(1, 5, 32)
    assert not torch.equal(attention(states)[0], attention(states)[0])


def test_hooks_of_the_layers_run() -> None:
    encoder, _ = both()
    attention, called = encoder.layers[1].self_attn, []
    for name, module in (
        ("conv2", encoder.conv2),
        ("query", attention.q_proj),
        ("out", attention.out_proj),
        ("attention", attention),
    ):
        module.register_forward_hook(lambda *_, name=name: called.append(name))
    encoder(clips())
    assert called == ["conv2", "query", "out", "attention"]


def test_layers_of_other_classes_are_left_alone() -> None:
    class Quantised(torch.nn.Conv1d):
        pass

    class Patched(WhisperAttention):
        pass

    encoder = encoder_of()
    encoder.conv2.__class__ = Quantised
    encoder.layers[0].self_attn.__class__ = Patched
    use_fewer_copies(encoder)
    assert type(encoder.conv2) is Quantised
    assert type(encoder.layers[0].self_attn) is Patched
    assert type(encoder.layers[1].self_attn) is EncoderAttention


def test_the_adapter_takes_them(platform_stub: Platform) -> None:
    adapter = CovoAudioFactory().build("tiny", torch.device("cpu"), torch.float32, seed=1)
    adapter.prepare(platform_stub)
    assert type(adapter.encoder.conv2) is ChannelsLastConvolution
    assert {type(layer.self_attn) for layer in adapter.encoder.layers} == {EncoderAttention}
