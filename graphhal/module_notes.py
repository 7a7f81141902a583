"""What modules note from call to call, as it was when a captured call began."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch


class ModuleNotes:
    """The tensors that modules hold, beside their parameters as well.

    What a forward sets during a capture lies in a graph's memory, and holds garbage: an eager call
    must find what was there before. And what was there before is what the graph reads: it has to
    live as long, even where a later call puts something else in its place.

    Args:
        modules: the roots.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        every = {id(module): module for root in modules for module in root.modules()}.values()
        plain = [module for module in every if not isinstance(module, torch.jit.ScriptModule)]
        self._attributes = [vars(module) for module in plain]
        weights = [table for m in plain for table in (m._parameters, m._buffers)]
        self._tables: list[dict[str, Any]] = [*self._attributes, *weights]
        self._noted: list[Mapping[str, Any]] = []

    def take(self) -> None:
        """Note everything, at the start of a call."""
        self._noted = [table.copy() for table in self._tables]

    def put_back(self) -> None:
        """Replace every tensor that was set since, by what was noted."""
        for table, noted in zip(self._tables, self._noted, strict=False):
            for name, held in list(table.items()):
                if not isinstance(held, torch.Tensor) or held is noted.get(name):
                    continue
                if name in noted:
                    table[name] = noted[name]
                else:
                    del table[name]

    def attributes(self) -> tuple[torch.Tensor, ...]:
        """The noted tensors that are neither parameters nor buffers; the notes end here."""
        noted, self._noted = self._noted[: len(self._attributes)], []
        held = (value for table in noted for value in table.values())
        return tuple(value for value in held if isinstance(value, torch.Tensor))
