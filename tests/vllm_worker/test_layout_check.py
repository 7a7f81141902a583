"""Groups of new sizes against eager: agreed, wrong for good, or not comparable now."""

from collections.abc import Callable

import pytest
import torch

from graphhal.errors import RefusedError
from graphhal.items import ItemSpec
from graphhal.vllm_worker.layout_check import LayoutCheck
from graphhal.vllm_worker.protocol_items import Signature


def group(*tokens: int) -> tuple[ItemSpec, ...]:
    return tuple(
        ItemSpec(n, "image", t, t, {}, Signature(t, (n, len(tokens)))) for n, t in enumerate(tokens)
    )


GRAPH = 7
SHAPES = ("pixel_values", (2, 8))
ITEMS = group(2, 2)
EAGER = torch.arange(12.0).reshape(4, 3)


def padded(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows, torch.full((2, 3), float("nan"))])


def test_padding_rows_are_not_compared() -> None:
    check = LayoutCheck("model", None)
    check.compare(GRAPH, ITEMS, SHAPES, lambda: padded(EAGER), lambda: EAGER)
    assert not check.is_wrong(ITEMS)


@pytest.mark.parametrize("eager", [EAGER * 1.01, EAGER[:3]])
def test_a_layout_that_differs_is_wrong_for_good(eager: torch.Tensor) -> None:
    check = LayoutCheck("model", None)
    with pytest.raises(RefusedError, match="2 items of 2, 2 tokens"):
        check.compare(GRAPH, ITEMS, SHAPES, lambda: padded(EAGER), lambda: eager)
    assert check.is_wrong(ITEMS)
    assert not check.is_wrong(group(2))
    assert not check.is_settled(GRAPH, ITEMS, SHAPES)


def test_an_item_that_is_wrong_alone_is_wrong_in_every_group() -> None:
    check = LayoutCheck("model", None)
    with pytest.raises(RefusedError, match="1 items of 4 tokens"):
        check.compare(GRAPH, group(4), SHAPES, lambda: EAGER, lambda: EAGER * 1.01)
    assert check.is_wrong(group(2, 4))
    assert not check.is_wrong(group(2, 3))


def right(check: LayoutCheck, graph: int, *tokens: int) -> None:
    rows = torch.ones(sum(tokens), 3)
    check.compare(graph, group(*tokens), SHAPES, lambda: rows, lambda: rows)


def test_what_was_right_in_other_groups_is_settled() -> None:
    check = LayoutCheck("model", None)
    right(check, GRAPH, 2, 3, 3)
    right(check, GRAPH, 3, 2)
    assert check.is_settled(GRAPH, group(3, 3, 2), SHAPES)
    assert check.is_settled(GRAPH, group(2, 3), SHAPES)


@pytest.mark.parametrize(
    ("graph", "tokens"),
    [(GRAPH, (4, 3)), (GRAPH, (3, 2)), (GRAPH, (2, 3, 3)), (8, (2, 3))],
    ids=["another size", "another order", "more items", "another graph"],
)
def test_anything_new_is_compared(graph: int, tokens: tuple[int, ...]) -> None:
    check = LayoutCheck("model", None)
    right(check, GRAPH, 2, 3)
    assert not check.is_settled(graph, group(*tokens), SHAPES)


def test_a_group_without_the_largest_size_of_the_others_is_compared() -> None:
    """Gemma 4 pads all pictures of a group to its largest, and is right where that fills a slot."""
    check = LayoutCheck("model", None)
    right(check, GRAPH, 3, 3, 4)
    assert not check.is_settled(GRAPH, group(3, 3, 3), SHAPES)
    right(check, GRAPH, 3, 3, 3)
    assert check.is_settled(GRAPH, group(3, 3, 3), SHAPES)


def test_a_group_whose_buffers_have_another_shape_is_compared() -> None:
    """Rows that are missing would be zeros in a graph."""
    check = LayoutCheck("model", None)
    right(check, GRAPH, 2, 3)
    assert check.is_settled(GRAPH, group(2, 3), SHAPES)
    assert not check.is_settled(GRAPH, group(2, 3), ("pixel_values", (1, 8)))


def test_the_tolerance_of_the_settings_holds() -> None:
    LayoutCheck("model", 0.02).compare(GRAPH, ITEMS, SHAPES, lambda: EAGER, lambda: EAGER * 1.01)


def full() -> torch.Tensor:
    raise torch.OutOfMemoryError("no room")


def overflowing() -> torch.Tensor:
    return torch.where(EAGER == 5, float("inf"), EAGER)


@pytest.mark.parametrize(("eager", "why"), [(full, "no room"), (overflowing, "not finite")])
def test_what_cannot_be_compared_now_may_be_later(
    eager: Callable[[], torch.Tensor], why: str
) -> None:
    """One picture that float16 cannot encode must not cost all others of its size their graphs."""
    check = LayoutCheck("model", None)
    with pytest.raises(RefusedError, match=why):
        check.compare(GRAPH, ITEMS, SHAPES, eager, eager)
    assert not check.is_wrong(ITEMS)
    assert not check.is_settled(GRAPH, ITEMS, SHAPES)
    check.compare(GRAPH, ITEMS, SHAPES, lambda: padded(EAGER), lambda: EAGER)
    assert check.is_settled(GRAPH, ITEMS, SHAPES)


def test_a_graph_that_is_not_finite_where_eager_is_differs() -> None:
    check = LayoutCheck("model", None)
    with pytest.raises(RefusedError, match="another result than eager"):
        check.compare(GRAPH, ITEMS, SHAPES, overflowing, lambda: EAGER)
    assert check.is_wrong(ITEMS)
