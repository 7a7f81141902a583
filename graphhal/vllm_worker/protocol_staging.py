"""Copies the buffers that a model prepares for a replay into a graph's own, padding included."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from graphhal.adapter import BufferSpec
from graphhal.errors import RefusedError

KEPT_VIEWS = 8
"""Sizes of one buffer whose views are kept; a group's buffers nearly always have the same."""

PaddingLogic = Callable[[torch.Tensor, torch.Tensor], Any]
Copy = Callable[[torch.Tensor], Any]
Split = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]


@dataclass(frozen=True, slots=True)
class Padding:
    """What follows the last sequence of a boundary buffer.

    Attributes:
        rows: of the graph; the last dummy sequence ends there.
        bound: rows of a sequence, at most.
        steps: multiples of the bound, from one of it, on the buffer's device.
    """

    rows: int
    bound: int
    steps: torch.Tensor


@dataclass(slots=True)
class Captured:
    """What one graph was captured with.

    Attributes:
        number: of the graph in its ladder.
        budget: tokens that it holds.
        items: that its buffers hold.
        frames: that its buffers hold.
        specs: static inputs, by name.
        constants: host tensors, baked into the graph.
        ends: the padding of each boundary buffer.
        made: rows that its forward makes, at most the budget; 0 before the first.
    """

    number: int
    budget: int
    items: int
    frames: int
    specs: dict[str, BufferSpec]
    constants: dict[str, torch.Tensor]
    ends: dict[str, Padding] = field(default_factory=dict)
    made: int = 0


def copies(
    captured: Captured,
    inputs: Mapping[str, torch.Tensor],
    padding_logics: Mapping[str, PaddingLogic],
    takes_raw: bool = False,
) -> Callable[[Mapping[str, torch.Tensor | None]], None]:
    """A function that checks the values a model prepared, and copies them into `inputs`.

    It raises `RefusedError` where a value is missing, does not fit its buffer, or is a host scalar
    above the one that was captured.

    Args:
        captured: what the graph was captured with.
        inputs: its static inputs.
        padding_logics: the model's own, by buffer.
        takes_raw: the captured forward normalises raw pixels, in whatever dtype they come.
    """
    checks = {name: _constant(name, constant) for name, constant in captured.constants.items()}
    plain = {
        name: _rows(name, target, takes_raw)
        for name, target in inputs.items()
        if name not in captured.ends and name not in padding_logics and target.dim() > 0
    }
    others = {
        name: _copy(name, target, captured, padding_logics)
        for name, target in inputs.items()
        if name not in plain
    }

    def copy(values: Mapping[str, torch.Tensor | None]) -> None:
        for name, check in checks.items():
            value = values.get(name)
            if value is not None:
                check(value)
        heads, sources, tails = [], [], []
        for name, split in plain.items():
            source = _given(name, values)
            head, tail = split(source)
            heads.append(head)
            sources.append(source)
            if tail is not None:
                tails.append(tail)
        for name, into in others.items():
            into(_given(name, values))
        # Together: small models' time goes into launches, and these are most of the copies.
        if heads:
            torch._foreach_copy_(heads, sources)
        if tails:
            torch._foreach_zero_(tails)

    return copy


def _given(name: str, values: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
    value = values.get(name)
    if value is None:
        raise RefusedError(f"the model prepared no value for its buffer {name!r}")
    return value


def _constant(name: str, constant: torch.Tensor) -> Copy:
    def check(value: torch.Tensor) -> None:
        if value.device.type != "cpu" or value.shape != constant.shape:
            raise RefusedError(f"{name} is baked at capture and cannot be replaced")
        if (value.item() > constant.item()) if single else bool((value > constant).any()):
            raise RefusedError(
                f"{name} is {value.tolist()}, above the {constant.tolist()} baked at capture"
            )

    single = constant.numel() == 1
    return check


def _copy(
    name: str,
    target: torch.Tensor,
    captured: Captured,
    padding_logics: Mapping[str, PaddingLogic],
) -> Copy:
    if name in captured.ends:
        return _copy_ends(name, target, captured.ends[name])
    if target.dim() == 0:
        return target.copy_
    logic = padding_logics[name]

    def padded(source: torch.Tensor) -> None:
        if source.dim() != target.dim() or any(map(int.__gt__, source.shape, target.shape)):
            raise _misfit(name, source, target)
        logic(target, source)

    return padded


def _rows(name: str, target: torch.Tensor, takes_raw: bool) -> Split:
    """Views for the rows of a source, and for the zeros after them. Only rows may be missing: a
    narrower source would be broadcast. Raw pixels are no normalised ones, nor the reverse."""
    room, rest = target.shape[0], target.shape[1:]
    views: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {room: (target, None)}

    def split(source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        shape = source.shape
        if not shape or shape[0] > room or shape[1:] != rest:
            raise _misfit(name, source, target)
        floating = source.dtype.is_floating_point
        if floating != target.dtype.is_floating_point and (floating or not takes_raw):
            raise RefusedError(f"{name} is {source.dtype}, the graph's buffer is {target.dtype}")
        rows = shape[0]
        if rows not in views:
            _make_room(views)
            views[rows] = target[:rows], target[rows:] if rows < room else None
        return views[rows]

    return split


def _copy_ends(name: str, target: torch.Tensor, padding: Padding) -> Copy:
    """Boundaries, then the padding as dummy sequences no longer than the bound, then repeats."""
    room, rows, steps = target.shape[0], padding.rows, padding.steps
    one_dummy = rows <= padding.bound  # however much is left, one sequence takes it
    views: dict[int, tuple[torch.Tensor, ...]] = {}

    def copy(source: torch.Tensor) -> None:
        if source.dim() != 1 or not 0 < source.shape[0] <= room:
            raise _misfit(name, source, target)
        count = source.shape[0]
        if count == room:
            target.copy_(source)
            return
        if count not in views:
            _make_room(views)
            views[count] = target[:count], target[count - 1], steps[: room - count], target[count:]
        head, last, further, tail = views[count]
        head.copy_(source)
        if one_dummy:
            tail.fill_(rows)
        else:
            torch.add(last, further, out=tail)
            tail.clamp_(max=rows)

    return copy


def _make_room(views: dict[int, Any]) -> None:
    if len(views) >= KEPT_VIEWS:
        views.clear()


def _misfit(name: str, source: torch.Tensor, target: torch.Tensor) -> RefusedError:
    return RefusedError(
        f"{name} is {list(source.shape)}, the graph's buffer is {list(target.shape)}"
    )
