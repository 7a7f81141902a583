"""What tables, lists and tensors hold, and where it lies: noted once, and looked at again."""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress
from math import inf
from typing import Any, NamedTuple

import torch

NUMBERS = frozenset({bool, int, float, str, type(None)})
"""What lists of sizes, names and flags hold: equal ones compute the same."""
CONTENTS = 256
"""Lists and dicts of more entries, as vocabularies, are not noted entry by entry."""

_GET: Callable[[Mapping[Any, Any], Any], Any] = dict.get  # type: ignore[assignment]


class TablePlace(NamedTuple):
    """A key of a table, and what is held there.

    Attributes:
        lies: address and strides of a tensor; None for what has none.
    """

    table: Mapping[Any, Any]
    name: Any
    held: Any
    lies: tuple[int, tuple[int, ...]] | None

    @classmethod
    def of(cls, table: Mapping[Any, Any], name: Any) -> "TablePlace":
        """What is held there now."""
        held = table.get(name)
        return cls(table, name, held, _lies(held))

    def is_as_it_was(self) -> bool:
        """Whether the same is held, where it lay."""
        return self.table.get(self.name) is self.held and _lies(self.held) == self.lies


class ListPlace(NamedTuple):
    """What a list holds."""

    table: list[Any]
    held: tuple[Any, ...]
    name: None = None
    lies: None = None

    def is_as_it_was(self) -> bool:
        """Whether the same is held, in the same order."""
        return len(self.table) == len(self.held) and all(map(operator.is_, self.table, self.held))


Place = TablePlace | ListPlace


Container = list[Any] | tuple[Any, ...] | dict[Any, Any]
CONTAINERS = (list, tuple, dict)


def containers(held: Any, seen: set[int], most: float = inf) -> Iterator[Container]:
    """Lists, tuples and dicts that are held, at any depth, but for those of more than `most`
    entries and of what was `seen`."""
    if not isinstance(held, CONTAINERS) or len(held) > most or id(held) in seen:
        return
    seen.add(id(held))
    yield held
    for part in entries(held):
        yield from containers(part, seen, most)


def entries(container: Container) -> Iterable[Any]:
    """What a list, tuple or dict holds."""
    return container.values() if isinstance(container, dict) else container


def contents(held: Any, seen: set[int]) -> Iterator[Place]:
    """What lists, tuples and dicts hold, at any depth."""
    for container in containers(held, seen, CONTENTS):
        if isinstance(container, list):
            yield ListPlace(container, tuple(container))
        table = container if isinstance(container, dict) else dict(enumerate(container))
        for name, part in table.items():
            if table is container or isinstance(part, torch.Tensor):
                yield TablePlace.of(table, name)


def _lies(held: Any) -> tuple[int, tuple[int, ...]] | None:
    """Where a tensor lies; a sparse one has no memory of its own."""
    if not isinstance(held, torch.Tensor) or not torch._C._has_storage(held):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return held.data_ptr(), held.stride()


class Memory:
    """Where tensors lie."""

    def __init__(self, places: Sequence[Place]) -> None:
        tensors = [(place.held, place.lies[0]) for place in places if place.lies is not None]
        self._data_ptrs = [held.data_ptr for held, _ in tensors]
        self._addresses = [address for _, address in tensors]

    def moved(self) -> bool:
        """Whether a tensor has other storage."""
        with torch._C.DisableTorchFunctionSubclass():  # vLLM's parameters take calls in Python
            return [data_ptr() for data_ptr in self._data_ptrs] != self._addresses


class Held:
    """What tables and lists hold, and the strides of what is a tensor."""

    def __init__(self, places: Sequence[Place]) -> None:
        keys = [place for place in places if isinstance(place, TablePlace)]
        lists = [place for place in places if isinstance(place, ListPlace)]
        plain = [NUMBERS.issuperset(map(type, place.held)) for place in lists]
        self._plain_lists = [place.table for place in compress(lists, plain)]
        self._plain_held = [list(place.held) for place in compress(lists, plain)]
        self._lists = list(compress(lists, map(operator.not_, plain)))
        self._tables = [place.table for place in keys]
        self._names = [place.name for place in keys]
        self._held = [place.held for place in keys]
        strided = [
            (place.held, place.lies[1])
            for place in keys
            if place.lies is not None and len(place.lies[1]) > 1
        ]
        self._strides = [held.stride for held, _ in strided]
        self._steps = [steps for _, steps in strided]

    def replaced(self) -> bool:
        """Whether something else is held, or a tensor has other strides."""
        if not all(map(operator.is_, map(_GET, self._tables, self._names), self._held)):
            return True
        if self._plain_lists != self._plain_held:  # at once: vLLM's towers have a hundred and more
            return True
        if not all(place.is_as_it_was() for place in self._lists):
            return True
        with torch._C.DisableTorchFunctionSubclass():
            return [stride() for stride in self._strides] != self._steps


class Absent:
    """Names that tables lack. They are looked for where a table grew or shrank: there are many."""

    def __init__(self, names: Iterable[tuple[Mapping[str, Any], frozenset[str]]]) -> None:
        self._names = list(names)
        self._tables = [table for table, _ in self._names]
        self._sizes: list[int] = []

    def came(self) -> bool:
        """Whether a table has such a name."""
        sizes = list(map(len, self._tables))
        if sizes == self._sizes:
            return False
        if any(not names.isdisjoint(table) for table, names in self._names):
            return True
        self._sizes = sizes
        return False

    def without_those_that_came(self, kept: frozenset[str]) -> "Absent":
        """The same without names that a table has, but for `kept` ones."""
        return Absent((table, names - (table.keys() - kept)) for table, names in self._names)
