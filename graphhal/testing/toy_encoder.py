"""A small encoder with everything that goes wrong in big ones, and its float64 host reference.

Two attention layers with a boundary set each, host metadata beside the boundaries, two rows to a
token, two output levels. Adapter of the conformance suite; vendors may use it as they like.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from graphhal.adapter import BufferSpec, EncoderAdapter
from graphhal.errors import InputError
from graphhal.items import ItemSpec
from graphhal.plan import Capacity, GraphKey, SequenceBound
from graphhal.platform import Platform, VarlenAttention
from graphhal.settings import Settings

HEADS = 2
HEAD_DIM = 64
WIDTH = HEADS * HEAD_DIM
PIXELS = 32
LEVEL_WIDTH = 48
ROWS_PER_TOKEN = 2
FULL = "cu_seqlens"
WINDOWED = "cu_window_seqlens"
_PROJECTIONS = ("query", "key", "value")


@dataclass(frozen=True, slots=True)
class ToyItem:
    """One item of a toy request.

    Attributes:
        rows: input rows; even.
        window: rows of its attention windows in the second layer; None for one window.
        phase: host metadata of its rows, added to them along a weight vector.
    """

    rows: int
    window: int | None = None
    phase: float = 0.0

    @property
    def windows(self) -> tuple[int, ...]:
        """Rows of each window."""
        size = self.window or self.rows
        whole, rest = divmod(self.rows, size)
        return (*[size] * whole, *([rest] if rest else []))


class ToyEncoder(EncoderAdapter):
    """Packed rows of pixels in, tokens of two levels out.

    A request is `{"pixels": (rows, 32) tensor on the host, "items": [ToyItem, …]}`.

    Args:
        device: where weights and inputs live.
        dtype: of weights and outputs.
        budgets: input rows of the ladder's graphs.
        slots: attention sequences that a graph holds, in either boundary set.
        path: ladder name; two encoders of one ladder size differ by it.
    """

    modalities = ("image",)

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        budgets: Sequence[int] = (16, 32),
        slots: int = 6,
        path: str = "image",
    ) -> None:
        self.name = "toy"
        self.device = device
        self.dtype = dtype
        self.budgets = tuple(budgets)
        self.slots = slots
        self._path = path
        self._attention: VarlenAttention | None = None
        self.weights = {
            name: weight.to(dtype=dtype, device=device, copy=True)
            for name, weight in _weights().items()
        }

    def prepare(self, platform: Platform) -> None:
        """Take the platform's attention."""
        self._attention = platform.info.attention

    def item_specs(self, mm_kwargs: Mapping[str, Any]) -> tuple[ItemSpec, ...]:
        """Sizes of the items."""
        items: list[ToyItem] = list(mm_kwargs["items"])
        specs = []
        offset = 0
        for index, item in enumerate(items):
            if item.rows < ROWS_PER_TOKEN or item.rows % ROWS_PER_TOKEN:
                raise InputError(f"rows must be even and above 0, not {item.rows}", index)
            specs.append(
                ItemSpec(
                    index=index,
                    modality="image",
                    rows=item.rows,
                    tokens=item.rows // ROWS_PER_TOKEN,
                    sequences={FULL: (item.rows,), WINDOWED: item.windows},
                    signature=item,
                    row_offset=offset,
                )
            )
            offset += item.rows
        if offset != len(mm_kwargs["pixels"]):
            raise InputError(f"pixels has {len(mm_kwargs['pixels'])} rows, the items have {offset}")
        return tuple(specs)

    def capacities(self, settings: Settings) -> tuple[Capacity, ...]:
        """One graph for each of `budgets`."""
        return tuple(self.capacity(rows) for rows in self.budgets)

    def capacity(self, rows: int, max_seqlen: int | None = None) -> Capacity:
        """A graph of `rows` rows whose sequences are no longer than `max_seqlen` (or `rows`)."""
        bound = SequenceBound(rows, self.slots, max_seqlen or rows)
        return Capacity(
            key=GraphKey(self.name, self._path, rows),
            rows=rows,
            tokens=rows // ROWS_PER_TOKEN,
            items=self.slots,
            sequences={FULL: bound, WINDOWED: bound},
        )

    def path(self, item: ItemSpec) -> str:
        """The one ladder."""
        return self._path

    def buffers(self, capacity: Capacity) -> Mapping[str, BufferSpec]:
        """Pixels in bulk; boundaries and phases packed."""
        ends = {
            name: BufferSpec((bound.slots + 1,), torch.int32, packed=True)
            for name, bound in capacity.sequences.items()
        }
        return {
            "pixels": BufferSpec((capacity.rows, PIXELS), self.dtype),
            FULL: ends[FULL],
            "phases": BufferSpec((capacity.rows, 1), torch.float32, packed=True),
            WINDOWED: ends[WINDOWED],
        }

    def metadata(self, items: Sequence[ItemSpec]) -> Mapping[str, npt.NDArray[np.generic]]:
        """The phase of every row."""
        phases = [np.full((item.rows, 1), _toy(item).phase, np.float32) for item in items]
        return {"phases": np.concatenate(phases)}

    def stage(
        self,
        mm_kwargs: Mapping[str, Any],
        items: Sequence[ItemSpec],
        inputs: Mapping[str, torch.Tensor],
    ) -> None:
        """Copy pixels; zero the padding."""
        target, row = inputs["pixels"], 0
        for item in items:
            source = mm_kwargs["pixels"][item.row_offset : item.row_offset + item.rows]
            target[row : row + item.rows].copy_(source.to(self.dtype))
            row += item.rows
        target[row:].zero_()

    def forward(
        self, inputs: Mapping[str, torch.Tensor], max_seqlen: Mapping[str, int]
    ) -> list[torch.Tensor]:
        """Two levels of (tokens, 48)."""
        weights = self.weights
        rows = inputs["pixels"] @ weights["input"]
        rows = rows + inputs["phases"].to(self.dtype) * weights["phase"]
        first = rows + self._attend(rows, "1", inputs[FULL], max_seqlen[FULL])
        second = first + self._attend(first, "2", inputs[WINDOWED], max_seqlen[WINDOWED])
        shape = (len(rows) // ROWS_PER_TOKEN, ROWS_PER_TOKEN * WIDTH)
        return [
            second.reshape(shape) @ weights["level_1"],
            first.reshape(shape) @ weights["level_2"],
        ]

    def _attend(
        self, rows: torch.Tensor, layer: str, cu_seqlens: torch.Tensor, max_seqlen: int
    ) -> torch.Tensor:
        if self._attention is None:
            raise RuntimeError("ToyEncoder.prepare(platform) was not called")
        query, key, value = (
            (rows @ self.weights[f"{name}_{layer}"]).view(-1, HEADS, HEAD_DIM)
            for name in _PROJECTIONS
        )
        mixed = self._attention(query, key, value, cu_seqlens, max_seqlen, HEAD_DIM**-0.5)
        return mixed.reshape(rows.shape)

    def request(self, items: Iterable[ToyItem | int], seed: int = 0) -> dict[str, Any]:
        """A seeded request; an int is an item of that many rows."""
        toys = [ToyItem(item) if isinstance(item, int) else item for item in items]
        draw = torch.Generator().manual_seed(seed)
        rows = sum(toy.rows for toy in toys)
        pixels = torch.randn(rows, PIXELS, generator=draw, device="cpu")
        return {"pixels": pixels, "items": toys}

    def example(self, items: Sequence[ItemSpec], seed: int) -> dict[str, Any]:
        """A seeded request of exactly these items."""
        return self.request([_toy(item) for item in items], seed)

    def worst_cases(self, capacity: Capacity) -> Iterable[tuple[ItemSpec, ...]]:
        """Full as one sequence, full with windows, one token short, many short ones."""
        rows, longest = capacity.rows, capacity.sequences[FULL].max_seqlen
        many = [ROWS_PER_TOKEN] * (capacity.items - 2)
        cases = (
            [longest, *([rows - longest] if rows > longest else [])],
            [ToyItem(rows // 2, rows // 4), ToyItem(rows - rows // 2, phase=1.5)],
            [min(longest, rows - ROWS_PER_TOKEN)],
            many,
        )
        for case in cases:
            items = self.item_specs(self.request(case))
            if capacity.misfit(items) is None:
                yield items

    def reference(self, mm_kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """What the encoder should return, one (tokens, 96) float64 host tensor an item.

        Computed sequence by sequence with PyTorch on the host, without the platform.
        """
        weights = {name: value.cpu().double() for name, value in self.weights.items()}
        outputs = []
        for spec in self.item_specs(mm_kwargs):
            pixels = mm_kwargs["pixels"][spec.row_offset : spec.row_offset + spec.rows]
            rows = pixels.to(self.dtype).double() @ weights["input"]
            rows = rows + _toy(spec).phase * weights["phase"]
            first = rows + _reference_attention(rows, weights, "1", spec.sequences[FULL])
            second = first + _reference_attention(first, weights, "2", spec.sequences[WINDOWED])
            shape = (spec.tokens, ROWS_PER_TOKEN * WIDTH)
            levels = [
                second.reshape(shape) @ weights["level_1"],
                first.reshape(shape) @ weights["level_2"],
            ]
            outputs.append(torch.cat(levels, dim=1))
        return outputs


@cache
def _weights() -> dict[str, torch.Tensor]:
    """Seeded float32 weights on the host."""
    draw = torch.Generator().manual_seed(20)
    shapes = {"input": (PIXELS, WIDTH), "phase": (1, WIDTH)}
    shapes |= {f"{name}_{layer}": (WIDTH, WIDTH) for name in _PROJECTIONS for layer in "12"}
    shapes |= {f"level_{level}": (ROWS_PER_TOKEN * WIDTH, LEVEL_WIDTH) for level in "12"}
    return {
        name: torch.randn(shape, generator=draw, device="cpu") * shape[0] ** -0.5
        for name, shape in shapes.items()
    }


def _toy(item: ItemSpec) -> ToyItem:
    if not isinstance(item.signature, ToyItem):
        raise InputError(f"{item!r} is no item of ToyEncoder", item.index)
    return item.signature


def _reference_attention(
    rows: torch.Tensor, weights: Mapping[str, torch.Tensor], layer: str, lengths: Sequence[int]
) -> torch.Tensor:
    query, key, value = (
        (rows @ weights[f"{name}_{layer}"]).view(-1, HEADS, HEAD_DIM) for name in _PROJECTIONS
    )
    return reference_attention(query, key, value, lengths, HEAD_DIM**-0.5).reshape(rows.shape)


def reference_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[int],
    scale: float,
) -> torch.Tensor:
    """Attention within each sequence, for (rows, heads, head_dim) float64 host tensors."""
    parts = []
    for q, k, v in zip(*(torch.split(t, list(lengths)) for t in (query, key, value)), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(parts)
