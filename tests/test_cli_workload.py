"""A trace holds sizes alone; what is made of them must fit the graphs as the real items would."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphhal.bench.workload import Trace, TraceItem, cover, item_spec, modality_shapes
from graphhal.items import ItemSpec
from graphhal.plan import Capacity, GraphKey, Planner, SequenceBound
from graphhal.settings import Policy


def capacity(budget: int, path: str = "image", longest: int = 64) -> Capacity:
    rows = 4 * budget
    bound = SequenceBound(rows=rows, slots=64, max_seqlen=min(longest, rows))
    return Capacity(GraphKey("tower", path, budget), rows, budget, 8, {"cu_seqlens": bound})


def planner(*ladder: Capacity, policy: Policy = Policy.SINGLE) -> Planner:
    return Planner(ladder, policy, lambda item: item.modality, lambda _: None)


def trace(*groups: tuple[int, list[int]]) -> Trace:
    return Trace.model_validate(
        {
            "schema": 1,
            "groups": [
                {"count": count, "items": [{"modality": "image", "tokens": t} for t in tokens]}
                for count, tokens in groups
            ],
        }
    )


@given(st.integers(1, 500), st.integers(1, 8), st.integers(1, 400))
def test_sequences_cover_the_rows_and_keep_the_bound(
    tokens: int, frames: int, longest: int
) -> None:
    shape = capacity(128, longest=longest)
    spec = item_spec(0, TraceItem(modality="video", tokens=tokens * frames, frames=frames), shape)
    lengths = spec.sequences["cu_seqlens"]
    assert spec.rows == sum(lengths) == 4 * tokens * frames
    assert 0 < max(lengths) <= shape.sequences["cu_seqlens"].max_seqlen
    assert len(lengths) % frames == 0
    assert spec.splittable == (frames > 1)


def test_coverage_is_weighted_by_how_often_a_group_came() -> None:
    ladder = (capacity(16), capacity(64))
    found = cover(
        trace((5, [12]), (2, [16, 40]), (1, [100])), {"image": ladder[1]}, planner(*ladder)
    )
    assert (found.items, found.hits) == (5 + 4 + 1, 5 + 4)
    assert found.hit_rate == pytest.approx(0.9)
    assert found.misses == {"more rows than the largest graph": 1}
    assert found.replays == {ladder[0].key: 5, ladder[1].key: 2}
    assert found.padding_waste == pytest.approx(1 - (5 * 48 + 2 * 224) / (5 * 64 + 2 * 256))


def test_packing_changes_what_a_trace_gets() -> None:
    ladder = (capacity(16),)
    wide = trace((1, [16, 16]))
    assert cover(wide, {"image": ladder[0]}, planner(*ladder)).hits == 0
    packed = planner(*ladder, policy=Policy.PACKED)
    assert cover(wide, {"image": ladder[0]}, packed).hits == 2


def test_items_of_other_towers_are_left_out() -> None:
    found = cover(trace((3, [8])), {"audio": capacity(16, "audio")}, planner(capacity(16, "audio")))
    assert (found.items, found.hit_rate, found.padding_waste) == (0, 0.0, 0.0)


def test_items_of_a_tower_without_graphs_run_eagerly() -> None:
    found = cover(trace((3, [8, 8])), {}, planner(), ("image", "video"))
    assert (found.items, found.hits, found.hit_rate) == (6, 0, 0.0)
    assert found.misses == {"no graph is captured": 6}


def test_the_shape_of_a_modality_is_its_largest_graph() -> None:
    def path(item: ItemSpec) -> str:
        return "image" if item.modality == "still" else item.modality

    ladder = (capacity(16), capacity(64), capacity(32, "audio"))
    shapes = modality_shapes(("still", "audio", "video"), ladder, path)
    assert {name: shape.key.size for name, shape in shapes.items()} == {"still": 64, "audio": 32}
