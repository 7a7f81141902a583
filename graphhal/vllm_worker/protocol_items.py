"""What tells items of a protocol model apart: their `ItemSpec.signature`."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple, cast

from graphhal.items import ItemSpec


class Signature(NamedTuple):
    """Of one item.

    Attributes:
        tokens: that it makes on the path.
        place: its position in the request, and how many items that has; items of one path alone
            are numbered from 0.
        axes: capture axes that its group resolved to.
        lengths: rows of its attention sequences; none where the model keeps its boundaries.
    """

    tokens: int
    place: tuple[int, int]
    axes: tuple[Hashable, ...] = ()
    lengths: tuple[int, ...] = ()


def signature_of(item: ItemSpec) -> Signature:
    """The signature of a protocol model's item."""
    return cast("Signature", item.signature)


def are_all(items: Sequence[ItemSpec]) -> bool:
    """Whether these are all items of their request, in its order."""
    places = [signature_of(item).place for item in items]
    return places == [(position, len(items)) for position in range(len(items))]
