"""What modules note from call to call, as it was when a captured call began."""

from collections.abc import Iterable, Mapping
from itertools import chain, zip_longest
from typing import Any

import torch

from graphhal.held_places import CONTAINERS, containers, entries

OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
"""What PyTorch keeps on each: tables, the mode, and its own notes."""


class ModuleNotes:
    """The tensors that modules hold, beside their parameters as well, also in lists and dicts.

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
        self._weights = [table for m in plain for table in (m._parameters, m._buffers)]
        self._noted: list[tuple[dict[str, Any], Mapping[str, Any]]] = []
        self._lists: list[tuple[list[Any], tuple[Any, ...]]] = []
        self._tuples: list[tuple[Any, ...]] = []

    def take(self) -> None:
        """Note everything, at the start of a call."""
        seen: set[int] = set()
        within = [
            container
            for table in self._attributes
            for name, held in table.items()
            if isinstance(held, CONTAINERS) and name not in OF_EVERY_MODULE
            for container in containers(held, seen)
        ]
        dicts = [each for each in within if isinstance(each, dict)]
        tables = (*self._weights, *self._attributes, *dicts)
        self._noted = [(table, table.copy()) for table in tables]
        self._lists = [(each, tuple(each)) for each in within if isinstance(each, list)]
        self._tuples = [each for each in within if isinstance(each, tuple)]

    def put_back(self) -> None:
        """Replace every tensor that was set since, by what was noted."""
        for table, noted in self._noted:
            for name, held in list(table.items()):
                if held is noted.get(name) or not _holds_tensor(held):
                    continue
                if name in noted:
                    table[name] = noted[name]
                else:
                    del table[name]
        for listed, before in self._lists:
            pairs = zip_longest(listed, before)
            if any(held is not was and _holds_tensor(held) for held, was in pairs):
                listed[:] = before

    def attributes(self) -> tuple[torch.Tensor, ...]:
        """The noted tensors that are neither parameters nor buffers; the notes end here."""
        tables = (noted.values() for _, noted in self._noted[len(self._weights) :])
        held = chain(*tables, *(before for _, before in self._lists), *self._tuples)
        kept = tuple(each for each in held if isinstance(each, torch.Tensor))
        self._noted, self._lists, self._tuples = [], [], []
        return kept


def _holds_tensor(held: Any) -> bool:
    return isinstance(held, torch.Tensor) or any(
        isinstance(part, torch.Tensor)
        for container in containers(held, set())
        for part in entries(container)
    )
