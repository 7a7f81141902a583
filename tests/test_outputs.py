"""Copies of outputs: levels side by side, request order, against a slow, obvious model."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphhal.errors import AdapterError
from graphhal.items import ItemSpec
from graphhal.outputs import as_levels, runs, split_items, token_starts, write_levels

counts = st.lists(st.integers(1, 6), min_size=1, max_size=7)


def item(index: int, tokens: int, offset: int = 0) -> ItemSpec:
    return ItemSpec(index, "image", tokens, tokens, {}, tokens, token_offset=offset)


@st.composite
def steps(draw):
    """(tokens of each item, steps): every token in exactly one step, parts in any order."""
    tokens = draw(counts)
    parts = []
    for index, count in enumerate(tokens):
        at = 0
        while at < count:
            take = draw(st.integers(1, count - at))
            parts.append(item(index, take, at))
            at += take
    parts = draw(st.permutations(parts))
    cut = draw(st.integers(0, len(parts)))
    return tokens, [part for part in (parts[:cut], parts[cut:]) if part]


@settings(max_examples=80)
@given(steps())
def test_runs_put_every_token_in_its_place(drawn):
    tokens, made = drawn
    starts = token_starts([item(i, n) for i, n in enumerate(tokens)])
    group = torch.full((sum(tokens),), -1)
    for step in made:
        # The obvious model: a step's output is its parts one after another; a token's value says
        # which item it belongs to, and where.
        source = torch.tensor(
            [p.index * 100 + p.token_offset + n for p in step for n in range(p.tokens)]
        )
        for begin, target, rows in runs(step, starts):
            assert rows > 0
            group[target : target + rows] = source[begin : begin + rows]
    assert group.tolist() == [i * 100 + n for i, count in enumerate(tokens) for n in range(count)]


@given(counts)
def test_a_group_in_order_is_one_copy(tokens):
    items = [item(i, n) for i, n in enumerate(tokens)]
    assert list(runs(items, token_starts(items))) == [(0, 0, sum(tokens))]


def test_neighbours_in_the_target_are_one_copy():
    items = [item(1, 2), item(2, 3), item(0, 4)]
    assert list(runs(items, (0, 4, 6, 9))) == [(0, 4, 5), (5, 0, 4)]


@given(counts)
def test_split_gives_each_item_its_tokens(tokens):
    items = [item(i, n) for i, n in enumerate(tokens)]
    group = torch.arange(sum(tokens) * 2).reshape(-1, 2)
    parts = split_items(group, token_starts(items))
    assert [len(part) for part in parts] == tokens
    assert torch.equal(torch.cat(parts), group)


@given(st.integers(0, 5), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_levels_stand_side_by_side(tokens, widths):
    levels = [torch.randn(tokens, width) for width in widths]
    target = torch.full((tokens, sum(widths)), float("nan"))
    write_levels(levels, target, "toy")
    assert torch.equal(target, torch.cat(levels, dim=1))


def test_one_tensor_is_one_level():
    level = torch.randn(3, 2)
    assert as_levels(level, "toy") == (level,)


@pytest.mark.parametrize(
    "output",
    [
        [],
        (),
        [torch.zeros(3, 2), None],
        [torch.zeros(3)],
        torch.zeros(3),
        torch.zeros(1, 3, 2),
        torch.zeros(3, 2, dtype=torch.complex64),
        [torch.zeros(3, 2), torch.zeros(4, 2)],
        [torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.float64)],
        None,
        {"last": torch.zeros(3, 2)},
    ],
    ids=str,
)
def test_what_is_no_level_is_refused(output):
    with pytest.raises(AdapterError, match=r"^toy: forward must return \(tokens, width\) tensors"):
        as_levels(output, "toy")


@pytest.mark.parametrize("width", [1, 3])
def test_levels_of_another_width_are_refused(width):
    with pytest.raises(
        AdapterError, match=rf"^toy: forward made 4 tokens of {width} columns, 4 of 2 are"
    ):
        write_levels(torch.zeros(4, width), torch.zeros(4, 2), "toy")


def test_tokens_are_never_broadcast():
    with pytest.raises(AdapterError, match=r"^toy: forward made 1 tokens of 2 columns, 4 of 2 are"):
        write_levels(torch.zeros(1, 2), torch.zeros(4, 2), "toy")


def test_what_is_no_tensor_is_told_by_its_type_not_by_its_values():
    with pytest.raises(AdapterError, match=r"got \['dict'\]; return a tensor, or a list"):
        as_levels({"features": torch.ones(2, 3)}, "toy")
