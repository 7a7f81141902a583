"""Encoders on the simulated device with twins on the CPU, and random requests for them."""

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from graphhal.adapter import EncoderAdapter
from graphhal.adapters.plugin import graphhal_adapters
from graphhal.platform import Platform
from graphhal.runner import EncoderGraphs
from graphhal.self_check import Difference
from graphhal.settings import Settings
from tests.plain_platform import plain_platform
from tests.toy_encoder import MERGE, ToyEncoder, request

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
SETTINGS: dict[str, Any] = {
    "audio_chunks": (1, 2, 4),
    "max_items": 4,
    "max_frames": 8,
    "self_check": "quick",
}
BUDGETS = {"qwen3_omni_vision": (8, 24, 64)}
SHORT = " of short clips"


@dataclass(frozen=True)
class Twins:
    """The same encoder on the device, behind the engine, and on the CPU."""

    graphs: EncoderGraphs
    reference: EncoderGraphs

    def expected(self, mm_kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """What the CPU makes of a request, in one eager call."""
        return self.reference.run_eager(mm_kwargs)


def twins(
    name: str, platform: Platform, dtype: torch.dtype = torch.float32, **options: Any
) -> Twins:
    """An encoder of a family (`toy`, or an adapter's name, with `SHORT` after CoVo-Audio's), not
    captured yet."""
    if name in BUDGETS:
        options = {"token_budgets": BUDGETS[name], **options}
    settings = Settings(**{**SETTINGS, **options})
    if name == "toy":
        return toy_twins(platform, settings, paths=("image", "video"), dtype=dtype)
    from graphhal.adapters.covo_audio import CovoStage  # imports transformers, which takes seconds

    factory = next(f for f in graphhal_adapters() if f.name == name.removesuffix(SHORT))
    if name.endswith(SHORT):
        reference = factory.wrap(covo_of_short_clips(dtype))
        assert reference is not None
    else:
        reference = factory.build("tiny", torch.device("cpu"), dtype)
    modules = list(reference.modules())
    for module in modules:
        _take_the_devices_gelu(module)
    tower = modules[0] if len(modules) == 1 else CovoStage(*modules)
    ours = factory.wrap(copy.deepcopy(tower).to("npu:0"))
    assert ours is not None
    return _both(ours, reference, platform, settings)


def toy_twins(
    platform: Platform,
    settings: Settings,
    budgets: Sequence[int] = (4, 8, 24),
    device: str = "npu:0",
    **knobs: Any,
) -> Twins:
    """The toy encoder with these knobs."""
    ours, reference = (ToyEncoder(budgets=budgets, **knobs) for _ in range(2))
    ours.tower.to(device)
    ours.device = torch.device(device)
    return _both(ours, reference, platform, settings)


def _both(
    ours: EncoderAdapter, reference: EncoderAdapter, platform: Platform, settings: Settings
) -> Twins:
    return Twins(
        EncoderGraphs(ours, platform, settings),
        EncoderGraphs(reference, plain_platform(), settings),
    )


def covo_of_short_clips(dtype: torch.dtype) -> torch.nn.Module:
    """CoVo-Audio's stage with a window of 2 seconds, 13 tokens, instead of 30: fast on a CPU."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    from graphhal.adapters.covo_audio import CovoStage, Downsampler
    from graphhal.adapters.seeded_weights import with_seeded_weights

    config = WhisperConfig(
        num_mel_bins=16,
        d_model=32,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=64,
        max_source_positions=100,
    )
    config._attn_implementation = "sdpa"
    return with_seeded_weights(
        lambda: CovoStage(WhisperEncoder(config), Downsampler(32, 24, 8, 64)),
        torch.device("cpu"),
        dtype,
        seed=0,
    )


@contextmanager
def without_onednn() -> Iterator[None]:
    """PyTorch 2.13's CPU convolution of bfloat16 reads memory beyond very short inputs, on some
    machines, where it goes through oneDNN: clips of a few frames would have random references."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


def in_bfloat16(request: dict[str, Any]) -> dict[str, Any]:
    """Floating-point tensors of a request in bfloat16."""
    return {
        key: value.bfloat16() if torch.is_tensor(value) and value.is_floating_point() else value
        for key, value in request.items()
    }


def _take_the_devices_gelu(module: torch.nn.Module) -> None:
    """torch_npu knows one form of GELU, whatever `approximate` asks for; the twins agree on it."""
    for name, child in module.named_children():
        if type(child).__name__ == "GELUTanh":
            setattr(module, name, torch.nn.GELU())
        else:
            _take_the_devices_gelu(child)


def random_request(adapter: EncoderAdapter, chooser: random.Random) -> dict[str, Any]:
    """A group of one modality: one to four items, most of which fit a graph."""
    generator = torch.Generator().manual_seed(chooser.randrange(2**31))
    return _MAKERS[adapter.name](adapter, chooser, generator)


def _toy(_: Any, chooser: random.Random, generator: torch.Generator) -> dict[str, Any]:
    count = chooser.randint(1, 4)
    if chooser.random() < 0.5:
        grids = [(1, MERGE * chooser.randint(1, 8), "image") for _ in range(count)]
    else:
        grids = [(chooser.randint(1, 5), MERGE * chooser.randint(1, 3), "video")]
    return request(grids, seed=generator.initial_seed())


def _vision(adapter: Any, chooser: random.Random, generator: torch.Generator) -> dict[str, Any]:
    modality = chooser.choice(["image", "video"])
    most = 1 if modality == "image" else 6
    grid = [
        (chooser.randint(1, most), 2 * chooser.randint(1, 5), 2 * chooser.randint(1, 5))
        for _ in range(chooser.randint(1, 3))
    ]
    patches = sum(t * h * w for t, h, w in grid)
    pixels = torch.randn((patches, adapter.patch_width), generator=generator)
    keys = {
        "image": ("pixel_values", "image_grid_thw"),
        "video": ("pixel_values_videos", "video_grid_thw"),
    }
    return dict(zip(keys[modality], (pixels.to(adapter.dtype), torch.tensor(grid)), strict=True))


def _audio(adapter: Any, chooser: random.Random, generator: torch.Generator) -> dict[str, Any]:
    lengths = [chooser.randint(1, 2 * adapter.width) for _ in range(chooser.randint(1, 3))]
    features = torch.randn((adapter.mel, sum(lengths)), generator=generator)
    return {"input_features": features.to(adapter.dtype), "feature_lens": lengths}


def _covo(adapter: Any, chooser: random.Random, generator: torch.Generator) -> dict[str, Any]:
    counts = [chooser.randint(1, adapter.tokens_per_clip) for _ in range(chooser.randint(1, 3))]
    features = torch.randn((len(counts), adapter.mel, adapter.frames), generator=generator)
    return {"audio_features": features.to(adapter.dtype), "audio_num_tokens": counts}


_MAKERS: dict[str, Callable[[Any, random.Random, torch.Generator], dict[str, Any]]] = {
    "toy": _toy,
    "qwen3_omni_vision": _vision,
    "qwen3_omni_audio": _audio,
    "covo_audio": _covo,
}


def assert_equal(
    outputs: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], dtype: torch.dtype
) -> None:
    """Every item within the dtype's relative L2, no value missing."""
    assert len(outputs) == len(expected)
    for index, (ours, reference) in enumerate(zip(outputs, expected, strict=True)):
        assert ours.shape == reference.shape
        found = Difference.between(ours.cpu(), reference)
        assert found.relative_l2 <= TOLERANCE[dtype], f"item {index}: {found}"


def serves(tower: Twins, count: int = 3) -> None:
    """A few random requests equal the CPU."""
    chooser = random.Random(13)
    for _ in range(count):
        request = random_request(tower.graphs.adapter, chooser)
        assert_equal(tower.graphs.run(request), tower.expected(request), torch.float32)
