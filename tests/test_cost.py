"""Costs measured at start-up, and what the table makes of them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphhal import cost
from graphhal.cost_table import CostTable, Timing
from graphhal.execution import Execution
from graphhal.runner import EncoderGraphs
from graphhal.settings import Settings
from tests.plain_platform import PlainPlugin, plain_platform
from tests.toy_encoder import ToyEncoder

BUDGETS = (4, 8, 16, 32, 64)


@pytest.fixture
def measured():
    plugin = PlainPlugin()
    platform = plain_platform(plugin)
    adapter = ToyEncoder(budgets=BUDGETS, paths=("image", "video"))
    graphs = EncoderGraphs(adapter, platform, Settings(self_check="off", max_items=64))
    graphs.capture()
    plugin.calls.clear()
    return graphs, plugin, cost.measure(adapter, Execution(adapter, platform), graphs._graphs)


def test_every_graph_has_a_price_and_eager_ones_reach_from_the_smallest_to_the_largest(measured):
    graphs, plugin, costs = measured
    assert set(costs.replays) == set(graphs.keys())
    assert set(costs.eager) == {"image", "video"}
    for sizes in costs.eager.values():
        assert (min(sizes), max(sizes)) == (2 * BUDGETS[0], 2 * BUDGETS[-1])
    replays = [t for each in costs.replays.values() for t in each]
    eager = [t for sizes in costs.eager.values() for each in sizes.values() for t in each]
    assert all(t.milliseconds > 0 and t.attention > 0 for t in replays + eager)
    # All that is timed lies within a step of a reference, and a replay's step within another.
    steps = 3 * len(replays) + 2 * len(eager)
    assert steps * (1 + cost.REPEATS) == plugin.count("step")


def test_eager_calls_are_priced_by_the_work_that_an_eager_call_does(measured):
    _, _, costs = measured
    full = ToyEncoder(budgets=(64,)).item(0, 1, 128)
    heaviest = max(costs.eager["image"][128])
    assert heaviest.attention == sum(n * n for s in full.sequences.values() for n in s)
    lightest = min(costs.eager["image"][128])
    assert lightest.attention == 64 * (2 * 2 + 2 * 2)  # 64 images of two rows, in both sets


times = st.floats(0.01, 100)
timings = st.lists(st.builds(Timing, st.integers(0, 99), times), min_size=1, max_size=3).map(tuple)


@given(st.dictionaries(st.integers(1, 200), timings, min_size=1, max_size=5), st.integers(0, 120))
def test_eager_prices_lie_between_what_was_measured(sizes, attention):
    table = CostTable({}, {"image": sizes})
    known = sorted(sizes)
    at = {rows: table.eager_ms("image", rows, attention) for rows in known}
    for rows in known:
        prices = [timing.milliseconds for timing in sizes[rows]]
        assert min(prices) - 1e-9 <= at[rows] <= max(prices) + 1e-9
    for low, high in pairwise(known):
        between = table.eager_ms("image", (low + high) // 2, attention)
        bounds = sorted((at[low], at[high]))
        assert bounds[0] - 1e-9 <= between <= bounds[1] + 1e-9
    assert table.eager_ms("image", 0, attention) == pytest.approx(at[known[0]])
    top = known[-1]
    assert table.eager_ms("image", 2 * top, attention) == pytest.approx(2 * at[top])
    assert table.eager_ms("video", 1, attention) is None


@given(timings, st.integers(0, 120), st.integers(0, 120))
def test_more_attention_never_costs_less_where_heavier_was_slower(measured_timings, one, other):
    light, heavy = min(measured_timings), max(measured_timings)
    if heavy.milliseconds < light.milliseconds:
        return
    table = CostTable({"graph": measured_timings})
    low, high = sorted((one, other))
    assert table.replay_ms("graph", low) <= table.replay_ms("graph", high) + 1e-9
    assert table.replay_ms("another", low) is None
