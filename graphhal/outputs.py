"""Outputs: levels side by side in the static output, copied out to memory the caller owns."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from graphhal.errors import AdapterError
from graphhal.items import ItemSpec


def as_levels(
    output: torch.Tensor | Sequence[torch.Tensor], adapter: str
) -> tuple[torch.Tensor, ...]:
    """The levels of a forward: (tokens, width) each, of equal tokens and of one real dtype.

    Args:
        output: of the forward.
        adapter: name of the adapter, for the error.

    Raises:
        AdapterError: not a tensor or a sequence of such tensors.
    """
    listed = (output,) if isinstance(output, torch.Tensor) else output
    levels = tuple(listed) if isinstance(listed, list | tuple) else (listed,)
    tensors = bool(levels) and all(isinstance(level, torch.Tensor) for level in levels)
    if not tensors or any(
        level.dim() != 2
        or len(level) != len(levels[0])
        or level.dtype != levels[0].dtype
        or level.is_complex()  # tokens are compared with eager, and handed on, as real numbers
        for level in levels
    ):
        shown = [
            f"{level.dtype}{list(level.shape)}"
            if isinstance(level, torch.Tensor)
            else type(level).__name__
            for level in levels
        ]
        raise AdapterError(
            f"{adapter}: forward must return (tokens, width) tensors of equal tokens and of one "
            f"real dtype, got {shown}; return a tensor, or a list of levels, flattened and cast"
        )
    return levels


def write_levels(
    output: torch.Tensor | Sequence[torch.Tensor], target: torch.Tensor, adapter: str
) -> None:
    """Copy the levels side by side into `target`, (tokens, sum of widths); `adapter` as above.

    Raises:
        AdapterError: the levels have other tokens or columns; a copy would broadcast one token.
    """
    levels = as_levels(output, adapter)
    shape = (len(levels[0]), sum(level.shape[1] for level in levels))
    if shape != target.shape:
        raise AdapterError(
            f"{adapter}: forward made {shape[0]} tokens of {shape[1]} columns, {target.shape[0]} "
            f"of {target.shape[1]} are expected; return as many tokens as item_specs and "
            "capacities promise, and levels of the same width at every call"
        )
    column = 0
    for level in levels:
        width = level.shape[1]
        target.narrow(1, column, width).copy_(level)
        column += width


def token_starts(items: Sequence[ItemSpec]) -> tuple[int, ...]:
    """First row of each item in the group's output, by item index; one more entry: the end."""
    starts = [0]
    for item in items:
        starts.append(starts[-1] + item.tokens)
    return tuple(starts)


def runs(items: Sequence[ItemSpec], starts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(source row, target row, rows) of the copies that put a step's tokens in request order.

    Neighbours in both source and target are one copy: the usual group is one run.
    """
    source = target = length = 0
    position = 0
    for item in items:
        start = starts[item.index] + item.token_offset
        if length and start == target + length:
            length += item.tokens
        else:
            if length:
                yield source, target, length
            source, target, length = position, start, item.tokens
        position += item.tokens
    if length:
        yield source, target, length


def split_items(group: torch.Tensor, starts: Sequence[int]) -> list[torch.Tensor]:
    """One (tokens, width) view per item, in request order."""
    if len(starts) == 2:
        return [group]
    sizes = [end - start for start, end in pairwise(starts)]
    return list(torch.split(group, sizes))
