"""A finished tape: what a replay runs, step by step, and what it holds."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from graphhal.cpu.memory import (
    EMPTY_OPS,
    PoisonEmpties,
    has_storage,
    holds_tensor,
    peak_bytes,
    poison,
)
from graphhal.errors import ReplayError

# Their kernels write all that they return, or poison it themselves.
KNOWN_NAMESPACES = frozenset(("aten", "prims", "prim", "graphhal", "c10d", "_c10d_functional"))
_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

PART = "part of a result"
Step = tuple[Callable[..., Any], Callable[[list[Any]], Any], int, tuple[int, ...], str]


@dataclass(slots=True)
class Recording:
    """A finished tape.

    Attributes:
        registers: constants and static tensors; None where a step puts its result.
        steps: function, getter of its operands, result register, registers to free, name.
        peak_bytes: intermediate memory that lives at once, at most.
        snapshot_bytes: static memory that the capture wrote to and had to put back.
        escaped: intermediates that the forward kept a reference to, as weak keys.
    """

    registers: list[Any]
    steps: list[Step]
    peak_bytes: int
    snapshot_bytes: int
    escaped: MutableMapping[torch.Tensor, None]

    def run(self) -> None:
        """Execute all steps; every intermediate is gone afterwards."""
        registers, step = self.registers.copy(), None
        try:
            for step in self.steps:
                function, operands, result, dead, _ = step
                registers[result] = function(*operands(registers))
                for register in dead:
                    registers[register] = None
        except Exception as error:
            name = "a replay" if step is None else step[-1]
            raise ReplayError(f"{name} failed: {type(error).__name__}: {error}") from error


@dataclass(slots=True)
class Note:
    """One call on the tape: a function, its operand registers, its result register."""

    function: Callable[..., Any]
    operands: list[int]
    result: int
    name: str


class Notes:
    """Calls noted one after the other, over one file of registers.

    Attributes:
        registers: constants and static tensors; None where a call puts its result.
        storage_of: number of the new memory that a register's tensor lies in.
    """

    def __init__(self) -> None:
        self.registers: list[Any] = []
        self.storage_of: dict[int, int] = {}
        self._notes: list[Note] = []
        self._sizes: list[int] = []

    def register(self, value: Any = None) -> int:
        """A new register that holds the value."""
        self.registers.append(value)
        return len(self.registers) - 1

    def new_storage(self, tensor: torch.Tensor) -> int:
        """A number for memory that a call has allocated."""
        self._sizes.append(tensor.untyped_storage().nbytes() if has_storage(tensor) else 0)
        return len(self._sizes) - 1

    def note(self, function: Callable[..., Any], name: str, operands: list[int]) -> int:
        """Note a call on registers; returns the register of its result."""
        result = self.register()
        self._notes.append(Note(function, operands, result, name))
        return result

    def call(
        self,
        function: Callable[..., Any],
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        register_of: Callable[[torch.Tensor], int],
    ) -> int:
        """Note a call on values: tensors by their registers, everything else frozen."""
        moving = tuple(key for key, value in kwargs.items() if holds_tensor(value))
        fixed = {key: value for key, value in kwargs.items() if key not in moving}
        if moving:
            function = partial(_with_keywords, function, moving, fixed)
        elif fixed:
            function = partial(function, **fixed)
        values = [*args, *(kwargs[key] for key in moving)]
        return self.note(function, name, [self._operand(value, register_of) for value in values])

    def _operand(self, value: Any, register_of: Callable[[torch.Tensor], int]) -> int:
        if isinstance(value, torch.Tensor):
            return register_of(value)
        if isinstance(value, list | tuple) and holds_tensor(value):
            return self.note(_as_list, "list", [self._operand(item, register_of) for item in value])
        return self.register(value)

    def finish(self, snapshot_bytes: int, escaped: MutableMapping[torch.Tensor, None]) -> Recording:
        """The recording: unread parts of results left out, registers freed after their last use."""
        read = {register for note in self._notes for register in note.operands}
        notes = [n for n in self._notes if n.result in read or n.name != PART]
        last = {register: i for i, n in enumerate(notes) for register in (n.result, *n.operands)}
        dead: list[list[int]] = [[] for _ in notes]
        spans: dict[int, list[int]] = {}
        for index, note in enumerate(notes):
            end = last[note.result]
            dead[end].append(note.result)
            if (storage := self.storage_of.get(note.result)) is not None:
                spans.setdefault(storage, []).extend((index, end))
        steps = [
            (note.function, _getter(note.operands), note.result, tuple(ended), note.name)
            for note, ended in zip(notes, dead, strict=True)
        ]
        peak = peak_bytes((self._sizes[s], min(span), max(span)) for s, span in spans.items())
        return Recording(self.registers, steps, peak, snapshot_bytes, escaped)


def function_of(op: Any) -> Callable[..., Any]:
    """The operator as capture and replay call it."""
    if op in EMPTY_OPS:
        return partial(_poisoned, op)
    if op.namespace == "c10d":
        return partial(_waited, op)
    return op if op.namespace in KNOWN_NAMESPACES else partial(_over_poison, op)


def _poisoned(op: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    return poison(op(*args, **kwargs))


def _over_poison(op: Any, *args: Any, **kwargs: Any) -> Any:
    """A custom kernel that leaves rows unwritten shows what a device pool holds there."""
    with PoisonEmpties():  # type: ignore[no-untyped-call]
        return op.redispatch(_CPU_KEYS, *args, **kwargs)


def _waited(op: Any, *args: Any, **kwargs: Any) -> Any:
    """A collective, and the wait for its `Work`: the forward's own wait is no operator."""
    result = op(*args, **kwargs)
    for part in result if isinstance(result, list | tuple) else (result,):
        if isinstance(part, torch.ScriptObject):
            torch.distributed.Work.unbox(part).wait()
    return result


def _with_keywords(
    function: Callable[..., Any], names: tuple[str, ...], fixed: Mapping[str, Any], *values: Any
) -> Any:
    split = len(values) - len(names)
    return function(*values[:split], **fixed, **dict(zip(names, values[split:], strict=True)))


def _as_list(*items: Any) -> list[Any]:
    return list(items)


def _getter(operands: Sequence[int]) -> Callable[[list[Any]], Any]:
    if len(operands) > 1:
        return itemgetter(*operands)
    start = operands[0] if operands else 0
    return itemgetter(slice(start, start + len(operands)))
