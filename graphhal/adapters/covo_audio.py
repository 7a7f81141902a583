"""CoVo-Audio's first stage: transformers' Whisper encoder and a downsampling adapter."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import WhisperConfig, WhisperFeatureExtractor
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from graphhal.adapter import BufferSpec, EncoderAdapter, Place
from graphhal.adapters.host_sizes import host_int, host_ints
from graphhal.adapters.request_tensors import refuse_unreadable
from graphhal.adapters.sample_files import read_sound, sample_speech
from graphhal.adapters.seeded_weights import chosen_preset, with_seeded_weights
from graphhal.adapters.whisper_layers import use_fewer_copies
from graphhal.errors import AdapterError, InputError
from graphhal.items import ItemSpec
from graphhal.plan import Capacity, GraphKey
from graphhal.platform import Platform
from graphhal.settings import Settings

CLIPS_PER_GRAPH = (1, 2)
"""Clips of the graphs that are captured unless `token_budgets` says otherwise."""

FEATURES = "audio_features"
COUNTS = "audio_num_tokens"
VALID = "valid_indices"


class DownsampleLayer(nn.Module):
    """A stride-2 convolution and two linear layers."""

    def __init__(self, width: int, output: int, hidden: int) -> None:
        super().__init__()
        self.conv1d = nn.Conv1d(width, width, kernel_size=3, stride=2, padding=1)
        self.linear1 = nn.Linear(width, hidden)
        self.linear2 = nn.Linear(hidden, output)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(clips, places, width) to (clips, places / 2, output)."""
        halved = self.conv1d(features.mT).mT.relu()
        out: torch.Tensor = self.linear2(self.linear1(halved).relu())
        return out


class Downsampler(nn.Module):
    """A stack of stride-2 layers, shaped like CoVo-Audio's.

    Args:
        width: of the encoder's features.
        output: width of what comes out.
        factor: power of two by which the places become fewer.
        hidden: width between the linear layers.
    """

    def __init__(self, width: int, output: int, factor: int, hidden: int) -> None:
        super().__init__()
        outputs = [width] * (factor.bit_length() - 2) + [output]
        self.downsample_layers = nn.ModuleList(
            DownsampleLayer(width, layer_output, hidden) for layer_output in outputs
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(clips, places, width) to (clips, places / factor, output)."""
        for layer in self.downsample_layers:
            features = layer(features)
        return features


class CovoStage(nn.Module):
    """The encoder and the adapter, under the names that vLLM-Omni's stage gives them."""

    def __init__(self, encoder: nn.Module, audio_adapter: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.audio_adapter = audio_adapter


def refuse_length(
    num_samples: int, most_samples: int, sample_rate: int, item: int | None = None
) -> None:
    """Refuse a clip that the window does not hold.

    Raises:
        InputError: no sample, or more than `most_samples`.
    """
    if num_samples > most_samples:
        raise InputError(
            f"the clip lasts {num_samples / sample_rate:.4f} s ({num_samples} samples); at "
            f"most {most_samples / sample_rate:g} s ({most_samples} samples at "
            f"{sample_rate} Hz) fit, cut it into shorter clips",
            item,
        )
    if num_samples < 1:
        raise InputError("the clip holds no sample; drop it", item)


class CovoAudio(EncoderAdapter):
    """CoVo-Audio's audio encoder; every clip is padded to the encoder's whole window.

    Rows are clips. The encoder makes the same number of places of each; the first
    `audio_num_tokens` of them are the clip's tokens, gathered inside the graph. Attention stays
    within a clip by shape, so there is no boundary set.

    Requests are `audio_features` (clips, mel, frames), or a list of (mel, frames), with
    `audio_num_tokens` on the host; without it every clip has all its tokens.

    Args:
        stage: has `encoder`, transformers' `WhisperEncoder`, and `audio_adapter`, whose
            `downsample_layers` each have a `conv1d`: vLLM-Omni's class, or `CovoStage`.
        sample_rate: hertz of the clips that the processor takes.
        hop: samples between two frames of it.
    """

    name = "covo_audio"
    modalities = ("audio",)

    def __init__(self, stage: Any, sample_rate: int = 16_000, hop: int = 160) -> None:
        self.owner = stage
        config = self.encoder.config
        # Whisper's own attention takes whole clips; nothing in it needs a platform's kernel.
        if "flash" in (config._attn_implementation or ""):
            raise AdapterError(f"{self.name}: build the Whisper encoder with sdpa attention")
        self._convolutions = [self.encoder.conv1, self.encoder.conv2]
        self._convolutions += [layer.conv1d for layer in self.downsampler.downsample_layers]
        strides = [self.encoder.conv1.stride[0], self.encoder.conv2.stride[0]]
        self.frames = int(config.max_source_positions) * strides[0] * strides[1]
        self.mel = int(config.num_mel_bins)
        self.tokens_per_clip = self._after_convolutions(self.frames)
        self.sample_rate, self.hop = sample_rate, hop
        self.most_samples = self.frames * hop

    @property
    def encoder(self) -> Any:
        """The stage's encoder, as it is now."""
        return self.owner.encoder

    @property
    def downsampler(self) -> Any:
        """The stage's downsampling adapter, as it is now."""
        return self.owner.audio_adapter

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # follows the stage's `.to()`
        """Of the encoder's weights."""
        return self.encoder.conv1.weight.device  # type: ignore[no-any-return]

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]  # follows the stage's `.to()`
        """Of the encoder's weights."""
        return self.encoder.conv1.weight.dtype  # type: ignore[no-any-return]

    def prepare(self, platform: Platform) -> None:
        """Layers of few copies; Whisper's own attention takes whole clips on every platform."""
        use_fewer_copies(self.encoder)

    def modules(self) -> Iterable[torch.nn.Module]:
        """The encoder and the downsampling adapter."""
        return (self.encoder, self.downsampler)

    def places(self) -> Iterable[Place]:
        """Where the stage keeps them, if it is a module."""
        owner = self.owner
        if not isinstance(owner, nn.Module):
            return ()
        return ((owner, "encoder", self.encoder), (owner, "audio_adapter", self.downsampler))

    def num_tokens(self, num_samples: int, sample_rate: int, item: int | None = None) -> int:
        """Tokens of a clip, from its length: what the processor announces for it.

        Raises:
            InputError: another sample rate, no sample, or more than the window holds.
        """
        num_samples = host_int(num_samples, "the number of samples", item)
        if sample_rate != self.sample_rate:
            raise InputError(
                f"the clip has {sample_rate} samples a second; resample it to {self.sample_rate}",
                item,
            )
        refuse_length(num_samples, self.most_samples, sample_rate, item)
        return self._after_convolutions(num_samples // self.hop)

    def _after_convolutions(self, frames: int) -> int:
        for conv in self._convolutions:
            reach = conv.dilation[0] * (conv.kernel_size[0] - 1) + 1
            frames = (frames + 2 * conv.padding[0] - reach) // conv.stride[0] + 1
        return max(frames, 0)

    def item_specs(self, mm_kwargs: Mapping[str, Any]) -> tuple[ItemSpec, ...]:
        """Clips in order; a token count outside 0..tokens_per_clip is refused."""
        features = mm_kwargs.get(FEATURES)
        if isinstance(features, torch.Tensor):
            refuse_unreadable(features, FEATURES, self.device)
            if features.dim() != 3:
                raise InputError(
                    f"{FEATURES} must be (clips, {self.mel}, {self.frames}), got "
                    f"{tuple(features.shape)}; stack the clips"
                )
        if not isinstance(features, torch.Tensor | Sequence | None):
            raise InputError(f"{FEATURES} must be tensors, got {type(features).__name__}")
        if features is None or len(features) == 0:
            raise InputError(f"the group is empty; pass {FEATURES} with {COUNTS}")
        counts = mm_kwargs.get(COUNTS)
        clips = len(features)
        whole = (self.tokens_per_clip,) * clips
        numbers = whole if counts is None else host_ints(counts, COUNTS)
        if len(numbers) != clips:
            raise InputError(f"{COUNTS} has {len(numbers)} counts for {clips} clips; one for each")
        batched = isinstance(features, torch.Tensor)
        for index, clip in enumerate((features,) if batched else features):
            self._check_features(clip, clips if batched else None, index)
        for index, number in enumerate(numbers):
            if not 0 <= number <= self.tokens_per_clip:
                raise InputError(
                    f"{COUNTS} is {number}; a clip has 0 to {self.tokens_per_clip} tokens", index
                )
        return tuple([self._spec(index, number) for index, number in enumerate(numbers)])

    def _check_features(self, features: Any, clips: int | None, index: int) -> None:
        item = index if clips is None or clips == 1 else None
        if not isinstance(features, torch.Tensor):
            raise InputError(f"{FEATURES} must be tensors, got {type(features).__name__}", item)
        if clips is None:
            refuse_unreadable(features, FEATURES, self.device, item)
        wanted = (self.mel, self.frames) if clips is None else (clips, self.mel, self.frames)
        if tuple(features.shape) != wanted:
            raise InputError(
                f"{FEATURES} must be {wanted}, got {tuple(features.shape)}; pad clips to the "
                "encoder's window, as its feature extractor does",
                item,
            )
        if not features.dtype.is_floating_point:
            raise InputError(f"{FEATURES} is {features.dtype}; pass floating-point features", item)

    def _spec(self, index: int, tokens: int) -> ItemSpec:
        return ItemSpec(
            index=index,
            modality="audio",
            rows=1,
            tokens=tokens,
            sequences={},
            signature=tokens,
            row_offset=index,
        )

    def capacities(self, settings: Settings) -> tuple[Capacity, ...]:
        """One and two clips; or the whole clips that `settings.token_budgets` hold."""
        counts = set(CLIPS_PER_GRAPH)
        if settings.token_budgets is not None:
            counts = {budget // self.tokens_per_clip for budget in settings.token_budgets}
        return tuple(
            Capacity(
                key=GraphKey(self.name, "audio", clips * self.tokens_per_clip),
                rows=clips,
                tokens=clips * self.tokens_per_clip,
                items=clips,
                sequences={},
                gathers_last=True,
            )
            for clips in sorted(counts)
            if 0 < clips <= settings.max_items
        )

    def buffers(self, capacity: Capacity) -> Mapping[str, BufferSpec]:
        """Features in the encoder's dtype; the places of real tokens packed."""
        return {
            FEATURES: BufferSpec((capacity.rows, self.mel, self.frames), self.dtype),
            VALID: BufferSpec((capacity.tokens,), torch.int64, packed=True),
        }

    def metadata(self, items: Sequence[ItemSpec]) -> Mapping[str, npt.NDArray[np.generic]]:
        """`valid_indices` (tokens,) int64: each clip's first places."""
        places = self.tokens_per_clip
        parts = [np.arange(n * places, n * places + i.tokens) for n, i in enumerate(items)]
        return {VALID: np.concatenate(parts)}

    def stage(
        self,
        mm_kwargs: Mapping[str, Any],
        items: Sequence[ItemSpec],
        inputs: Mapping[str, torch.Tensor],
    ) -> None:
        """One copy for each run of neighbouring clips."""
        features, target, at = mm_kwargs[FEATURES], inputs[FEATURES], 0
        while at < len(items):
            start, count = items[at].row_offset, 1
            if isinstance(features, torch.Tensor):
                while at + count < len(items) and items[at + count].row_offset == start + count:
                    count += 1
                target[at : at + count].copy_(features[start : start + count])
            else:
                target[at].copy_(features[start])
            at += count
        if at < target.shape[0]:
            target[at:].zero_()

    def forward(
        self, inputs: Mapping[str, torch.Tensor], max_seqlen: Mapping[str, int]
    ) -> torch.Tensor:
        """Tokens (tokens, hidden of the language model)."""
        features = self.encoder(inputs[FEATURES]).last_hidden_state
        output: torch.Tensor = self.downsampler(features).flatten(0, 1)
        return output.index_select(0, inputs[VALID])

    def example(self, items: Sequence[ItemSpec], seed: int) -> dict[str, Any]:
        """Normally distributed features on the encoder's device."""
        generator = torch.Generator(device=self.device).manual_seed(seed)
        shape = (len(items), self.mel, self.frames)
        features = torch.randn(shape, generator=generator, dtype=self.dtype, device=self.device)
        return {FEATURES: features, COUNTS: [item.tokens for item in items]}

    def worst_cases(self, capacity: Capacity) -> Iterable[tuple[ItemSpec, ...]]:
        """Full, one token short in every clip, and a lone short clip."""
        for counts in (
            [self.tokens_per_clip] * capacity.rows,
            [self.tokens_per_clip - 1] * capacity.rows,
            [1],
        ):
            yield tuple([self._spec(index, count) for index, count in enumerate(counts)])


def _tiny() -> tuple[WhisperConfig, int, int]:
    return WhisperConfig(
        num_mel_bins=128,
        d_model=64,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=128,
    ), 32, 128  # fmt: skip


def _full() -> tuple[WhisperConfig, int, int]:
    """Whisper-large-v3's encoder, downsampled into a language model that is 3584 wide."""
    return WhisperConfig(
        num_mel_bins=128,
        d_model=1280,
        encoder_layers=32,
        encoder_attention_heads=20,
        encoder_ffn_dim=5120,
    ), 3584, 2048  # fmt: skip


class CovoAudioFactory:
    """Finds, builds and feeds `CovoAudio`."""

    name = "covo_audio"
    modality = "audio"
    presets = MappingProxyType({"tiny": _tiny, "full": _full})
    downsample = 8

    def wrap(self, module: torch.nn.Module) -> CovoAudio | None:
        """An adapter for vLLM-Omni's stage or `CovoStage`; None for any other module."""
        stage = getattr(module, "fused_thinker_talker", module)
        layers = getattr(getattr(stage, "audio_adapter", None), "downsample_layers", None)
        if isinstance(getattr(stage, "encoder", None), WhisperEncoder) and layers is not None:
            return CovoAudio(stage)
        return None

    def build(
        self, preset: str, device: torch.device, dtype: torch.dtype, seed: int = 0
    ) -> CovoAudio:
        """The stage with seeded random weights.

        Raises:
            SettingsError: no such preset.
        """
        config, output, hidden = chosen_preset(self.presets, preset)()
        config._attn_implementation = "sdpa"
        stage = with_seeded_weights(
            lambda: CovoStage(
                WhisperEncoder(config),
                Downsampler(config.d_model, output, self.downsample, hidden),
            ),
            device,
            dtype,
            seed,
        )
        return CovoAudio(stage)

    def load(self, adapter: EncoderAdapter, files: Sequence[Path]) -> dict[str, Any]:
        """Sound files through Whisper's feature extractor, or a sample.

        Raises:
            InputError: a file cannot be decoded, or is longer than the encoder's window.
        """
        if not isinstance(adapter, CovoAudio):
            raise AdapterError(f"{self.name} loads for CovoAudio, not {type(adapter).__name__}")
        paths = list(files) or [sample_speech()]
        rate = adapter.sample_rate
        clips = [read_sound(path, item, rate) for item, path in enumerate(paths)]
        counts = [adapter.num_tokens(len(clip), rate, item) for item, clip in enumerate(clips)]
        extractor = WhisperFeatureExtractor(
            feature_size=adapter.mel, sampling_rate=rate, hop_length=adapter.hop
        )
        out = extractor(clips, sampling_rate=rate, return_tensors="pt")
        features = out["input_features"].to(adapter.device, adapter.dtype)
        return {FEATURES: features, COUNTS: torch.tensor(counts)}
