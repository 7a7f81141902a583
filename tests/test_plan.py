"""Capacity, planner and cost table: pure decisions, checked against what a plan must be."""

from collections import Counter
from dataclasses import replace
from itertools import cycle, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphhal.boundaries import Boundaries
from graphhal.cost_table import CostTable, Timing
from graphhal.errors import BoundariesError
from graphhal.items import ItemSpec
from graphhal.plan import (
    Capacity,
    Eager,
    GraphKey,
    MissReason,
    Planner,
    Replay,
    SequenceBound,
)
from graphhal.settings import Policy
from tests.toy_encoder import FULL, MERGE, WINDOWED, ToyEncoder

TOY = ToyEncoder()


def capacity(
    budget: int,
    items: int = 8,
    slots: int = 64,
    longest: int | None = None,
    path: str = "image",
    windows: int = 64,
    axes: tuple[tuple[str, int], ...] = (),
    lone_from: int | None = None,
) -> Capacity:
    rows = budget * MERGE
    return Capacity(
        GraphKey("toy", path, budget, axes),
        rows,
        budget,
        items,
        {
            FULL: SequenceBound(rows, slots, longest or rows),
            WINDOWED: SequenceBound(rows, windows, 4),
        },
        lone_from,
    )


def group(*tokens: int, path: str = "image", frames: int = 1) -> tuple[ItemSpec, ...]:
    items, offset = [], 0
    for index, count in enumerate(tokens):
        items.append(TOY.item(index, frames, count * MERGE, path, offset))
        offset += items[-1].rows
    return tuple(items)


def planner(*ladder: Capacity, policy: Policy = Policy.SINGLE, **options) -> Planner:
    refused = options.pop("refused", None)
    return Planner(ladder, policy, lambda item: item.modality, lambda items: refused, **options)


def sizes(plan) -> list:
    """[(budget, tokens of the items)] of replays, (reason, tokens) of eager calls."""
    return [
        (step.capacity.key.size, [i.tokens for i in step.items])
        if isinstance(step, Replay)
        else (step.reason, [i.tokens for i in step.items])
        for step in plan.steps
    ]


# Any plan ------------------------------------------------------------------------------------


@st.composite
def ladders(draw):
    made = {}
    for _ in range(draw(st.integers(0, 5))):
        path = draw(st.sampled_from(["image", "video"]))
        budget = draw(st.integers(1, 24))
        made[path, budget] = capacity(
            budget,
            items=draw(st.integers(1, 6)),
            slots=draw(st.integers(1, 12)),
            longest=draw(st.one_of(st.none(), st.integers(1, 20))),
            path=path,
            windows=draw(st.integers(1, 24)),
        )
    return tuple(made.values())


@st.composite
def groups(draw):
    items, offset = [], 0
    for index in range(draw(st.integers(1, 6))):
        path = draw(st.sampled_from(["image", "video"]))
        frames = draw(st.integers(1, 5)) if path == "video" else 1
        items.append(TOY.item(index, frames, draw(st.integers(1, 10)) * MERGE, path, offset))
        offset += items[-1].rows
    return tuple(items)


def cost_table(replays, eager):
    """Costs that do not depend on attention work."""
    return CostTable(
        {key: (Timing(0, ms),) for key, ms in replays.items()},
        {path: {rows: (Timing(0, ms),) for rows, ms in points} for path, points in eager.items()},
    )


@st.composite
def costs(draw, ladder):
    price = st.floats(0.01, 10)
    measured = [c for c in ladder if draw(st.booleans())]
    points = st.lists(
        st.tuples(st.integers(1, 200), price), max_size=4, unique_by=lambda point: point[0]
    )
    return cost_table(
        {c.key: draw(price) for c in measured},
        {path: tuple(sorted(draw(points))) for path in ("image", "video")},
    )


@settings(max_examples=80)
@given(st.data(), ladders(), groups(), st.sampled_from(Policy), st.booleans(), st.booleans())
def test_a_plan_covers_every_token_once_and_stays_within_capacity(
    data, ladder, items, policy, exact_only, allow_empty
):
    made = planner(
        *ladder,
        policy=policy,
        exact_only=exact_only,
        allow_empty=allow_empty,
        costs=data.draw(costs(ladder)),
    )
    plan = made.plan(items)
    covered: Counter[tuple[int, int]] = Counter()
    for step in plan.steps:
        assert step.items
        for part in step.items:
            whole = items[part.index]
            covered.update((part.index, part.token_offset + n) for n in range(part.tokens))
            assert part.row_offset == whole.row_offset + part.token_offset * MERGE
            assert part.rows == part.tokens * MERGE
            assert part == whole or (whole.splittable and isinstance(step, Replay))
    assert covered == Counter((i.index, n) for i in items for n in range(i.tokens))
    for step in plan.steps:
        paths = {part.modality for part in step.items}
        assert len(paths) == 1
        if isinstance(step, Eager):
            continue
        graph = step.capacity
        assert graph in ladder
        assert {graph.key.path} == paths
        assert graph.misfit(step.items, allow_empty) is None
        assert not exact_only or graph.is_exact_for(step.items)
        for name, bounds in graph.boundaries(step.items, allow_empty).items():
            limit = graph.sequences[name]
            lengths = [n for part in step.items for n in part.sequences[name]]
            assert list(bounds.lengths[: len(lengths)]) == lengths
            assert bounds.rows == limit.rows
            assert len(bounds.cu_seqlens) == limit.slots + 1
            assert bounds.max_seqlen <= limit.max_seqlen
            assert allow_empty or bounds.spare_slots == 0
    if policy is Policy.SINGLE:
        for path in {item.modality for item in items}:
            same = [item for item in items if item.modality == path]
            steps = [s for s in plan.steps if s.items[0].modality == path]
            assert [p.index for s in steps for p in s.items] == sorted(
                p.index for s in steps for p in s.items
            )
            assert len(steps) == 1 or all(item.splittable for item in same)


@settings(max_examples=40)
@given(ladders(), groups(), st.booleans())
def test_single_replays_whenever_one_graph_holds_the_group(ladder, items, allow_empty):
    items = tuple(item for item in items if item.modality == "image")
    if not items:
        return
    fitting = [c for c in ladder if c.key.path == "image" and c.misfit(items, allow_empty) is None]
    (step,) = planner(*ladder, allow_empty=allow_empty).plan(items).steps
    if not fitting:
        assert isinstance(step, Eager)
    else:
        assert isinstance(step, Replay)
        assert step.capacity.rows == min(c.rows for c in fitting)


@settings(max_examples=40)
@given(ladders(), groups(), st.booleans())
def test_misfit_and_boundaries_agree(ladder, items, allow_empty):
    about_boundaries = {
        MissReason.TOO_MANY_SEQUENCES,
        MissReason.SEQUENCE_TOO_LONG,
        MissReason.EMPTY_SLOT,
    }
    for graph in ladder:
        reason = graph.misfit(items, allow_empty)
        if reason is None:
            assert set(graph.boundaries(items, allow_empty)) == {FULL, WINDOWED}
        elif reason in about_boundaries:
            with pytest.raises(BoundariesError):
                graph.boundaries(items, allow_empty)


# Reasons -------------------------------------------------------------------------------------

REASONS = {
    MissReason.NO_GRAPHS: lambda: planner().plan(group(4)),
    MissReason.TOO_MANY_ROWS: lambda: planner(capacity(8)).plan(group(9)),
    MissReason.TOO_MANY_ITEMS: lambda: planner(capacity(8, items=2)).plan(group(1, 1, 1)),
    MissReason.TOO_MANY_SEQUENCES: lambda: planner(capacity(8, slots=2)).plan(group(1, 1, 1)),
    MissReason.SEQUENCE_TOO_LONG: lambda: planner(capacity(8, longest=8)).plan(group(5)),
    MissReason.EMPTY_SLOT: lambda: planner(capacity(4, slots=4), allow_empty=False).plan(group(4)),
    MissReason.NOT_EXACT: lambda: planner(capacity(8), exact_only=True).plan(group(7)),
    MissReason.REFUSED: lambda: planner(capacity(8), refused="pruned").plan(group(8)),
    MissReason.CHEAPER_EAGER: lambda: planner(
        capacity(8),
        policy=Policy.MEASURED,
        costs=cost_table({capacity(8).key: 2.0}, {"image": ((16, 1.0),)}),
    ).plan(group(8)),
}
IN_RUNNER = {
    MissReason.OUTER_CAPTURE,
    MissReason.NESTED,
    MissReason.REPLAY_FAILED,
    MissReason.WEIGHTS_MOVED,
}


@pytest.mark.parametrize("reason", REASONS, ids=lambda reason: reason.name)
def test_every_reason_is_reached(reason):
    (step,) = REASONS[reason]().steps
    assert isinstance(step, Eager)
    assert step.reason is reason


def test_no_reason_is_unknown_to_these_tests():
    assert set(REASONS) | IN_RUNNER == set(MissReason)


def test_padding_that_needs_more_sequences_than_slots_is_a_miss():
    # 12 rows of slack under a bound of 4 are three dummies, and only two slots are left.
    assert capacity(8, slots=3, longest=4).misfit(group(2)) is MissReason.TOO_MANY_SEQUENCES
    assert capacity(8, slots=4, longest=4).misfit(group(2)) is None


def test_padding_that_gives_every_spare_slot_a_row_leaves_none_empty():
    # 1 sequence and 4 rows of padding; 3 windows and the same.
    assert capacity(8, slots=5, windows=7).misfit(group(6), allow_empty=False) is None
    for slots, windows in ((6, 7), (5, 8)):
        found = capacity(8, slots=slots, windows=windows).misfit(group(6), allow_empty=False)
        assert found is MissReason.EMPTY_SLOT


def test_rows_beyond_the_input_are_a_miss_though_their_sequences_fit():
    graph = Capacity(GraphKey("toy", "image", 64), 8, 64, 8, {FULL: SequenceBound(64, 8, 64)})
    item = ItemSpec(0, "image", 10, 5, {FULL: (10,)}, signature=10)
    assert graph.misfit((item,)) is MissReason.TOO_MANY_ROWS


def test_tokens_beyond_the_budget_are_a_miss_though_the_rows_fit():
    graph = Capacity(GraphKey("toy", "image", 4), 64, 4, 8, {FULL: SequenceBound(64, 8, 64)})
    item = ItemSpec(0, "image", 10, 5, {FULL: (10,)}, signature=10)
    assert graph.misfit((item,)) is MissReason.TOO_MANY_ROWS


def test_rows_of_a_boundary_set_beyond_its_own_are_a_miss_though_the_input_fits():
    """Audio is shorter where it is attended to than where it comes in."""
    graph = Capacity(GraphKey("toy", "image", 64), 64, 64, 8, {FULL: SequenceBound(16, 8, 64)})
    item = ItemSpec(0, "image", 40, 20, {FULL: (20,)}, signature=20)
    assert graph.misfit((item,)) is MissReason.TOO_MANY_ROWS
    with pytest.raises(BoundariesError):
        graph.boundaries((item,))


def test_padding_of_a_boundary_set_alone_is_not_exact():
    graph = Capacity(GraphKey("toy", "image", 20), 40, 20, 8, {FULL: SequenceBound(20, 8, 20)})
    for rows, exact in ((20, True), (19, False)):
        item = ItemSpec(0, "image", 40, 20, {FULL: (rows,)}, signature=rows)
        assert graph.misfit((item,)) is None
        assert graph.is_exact_for((item,)) is exact


def test_a_graph_of_more_tokens_is_not_exact_unless_they_are_gathered_last():
    """What comes after a gather of real tokens multiplies matrices of other sizes."""
    graph = Capacity(GraphKey("toy", "audio", 2), 2, 8, 2, {})
    items = [ItemSpec(n, "audio", 1, tokens, {}, tokens) for n, tokens in enumerate((4, 3))]
    assert graph.misfit(items) is None
    assert not graph.is_exact_for(items)
    assert graph.is_exact_for([items[0], replace(items[0], index=1)])
    assert replace(graph, gathers_last=True).is_exact_for(items)


def test_windowed_layers_have_a_bound_of_their_own():
    graph = Capacity(
        GraphKey("toy", "image", 8),
        16,
        8,
        8,
        {FULL: SequenceBound(16, 8, 16), WINDOWED: SequenceBound(16, 8, 3)},
    )
    assert graph.misfit(group(2)) is MissReason.SEQUENCE_TOO_LONG
    with pytest.raises(BoundariesError, match=r"^toy/image\[8\]: a sequence of 4 rows is longer"):
        graph.boundaries(group(2))


def test_the_frame_of_a_video_counts_not_its_total():
    video = group(3, path="video", frames=4)
    assert capacity(12, longest=6, path="video").misfit(video) is None
    assert capacity(12, longest=5, path="video").misfit(video) is MissReason.SEQUENCE_TOO_LONG


# Policies ------------------------------------------------------------------------------------


def test_an_empty_group_has_an_empty_plan():
    for policy in Policy:
        assert planner(capacity(8), policy=policy).plan(()).steps == ()


def test_single_takes_the_smallest_graph_that_holds_all():
    made = planner(capacity(16), capacity(4), capacity(8))
    assert sizes(made.plan(group(2, 3))) == [(8, [2, 3])]
    assert sizes(made.plan(group(8, 9))) == [(MissReason.TOO_MANY_ROWS, [8, 9])]


def test_packed_spreads_and_leaves_one_eager_call():
    made = planner(capacity(4), capacity(8), policy=Policy.PACKED)
    plan = made.plan(group(5, 12, 3, 6, 9))
    assert sizes(plan) == [(8, [3, 5]), (8, [6]), (MissReason.TOO_MANY_ROWS, [12, 9])]
    assert [i.index for i in plan.steps[-1].items] == [1, 4]


def test_measured_takes_the_cheapest_graph_even_if_larger():
    ladder = (capacity(4), capacity(8))
    costs = cost_table({ladder[0].key: 3.0, ladder[1].key: 1.0}, {"image": ((8, 2.0),)})
    assert sizes(planner(*ladder, policy=Policy.MEASURED, costs=costs).plan(group(4))) == [(8, [4])]


def test_measured_replays_items_one_by_one_where_that_is_cheaper():
    ladder = (capacity(4), capacity(8))
    costs = cost_table({ladder[0].key: 0.4, ladder[1].key: 1.0}, {"image": ((8, 5.0),)})
    plan = planner(*ladder, policy=Policy.MEASURED, costs=costs).plan(group(4, 4))
    assert sizes(plan) == [(4, [4]), (4, [4])]


def test_measured_without_measurements_replays():
    assert sizes(planner(capacity(8), policy=Policy.MEASURED).plan(group(4))) == [(8, [4])]


def test_measured_packs_what_one_graph_does_not_hold_unless_eager_is_cheaper():
    graph = capacity(4)
    for eager_ms, expected in [
        (9.0, [(4, [4]), (4, [4])]),
        (1.0, [(MissReason.CHEAPER_EAGER, [4, 4])]),
    ]:
        costs = cost_table({graph.key: 1.0}, {"image": ((16, eager_ms),)})
        made = planner(graph, policy=Policy.MEASURED, costs=costs)
        assert sizes(made.plan(group(4, 4))) == expected


def test_measured_compares_frame_chunks_with_eager():
    graph = capacity(4, path="video")
    video = group(4, path="video", frames=5)
    for eager_ms, first in [(9.0, 4), (1.0, MissReason.CHEAPER_EAGER)]:
        costs = cost_table({graph.key: 1.0}, {"video": ((40, eager_ms),)})
        made = planner(graph, policy=Policy.MEASURED, costs=costs)
        assert sizes(made.plan(video))[0][0] == first


@pytest.mark.parametrize("policy", Policy)
def test_a_long_video_replays_over_successive_frames(policy):
    graph = capacity(8, path="video", slots=5)
    plan = planner(graph, policy=policy).plan(group(2, path="video", frames=10))
    assert [(s.capacity.key.size, s.items[0].frames) for s in plan.steps] == [
        (8, 4),
        (8, 4),
        (8, 2),
    ]
    assert [s.items[0].row_offset for s in plan.steps] == [0, 16, 32]


def test_several_videos_share_replays_and_keep_their_own_rows():
    # Frames of 4 rows: [6 frames, 1 frame, 1 frame], two frames a graph.
    items, offset = [], 0
    for index, frames in enumerate((6, 1, 1)):
        items.append(TOY.item(index, frames, 4, "video", offset))
        offset += items[-1].rows
    plan = planner(capacity(4, path="video", slots=3)).plan(items)
    parts = [[(p.index, p.frames, p.row_offset) for p in step.items] for step in plan.steps]
    assert parts == [
        [(0, 2, 0)],
        [(0, 2, 8)],
        [(0, 2, 16)],
        [(1, 1, 24), (2, 1, 28)],
    ]


def test_a_frame_larger_than_every_graph_makes_the_whole_group_one_eager_call():
    items = (TOY.item(0, 2, 4, "video"), TOY.item(1, 2, 20, "video", 8))
    plan = planner(capacity(4, path="video")).plan(items)
    assert sizes(plan) == [(MissReason.TOO_MANY_ROWS, [4, 20])]


def test_a_video_that_may_not_be_cut_keeps_its_whole_group_together():
    whole = replace(TOY.item(0, 2, 8, "video"), splittable=False)
    plan = planner(capacity(8, path="video")).plan((whole, TOY.item(1, 2, 8, "video", 16)))
    assert sizes(plan) == [(MissReason.TOO_MANY_ROWS, [8, 8])]


def test_exact_only_never_cuts_a_video():
    video = group(4, path="video", frames=2)
    made = planner(capacity(4, path="video"), exact_only=True)
    assert sizes(made.plan(video)) == [(MissReason.TOO_MANY_ROWS, [8])]


def test_exact_only_takes_the_graph_of_exactly_this_size():
    made = planner(capacity(4), capacity(7), capacity(8), exact_only=True)
    assert sizes(made.plan(group(3, 4))) == [(7, [3, 4])]
    assert sizes(made.plan(group(5))) == [(MissReason.NOT_EXACT, [5])]


def test_measured_takes_exact_graphs_and_whole_groups_where_no_other_is_allowed():
    ladder = (capacity(8), capacity(16))
    costs = cost_table({ladder[0].key: 3.0, ladder[1].key: 1.0}, {})
    made = planner(*ladder, policy=Policy.MEASURED, exact_only=True, costs=costs)
    assert sizes(made.plan(group(3, 5))) == [(8, [3, 5])]


@pytest.mark.parametrize("policy", Policy)
def test_paths_are_planned_apart(policy):
    items = (TOY.item(0, 1, 8), TOY.item(1, 2, 8, "video", 8), TOY.item(2, 1, 4, offset=24))
    made = planner(capacity(8), capacity(16, path="video"), policy=policy)
    assert [(s.capacity.key.path, [i.index for i in s.items]) for s in made.plan(items).steps] == [
        ("image", [0, 2]),
        ("video", [1]),
    ]


def test_a_path_that_changes_while_it_is_asked_for_loses_no_item():
    answers = cycle(("image", "video"))
    ladder = [capacity(8), capacity(8, path="video")]
    made = Planner(ladder, Policy.SINGLE, lambda item: next(answers), lambda items: None)
    for items in (group(2), group(2, 2), group(1, 1, 1)):
        steps = made.plan(items).steps
        assert sorted(item.index for step in steps for item in step.items) == [*range(len(items))]


def test_a_refusal_is_asked_for_each_path():
    items = (TOY.item(0, 1, 8), TOY.item(1, 2, 8, "video", 8))
    made = Planner(
        (capacity(8), capacity(16, path="video")),
        Policy.SINGLE,
        lambda item: item.modality,
        lambda part: "no video" if part[0].modality == "video" else None,
    )
    assert sizes(made.plan(items)) == [(8, [4]), (MissReason.REFUSED, [8])]


# Costs and keys ------------------------------------------------------------------------------


def test_eager_cost_is_linear_between_measurements():
    costs = cost_table({}, {"image": ((10, 2.0), (20, 4.0), (40, 4.0))})
    expected = {1: 2.0, 10: 2.0, 15: 3.0, 20: 4.0, 30: 4.0, 40: 4.0, 80: 8.0}
    assert {rows: costs.eager_ms("image", rows, 0) for rows in expected} == expected
    assert costs.eager_ms("video", 10, 0) is None


@given(
    st.lists(
        st.tuples(st.integers(1, 99), st.floats(0.1, 9)), min_size=1, unique_by=lambda p: p[0]
    ),
    st.integers(1, 200),
)
def test_eager_cost_lies_between_its_neighbours(points, rows):
    points = sorted(points)
    cost = cost_table({}, {"image": tuple(points)}).eager_ms("image", rows, 0)
    below = [ms for at, ms in points if at <= rows]
    above = [ms for at, ms in points if at >= rows]
    if below and above:
        low, high = sorted((below[-1], above[0]))
        assert low - 1e-9 <= cost <= high + 1e-9
    else:
        assert cost >= (below[-1] if below else above[0])


def test_keys_are_ordered_and_read_well():
    keys = [
        GraphKey("toy", "image", 8, (("frames", 2),)),
        GraphKey("toy", "image", 8),
        GraphKey("toy", "image", 4),
    ]
    assert [str(key) for key in sorted(keys)] == [
        "toy/image[4]",
        "toy/image[8]",
        "toy/image[8,frames=2]",
    ]


def test_an_eager_call_has_exactly_the_items_capacity():
    items = group(3, 2)
    exact = Capacity.of(items, GraphKey("toy", "image", 0))
    assert (exact.rows, exact.tokens, exact.items) == (10, 5, 2)
    assert exact.sequences == {
        FULL: SequenceBound(10, 2, 6),
        WINDOWED: SequenceBound(10, 3, 4),
    }
    for allow_empty, name in product((True, False), (FULL, WINDOWED)):
        made = exact.boundaries(items, allow_empty)[name]
        assert made == Boundaries.from_lengths(n for i in items for n in i.sequences[name])
    assert exact.is_exact_for(items)
    assert exact.misfit(items, allow_empty=False) is None


def test_attention_work_counts_the_padding():
    graph = Capacity(GraphKey("toy", "image", 16), 32, 16, 8, {FULL: SequenceBound(19, 8, 6)})
    item = ItemSpec(0, "image", 4, 2, {FULL: (4,)}, signature=4)
    assert graph.attention_work((item,)) == 4**2 + 2 * 6**2 + 3**2


def test_costs_follow_attention_work_at_equal_rows():
    costs = CostTable(
        {"key": (Timing(100, 8.0), Timing(10, 2.0))},
        {"image": {10: (Timing(100, 8.0), Timing(10, 2.0)), 20: (Timing(400, 32.0),)}},
    )
    assert [costs.replay_ms("key", work) for work in (1, 10, 55, 100, 1000)] == [2, 2, 5, 8, 8]
    assert costs.eager_ms("image", 10, 55) == 5.0
    assert costs.eager_ms("image", 15, 55) == (5.0 + 32.0) / 2
    assert costs.replay_ms("other", 1) is None


def test_measured_keeps_the_smallest_graph_where_another_saves_next_to_nothing():
    ladder = (capacity(4), capacity(8))
    costs = cost_table({ladder[0].key: 1.0, ladder[1].key: 0.99}, {})
    assert sizes(planner(*ladder, policy=Policy.MEASURED, costs=costs).plan(group(4))) == [(4, [4])]


def lone_ladder(*lone: int, several: tuple[int, ...] = (16, 18, 20, 24)) -> list[Capacity]:
    """Graphs of several items, and of one from 16 tokens on, in the order of nothing."""
    start = 16 * MERGE
    ladder = [capacity(size, lone_from=start) for size in several]
    own = [capacity(size, items=1, slots=2, axes=(("items", 1),), lone_from=start) for size in lone]
    return [*ladder, *own][::-1]


def taken(ladder: list[Capacity], *tokens: int, **options) -> str:
    (step,) = planner(*ladder, **options).plan(group(*tokens)).steps
    return str(step.capacity.key) if isinstance(step, Replay) else str(step.reason)


@pytest.mark.parametrize("policy", [Policy.SINGLE, Policy.PACKED, Policy.MEASURED])
@pytest.mark.parametrize(
    ("tokens", "graph"),
    [
        ((16,), "toy/image[18,items=1]"),  # an eighth larger
        ((17,), "toy/image[18,items=1]"),  # equally large
        ((19,), "toy/image[20]"),  # 24 is a fifth larger than 20
        ((21,), "toy/image[24,items=1]"),
        ((8, 8), "toy/image[16]"),
        ((9, 9), "toy/image[18]"),
    ],
)
def test_one_item_takes_a_lone_graph_that_is_hardly_larger(tokens, graph, policy):
    assert taken(lone_ladder(18, 24), *tokens, policy=policy) == graph


def test_more_than_the_largest_graph_is_told_as_such():
    assert taken(lone_ladder(24), 25) == MissReason.TOO_MANY_ROWS
    assert taken(lone_ladder(24), *[2] * 9) == MissReason.TOO_MANY_ITEMS
    several = capacity(24, windows=3, lone_from=16 * MERGE)
    assert taken([several, *lone_ladder(24, several=())], 8, 8) == MissReason.TOO_MANY_SEQUENCES


def test_a_graph_of_several_is_not_exact_for_a_lone_sequence():
    """Eager attends to it by the kernel of lone ones, which rounds otherwise."""
    assert taken(lone_ladder(18, 24), 24, exact_only=True) == "toy/image[24,items=1]"
    assert taken(lone_ladder(18), 24, exact_only=True) == MissReason.NOT_EXACT
    assert taken(lone_ladder(18), 16, 8, exact_only=True) == "toy/image[24]"
    assert taken(lone_ladder(16), 16, exact_only=True) == "toy/image[16,items=1]"
    assert taken(lone_ladder(), 16, exact_only=True) == MissReason.NOT_EXACT
    three = [capacity(24, slots=3, lone_from=16 * MERGE)]
    assert taken(three, 24, exact_only=True) == MissReason.NOT_EXACT
    for slots in (2, 64):
        below = [capacity(8, slots=slots, lone_from=16 * MERGE)]
        assert taken(below, 8, exact_only=True) == "toy/image[8]"
