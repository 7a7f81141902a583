"""Notices weights that were rebound after capture, which a graph reads by address, and modules
that compute otherwise since: a graph runs no hook, `forward` or submodule that came later, and
keeps the numbers that modules held."""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from inspect import unwrap
from itertools import count, cycle
from time import monotonic
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import (
    _global_forward_hooks,
    _global_forward_pre_hooks,
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle

from graphhal.errors import CaptureError
from graphhal.module_notes import OF_EVERY_MODULE

WHOLE = 128
"""A tower of at most so many tensors is checked whole on every request."""
WINDOW = 16
"""Tensors of a larger tower whose memory is checked before every launch; some 350 at once would
take 30 µs or more."""
PLACES = 64
"""Places of a larger tower, a key of a table each, checked after every launch; some 4700 at once
would take 200 µs."""
PAUSE_SECONDS = 0.1
"""The first request after a pause of this length checks every tensor: reloads take longer."""
FULL_CHECK_SECONDS = 1.0
"""So does a request later than this after the last full check, however busy the server is."""

CALLED = ("forward", "_call_impl")
"""What a call of a module runs, and what is patched, on one module or on its class."""
CONTENTS = 256
"""Lists and dicts of more entries, as vocabularies, are not watched entry by entry."""


_registrations = count(1)
_registered = 0


def _note(*_: object) -> None:
    """A module of this process got a parameter, buffer or submodule."""
    global _registered
    _registered = next(_registrations)


@cache
def _watch_registrations() -> None:
    """Let PyTorch tell of every registration; once, and only where graphs are captured."""
    register_module_parameter_registration_hook(_note)
    register_module_buffer_registration_hook(_note)
    register_module_module_registration_hook(_note)


def _changes() -> int:
    """Rises with every registration and every new hook in this process."""
    return _registered + RemovableHandle.next_id


_GET: Callable[[Mapping[Any, Any], Any], Any] = dict.get  # type: ignore[assignment]
_called = operator.attrgetter("__call__", *CALLED)


class _Place(NamedTuple):
    """A key of a table, and what is held there.

    Attributes:
        lies: address and strides of a tensor; None for what has none.
    """

    table: Mapping[Any, Any]
    name: Any
    held: Any
    lies: tuple[int, tuple[int, ...]] | None

    @classmethod
    def of(cls, table: Mapping[Any, Any], name: Any, held: Any) -> "_Place":
        return cls(table, name, held, _lies(held))

    def is_as_it_was(self) -> bool:
        return self.table.get(self.name) is self.held and _lies(self.held) == self.lies


class _ListPlace(NamedTuple):
    """What a list holds."""

    table: list[Any]
    held: tuple[Any, ...]
    name: None = None
    lies: None = None

    def is_as_it_was(self) -> bool:
        return len(self.table) == len(self.held) and all(map(operator.is_, self.table, self.held))


_AnyPlace = _Place | _ListPlace


def _contents(held: Any, seen: set[int]) -> Iterator[_AnyPlace]:
    """What lists, tuples and dicts hold, at any depth."""
    if not isinstance(held, list | tuple | dict) or len(held) > CONTENTS or id(held) in seen:
        return
    seen.add(id(held))
    if isinstance(held, list):
        yield _ListPlace(held, tuple(held))
    table = held if isinstance(held, dict) else dict(enumerate(held))
    for name, part in table.items():
        if table is held or isinstance(part, torch.Tensor):
            yield _Place.of(table, name, part)
        yield from _contents(part, seen)


def _shadowable(kind: type[torch.nn.Module]) -> Iterator[str]:
    """What an instance of this class may have of its own after capture in place of the class's."""
    for each in kind.__mro__[: kind.__mro__.index(torch.nn.Module)]:
        if not each.__module__.startswith("torch.nn."):
            for name, held in vars(each).items():
                if not name.startswith("__") and not isinstance(held, cached_property):
                    yield name


def _computes_by_mode(kind: type[torch.nn.Module]) -> bool:
    """Whether modules of this class may compute otherwise after `train()` or `eval()`."""
    code = getattr(unwrap(kind.forward), "__code__", None)
    return code is not None and _reads_mode(code)


def _reads_mode(code: CodeType) -> bool:
    within = (part for part in code.co_consts if isinstance(part, CodeType))
    return "training" in code.co_names or any(map(_reads_mode, within))


def _lies(held: Any) -> tuple[int, tuple[int, ...]] | None:
    """Where a tensor lies; a sparse one has no memory of its own."""
    if not isinstance(held, torch.Tensor) or not torch._C._has_storage(held):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return held.data_ptr(), held.stride()


class WeightWatch:
    """The parameters, buffers, submodules, attributes and forward hooks of modules, as they were
    when graphs were captured, and what a call of a module runs: its class, and a `forward` of its
    own.

    In-place updates keep addresses and need no recapture. A tensor or module that was replaced
    (`module.weight = …`), or given other storage or strides (`weight.data = …`, sleep and wake),
    does; so does a module that was hooked, patched or given a submodule. What was replaced,
    registered or hooked is noticed by the next request, because PyTorch tells of it, and so is a
    class that was patched; other storage under a few of more than `WHOLE` tensors by the first one
    after a pause, or in turn, and so are hooks that are gone, patches of single modules, the mode
    where a `forward` reads it, and attributes: a tensor beside the parameters, a number, an
    activation, and what lists and dicts of them hold. What is new does not count, as a key of a
    dict, unless it takes the place of a class's own: a number, a method.

    Args:
        modules: the roots.
        kept: where the host keeps them: owner, attribute, module.
        attributes: whether the modules' attributes count.

    Raises:
        CaptureError: TorchScript cannot be watched.
    """

    def __init__(
        self,
        modules: Iterable[torch.nn.Module],
        kept: Iterable[tuple[torch.nn.Module, str, torch.nn.Module]] = (),
        attributes: bool = True,
    ) -> None:
        places: dict[tuple[int, Any], _AnyPlace] = {
            (id(owner._modules), name): _Place.of(owner._modules, name, held)
            for owner, name, held in kept
        }
        every_module: tuple[Mapping[Any, Any], ...] = (
            _global_forward_pre_hooks,
            _global_forward_hooks,
        )
        self._tables = [*every_module]
        for table in every_module:
            for name, held in table.items():
                places[id(table), name] = _Place.of(table, name, held)
        self._modules = list({id(m): m for root in modules for m in root.modules()}.values())
        self._classes = list(map(type, self._modules))
        self._kinds = dict.fromkeys(self._classes)
        noted: dict[tuple[int, Any], _AnyPlace] = {}
        seen: set[int] = set()
        for module in self._modules:
            if isinstance(module, torch.jit.ScriptModule):
                raise CaptureError(
                    f"{type(module).__name__} keeps its weights where nobody sees them move; "
                    "pass the module that TorchScript was made of"
                )
            hooks = (module._forward_pre_hooks, module._forward_hooks)
            tables = (module._modules, module._parameters, module._buffers, *hooks)
            self._tables += tables
            for table in tables:
                for name, held in table.items():
                    places[id(table), name] = _Place.of(table, name, held)
            own = vars(module)
            for name in (*CALLED, *(["training"] if _computes_by_mode(type(module)) else ())):
                places[id(own), name] = _Place.of(own, name, own.get(name))
            for name in dict.fromkeys((*own, *_shadowable(type(module)))) if attributes else ():
                if name not in OF_EVERY_MODULE:
                    noted[id(own), name] = _Place.of(own, name, own.get(name))
                    for part in _contents(own.get(name), seen):
                        noted[id(part.table), part.name] = part
        self._firm = list(places.values())
        self._noted = [place for key, place in noted.items() if key not in places]
        own_tables = {id(vars(module)) for module in self._modules}
        held = {id(p.table): p.table for p in self._noted if isinstance(p.table, dict)}
        self._keys = [(table, list(table)) for i, table in held.items() if i not in own_tables]
        self._places = [*self._firm, *self._noted]
        self._look_at(self._places)
        self._calls = list(map(_called, self._kinds))
        self._num_entries = sum(map(len, self._tables))
        _watch_registrations()
        self._changes = _changes()
        self._checked_at = self._asked_at = monotonic()

    def _look_at(self, places: Sequence[_AnyPlace]) -> None:
        tensors = [place for place in places if place.lies is not None]
        self._memory, self._held = _Memory(tensors), _Held(places)
        self._large = len(tensors) > WHOLE
        self._memory_in_turn = cycle([_Memory(part) for part in _cut(tensors, WINDOW)])
        self._held_in_turn = cycle([_Held(part) for part in _cut(places, PLACES)])
        self._looked_at: _Held | None = None

    def settle(self) -> None:
        """Once a ladder is captured: what its forwards set themselves, as a count of calls, or
        what they keep of the last one or by size, is no attribute to watch."""
        caches = {id(table) for table, keys in self._keys if list(table) != keys}
        still = [p for p in self._noted if id(p.table) not in caches and p.is_as_it_was()]
        self._look_at([*self._firm, *still])

    def moved(self) -> bool:
        """Whether any tensor was replaced, or its memory moved, or a module was hooked, patched or
        given a submodule or another attribute. Host work only, no device read."""
        changes = _changes()
        if changes != self._changes:  # hooks that are gone are seen in the windows
            if sum(map(len, self._tables)) != self._num_entries:
                return True
            self._changes = changes
        self._checked_at = monotonic()
        return (
            self._held.replaced()
            or self._memory.moved()
            or self._patched()
            or self._of_other_classes()
        )

    def _patched(self) -> bool:
        return list(map(_called, self._kinds)) != self._calls

    def _of_other_classes(self) -> bool:
        return list(map(type, self._modules)) != self._classes

    def unsafe_to_launch(self) -> bool:
        """Before a launch: whether memory that the graph reads may be gone. Cheap enough for every
        request: a few tensors in turn; all of them after a pause, from time to time, and where any
        module was given something new, or a hook."""
        now = monotonic()
        pause, self._asked_at = now - self._asked_at, now
        if self._changes != _changes():
            self._looked_at = None
            return self.moved()
        if self._large and pause < PAUSE_SECONDS and now - self._checked_at < FULL_CHECK_SECONDS:
            memory, self._looked_at = next(self._memory_in_turn), next(self._held_in_turn)
        else:
            memory, self._looked_at = self._memory, self._held
        return memory.moved()

    def outdated(self) -> bool:
        """After it, while the device computes: the rest of `moved`, some places in turn, or all
        where all memory was looked at. What was replaced is held here, so a launch could read it,
        but its output is not to be returned."""
        looked_at, self._looked_at = self._looked_at, None
        if looked_at is None:
            return False
        if looked_at.replaced() or self._patched():
            return True
        if looked_at is not self._held:
            return False
        self._checked_at = monotonic()
        return self._of_other_classes()


def _cut(places: Sequence[_AnyPlace], size: int) -> Iterator[Sequence[_AnyPlace]]:
    for start in range(0, len(places), size):
        yield places[start : start + size]


class _Memory:
    """Where tensors lie."""

    def __init__(self, places: Sequence[_AnyPlace]) -> None:
        tensors = [(place.held, place.lies[0]) for place in places if place.lies is not None]
        self._data_ptrs = [held.data_ptr for held, _ in tensors]
        self._addresses = [address for _, address in tensors]

    def moved(self) -> bool:
        """Whether a tensor has other storage."""
        with torch._C.DisableTorchFunctionSubclass():  # vLLM's parameters take calls in Python
            return [data_ptr() for data_ptr in self._data_ptrs] != self._addresses


class _Held:
    """What tables hold, and the strides of what is a tensor."""

    def __init__(self, every: Sequence[_AnyPlace]) -> None:
        places = [place for place in every if isinstance(place, _Place)]
        self._lists = [place for place in every if isinstance(place, _ListPlace)]
        self._tables = [place.table for place in places]
        self._names = [place.name for place in places]
        self._held = [place.held for place in places]
        strided = [
            (place.held, place.lies[1])
            for place in places
            if place.lies is not None and len(place.lies[1]) > 1
        ]
        self._strides = [held.stride for held, _ in strided]
        self._steps = [steps for _, steps in strided]

    def replaced(self) -> bool:
        """Whether a table holds something else, or a tensor has other strides."""
        if not all(map(operator.is_, map(_GET, self._tables, self._names), self._held)):
            return True
        if not all(place.is_as_it_was() for place in self._lists):
            return True
        with torch._C.DisableTorchFunctionSubclass():
            return [stride() for stride in self._strides] != self._steps
