"""What modules note from call to call, as it was when a captured call began."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

import torch

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
        self._kept: tuple[torch.Tensor, ...] = ()

    def take(self) -> None:
        """Note everything, at the start of a call."""
        parts = [part for table in self._attributes for part in _parts(_own(table), set())]
        self._kept = tuple(part for part in parts if isinstance(part, torch.Tensor))
        dicts = [part for part in parts if isinstance(part, dict)]
        tables = (*self._attributes, *self._weights, *dicts)
        self._noted = [(table, table.copy()) for table in tables]
        self._lists = [(part, tuple(part)) for part in parts if isinstance(part, list)]

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
        for entries, before in self._lists:
            pairs = zip_longest(entries, before)
            if any(held is not was and _holds_tensor(held) for held, was in pairs):
                entries[:] = before

    def attributes(self) -> tuple[torch.Tensor, ...]:
        """The noted tensors that are neither parameters nor buffers; the notes end here."""
        kept, self._kept, self._noted, self._lists = self._kept, (), [], []
        return kept


def _own(attributes: Mapping[str, Any]) -> list[Any]:
    return [held for name, held in attributes.items() if name not in OF_EVERY_MODULE]


def _parts(held: Any, seen: set[int]) -> Iterator[Any]:
    """What is held, and what is in it where it is a list, tuple or dict, at any depth."""
    if id(held) not in seen:
        seen.add(id(held))
        yield held
        within = held.values() if isinstance(held, dict) else held
        for part in within if isinstance(held, list | tuple | dict) else ():
            yield from _parts(part, seen)


def _holds_tensor(held: Any) -> bool:
    return any(isinstance(part, torch.Tensor) for part in _parts(held, set()))
