"""Adapters for vLLM's own Qwen towers: host integers in one packed copy, the rest in the graph.

Sizes, boundaries and positions come from graphhal's adapters of the same encoders; what differs is
the module that computes. Eager calls run the module's own eager code, so that the self-check
compares a graph with what vLLM would have answered: a tower that changed loses its graphs, and
never answers wrongly.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from graphhal.adapter import BufferSpec, Place
from graphhal.adapters.frame_positions import Taps
from graphhal.adapters.qwen3_omni_vision import (
    BOUNDARIES,
    KEYS,
    PIXELS,
    Qwen3OmniVision,
    frame_size,
)
from graphhal.items import ItemSpec
from graphhal.plan import Capacity, SequenceBound
from graphhal.settings import Settings
from graphhal.vllm_worker.held_tower import EAGER, HeldTower
from graphhal.vllm_worker.qwen_blocks import through_parts

log = logging.getLogger(__name__)

WINDOWS = "cu_window_seqlens"

MODALITY_OF = {pixels: modality for modality, (pixels, _) in KEYS.items()}
"""Of the key that carries pixels."""

Arrays = tuple[npt.NDArray[Any], ...]


class VllmQwenVision(HeldTower, Qwen3OmniVision):
    """vLLM's Qwen3-VL tower, and the Qwen3-Omni thinker's; images and videos, DeepStack levels.

    Args:
        tower: `Qwen3_VisionTransformer` or `Qwen3Omni_VisionTransformer`.
        modalities: which ladders to offer.
        takes_metadata: the tower takes `encoder_metadata`; else its blocks are called here.
        name: of the adapter.
        kept: where the model keeps the tower, and what holds it.
    """

    tower: Any

    def __init__(
        self,
        tower: Any,
        modalities: Sequence[str],
        takes_metadata: bool,
        name: str,
        kept: Sequence[Place] = (),
    ) -> None:
        HeldTower.__init__(self, tower, kept)
        self.name = name
        self.modalities = tuple(modalities)
        self.takes_metadata = takes_metadata
        self.merge = int(tower.spatial_merge_size)
        self.merge_area = self.merge**2
        self.table_side = self._table_side()
        projection = self._weight()
        self.patch_width = prod(projection.shape[1:])
        self.device = projection.device
        self._keep_by_size()
        self.own_pixel_dtype = _own_pixel_dtype(tower)
        self.forget()

    def _weight(self) -> torch.Tensor:
        return self.tower.patch_embed.proj.weight  # type: ignore[no-any-return]

    def _table_side(self) -> int:
        return int(self.tower.num_grid_per_side)

    def forget(self) -> None:
        """Blocks are tried part by part anew, and the rotary table is looked at again."""
        self._by_parts: bool | None = None
        self._known_places: int | None = None

    def output_order(self, mm_kwargs: Mapping[str, Any]) -> Iterable[str]:
        """As in vLLM's models: that of the request's keys."""
        return [MODALITY_OF[key] for key in mm_kwargs if key in MODALITY_OF]

    def refusal(self, items: Sequence[ItemSpec]) -> str | None:
        """Pictures with more places on a side than the rotary table has rows."""
        known = self._known_places
        if known is None:  # once: another table later is noticed as other weights are
            known = self._known_places = len(self.tower.rotary_pos_emb.cos_sin_cache)
        for item in items:
            h, w = frame_size(item)
            if max(h, w) > known:
                return f"{h} x {w} patches are more than the rotary table's {known}"
        return None

    def capture_case(self, capacity: Capacity) -> tuple[ItemSpec, ...] | None:
        """As for the encoder, if the rotary table reaches it."""
        items = super().capture_case(capacity)
        return items if items is not None and self.refusal(items) is None else None

    def worst_cases(self, capacity: Capacity) -> Iterable[tuple[ItemSpec, ...]]:
        """As for the encoder, but for pictures that the rotary table does not reach: looking up a
        row that it lacks would end a CUDA process."""
        reached = [i for i in super().worst_cases(capacity) if self.refusal(i) is None]
        even = self.capture_case(capacity)
        if even is not None and even not in reached:
            reached.append(even)
        return sorted(reached, key=lambda items: sum(i.tokens for i in items), reverse=True)

    def _axis_taps(self, size: int) -> Taps:
        """As vLLM has it: the outer places of both grids lie on each other."""
        last = np.float32(self.table_side - 1)
        scale = last / np.float32(size - 1) if size > 1 else np.float32(0)
        source = np.arange(size, dtype=np.float32) * scale
        floor = np.minimum(np.floor(source), last)
        taps = floor.astype(np.int32)[:, None] + np.arange(2, dtype=np.int32)
        distance = source - floor
        weights = np.stack((np.float32(1) - distance, distance), axis=1)
        return taps.clip(0, self.table_side - 1), weights.astype(np.float32)

    def eager_inputs(
        self, mm_kwargs: Mapping[str, Any], items: Sequence[ItemSpec]
    ) -> dict[str, torch.Tensor]:
        """The caller's pixels, and a mark for `forward` to run the tower's own eager code."""
        self._eager_items = tuple(items)
        return super().eager_inputs(mm_kwargs, items) | {EAGER: torch.zeros(1)}

    def forward(
        self, inputs: Mapping[str, torch.Tensor], max_seqlen: Mapping[str, int]
    ) -> Sequence[torch.Tensor]:
        """Merged features and DeepStack levels side by side: one (tokens, width) tensor."""
        if EAGER in inputs:
            return (self._eager_forward(inputs[PIXELS]),)
        return self._encode(inputs, max_seqlen, bool(self._by_parts))

    def _encode(
        self, inputs: Mapping[str, torch.Tensor], max_seqlen: Mapping[str, int], by_parts: bool
    ) -> Sequence[torch.Tensor]:
        """Through the tower, or through its blocks, whole or part by part."""
        boundaries = {
            "cu_seqlens": inputs[BOUNDARIES],
            "max_seqlen": torch.tensor(max_seqlen[BOUNDARIES], dtype=torch.int32),
            "sequence_lengths": None,
        }
        cos, sin = self._rotary(inputs["position_ids"])
        positions = self._positions(inputs["interp_indices"], inputs["interp_weights"])
        if self.takes_metadata and not by_parts:
            metadata = {
                "pos_embeds": positions,
                "rotary_pos_emb_cos": cos,
                "rotary_pos_emb_sin": sin,
                **boundaries,
            }
            return (self.tower(inputs[PIXELS], None, encoder_metadata=metadata),)
        return self._through_blocks(inputs[PIXELS], positions, cos, sin, boundaries, by_parts)

    def _eager_forward(self, pixels: torch.Tensor) -> torch.Tensor:
        items = self._take_eager_items()
        if self._by_parts is None:  # comes before every capture of a ladder
            self._by_parts = self._parts_agree()
        grid = [[item.frames, *frame_size(item)] for item in items]
        output: torch.Tensor = self.tower(
            pixels, grid if self.takes_metadata else torch.tensor(grid)
        )
        return output

    def _rotary(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, 2 halves) each, gathered from the tower's table by row and column."""
        table = self.tower.rotary_pos_emb.cos_sin_cache
        picked = table.index_select(0, position_ids.reshape(-1))
        cos, sin = picked.chunk(2, dim=-1)
        rows = len(position_ids)
        return cos.reshape(rows, -1), sin.reshape(rows, -1)

    def _positions(self, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor | None:
        """(rows, hidden): four rows of the position table, weighted."""
        if not getattr(self.tower, "apply_vit_abs_pos_embed", True):
            return None
        table = self.tower.pos_embed.weight
        return torch.nn.functional.embedding_bag(
            indices, table, mode="sum", per_sample_weights=weights.to(self.dtype)
        )

    def _through_blocks(
        self,
        pixels: torch.Tensor,
        positions: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        boundaries: Mapping[str, Any],
        by_parts: bool,
    ) -> tuple[torch.Tensor, ...]:
        tower = self.tower
        if hasattr(tower, "input_norm"):
            pixels = tower.input_norm(pixels, self.dtype)
        hidden = tower.patch_embed(pixels)
        if positions is not None:
            hidden = hidden + positions
        hidden = hidden.unsqueeze(1)
        levels: list[torch.Tensor] = []
        wanted = tower.deepstack_visual_indexes or []
        mergers = tower.deepstack_merger_list if self.takes_metadata else tower.merger_list
        for number, block in enumerate(tower.blocks):
            if by_parts:
                hidden = through_parts(block, hidden, cos, sin, **boundaries)
            else:
                hidden = block(hidden, rotary_pos_emb_cos=cos, rotary_pos_emb_sin=sin, **boundaries)
            if number in wanted:
                levels.append(mergers[len(levels)](hidden))
        return (tower.merger(hidden), *levels)

    def _parts_agree(self) -> bool:
        """Whether blocks called part by part compute what they do as a whole, bit by bit.

        A release may change them, an operator compile them, and kernels differ by device.
        """
        items = self._items_of(self.modalities[0], [(1, 2), (1, 1)])
        lengths = [length for item in items for length in item.sequences[BOUNDARIES]]
        (pixels, _), *_ = (KEYS[item.modality] for item in items)
        tensors = {name: torch.tensor(array) for name, array in self.metadata(items).items()}
        tensors[BOUNDARIES] = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        inputs = {name: tensor.to(self.device) for name, tensor in tensors.items()}
        inputs[PIXELS] = self.example(items, seed=0)[pixels]
        try:
            whole, parts = (
                torch.cat(list(self._encode(inputs, {BOUNDARIES: max(lengths)}, by_parts)), dim=1)
                for by_parts in (False, True)
            )
        except Exception:  # the model's own code
            log.debug("%s: blocks are called as a whole", self.name, exc_info=True)
            return False
        return torch.equal(whole, parts)


class VllmQwen25Vision(VllmQwenVision):
    """vLLM's Qwen2.5-VL tower: windowed layers have boundaries and a bound of their own."""

    def __init__(
        self, tower: Any, modalities: Sequence[str], name: str, kept: Sequence[Place] = ()
    ) -> None:
        super().__init__(tower, modalities, takes_metadata=True, name=name, kept=kept)
        self.side = tower.window_size // self.merge // tower.patch_size
        self.window_rows = self.side**2 * self.merge_area

    def _table_side(self) -> int:
        return 0

    def _parts_agree(self) -> bool:
        return False  # windows change the order of rows between the tower and its blocks

    def _spec(self, index: int, modality: str, t: int, h: int, w: int, offset: int) -> ItemSpec:
        spec = super()._spec(index, modality, t, h, w, offset)
        windows = tuple(map(int, self._frame_metadata(h, w)[2])) * t
        return replace(spec, sequences={**spec.sequences, WINDOWS: windows})

    def capacities(self, settings: Settings) -> tuple[Capacity, ...]:
        """As for Qwen3-VL, with room for the windows, and for the padding in windows."""
        return tuple(map(self._with_windows, super().capacities(settings)))

    def _with_windows(self, capacity: Capacity) -> Capacity:
        pieces = capacity.sequences[BOUNDARIES].slots
        # A strip one token wide makes the most windows; each picture or frame can cut one more.
        strip = -(-capacity.tokens // self.side)
        slots = min(capacity.tokens, pieces + strip) + -(-capacity.rows // self.window_rows)
        bound = SequenceBound(capacity.rows, slots, self.window_rows)
        return replace(capacity, sequences={**capacity.sequences, WINDOWS: bound})

    def buffers(self, capacity: Capacity) -> Mapping[str, BufferSpec]:
        """Patches in the tower's dtype; positions, windows and boundaries packed."""
        rows, tokens = capacity.rows, capacity.tokens
        return {
            PIXELS: BufferSpec((rows, self.patch_width), self.pixel_dtype),
            "position_ids": BufferSpec((rows, 2), torch.int32, packed=True),
            "window_index": BufferSpec((tokens,), torch.int64, packed=True),
            "reverse_index": BufferSpec((tokens,), torch.int64, packed=True),
        } | {
            name: BufferSpec((bound.slots + 1,), torch.int32, packed=True)
            for name, bound in capacity.sequences.items()
        }

    def metadata(self, items: Sequence[ItemSpec]) -> Mapping[str, npt.NDArray[np.generic]]:
        """`position_ids` (rows, 2) in the order of windows; `window_index` and its inverse."""
        positions, order, first = [], [], 0
        for item in items:
            h, w = frame_size(item)
            places, index, _ = self._frame_metadata(h, w)
            for _ in range(item.frames):
                positions.append(places)
                order.append(index + first)
                first += len(index)
        window_index = np.concatenate(order)
        reverse = np.empty_like(window_index)
        reverse[window_index] = np.arange(len(window_index))
        return {
            "position_ids": np.concatenate(positions),
            "window_index": window_index,
            "reverse_index": reverse,
        }

    def _compute_frame_metadata(self, h: int, w: int) -> Arrays:
        """Of one frame: places of its patches, its tokens in window order, rows of each window."""
        tall, wide = h // self.merge, w // self.merge
        token = np.arange(tall * wide).reshape(tall, wide)
        windows = [
            token[top : top + self.side, left : left + self.side].ravel()
            for top in range(0, tall, self.side)
            for left in range(0, wide, self.side)
        ]
        order = np.concatenate(windows)
        rows, columns = np.divmod(order, wide)
        inner = np.arange(self.merge)
        shape = (len(order), self.merge, self.merge)
        place_rows = np.broadcast_to((rows[:, None] * self.merge + inner)[:, :, None], shape)
        place_columns = np.broadcast_to((columns[:, None] * self.merge + inner)[:, None, :], shape)
        places = np.stack((place_rows.ravel(), place_columns.ravel()), axis=1).astype(np.int32)
        lengths = np.array([len(window) * self.merge_area for window in windows])
        return places, order.astype(np.int64), lengths

    def forward(
        self, inputs: Mapping[str, torch.Tensor], max_seqlen: Mapping[str, int]
    ) -> Sequence[torch.Tensor]:
        """Merged features (tokens, width)."""
        if EAGER in inputs:
            return (self._eager_forward(inputs[PIXELS]),)
        cos, sin = self._rotary(inputs["position_ids"])
        metadata = {
            "rotary_pos_emb_cos": cos,
            "rotary_pos_emb_sin": sin,
            "window_index": inputs["window_index"],
            "reverse_indices": inputs["reverse_index"],
            "cu_seqlens": inputs[BOUNDARIES],
            "cu_window_seqlens": inputs[WINDOWS],
            "max_seqlen_full": torch.tensor(max_seqlen[BOUNDARIES], dtype=torch.int32),
            "max_seqlen_window": torch.tensor(max_seqlen[WINDOWS], dtype=torch.int32),
        }
        return (self.tower(inputs[PIXELS], None, encoder_metadata=metadata),)


def _own_pixel_dtype(tower: Any) -> torch.dtype | None:
    """Of raw pixels, where the tower normalises them (`mm_device_do_normalize`)."""
    norm = getattr(tower, "input_norm", None)
    raw = getattr(norm, "input_dtype", None)
    if getattr(norm, "is_identity", True) is False:  # 0.30 names no dtype
        raw = torch.uint8
    return raw if isinstance(raw, torch.dtype) else None
