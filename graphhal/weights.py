"""Notices weights that were rebound after capture, which a graph reads by address, and modules
that compute otherwise since: a graph runs no hook, `forward` or submodule that came later, and
keeps the numbers that modules held."""

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from inspect import unwrap
from itertools import chain, count, cycle
from time import monotonic
from types import CodeType, FunctionType
from typing import Any

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
from graphhal.held_places import Absent, Held, Memory, Place, TablePlace, contents
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

HOOKS_OF_ALL: tuple[Mapping[Any, Any], ...] = (_global_forward_pre_hooks, _global_forward_hooks)
"""What PyTorch calls with every module of the process."""
CALLED = frozenset({"forward", "_call_impl"})
"""What a call of a module runs, and what is patched, on one module or on its class."""
SETS_MODE = frozenset({"train", "eval"})
"""What sets the mode may read it, and computes nothing."""

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


def registrations() -> int:
    """Rises with every parameter, buffer and submodule that any module of this process gets, from
    the first call on."""
    _watch_registrations()
    return _registered


def _changes() -> int:
    """Rises with every registration and every new hook in this process."""
    return _registered + RemovableHandle.next_id


_called = operator.attrgetter("__call__", *CALLED)


def _tables_of(module: torch.nn.Module) -> tuple[Mapping[Any, Any], ...]:
    hooks = (module._forward_pre_hooks, module._forward_hooks)
    return (module._modules, module._parameters, module._buffers, *hooks)


def _of_calls(module: torch.nn.Module, by_mode: bool) -> Iterator[TablePlace]:
    """What a call of a module runs, where that is its own, and the mode where it reads that."""
    own = vars(module)
    for name in own:
        if name in CALLED or (by_mode and name == "training"):
            yield TablePlace.of(own, name)


def _attributes(module: torch.nn.Module, seen: set[int]) -> Iterator[Place]:
    own = vars(module)
    for name in own:
        if name not in OF_EVERY_MODULE:
            yield TablePlace.of(own, name)
            yield from contents(own[name], seen)


def _shadowable(kind: type[torch.nn.Module]) -> frozenset[str]:
    """What an instance of this class may get of its own in place of the class's."""
    return frozenset(
        name
        for each in kind.__mro__[: kind.__mro__.index(torch.nn.Module)]
        if not each.__module__.startswith("torch.nn.")
        for name, held in vars(each).items()
        if not name.startswith("__") and not isinstance(held, cached_property)
    )


def _computes_by_mode(kind: type[torch.nn.Module]) -> bool:
    """Whether modules of this class may compute otherwise after `train()` or `eval()`: `forward`
    reads the mode, or a method that it may call, of the class or of one that it derives from."""
    methods = (
        unwrap(held)
        for each in kind.__mro__
        if each is not torch.nn.Module
        for name, held in vars(each).items()
        if isinstance(held, FunctionType) and name not in SETS_MODE
    )
    codes = (getattr(method, "__code__", None) for method in (unwrap(kind.forward), *methods))
    return any(code is not None and _reads_mode(code) for code in codes)


def _reads_mode(code: CodeType) -> bool:
    within = (part for part in code.co_consts if isinstance(part, CodeType))
    return "training" in code.co_names or any(map(_reads_mode, within))


class WeightWatch:
    """The parameters, buffers, submodules, attributes and forward hooks of modules, as they were
    when graphs were captured, and what a call of a module runs: its class, and a `forward` of its
    own.

    In-place updates keep addresses and need no recapture. A tensor or module that was replaced
    (`module.weight = …`), or given other storage or strides (`weight.data = …`, sleep and wake),
    does; so does a module that was hooked, patched or given a submodule. What was replaced,
    registered or hooked is noticed by the next request, because PyTorch tells of it; other storage
    under a few of more than `WHOLE` tensors by the first one after a pause, or in turn, and so are
    hooks that are gone, patches of classes and of single modules, the mode where a method reads it,
    and attributes: a tensor beside the parameters, a number, an
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
        self._modules = list({id(m): m for root in modules for m in root.modules()}.values())
        for module in self._modules:
            if isinstance(module, torch.jit.ScriptModule):
                raise CaptureError(
                    f"{type(module).__name__} keeps its weights where nobody sees them move; "
                    "pass the module that TorchScript was made of"
                )
        self._classes = list(map(type, self._modules))
        self._kinds = dict.fromkeys(self._classes)
        self._tables = [*HOOKS_OF_ALL, *chain.from_iterable(map(_tables_of, self._modules))]
        firm: dict[tuple[int, Any], Place] = {}
        for owner, name, module in kept:
            place = TablePlace.of(owner._modules, name)
            firm[id(place.table), name] = place._replace(held=module)
        for table in self._tables:
            firm |= {(id(table), name): TablePlace.of(table, name) for name in table}
        by_mode = {kind: _computes_by_mode(kind) for kind in self._kinds}
        for module in self._modules:
            calls = _of_calls(module, by_mode[type(module)])
            firm |= {(id(place.table), place.name): place for place in calls}
        self._firm = list(firm.values())
        noted: dict[tuple[int, Any], Place] = {}
        seen: set[int] = set()
        for module in self._modules if attributes else ():
            noted |= {(id(place.table), place.name): place for place in _attributes(module, seen)}
        self._noted = [place for key, place in noted.items() if key not in firm]
        names = {kind: _shadowable(kind) if attributes else frozenset() for kind in self._kinds}
        owns = list(map(vars, self._modules))
        self._absent = Absent(
            (own, (CALLED | names[kind]) - own.keys())
            for own, kind in zip(owns, self._classes, strict=True)
        )
        within = {id(p.table): p.table for p in self._noted if isinstance(p.table, dict)}
        self._keys = [(within[i], list(within[i])) for i in within.keys() - set(map(id, owns))]
        self._look_at([*self._firm, *self._noted])
        self._calls = list(map(_called, self._kinds))
        self._calls_in_turn = cycle(zip(self._kinds, self._calls, strict=True))
        self._num_entries = sum(map(len, self._tables))
        _watch_registrations()
        self._changes = _changes()
        self._checked_at = self._asked_at = monotonic()

    def _look_at(self, places: Sequence[Place]) -> None:
        tensors = [place for place in places if place.lies is not None]
        self._memory, self._held = Memory(tensors), Held(places)
        self._large = len(tensors) > WHOLE
        self._memory_in_turn = cycle([Memory(part) for part in _cut(tensors, WINDOW)])
        self._held_in_turn = cycle([Held(part) for part in _cut(places, PLACES)])
        self._looked_at: Held | None = None

    def settle(self) -> None:
        """Once a ladder is captured: what its forwards set themselves, as a count of calls, or
        what they keep of the last one or by size, is no attribute to watch."""
        caches = {id(table) for table, keys in self._keys if list(table) != keys}
        still = [p for p in self._noted if id(p.table) not in caches and p.is_as_it_was()]
        self._look_at([*self._firm, *still])
        self._absent = self._absent.without_those_that_came(kept=CALLED)

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
            or self._absent.came()
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
        if looked_at.replaced():
            return True
        if looked_at is not self._held:
            kind, called = next(self._calls_in_turn)
            return bool(_called(kind) != called)
        self._checked_at = monotonic()
        return self._patched() or self._absent.came() or self._of_other_classes()


def _cut(places: Sequence[Place], size: int) -> Iterator[Sequence[Place]]:
    for start in range(0, len(places), size):
        yield places[start : start + size]
