"""The static inputs of a path's graphs, as the model itself asks for them."""

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from graphhal.adapter import BufferSpec
from graphhal.plan import GraphKey
from graphhal.vllm_worker.limits import Limits
from graphhal.vllm_worker.protocol import Dialect, tower_modules
from graphhal.vllm_worker.protocol_staging import Captured, Padding

MARKER = "graph_number"
"""A static input that nothing reads: its length tells which graph a forward belongs to."""
BOUNDS = {
    "cu_seqlens": ("max_seqlen", "max_seqlen_full"),
    "cu_window_seqlens": ("max_seqlen_window",),
}
"""Buffers that hold boundaries, and the host scalar that bounds their longest sequence."""


class ProtocolBuffers:
    """What each graph of one path is captured with.

    Attributes:
        model, dialect, path, limits, device: as given.
        scaled: boundaries are no row numbers, and kept as the model prepares them.
        ends_on_host: boundary buffers are filled from the host, with the other host metadata.

    Args:
        model: the model, unwrapped.
        dialect: how this vLLM spells the protocol.
        path: one of the model's paths.
        limits: items and frames that a graph holds.
        device: of the graphs.
        dtype: of the graphs' floating-point inputs.
    """

    def __init__(
        self,
        model: Any,
        dialect: Dialect,
        path: str,
        limits: Limits,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.model = model
        self.dialect = dialect
        self.path = path
        self.limits = limits
        self.device, self._dtype = device, dtype
        self.scaled = _scales_boundaries(model)
        self.ends_on_host = False
        self._known: dict[GraphKey, Captured] = {}

    def dummies(self, budget: int, axes: tuple[Hashable, ...]) -> dict[str, torch.Tensor | None]:
        """The model's own capture inputs for a budget."""
        items, frames = self.limits.items_for(budget), self.limits.frames_for(budget)
        return self.dialect.capture_inputs(
            budget, items, frames, self.device, self._dtype, self.path, axes
        )

    def of(self, key: GraphKey, axes: tuple[Hashable, ...]) -> Captured:
        """Of one graph; asked once of the model."""
        if key not in self._known:
            self._known[key] = self._captured(key.size, axes)
        return self._known[key]

    def rows_of(self, key: GraphKey) -> int:
        """Rows that the model makes of its dummy inputs for a graph: fewer than its budget where
        that is no multiple of an item's; the budget before the graph's first forward."""
        known = self._known.get(key)
        return key.size if known is None else known.made or key.size

    def dummies_of(self, rows: int, axes: tuple[Hashable, ...]) -> dict[str, torch.Tensor | None]:
        """The model's dummy inputs of which it makes so many rows."""
        budgets = (known.budget for known in self._known.values() if known.made == rows)
        return self.dummies(next(budgets, rows), axes)

    def behind(self, inputs: Mapping[str, torch.Tensor]) -> Captured:
        """Of the graph whose static inputs these are."""
        number = len(inputs[MARKER])
        return next(known for known in self._known.values() if known.number == number)

    def _captured(self, budget: int, axes: tuple[Hashable, ...]) -> Captured:
        items, frames = self.limits.items_for(budget), self.limits.frames_for(budget)
        captured = Captured(len(self._known) + 1, budget, items, frames, {}, {})
        values = self.dummies(budget, axes)
        for name, value in values.items():
            if value is None:
                continue
            if value.device.type == "cpu" and (value.dim() == 0 or self.device.type != "cpu"):
                captured.constants[name] = safe_bound(name, value, values)
            elif name in BOUNDS and not self.scaled:
                captured.specs[name] = self._boundary_spec(captured, name, value, values)
            else:
                captured.specs[name] = BufferSpec(tuple(value.shape), value.dtype)
        captured.specs[MARKER] = BufferSpec((captured.number,), torch.uint8)
        return captured

    def _boundary_spec(
        self,
        captured: Captured,
        name: str,
        value: torch.Tensor,
        values: Mapping[str, torch.Tensor | None],
    ) -> BufferSpec:
        """Room for the dummy sequences that padding rows become."""
        rows = int(value[-1])
        scalars = [(scalar, values.get(scalar)) for scalar in BOUNDS[name]]
        bounds = (int(safe_bound(n, each, values)) for n, each in scalars if each is not None)
        bound = next(bounds, 0) or rows
        dummies = -(-rows // bound)
        slots = max(len(value) - 1, captured.frames, captured.items) + dummies
        steps = torch.arange(1, slots + 1, dtype=value.dtype, device=self.device) * bound
        captured.ends[name] = Padding(rows, bound, steps)
        return BufferSpec((slots + 1,), value.dtype, packed=self.ends_on_host)


def safe_bound(
    name: str, value: torch.Tensor, values: Mapping[str, torch.Tensor | None]
) -> torch.Tensor:
    """A host scalar as it is baked: the bound of whole pictures holds one that fills the graph.
    Kimi VL bakes one of tokens where sequences are of patches, four times as many."""
    ends = values.get("cu_seqlens")
    if name not in BOUNDS["cu_seqlens"] or ends is None:
        return value
    return torch.maximum(value, ends[-1].to(value.device, value.dtype))


def _scales_boundaries(model: Any) -> bool:
    """Whether boundaries are not row numbers: FlashInfer's are element offsets, in sections."""
    backends = {
        str(getattr(getattr(module, "attn_backend", None), "name", ""))
        for module in tower_modules(model)
    }
    return "FLASHINFER" in backends
