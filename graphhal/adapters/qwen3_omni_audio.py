"""Qwen3-Omni's audio encoder from transformers: clips in windows, tails padded apart."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import WhisperFeatureExtractor
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeAudioEncoderConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

from graphhal.adapter import BufferSpec, EncoderAdapter
from graphhal.adapters.host_sizes import host_ints
from graphhal.adapters.request_tensors import refuse_unreadable
from graphhal.adapters.sample_files import read_sound, sample_speech
from graphhal.adapters.seeded_weights import chosen_preset, with_seeded_weights
from graphhal.adapters.transformers_attention import use_packed_attention
from graphhal.errors import AdapterError, InputError
from graphhal.items import ItemSpec
from graphhal.plan import Capacity, GraphKey, SequenceBound
from graphhal.platform import Platform
from graphhal.settings import Settings

CACHED_GROUPS = 1024
"""Groups (lengths) whose item specs are kept."""
CONVOLUTIONS = 3
"""Convolutions in front of the layers, each of stride 2."""
SAMPLE_RATE = 16_000

CONVOLVED_WINDOWS = 16
"""Windows that go through the convolutions together, eagerly and in a graph. Their activations are
what audio graphs need memory for: 64 windows of a full-size tower at once took 620 MiB."""
BOUNDARIES = "cu_seqlens"
WINDOWS = "padded_feature"
FRAMES = "frames"
FEATURE_KEYS = ("input_features", "input_audio_features")
LENGTH_KEYS = ("feature_lens", "audio_feature_lengths")


class Qwen3OmniAudio(EncoderAdapter):
    """Qwen3-Omni's audio encoder.

    Rows are windows of 2 x n_window frames, zero-padded at a clip's end. Convolutions turn a
    window into a fixed number of places, of which a padded one uses only the first; tokens are the
    used places. Attention runs over `n_window_infer` frames of a clip at a time.

    A window's padding changes what its last used places see, so the padded width matters. The
    encoder pads to the longest window of the call; that is the full width unless every clip is
    shorter than one window. Items carry the width of their request (`ItemSpec.signature`), and
    such short groups are not replayed, unless their width makes no difference.

    A graph takes the frames of all clips side by side, which is one copy whatever their lengths,
    and gathers its windows itself.

    Requests are `input_features` (mel, frames of all clips) with `feature_lens`, or vLLM's
    `input_audio_features` with `audio_feature_lengths`. Lengths may be CPU tensors, arrays or
    lists; a device tensor costs a read. `ItemSpec.row_offset` counts frames.

    Args:
        encoder: transformers' `Qwen3OmniMoeAudioEncoder`; `prepare` changes its attention.
    """

    name = "qwen3_omni_audio"
    modalities = ("audio",)

    def __init__(self, encoder: Qwen3OmniMoeAudioEncoder) -> None:
        self.encoder = encoder
        self.width = 2 * int(encoder.n_window)
        self.mel = int(encoder.num_mel_bins)
        self.window_tokens = after_convolutions(self.width)
        self.attention_tokens = self.window_tokens * (int(encoder.n_window_infer) // self.width)
        if self.attention_tokens < 1:
            raise AdapterError(f"{self.name}: n_window_infer is shorter than one window")
        self.device = self._weight().device
        self._specs = lru_cache(CACHED_GROUPS)(self._checked_specs)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]  # follows the tower's `.to()`
        """Of the tower's weights."""
        return self._weight().dtype

    def _weight(self) -> torch.Tensor:
        # Of a convolution: linear layers may be quantised.
        return self.encoder.conv2d1.weight  # type: ignore[no-any-return]

    def prepare(self, platform: Platform) -> None:
        """Take the platform's attention, and convolve few windows at a time."""
        use_packed_attention(self.encoder, platform.info.attention)
        self.encoder.conv_chunksize = min(int(self.encoder.conv_chunksize), CONVOLVED_WINDOWS)

    def modules(self) -> Iterable[torch.nn.Module]:
        """The encoder."""
        return (self.encoder,)

    def item_specs(self, mm_kwargs: Mapping[str, Any]) -> tuple[ItemSpec, ...]:
        """Clips in order. Equal lengths cost a cache look-up."""
        features, key = self._features(mm_kwargs)
        lengths, length_key = _first_of(mm_kwargs, LENGTH_KEYS)
        if lengths is None:
            raise InputError(f"{key} came without feature_lens; pass the frames of each clip")
        return self._specs(host_ints(lengths, length_key), features.shape[1], key, length_key)

    def _features(self, mm_kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, str]:
        features, key = _first_of(mm_kwargs, FEATURE_KEYS)
        if features is None:
            raise InputError("the group is empty; pass input_features with feature_lens")
        if not isinstance(features, torch.Tensor):
            raise InputError(
                f"{key} must be one tensor of all clips, got {type(features).__name__}; "
                "concatenate the clips along the frames"
            )
        refuse_unreadable(features, key, self.device)
        if features.dim() != 2 or features.shape[0] != self.mel:
            raise InputError(
                f"{key} must be ({self.mel}, frames of all clips), got {tuple(features.shape)}; "
                "drop padding frames and concatenate the clips along the frames"
            )
        if not features.dtype.is_floating_point:
            raise InputError(f"{key} is {features.dtype}; pass floating-point mel features")
        return features, key

    def _checked_specs(
        self, lengths: tuple[int, ...], frames: int, key: str, length_key: str
    ) -> tuple[ItemSpec, ...]:
        if not lengths:
            raise InputError(f"the group is empty: {length_key} names no clip")
        for index, length in enumerate(lengths):
            if length < 1:
                raise InputError(
                    f"{length_key} is {length}; a clip has 1 frame or more, drop empty ones", index
                )
        if sum(lengths) != frames:
            raise InputError(
                f"{key} has {frames} frames, but {length_key} {list(lengths)} sum to "
                f"{sum(lengths)}; drop padding frames or correct the lengths",
                0 if len(lengths) == 1 else None,
            )
        return self._items_of(lengths)

    def _items_of(self, lengths: Sequence[int]) -> tuple[ItemSpec, ...]:
        width = min(self.width, max(lengths))
        if _pads_alike(width, self.width):
            width = self.width
        specs, offset = [], 0
        for index, frames in enumerate(lengths):
            tokens = self._tokens(frames)
            whole, rest = divmod(tokens, self.attention_tokens)
            sequences = (self.attention_tokens,) * whole + (rest,) * (rest > 0)
            specs.append(
                ItemSpec(
                    index=index,
                    modality="audio",
                    rows=-(-frames // self.width),
                    tokens=tokens,
                    sequences={BOUNDARIES: sequences},
                    signature=(frames, width),
                    row_offset=offset,
                )
            )
            offset += frames
        return tuple(specs)

    def _tokens(self, frames: int) -> int:
        whole, rest = divmod(frames, self.width)
        return whole * self.window_tokens + after_convolutions(rest)

    def refusal(self, items: Sequence[ItemSpec]) -> str | None:
        """Groups whose every clip is shorter than a window: eager pads those to a shorter one, and
        the last places see the convolutions' own zeros instead of what those make of zeros."""
        if width_of(items) == self.width:
            return None
        return f"every clip is shorter than a window of {self.width} frames"

    def sized(self, modality: str, tokens: Sequence[int]) -> Sequence[ItemSpec]:
        """Clips of whole windows, and of the fewest frames that make the rest: what is shorter
        than a window is refused at most of the lengths that make so many tokens."""
        lengths = []
        for count in tokens:
            whole, rest = divmod(count, self.window_tokens)
            lengths.append(whole * self.width + (rest > 0) * (1 + (rest - 1) * 2**CONVOLUTIONS))
        return self._items_of(lengths)

    def capacities(self, settings: Settings) -> tuple[Capacity, ...]:
        """One graph for each chunk count of `settings.audio_chunks`."""
        return tuple(self._capacity(chunks, settings.max_items) for chunks in settings.audio_chunks)

    def _capacity(self, chunks: int, max_items: int) -> Capacity:
        tokens, items = chunks * self.window_tokens, min(max_items, chunks)
        longest = min(self.attention_tokens, tokens)
        # Each clip, and the padding, can end in one sequence that is shorter than the bound. A
        # spare slot would be an empty sequence even in a full graph, which some kernels refuse.
        parts = items + 1
        slots = (tokens - parts) // longest + parts
        return Capacity(
            key=GraphKey(self.name, "audio", chunks),
            rows=chunks,
            tokens=tokens,
            items=items,
            sequences={BOUNDARIES: SequenceBound(rows=tokens, slots=slots, max_seqlen=longest)},
        )

    def buffers(self, capacity: Capacity) -> Mapping[str, BufferSpec]:
        """Frames in the encoder's dtype; their places in windows, used places and boundaries
        packed."""
        slots, frames = capacity.sequences[BOUNDARIES].slots, capacity.rows * self.width
        return {
            FRAMES: BufferSpec((self.mel, frames), self.dtype),
            BOUNDARIES: BufferSpec((slots + 1,), torch.int32, packed=True),
            "valid_indices": BufferSpec((capacity.tokens,), torch.int64, packed=True),
            "frame_index": BufferSpec((frames,), torch.int32, packed=True),
            "frame_used": BufferSpec((frames,), torch.bool, packed=True),
        }

    def metadata(self, items: Sequence[ItemSpec]) -> Mapping[str, npt.NDArray[np.generic]]:
        """`valid_indices` (tokens,) int64: used places, in the grid of all windows' places.
        `frame_index` (windows x width,) int32 and `frame_used`, bool: which of the items' frames
        each place of the windows holds, and whether it holds one.

        Only a clip's last window has unused places, so a clip's used ones are consecutive.
        Padding gathers place 0 again, into sequences of its own, and frame 0, which is masked.
        """
        places, first, parts = after_convolutions(width_of(items)), 0, []
        windows = sum(item.rows for item in items)
        index = np.zeros(windows * self.width, dtype=np.int32)
        used = np.zeros(windows * self.width, dtype=np.bool_)
        frame = row = 0
        for item in items:
            parts.append(np.arange(first, first + item.tokens, dtype=np.int64))
            first += item.rows * places
            own, at = frames_of(item), row * self.width
            index[at : at + own] = np.arange(frame, frame + own, dtype=np.int32)
            used[at : at + own] = True
            frame, row = frame + own, row + item.rows
        valid = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return {"valid_indices": valid, "frame_index": index, "frame_used": used}

    def stage(
        self,
        mm_kwargs: Mapping[str, Any],
        items: Sequence[ItemSpec],
        inputs: Mapping[str, torch.Tensor],
    ) -> None:
        """One view and one copy for each run of neighbouring clips: one for a whole group."""
        self.stager(items, inputs)(mm_kwargs)

    def stager(
        self, items: Sequence[ItemSpec], inputs: Mapping[str, torch.Tensor]
    ) -> Callable[[Mapping[str, Any]], None]:
        """`stage` with the views of the input made once."""
        copies, at = [], 0
        for start, frames in _runs(items):
            copies.append((inputs[FRAMES][:, at : at + frames], start, frames))
            at += frames

        def stage(mm_kwargs: Mapping[str, Any]) -> None:
            features, _ = _first_of(mm_kwargs, FEATURE_KEYS)
            for into, start, frames in copies:
                whole = features.shape[1] == frames
                into.copy_(features if whole else features.narrow(1, start, frames))

        return stage

    def eager_inputs(
        self, mm_kwargs: Mapping[str, Any], items: Sequence[ItemSpec]
    ) -> dict[str, torch.Tensor]:
        """Windows of the width that the request has, which is shorter in a group of short clips."""
        features, _ = self._features(mm_kwargs)
        width, at = width_of(items), 0
        shape = (sum(item.rows for item in items), self.mel, width)
        windows = torch.zeros(shape, dtype=self.dtype, device=self.device)
        for item in items:
            whole, rest = divmod(frames_of(item), width)
            if whole:
                full = features.narrow(1, item.row_offset, whole * width)
                windows[at : at + whole] = full.view(self.mel, whole, width).transpose(0, 1)
            if rest:
                start = item.row_offset + whole * width
                windows[at + whole, :, :rest] = features.narrow(1, start, rest)
            at += item.rows
        return {WINDOWS: windows}

    def windows(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """(windows, mel, width): those of an eager call, or gathered from a graph's frames.

        What is not used is masked, not multiplied: frames that no clip of this request has are
        whatever an earlier one left.
        """
        if WINDOWS in inputs:
            return inputs[WINDOWS]
        gathered = inputs[FRAMES].index_select(1, inputs["frame_index"])
        gathered.masked_fill_(~inputs["frame_used"], 0)
        return gathered.view(self.mel, -1, self.width).transpose(0, 1).contiguous()

    def forward(
        self, inputs: Mapping[str, torch.Tensor], max_seqlen: Mapping[str, int]
    ) -> torch.Tensor:
        """Features (tokens, output_dim)."""
        windows = self.windows(inputs)
        output: torch.Tensor = self.encoder(
            None,
            None,
            padded_feature=windows,
            chunk_lengths=windows.shape[0],
            valid_indices=inputs["valid_indices"],
            cu_seqlens=inputs[BOUNDARIES],
            max_seqlen=max_seqlen[BOUNDARIES],
            return_dict=True,
        ).last_hidden_state
        return output

    def example(self, items: Sequence[ItemSpec], seed: int) -> dict[str, Any]:
        """Normally distributed features on the encoder's device."""
        generator = torch.Generator(device=self.device).manual_seed(seed)
        lengths = [frames_of(item) for item in items]
        shape = (self.mel, sum(lengths))
        features = torch.randn(shape, generator=generator, dtype=self.dtype, device=self.device)
        return {"input_features": features, "feature_lens": lengths}

    def worst_cases(self, capacity: Capacity) -> Iterable[tuple[ItemSpec, ...]]:
        """Full, a tail that is a token short, a window short (full enough where every slot needs a
        row), many short clips at full and at low load."""
        chunks, clips = capacity.rows, capacity.items
        full = chunks * self.width
        yield self._items_of([full])
        if chunks > 1:
            yield self._items_of([full - 2**CONVOLUTIONS])
            yield self._items_of([full - self.width])
        if clips > 1:
            yield self._items_of([(chunks - clips + 1) * self.width] + [1] * (clips - 1))
        if clips > 2:
            yield self._items_of([1] * (clips - 2) + [self.width])


def _runs(items: Sequence[ItemSpec]) -> Iterator[tuple[int, int]]:
    """(first frame, frames) of neighbouring clips in the items' order, as few as there can be."""
    start, end = items[0].row_offset, items[0].row_offset
    for item in items:
        if item.row_offset != end:
            yield start, end - start
            start = end = item.row_offset
        end += frames_of(item)
    yield start, end - start


def after_convolutions(frames: int) -> int:
    """Places that the convolutions, padded by 1, make of `frames` frames."""
    for _ in range(CONVOLUTIONS):
        frames = (frames + 1) // 2
    return frames


def _pads_alike(short: int, full: int) -> bool:
    """Whether clips of `short` frames at most use the same values padded to `short` and to `full`.

    So it is where each layer's places that the used ones read exist in both widths or in neither.
    """
    used = after_convolutions(short)
    for layer in range(1, CONVOLUTIONS):
        short, full = (short + 1) // 2, (full + 1) // 2
        read = used * 2 ** (CONVOLUTIONS - layer)
        if min(short, read) != min(full, read):
            return False
    return True


def width_of(items: Sequence[ItemSpec]) -> int:
    """Frames that the windows of the items' request are padded to."""
    signature: Any = items[0].signature
    return int(signature[1])


def frames_of(item: ItemSpec) -> int:
    """Mel frames of a clip."""
    signature: Any = item.signature
    return int(signature[0])


def _first_of(mm_kwargs: Mapping[str, Any], keys: Sequence[str]) -> tuple[Any, str]:
    for key in keys:
        value = mm_kwargs.get(key)
        if value is not None:
            return value, key
    return None, keys[0]


def _tiny() -> Qwen3OmniMoeAudioEncoderConfig:
    return Qwen3OmniMoeAudioEncoderConfig(
        encoder_layers=3,
        d_model=64,
        encoder_attention_heads=4,
        encoder_ffn_dim=128,
        downsample_hidden_size=16,
        output_dim=32,
    )


def _full() -> Qwen3OmniMoeAudioEncoderConfig:
    """Audio configuration of Qwen3-Omni-30B-A3B; its text model is 2048 wide."""
    return Qwen3OmniMoeAudioEncoderConfig(output_dim=2048)


class Qwen3OmniAudioFactory:
    """Finds, builds and feeds `Qwen3OmniAudio`."""

    name = "qwen3_omni_audio"
    modality = "audio"
    presets = MappingProxyType({"tiny": _tiny, "full": _full})

    def wrap(self, module: torch.nn.Module) -> Qwen3OmniAudio | None:
        """An adapter for transformers' encoder; None for any other module."""
        return Qwen3OmniAudio(module) if isinstance(module, Qwen3OmniMoeAudioEncoder) else None

    def build(
        self, preset: str, device: torch.device, dtype: torch.dtype, seed: int = 0
    ) -> Qwen3OmniAudio:
        """The encoder with seeded random weights.

        Raises:
            SettingsError: no such preset.
        """
        config = chosen_preset(self.presets, preset)()
        config._attn_implementation = "sdpa"
        encoder = with_seeded_weights(lambda: Qwen3OmniMoeAudioEncoder(config), device, dtype, seed)
        positions = encoder.positional_embedding
        table = positions.compute_default_singular_positional_embedding()
        positions.positional_embedding = table.to(device)
        return Qwen3OmniAudio(encoder)

    def load(self, adapter: EncoderAdapter, files: Sequence[Path]) -> dict[str, Any]:
        """Sound files through transformers' own feature extractor, or a sample.

        Raises:
            InputError: a file cannot be decoded.
        """
        extractor = WhisperFeatureExtractor(
            feature_size=adapter.encoder.num_mel_bins,  # type: ignore[attr-defined]
            sampling_rate=SAMPLE_RATE,
        )
        shortest = extractor.n_fft // 2 + 1
        clips = []
        for item, path in enumerate(list(files) or [sample_speech()]):
            samples = read_sound(path, item, SAMPLE_RATE)
            if len(samples) < shortest:
                raise InputError(
                    f"{path} holds {len(samples)} samples at {SAMPLE_RATE} Hz; the spectrum needs "
                    f"{shortest} or more",
                    item,
                )
            out = extractor(
                samples,
                sampling_rate=SAMPLE_RATE,
                padding=True,
                truncation=False,
                return_attention_mask=True,
                return_tensors="np",
            )
            frames = int(out["attention_mask"][0].sum())
            clips.append(out["input_features"][0, :, :frames])
        features = torch.from_numpy(np.concatenate(clips, axis=1))
        return {
            "input_features": features.to(adapter.device, adapter.dtype),
            "feature_lens": torch.tensor([clip.shape[1] for clip in clips]),
        }
