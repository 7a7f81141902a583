"""Qwen3-Omni's vision encoder from transformers: images and videos, with DeepStack levels."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import isqrt, prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeVisionEncoderConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeVisionEncoder

from graphhal.adapter import BufferSpec, EncoderAdapter
from graphhal.adapters.frame_ladders import (
    FrameGraph,
    Sizes,
    image_graphs,
    nearly_equal,
    video_graphs,
    worst_films,
    worst_images,
)
from graphhal.adapters.frame_positions import Taps, axis_taps, in_merge_blocks, patch_taps
from graphhal.adapters.host_sizes import host_rows
from graphhal.adapters.picture_patches import film_patches, picture_patches
from graphhal.adapters.qwen3_omni_layers import use_fewer_kernels
from graphhal.adapters.request_tensors import refuse_unreadable
from graphhal.adapters.sample_files import is_film, sample_photograph
from graphhal.adapters.seeded_weights import chosen_preset, with_seeded_weights
from graphhal.adapters.transformers_attention import use_packed_attention
from graphhal.errors import AdapterError, InputError, SettingsError
from graphhal.items import ItemSpec
from graphhal.plan import Capacity, GraphKey, SequenceBound
from graphhal.platform import Platform
from graphhal.settings import Settings

CACHED_FRAME_SIZES = 64
"""Frame sizes (h, w) whose host metadata is kept; one of 4096 tokens takes 640 KiB."""
CACHED_SIDES = 256
"""Sides of frames, in patches, whose taps into the position table are kept: 16 bytes a patch."""
CACHED_GROUPS = 1024
"""Groups (grids) whose item specs are kept."""

BOUNDARIES = "cu_seqlens"
PIXELS = "pixel_values"
KEYS = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}

Grid = tuple[tuple[int, ...], ...]


class Qwen3OmniVision(EncoderAdapter):
    """Qwen3-Omni's vision encoder.

    Rows are patches, tokens are merged patches, and every frame is one attention sequence. The
    output levels are the merged features and one level for each DeepStack layer. Images and
    videos have ladders of their own: transformers and vLLM encode them in separate calls too, and
    image graphs need no slots for frames.

    Requests are `pixel_values` (patches, width) with `image_grid_thw`, `pixel_values_videos` with
    `video_grid_thw`, or both: images come first then. Grids may be CPU tensors, arrays or lists; a
    device tensor costs a read.

    Args:
        encoder: transformers' `Qwen3OmniMoeVisionEncoder`; `prepare` changes its attention.
        modalities: which ladders to offer.
    """

    name = "qwen3_omni_vision"
    own_pixel_dtype: torch.dtype | None = None
    """Of pixels that the encoder converts, or normalises, itself."""
    lone_sequence_from: int | None = None
    """Patches from which one image has graphs of its own, as the platform's attention wants."""

    def __init__(
        self,
        encoder: Qwen3OmniMoeVisionEncoder,
        modalities: Sequence[str] = ("image", "video"),
    ) -> None:
        if getattr(encoder, "interpolation_mode", "bilinear") != "bilinear":
            raise AdapterError(f"{self.name}: only bilinear position interpolation is known")
        self.encoder = encoder
        self.modalities = tuple(modalities)
        self.merge = int(encoder.config.spatial_merge_size)
        self.merge_area = self.merge**2
        self.table_side = isqrt(encoder.config.num_position_embeddings)
        projection = self._weight()
        self.patch_width = prod(projection.shape[1:])
        self.device = projection.device
        self._keep_by_size()

    def _keep_by_size(self) -> None:
        """What depends on sizes alone is computed once for equal ones."""
        self._specs = lru_cache(CACHED_GROUPS)(self._checked_specs)
        self._frame_metadata = lru_cache(CACHED_FRAME_SIZES)(self._compute_frame_metadata)
        self._taps = lru_cache(CACHED_SIDES)(self._axis_taps)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]  # follows the tower's `.to()`
        """Of the tower's weights."""
        return self._weight().dtype

    @property
    def pixel_dtype(self) -> torch.dtype:
        """Of the pixels in a graph: the encoder's own, unless it takes others."""
        return self.own_pixel_dtype or self.dtype

    def _weight(self) -> torch.Tensor:
        return self.encoder.patch_embed.proj.weight  # type: ignore[no-any-return]

    def prepare(self, platform: Platform) -> None:
        """Take the platform's attention, and layers of few kernels."""
        use_fewer_kernels(self.encoder)
        use_packed_attention(self.encoder, platform.info.attention)
        self.lone_sequence_from = platform.info.lone_sequence_from

    def modules(self) -> Iterable[torch.nn.Module]:
        """The encoder."""
        return (self.encoder,)

    def item_specs(self, mm_kwargs: Mapping[str, Any]) -> tuple[ItemSpec, ...]:
        """Images, then videos. Equal grids cost a cache look-up."""
        specs: tuple[ItemSpec, ...] = ()
        for modality in self.output_order(mm_kwargs):
            pixels_key, grid_key = KEYS[modality]
            pixels, grid = mm_kwargs.get(pixels_key), mm_kwargs.get(grid_key)
            if pixels is None and grid is None:
                continue
            if modality not in self.modalities:
                raise InputError(f"{pixels_key} came, but no {modality} is served; leave it out")
            rows = self._pixel_rows(pixels, pixels_key, grid, grid_key)
            specs += self._specs(modality, host_rows(grid, grid_key, 3), rows, len(specs))
        if not specs:
            wanted = " or ".join(" with ".join(KEYS[modality]) for modality in self.modalities)
            raise InputError(f"the group is empty; pass {wanted}")
        return specs

    def output_order(self, mm_kwargs: Mapping[str, Any]) -> Iterable[str]:
        """The modalities that a request may have, in the order in which its outputs come."""
        return KEYS

    def _pixel_rows(self, pixels: Any, pixels_key: str, grid: Any, grid_key: str) -> int:
        if pixels is None or grid is None:
            missing, given = (pixels_key, grid_key) if pixels is None else (grid_key, pixels_key)
            raise InputError(f"{given} came without {missing}; pass both")
        if not isinstance(pixels, torch.Tensor):
            raise InputError(
                f"{pixels_key} must be one tensor of all patches, got {type(pixels).__name__}; "
                "concatenate the items along dimension 0"
            )
        refuse_unreadable(pixels, pixels_key, self.device)
        if pixels.dim() != 2 or pixels.shape[1] != self.patch_width:
            raise InputError(
                f"{pixels_key} must be (patches, {self.patch_width}), got {tuple(pixels.shape)}; "
                "use the processor that belongs to this encoder"
            )
        wanted = self.own_pixel_dtype
        if wanted is None or wanted.is_floating_point:
            if not pixels.dtype.is_floating_point:
                raise InputError(
                    f"{pixels_key} is {pixels.dtype}; normalise the pixels to floating point first"
                )
        elif pixels.dtype is not wanted:
            raise InputError(
                f"{pixels_key} is {pixels.dtype}, but this encoder normalises pixels itself; pass "
                f"them as {wanted}"
            )
        return pixels.shape[0]

    def _checked_specs(
        self, modality: str, grid: Grid, pixel_rows: int, first: int
    ) -> tuple[ItemSpec, ...]:
        pixels_key, grid_key = KEYS[modality]
        for index, (t, h, w) in enumerate(grid, first):
            self._check_grid(modality, grid_key, t, h, w, index)
        rows = sum(t * h * w for t, h, w in grid)
        if rows != pixel_rows:
            raise InputError(
                f"{pixels_key} has {pixel_rows} patches, but {grid_key} {list(grid)} describes "
                f"{rows}; pass the grid that the processor returned with these pixels",
                first if len(grid) == 1 else None,
            )
        specs, offset = [], 0
        for index, (t, h, w) in enumerate(grid, first):
            specs.append(self._spec(index, modality, t, h, w, offset))
            offset += t * h * w
        return tuple(specs)

    def _check_grid(self, modality: str, key: str, t: int, h: int, w: int, index: int) -> None:
        shown = f"{key} is ({t}, {h}, {w})"
        if min(t, h, w) < 1:
            raise InputError(f"{shown}; every side must be 1 or more, drop empty items", index)
        for side, length in (("height", h), ("width", w)):
            if length % self.merge:
                raise InputError(
                    f"{shown}, whose {side} {length} is not a multiple of {self.merge}, the merge "
                    "size; resize to whole merge blocks",
                    index,
                )
        if modality == "image" and t != 1:
            raise InputError(
                f"{shown}, but an image has one frame (t = 1); pass a video as "
                "pixel_values_videos with video_grid_thw",
                index,
            )

    def _spec(self, index: int, modality: str, t: int, h: int, w: int, offset: int) -> ItemSpec:
        return ItemSpec(
            index=index,
            modality=modality,
            rows=t * h * w,
            tokens=t * h * w // self.merge_area,
            sequences={BOUNDARIES: (h * w,) * t},
            signature=(modality, h, w),
            row_offset=offset,
            frames=t,
            splittable=modality == "video",
        )

    def capacities(self, settings: Settings) -> tuple[Capacity, ...]:
        """A dense ladder for images, large ones alone in a graph of their own where that is faster,
        and a coarser ladder for videos, few large frames in graphs of their own."""
        ladders = {
            "image": image_graphs(settings, self.merge_area, self.lone_sequence_from),
            "video": video_graphs(settings, self.merge_area),
        }
        unknown = set(self.modalities) - set(ladders)
        if unknown:
            raise SettingsError(
                f"{self.name}: unknown modality {min(unknown)!r}; known: image, video"
            )
        return tuple(self._capacity(name, g) for name in self.modalities for g in ladders[name])

    def _capacity(self, path: str, graph: FrameGraph) -> Capacity:
        rows = graph.tokens * self.merge_area
        bounds = {BOUNDARIES: SequenceBound(rows, graph.slots, graph.longest)}
        key = GraphKey(self.name, path, graph.tokens, graph.axes)
        return Capacity(key, rows, graph.tokens, graph.items, bounds, self.lone_sequence_from)

    def buffers(self, capacity: Capacity) -> Mapping[str, BufferSpec]:
        """Patches in the encoder's dtype; positions, interpolation and boundaries packed."""
        rows = capacity.rows
        slots = capacity.sequences[BOUNDARIES].slots
        return {
            PIXELS: BufferSpec((rows, self.patch_width), self.pixel_dtype),
            BOUNDARIES: BufferSpec((slots + 1,), torch.int32, packed=True),
            "position_ids": BufferSpec((rows, 2), torch.int32, packed=True),
            "interp_indices": BufferSpec((rows, 4), torch.int32, packed=True),
            "interp_weights": BufferSpec((rows, 4), torch.float32, packed=True),
        }

    def metadata(self, items: Sequence[ItemSpec]) -> Mapping[str, npt.NDArray[np.generic]]:
        """`position_ids` (rows, 2) int32, `interp_indices` (rows, 4) int32, `interp_weights`
        (rows, 4) float32."""
        frames: list[tuple[npt.NDArray[Any], ...]] = []
        for item in items:
            h, w = frame_size(item)
            frames += [self._frame_metadata(h, w)] * item.frames
        parts = (
            frames[0]
            if len(frames) == 1
            else [np.concatenate(p) for p in zip(*frames, strict=True)]
        )
        return dict(zip(("position_ids", "interp_indices", "interp_weights"), parts, strict=True))

    def _compute_frame_metadata(self, h: int, w: int) -> tuple[npt.NDArray[Any], ...]:
        """One frame's metadata, patches in the order of merge blocks."""
        positions = in_merge_blocks(h, w, self.merge)
        arrays = positions, *patch_taps(positions, self._taps(h), self._taps(w), self.table_side)
        for array in arrays:
            array.flags.writeable = False
        return arrays

    def _axis_taps(self, size: int) -> Taps:
        """Taps of an axis, as this encoder interpolates."""
        return axis_taps(size, self.table_side, self.encoder.interpolation_align_corners)

    def stage(
        self,
        mm_kwargs: Mapping[str, Any],
        items: Sequence[ItemSpec],
        inputs: Mapping[str, torch.Tensor],
    ) -> None:
        """One copy for each run of neighbouring rows: one for a whole group."""
        self.stager(items, inputs)(mm_kwargs)

    def stager(
        self, items: Sequence[ItemSpec], inputs: Mapping[str, torch.Tensor]
    ) -> Callable[[Mapping[str, Any]], None]:
        """`stage` with the views of the input made once."""
        target, at = inputs[PIXELS], 0
        copies = []
        for key, start, end in _runs(items):
            copies.append((key, start, end, target[at : at + end - start]))
            at += end - start
        padding = target[at:] if at < target.shape[0] else None

        def stage(mm_kwargs: Mapping[str, Any]) -> None:
            for key, start, end, into in copies:
                source = mm_kwargs[key]
                into.copy_(source if source.shape[0] == end - start else source[start:end])
            if padding is not None:
                padding.zero_()

        return stage

    def eager_inputs(
        self, mm_kwargs: Mapping[str, Any], items: Sequence[ItemSpec]
    ) -> dict[str, torch.Tensor]:
        """The caller's own pixels where they are one contiguous run; a gathered copy otherwise."""
        runs = [
            mm_kwargs[key][start:end].to(self.device, self.pixel_dtype)
            for key, start, end in _runs(items)
        ]
        return {PIXELS: (runs[0] if len(runs) == 1 else torch.cat(runs)).contiguous()}

    def forward(
        self, inputs: Mapping[str, torch.Tensor], max_seqlen: Mapping[str, int]
    ) -> Sequence[torch.Tensor]:
        """Merged features, then the DeepStack levels; each (tokens, out_hidden)."""
        output = self.encoder(
            inputs[PIXELS],
            None,
            cu_seqlens=inputs[BOUNDARIES],
            max_seqlen=max_seqlen[BOUNDARIES],
            position_ids=inputs["position_ids"],
            interp_indices=inputs["interp_indices"],
            interp_weights=inputs["interp_weights"],
            return_dict=True,
        )
        return [output.pooler_output, *output.deepstack_features]

    def example(self, items: Sequence[ItemSpec], seed: int) -> dict[str, Any]:
        """Normally distributed pixels on the encoder's device; raw ones around the middle."""
        generator = torch.Generator(device=self.device).manual_seed(seed)
        request: dict[str, Any] = {}
        for modality, (pixels_key, grid_key) in KEYS.items():
            own = [item for item in items if item.modality == modality]
            if own:
                rows = sum(item.rows for item in own)
                pixels = torch.randn(
                    (rows, self.patch_width),
                    generator=generator,
                    dtype=self.dtype,
                    device=self.device,
                )
                if not self.pixel_dtype.is_floating_point:
                    pixels = (pixels * 48 + 128).clamp(0, 255).to(self.pixel_dtype)
                request[pixels_key] = pixels
                request[grid_key] = [[item.frames, *frame_size(item)] for item in own]
        return request

    def capture_case(self, capacity: Capacity) -> tuple[ItemSpec, ...] | None:
        """As many pictures, or films of one frame, as fit, nearly equally large."""
        return self._items_of(capacity.key.path, nearly_equal(capacity))

    def worst_cases(self, capacity: Capacity) -> Iterable[tuple[ItemSpec, ...]]:
        """Each once, of those that hold anything; see `worst_images` and `worst_films`."""
        bound = capacity.sequences[BOUNDARIES]
        if capacity.key.path == "video":
            longest = bound.max_seqlen // self.merge_area
            groups = worst_films(capacity, bound.slots, longest, self.merge_area)
        else:
            groups = worst_images(capacity, bound.slots, self.merge_area)
        seen: list[Sizes] = []
        for group in groups:
            if group not in seen and group and all(min(sizes) > 0 for sizes in group):
                seen.append(group)
                yield self._items_of(capacity.key.path, group)

    def _items_of(self, modality: str, sizes: Sizes) -> tuple[ItemSpec, ...]:
        """Specs of items, as square as they can be."""
        specs: list[ItemSpec] = []
        for index, (frames, tokens) in enumerate(sizes):
            short = next(side for side in range(isqrt(tokens), 0, -1) if tokens % side == 0)
            h, w = short * self.merge, tokens // short * self.merge
            offset = specs[-1].row_offset + specs[-1].rows if specs else 0
            specs.append(self._spec(index, modality, frames, h, w, offset))
        return tuple(specs)


def _runs(items: Sequence[ItemSpec]) -> Iterator[tuple[str, int, int]]:
    """(key of the pixels, first row, end) in the items' order, as few as there can be."""
    modality, start = items[0].modality, items[0].row_offset
    end = start + items[0].rows
    for item in items[1:]:
        if item.modality != modality or item.row_offset != end:
            yield KEYS[modality][0], start, end
            modality, start = item.modality, item.row_offset
        end = item.row_offset + item.rows
    yield KEYS[modality][0], start, end


def frame_size(item: ItemSpec) -> tuple[int, int]:
    """Height and width of an item's frames, in patches."""
    signature: Any = item.signature
    return signature[1], signature[2]


def _tiny() -> Qwen3OmniMoeVisionEncoderConfig:
    return Qwen3OmniMoeVisionEncoderConfig(
        depth=4,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        out_hidden_size=32,
        deepstack_visual_indexes=[0, 1, 2],
    )


def _full() -> Qwen3OmniMoeVisionEncoderConfig:
    """Vision configuration of Qwen3-Omni-30B-A3B; its text model is 2048 wide."""
    return Qwen3OmniMoeVisionEncoderConfig(out_hidden_size=2048)


class Qwen3OmniVisionFactory:
    """Finds, builds and feeds `Qwen3OmniVision`."""

    name = "qwen3_omni_vision"
    modality = "image"
    presets = MappingProxyType({"tiny": _tiny, "full": _full})

    def wrap(self, module: torch.nn.Module) -> Qwen3OmniVision | None:
        """An adapter for transformers' encoder; None for any other module."""
        if isinstance(module, Qwen3OmniMoeVisionEncoder):
            return Qwen3OmniVision(module)
        return None

    def build(
        self, preset: str, device: torch.device, dtype: torch.dtype, seed: int = 0
    ) -> Qwen3OmniVision:
        """The encoder with seeded random weights.

        Raises:
            SettingsError: no such preset.
        """
        config = chosen_preset(self.presets, preset)()
        config._attn_implementation = "sdpa"
        encoder = with_seeded_weights(
            lambda: Qwen3OmniMoeVisionEncoder(config), device, dtype, seed
        )
        rotary = encoder.rotary_pos_emb
        frequencies, _ = rotary.compute_axial_rope_parameters(config)
        rotary.inv_freq = frequencies.to(device)
        rotary.original_inv_freq = frequencies.to(device, copy=True)
        return Qwen3OmniVision(encoder)

    def load(self, adapter: EncoderAdapter, files: Sequence[Path]) -> dict[str, Any]:
        """Pictures and films through transformers' own image processor, or a sample.

        Raises:
            InputError: a file cannot be decoded.
        """
        paths = list(files) or [sample_photograph()]
        request: dict[str, Any] = {}
        for modality, read in (("image", picture_patches), ("video", film_patches)):
            chosen = [(n, p) for n, p in enumerate(paths) if is_film(p) == (modality == "video")]
            if chosen:
                pixels, grids = zip(*(read(path, item) for item, path in chosen), strict=True)
                pixels_key, grid_key = KEYS[modality]
                request[pixels_key] = torch.from_numpy(np.concatenate(pixels)).to(
                    adapter.device, adapter.dtype
                )
                request[grid_key] = torch.tensor(grids)
        return request
