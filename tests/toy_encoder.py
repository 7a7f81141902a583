"""A small encoder for tests of the engine: packed rows, two boundary sets, DeepStack-like levels.

A request is `{"pixels": (rows, 6), "grids": [(frames, rows a frame), ...]}`; a third entry of a
grid names its modality. Two rows merge into one token.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from graphhal.adapter import BufferSpec, EncoderAdapter
from graphhal.errors import InputError
from graphhal.items import ItemSpec
from graphhal.plan import Capacity, GraphKey, SequenceBound
from graphhal.platform import Platform, VarlenAttention
from graphhal.settings import Settings

CHANNELS, HIDDEN, HEADS, WIDTH = 6, 8, 2, 5
MERGE = 2
WINDOW = 4
POSITIONS = 128
FULL, WINDOWED = "cu_seqlens", "cu_window_seqlens"


class Block(nn.Module):
    def __init__(self, boundary_set: str) -> None:
        super().__init__()
        self.boundary_set = boundary_set
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(
        self,
        rows: torch.Tensor,
        attention: VarlenAttention,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
    ) -> torch.Tensor:
        shape = (len(rows), HEADS, HIDDEN // HEADS)
        query, key, value = (x.reshape(shape) for x in self.qkv(rows).split(HIDDEN, dim=1))
        mixed = attention(query, key, value, cu_seqlens, max_seqlen, shape[2] ** -0.5)
        return rows + self.out(mixed.reshape(len(rows), HIDDEN))


class Tower(nn.Module):
    share = 1.0

    def __init__(self, sets: Sequence[str], levels: int) -> None:
        super().__init__()
        self.embed = nn.Linear(CHANNELS, HIDDEN)
        self.positions = nn.Parameter(torch.empty(POSITIONS, HIDDEN))
        self.register_buffer("scale", torch.full((HIDDEN,), 1.5))
        self.shift, self.gain = torch.zeros(HIDDEN), 1.0  # beside parameters and buffers
        self.gains, self.scaling = [1.0, [1.0]], {"default": 1.0, "by_level": [1.0]}
        self.merged: list[str] = []
        self.tables = (torch.ones(HIDDEN),)
        self.blocks = nn.ModuleList(Block(name) for name in sets)
        self.mergers = nn.ModuleList(nn.Linear(MERGE * HIDDEN, WIDTH) for _ in range(levels))

    def merged_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.reshape(-1, MERGE * HIDDEN) * self.share

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Tower":
        """`to` moves what PyTorch does not know of, too."""
        super()._apply(fn, recurse)
        self.shift = fn(self.shift)
        self.tables = tuple(map(fn, self.tables))
        return self


class ToyEncoder(EncoderAdapter):
    """See the module. Knobs are what the engine's tests vary."""

    def __init__(
        self,
        budgets: Sequence[int] = (4, 8, 16),
        paths: Sequence[str] = ("image",),
        sets: Sequence[str] = (FULL, WINDOWED),
        levels: int = 2,
        dtype: torch.dtype = torch.float32,
        max_seqlen: int | None = None,
        spare_slots: bool = True,
    ) -> None:
        self.name = "toy"
        self.modalities = ("image", "video")
        self.device = torch.device("cpu")
        self.dtype = dtype
        self.budgets, self.paths, self.sets = tuple(budgets), tuple(paths), tuple(sets)
        self.max_seqlen = max_seqlen
        self.spare_slots = spare_slots
        generator = torch.Generator().manual_seed(7)
        self.tower = Tower(self.sets, levels).to(dtype)
        for parameter in self.tower.parameters():
            nn.init.normal_(parameter, std=0.4, generator=generator)
        self.attention: VarlenAttention | None = None
        self.refused: str | None = None
        self.item_specs_calls = 0

    def prepare(self, platform: Platform) -> None:
        self.attention = platform.info.attention

    def item_specs(self, mm_kwargs: Mapping[str, Any]) -> tuple[ItemSpec, ...]:
        self.item_specs_calls += 1
        items: list[ItemSpec] = []
        offset = 0
        for index, (frames, rows, *modality) in enumerate(mm_kwargs["grids"]):
            if frames < 1 or rows < 1 or rows % MERGE:
                raise InputError(f"a frame of {rows} rows cannot be merged in pairs", index)
            items.append(self.item(index, frames, rows, *modality, offset=offset))
            offset += frames * rows
        if len(mm_kwargs["pixels"]) != offset:
            raise InputError(f"{len(mm_kwargs['pixels'])} rows do not match the grids' {offset}")
        return tuple(items)

    def item(
        self, index: int, frames: int, rows: int, modality: str | None = None, offset: int = 0
    ) -> ItemSpec:
        full, rest = divmod(rows, WINDOW)
        windows = (WINDOW,) * full + ((rest,) if rest else ())
        lengths = {FULL: (rows,) * frames, WINDOWED: windows * frames}
        modality = modality or ("video" if frames > 1 else "image")
        return ItemSpec(
            index=index,
            modality=modality,
            rows=frames * rows,
            tokens=frames * rows // MERGE,
            sequences={name: lengths[name] for name in self.sets},
            signature=(rows,),
            row_offset=offset,
            frames=frames,
            splittable=modality == "video",
        )

    def capacities(self, settings: Settings) -> tuple[Capacity, ...]:
        return tuple(
            self.capacity(path, budget, settings.max_items)
            for path in self.paths
            for budget in self.budgets
        )

    def capacity(self, path: str, budget: int, max_items: int) -> Capacity:
        rows = budget * MERGE
        longest = rows if self.max_seqlen is None else min(rows, self.max_seqlen)
        dummies = -(-rows // longest)
        frames = min(max_items * 4 if path == "video" else max_items, budget)
        spare = 1 if self.spare_slots else 0
        bounds = {
            FULL: SequenceBound(rows, frames + spare * dummies, longest),
            WINDOWED: SequenceBound(rows, rows // WINDOW + frames + spare, WINDOW),
        }
        return Capacity(
            key=GraphKey(self.name, path, budget),
            rows=rows,
            tokens=budget,
            items=max_items,
            sequences={name: bounds[name] for name in self.sets},
        )

    def buffers(self, capacity: Capacity) -> Mapping[str, BufferSpec]:
        specs = {
            "pixels": BufferSpec((capacity.rows, CHANNELS), self.dtype),
            "position_ids": BufferSpec((capacity.rows,), torch.int64, packed=True),
        }
        for name, bound in capacity.sequences.items():
            specs[name] = BufferSpec((bound.slots + 1,), torch.int32, packed=True)
        return specs

    def metadata(self, items: Sequence[ItemSpec]) -> Mapping[str, np.ndarray]:
        per_item = [np.tile(np.arange(i.rows // i.frames), i.frames) for i in items]
        return {"position_ids": np.concatenate(per_item)}

    def stage(
        self,
        mm_kwargs: Mapping[str, Any],
        items: Sequence[ItemSpec],
        inputs: Mapping[str, torch.Tensor],
    ) -> None:
        target, at = inputs["pixels"], 0
        for item in items:
            source = mm_kwargs["pixels"][item.row_offset : item.row_offset + item.rows]
            target[at : at + item.rows].copy_(source)
            at += item.rows
        target[at:].zero_()

    def forward(
        self, inputs: Mapping[str, torch.Tensor], max_seqlen: Mapping[str, int]
    ) -> torch.Tensor | Sequence[torch.Tensor]:
        assert self.attention is not None
        tower = self.tower
        rows = tower.embed(inputs["pixels"]) * tower.scale * tower.gain + tower.shift
        rows = rows * (tower.gains[0] * tower.scaling["default"] * (1 + len(tower.merged)))
        rows = rows * (tower.tables[0] * math.prod(tower.gains[1]))
        rows = rows + tower.positions[inputs["position_ids"]]
        levels: list[torch.Tensor] = []
        for block in tower.blocks:
            name = block.boundary_set
            rows = block(rows, self.attention, inputs[name], max_seqlen[name])
            levels.append(rows)
        merged = [
            merger(tower.merged_rows(level))
            for merger, level in zip(tower.mergers, reversed(levels), strict=False)
        ]
        return merged[0] if len(merged) == 1 else merged

    def example(self, items: Sequence[ItemSpec], seed: int) -> dict[str, Any]:
        return request(
            [(i.frames, i.rows // i.frames, i.modality) for i in items], seed, self.dtype
        )

    def worst_cases(self, capacity: Capacity) -> Iterable[tuple[ItemSpec, ...]]:
        path, rows, most = capacity.key.path, capacity.rows, capacity.items
        longest = rows if self.max_seqlen is None else min(rows, self.max_seqlen)
        count = -(-rows // longest)
        yield self._group(path, [longest] * (count - 1) + [rows - longest * (count - 1)])
        if longest > MERGE:
            yield self._group(path, [longest - MERGE])
        yield self._group(path, [MERGE] * min(most, rows // MERGE))
        if path == "video":
            yield (self.item(0, min(4, rows // MERGE), MERGE, "video"),)

    def _group(self, path: str, sizes: Sequence[int]) -> tuple[ItemSpec, ...]:
        items, offset = [], 0
        for index, rows in enumerate(sizes):
            items.append(self.item(index, 1, rows, path, offset))
            offset += rows
        return tuple(items)

    def refusal(self, items: Sequence[ItemSpec]) -> str | None:
        return self.refused

    def modules(self) -> Iterable[nn.Module]:
        return (self.tower,)


def request(
    grids: Sequence[Sequence[Any]], seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """A request of these grids, random pixels."""
    rows = sum(grid[0] * grid[1] for grid in grids)
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn((rows, CHANNELS), generator=generator, dtype=torch.float64).to(dtype)
    return {"pixels": pixels, "grids": [tuple(grid) for grid in grids]}


def images(*tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """A request of one image for each number of tokens."""
    return request([(1, n * MERGE) for n in tokens], seed, dtype)
