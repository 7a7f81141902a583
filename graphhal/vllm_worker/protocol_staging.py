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


@dataclass(slots=True)
class Captured:
    """What one graph was captured with.

    Attributes:
        number: of the graph in its ladder.
        items: that its buffers hold.
        frames: that its buffers hold.
        specs: static inputs, by name.
        constants: host tensors, baked into the graph.
        ends: per boundary buffer, its rows, and the ends of dummy sequences after the last one.
    """

    number: int
    items: int
    frames: int
    specs: dict[str, BufferSpec]
    constants: dict[str, torch.Tensor]
    ends: dict[str, tuple[int, torch.Tensor]] = field(default_factory=dict)


def copies(
    captured: Captured,
    inputs: Mapping[str, torch.Tensor],
    padding_logics: Mapping[str, PaddingLogic],
) -> Callable[[Mapping[str, torch.Tensor | None]], None]:
    """A function that checks the values a model prepared, and copies them into `inputs`.

    It raises `RefusedError` where a value is missing, does not fit its buffer, or is a host scalar
    above the one that was captured.
    """
    checks = [_constant(name, constant) for name, constant in captured.constants.items()]
    targets = {
        name: _copy(name, target, captured, padding_logics) for name, target in inputs.items()
    }

    def copy(values: Mapping[str, torch.Tensor | None]) -> None:
        for name, check in zip(captured.constants, checks, strict=True):
            value = values.get(name)
            if value is not None:
                check(value)
        for name, into in targets.items():
            source = values.get(name)
            if source is None:
                raise RefusedError(f"the model prepared no value for its buffer {name!r}")
            into(source)

    return copy


def _constant(name: str, constant: torch.Tensor) -> Copy:
    def check(value: torch.Tensor) -> None:
        if value is constant:
            return
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
        return _copy_ends(name, target, *captured.ends[name])
    if target.dim() == 0:
        return target.copy_
    logic = padding_logics.get(name)
    if logic is None:
        return _copy_rows(name, target)

    def padded(source: torch.Tensor) -> None:
        if source.dim() != target.dim() or any(map(int.__gt__, source.shape, target.shape)):
            raise _misfit(name, source, target)
        logic(target, source)

    return padded


def _copy_rows(name: str, target: torch.Tensor) -> Copy:
    """Rows, then zeros. Only rows may be missing: a narrower source would be broadcast."""
    room, rest = target.shape[0], target.shape[1:]
    views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def copy(source: torch.Tensor) -> None:
        shape = source.shape
        if not shape or shape[0] > room or shape[1:] != rest:
            raise _misfit(name, source, target)
        rows = shape[0]
        if rows == room:
            target.copy_(source)
            return
        if rows not in views:
            _make_room(views)
            views[rows] = target[:rows], target[rows:]
        head, tail = views[rows]
        head.copy_(source)
        tail.zero_()

    return copy


def _copy_ends(name: str, target: torch.Tensor, rows: int, steps: torch.Tensor) -> Copy:
    """Boundaries, then the padding as dummy sequences no longer than the bound, then repeats."""
    room = target.shape[0]
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
