"""Sizes of a request as host integers, whatever they came in."""

from collections.abc import Iterable, Mapping, Set
from operator import index
from typing import Any

import torch

from graphhal.errors import InputError


def host_rows(values: Any, name: str, columns: int) -> tuple[tuple[int, ...], ...]:
    """A table of host ints from a tensor, an array, or a list of either or of lists.

    A device tensor is accepted, and read back: keep sizes on the host to avoid that.

    Raises:
        InputError: not a table of whole numbers with `columns` columns.
    """
    rows = _listed(values, name)
    if _is_table(values, columns):
        return tuple(map(tuple, rows))
    try:
        table = tuple(
            [tuple(map(_whole, _in_order(_listed(row, name)))) for row in _in_order(rows)]
        )
    except TypeError as error:
        raise InputError(
            f"{name} must hold {columns} whole numbers for each item, got {values!r}"
        ) from error
    for number, row in enumerate(table):
        if len(row) != columns:
            raise InputError(f"{name} must have {columns} numbers, got {row}", number)
    return table


def _is_table(values: Any, columns: int) -> bool:
    """As processors return it, so that nothing is left to check."""
    return (
        isinstance(values, torch.Tensor)
        and values.dtype is torch.int64
        and values.dim() == 2
        and values.shape[1] == columns
    )


def host_ints(values: Any, name: str) -> tuple[int, ...]:
    """One host int for each item, from a tensor, an array, or a list of ints or of tensors of one.

    Raises:
        InputError: something else than one whole number for each item.
    """
    try:
        flat = _in_order(_listed(values, name))
    except TypeError as error:
        raise InputError(
            f"{name} must hold one whole number for each item, got {values!r}"
        ) from error
    return tuple([host_int(value, name, number) for number, value in enumerate(flat)])


def host_int(value: Any, name: str, item: int | None = None) -> int:
    """One host int, also from a tensor, an array or nested lists of one.

    Raises:
        InputError: something else than one whole number.
    """
    value = _listed(value, name, item)
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    try:
        return _whole(value)
    except TypeError as error:
        raise InputError(f"{name} must be one whole number, got {value!r}", item) from error


def _in_order(values: Any) -> Iterable[Any]:
    """Text is no list, and sets and mappings have no order that sizes could come in."""
    if type(values) is list or type(values) is tuple:  # the others take a microsecond to tell
        return values
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping | Set):
        raise TypeError("no list of sizes")
    return values


def _listed(values: Any, name: str, item: int | None = None) -> Any:
    if isinstance(values, torch.Tensor) and (
        values.is_meta or values.is_nested or values.layout is not torch.strided
    ):
        kind = "nested" if values.is_nested else values.layout
        raise InputError(f"{name} is {kind} on {values.device}; pass its values", item)
    return values.tolist() if hasattr(values, "tolist") else values


def _whole(value: Any) -> int:
    """A mask is no size: its `True` would be a size of 1."""
    if value is True or value is False:
        raise TypeError("true and false are no sizes")
    return index(value)
