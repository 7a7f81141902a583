"""The self-check: every fault that a graph can have shows on its worst cases."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphhal import self_check
from graphhal.errors import ReplayError
from graphhal.graph_set import GraphSet
from graphhal.plan import GraphKey, SequenceBound
from graphhal.runner import EncoderGraphs
from graphhal.self_check import TOKEN_FACTOR, TOLERANCE, Difference
from graphhal.settings import Settings
from tests.plain_platform import PlainPlugin, plain_attention, plain_platform
from tests.toy_encoder import FULL, MERGE, ToyEncoder, images

BUDGETS = (4, 8, 16)


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch):
    """A busy machine must not decide which cases run."""
    monkeypatch.setattr(self_check, "perf_counter", lambda: 0.0)


def captured(plugin: PlainPlugin, adapter=None, info=None, **options) -> EncoderGraphs:
    graphs = EncoderGraphs(
        adapter or ToyEncoder(budgets=BUDGETS),
        plain_platform(plugin, **(info or {})),
        Settings(**options),
    )
    graphs.capture()
    return graphs


def dropped(graphs: EncoderGraphs) -> list[int]:
    return sorted(line.key.size for line in graphs.report.dropped)


def only(size: int, spoil):
    """Spoil the output of the graph of this size."""
    return lambda graph: spoil(graph.request.output) if graph.key.size == size else None


def scale(output: torch.Tensor) -> None:
    output.mul_(1.01)


def not_a_number(output: torch.Tensor) -> None:
    output[-1, -1] = float("nan")


def infinite(output: torch.Tensor) -> None:
    output[0, 0] = float("inf")


def one_wrong_row(output: torch.Tensor) -> None:
    output[1] = output[0]


def one_slightly_wrong_row(output: torch.Tensor) -> None:
    output[1].mul_(1 + 2 * TOKEN_FACTOR * TOLERANCE[torch.float32])


def shifted(output: torch.Tensor) -> None:
    output.copy_(output.roll(1, dims=0))


def levels_swapped(output: torch.Tensor) -> None:
    output.copy_(output.flip(1))


def all_zero(output: torch.Tensor) -> None:
    output.zero_()


@pytest.mark.parametrize(("mode", "size"), [("full", 4), ("full", 16), ("quick", 8)])
@pytest.mark.parametrize(
    "spoil",
    [
        scale,
        not_a_number,
        infinite,
        one_wrong_row,
        one_slightly_wrong_row,
        shifted,
        levels_swapped,
        all_zero,
    ],
    ids=lambda spoil: spoil.__name__,
)
def test_a_wrong_graph_is_dropped_named_and_never_served(mode, spoil, size):
    plugin = PlainPlugin(after_replay=only(size, spoil), graph_bytes=lambda size: 2**20 * size)
    graphs = captured(plugin, self_check=mode)
    assert dropped(graphs) == [size]
    assert graphs.report.num_bytes == graphs.stats()["graph_bytes"]
    (line,) = graphs.report.dropped
    assert line.reason.startswith("self-check: differs from eager by relative L2 ")
    assert GraphKey("toy", "image", size) not in [each.key for each in graphs.report.captured]
    assert plugin.live == len(BUDGETS) - 1
    for tokens in ((3,), (7,), (16,)):
        asked = images(*tokens)
        torch.testing.assert_close(graphs.run(asked), graphs.run_eager(asked))


def test_one_wrong_row_of_many_does_not_drown():
    # In 512 rows it is within the tolerance of the whole.
    plugin = PlainPlugin(after_replay=only(512, one_slightly_wrong_row))
    adapter = ToyEncoder(budgets=(512,), max_seqlen=64)
    graphs = captured(plugin, adapter, max_items=32, self_check="quick")
    assert dropped(graphs) == [512]
    assert "relative L2 7" in graphs.report.dropped[0].reason
    assert "e-06" in graphs.report.dropped[0].reason


@pytest.mark.parametrize("mode", ["full", "quick"])
def test_a_platform_that_skips_boundary_updates_loses_every_graph(mode):
    graphs = captured(PlainPlugin(skip_updates=True), self_check=mode)
    assert dropped(graphs) == list(BUDGETS)


def test_a_platform_that_froze_the_capture_loses_every_graph():
    assert dropped(captured(PlainPlugin(frozen_output=True), self_check="quick")) == list(BUDGETS)


def test_a_platform_that_updates_too_late_loses_its_graphs():
    # It says "after", and yet its replay reads what was there at its launch.
    graphs = captured(PlainPlugin(), info={"boundary_order": "after"})
    assert dropped(graphs) == list(BUDGETS)


class StalePadding(ToyEncoder):
    """Forgets the padding tail; its forward lets padding rows reach real ones."""

    def stage(self, mm_kwargs, items, inputs):
        tail = inputs["pixels"][sum(i.rows for i in items) :].clone()
        super().stage(mm_kwargs, items, inputs)
        inputs["pixels"][sum(i.rows for i in items) :] = tail

    def forward(self, inputs, max_seqlen):
        levels = super().forward(inputs, max_seqlen)
        return [level + 0 * inputs["pixels"].sum() for level in levels]


def test_stale_padding_is_found_by_the_cases_that_are_not_full():
    assert dropped(captured(PlainPlugin(), StalePadding(budgets=BUDGETS))) == list(BUDGETS)


class SharedScale(ToyEncoder):
    """Normalises over all rows, padding included: right when full, wrong one short of full."""

    def forward(self, inputs, max_seqlen):
        levels = super().forward(inputs, max_seqlen)
        return [level / len(level) for level in levels]


def test_a_forward_that_depends_on_the_padding_is_found():
    assert dropped(captured(PlainPlugin(), SharedScale(budgets=BUDGETS))) == list(BUDGETS)


class LastSequenceGrows(ToyEncoder):
    """In a graph, the second sequence swallows the rest: right for one item, wrong for many."""

    def forward(self, inputs, max_seqlen):
        ends = inputs["cu_seqlens"].clone()
        if len(ends) == 10:  # eight items and padding: no eager call has so many
            ends[2:] = len(inputs["pixels"])
        return super().forward({**inputs, "cu_seqlens": ends}, max_seqlen)


def test_many_short_sequences_are_tried():
    adapter = LastSequenceGrows(budgets=(8, 16), sets=("cu_seqlens",))
    assert dropped(captured(PlainPlugin(), adapter)) == [8, 16]


def test_a_bound_that_attention_was_captured_too_small_with_is_found():
    def short(query, key, value, cu_seqlens, max_seqlen, scale):
        bound = max_seqlen if len(query) != 32 else max_seqlen - 2
        return plain_attention(query, key, value, cu_seqlens, bound, scale)

    graphs = captured(PlainPlugin(), info={"attention": short})
    assert 16 in dropped(graphs)


@pytest.mark.parametrize("mode", ["full", "quick", "off"])
def test_a_right_platform_keeps_every_graph(mode):
    graphs = captured(PlainPlugin(), self_check=mode)
    assert dropped(graphs) == []
    assert graphs.report.self_check_seconds >= 0


def test_off_checks_nothing_and_quick_only_the_full_case():
    plugin = PlainPlugin()
    captured(plugin, self_check="off")
    assert plugin.count("replay") == 0
    captured(plugin, self_check="quick")
    assert plugin.count("replay") == len(BUDGETS)
    captured(plugin, self_check="full")
    # full, one short, many short; the larger two also the full case of the next smaller, which is
    # eight short ones, as the largest has anyway
    assert plugin.count("replay") == len(BUDGETS) + 3 * len(BUDGETS) + 1


class Clock:
    """Ticks once for each row that a graph replays, and lets capture take as long as it is told."""

    def __init__(self, monkeypatch, capture: float) -> None:
        self.now = 0.0
        self.replayed: list[tuple[int, int]] = []
        monkeypatch.setattr(self_check, "perf_counter", lambda: self.now)
        own = GraphSet.capture

        def took(*args, **kwargs):
            report = own(*args, **kwargs)
            report.seconds = capture
            return report

        monkeypatch.setattr(GraphSet, "capture", took)

    def __call__(self, graph) -> None:
        self.now += graph.request.output.shape[0]
        ends = graph.request.inputs["cu_seqlens"]
        self.replayed.append((graph.key.size, int(ends.diff().max()) // MERGE))


def test_a_check_out_of_time_still_runs_the_full_and_the_emptiest_case(monkeypatch):
    clock = Clock(monkeypatch, capture=0.0)
    captured(PlainPlugin(after_replay=clock))
    # Of the smallest the longest and the next case, whatever they take.
    assert Counter(size for size, _ in clock.replayed) == {4: 3, 8: 2, 16: 2}
    for adapter in (StalePadding(budgets=BUDGETS), SharedScale(budgets=BUDGETS)):
        assert dropped(captured(PlainPlugin(), adapter)) == list(BUDGETS)


def test_what_always_runs_has_short_sequences_and_the_longest_come_first_when_there_is_time(
    monkeypatch,
):
    adapter = ToyEncoder(budgets=BUDGETS)
    clock = Clock(monkeypatch, capture=1000.0)
    captured(PlainPlugin(after_replay=clock), adapter, max_items=16)
    always, turns = clock.replayed[:7], clock.replayed[7:]
    assert [pair for pair in always if pair[0] > 4 and pair[1] > pair[0] / 2] == []
    assert [pair for pair in turns if pair[0] == pair[1]] == [(16, 16), (8, 8)]
    assert turns[0] == (16, 16)


@pytest.mark.parametrize("capture", [60.0, 75.0, 90.0, 105.0])
def test_a_check_takes_no_longer_than_the_capture(monkeypatch, capture):
    clock = Clock(monkeypatch, capture)
    captured(PlainPlugin(after_replay=clock), max_items=16)
    assert capture - 2 * 16 < clock.now <= max(capture, 4 * 3 + 8 * 2 + 16 * 2)


class KeepsARequest(ToyEncoder):
    """Stages the first request of each size for ever."""

    def stager(self, items, inputs):
        first = []

        def stage(mm_kwargs):
            first.append(mm_kwargs)
            self.stage(first[0], items, inputs)

        return stage


@pytest.mark.parametrize("mode", ["full", "quick"])
def test_what_staging_keeps_of_a_request_is_found(mode):
    graphs = captured(PlainPlugin(), KeepsARequest(budgets=BUDGETS), self_check=mode)
    assert dropped(graphs) == list(BUDGETS)


class FewAreOtherwise(ToyEncoder):
    """Three tokens or fewer are computed otherwise: in graphs, by the graph's size."""

    def forward(self, inputs, max_seqlen):
        few = len(inputs["pixels"]) <= 3 * MERGE
        return [level * (1 + few) for level in super().forward(inputs, max_seqlen)]


class SevenIsWrong(ToyEncoder):
    """In graphs, one sequence of seven tokens is computed wrongly."""

    def forward(self, inputs, max_seqlen):
        wrong = (inputs["cu_seqlens"][1] == 7 * MERGE) * (len(inputs["pixels"]) > 7 * MERGE)
        return [level * (1 + wrong) for level in super().forward(inputs, max_seqlen)]


@pytest.mark.parametrize(
    ("adapter", "lost"), [(FewAreOtherwise, [4, 8, 16]), (SevenIsWrong, [8, 16])]
)
def test_a_case_that_a_graph_fails_is_one_of_the_larger_graphs_too(adapter, lost):
    graphs = captured(PlainPlugin(), adapter(budgets=BUDGETS))
    assert dropped(graphs) == lost
    assert all("differs from eager" in line.reason for line in graphs.report.dropped)
    for tokens in ((3,), (7,), (16,)):
        asked = images(*tokens)
        torch.testing.assert_close(graphs.run(asked), graphs.run_eager(asked))


def test_a_case_that_a_graph_fails_is_none_of_another_paths():
    class LargeFilms(SevenIsWrong):
        def capacities(self, settings):
            every = super().capacities(settings)
            return tuple(c for c in every if c.key.path == "image" or c.key.size == 16)

    graphs = captured(PlainPlugin(), LargeFilms(budgets=BUDGETS, paths=("image", "video")))
    left = graphs.keys()
    assert [(key.path, key.size) for key in left] == [("image", 4), ("video", 16)]


@pytest.mark.parametrize("mode", ["full", "quick"])
def test_a_case_that_a_graph_fails_is_none_of_graphs_that_cannot_hold_it(mode):
    class FewerSlotsInEight(ToyEncoder):
        def capacities(self, settings):
            few = {FULL: SequenceBound(8 * MERGE, 2, 8 * MERGE)}
            return tuple(
                replace(c, items=1, sequences={**c.sequences, **few}) if c.key.size == 8 else c
                for c in super().capacities(settings)
            )

    plugin = PlainPlugin(after_replay=only(4, scale))
    graphs = captured(plugin, FewerSlotsInEight(budgets=BUDGETS), self_check=mode)
    assert dropped(graphs) == [4]


class LongIsWrong(ToyEncoder):
    """In graphs, one sequence of more than six tokens is computed wrongly."""

    def forward(self, inputs, max_seqlen):
        ends = inputs["cu_seqlens"]
        wrong = (ends.diff().max() > 6 * MERGE) & (len(ends) > 3)  # eager has one item then
        return [
            level * (1 + wrong.to(level.dtype)) for level in super().forward(inputs, max_seqlen)
        ]


def test_a_graph_without_time_for_a_case_that_another_failed_is_doubtful(monkeypatch):
    adapter = LongIsWrong(budgets=(4, 8, 9, 10, 16))
    clock = Clock(monkeypatch, capture=0.0)
    captured(PlainPlugin(after_replay=clock), adapter, max_items=16)
    needed = clock.now
    monkeypatch.undo()
    clock = Clock(monkeypatch, capture=needed + 16)  # the longest of the largest, and no more
    graphs = captured(PlainPlugin(after_replay=clock), adapter, max_items=16)
    assert dropped(graphs) == [8, 9, 10, 16]
    reasons = {line.key.size: line.reason for line in graphs.report.dropped}
    assert "differs from eager" in reasons[16]
    assert reasons[8] == "self-check: no time for a case that another graph of this path failed"


def test_eager_references_are_shared_between_graphs():
    plugin = PlainPlugin()
    captured(plugin)
    eager = sum(1 for name, kind in plugin.calls if (name, kind) == ("step", "reference"))
    replays = plugin.count("replay")
    # More for the output's width, for the buffers, for the example of each capture, and for its
    # packed inputs before and after; of each replay for poison before, for the replay itself, and
    # for the comparison. Beside each reference another request is staged.
    assert eager - 2 - 3 * len(BUDGETS) - 3 * replays == 2 * (replays - 2)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ReplayError("lost"), "self-check: ReplayError: lost"),
        (
            RuntimeError("vendor trouble"),
            "self-check: ReplayError: toy/image[8]: RuntimeError: vendor trouble",
        ),
    ],
)
def test_a_graph_that_cannot_be_replayed_is_dropped(error, words):
    graphs = captured(PlainPlugin(replay_errors={8: error}))
    assert [(line.key.size, line.reason) for line in graphs.report.dropped] == [(8, words)]


def test_an_eager_reference_that_fails_drops_the_graph_not_the_server():
    class Fragile(ToyEncoder):
        def example(self, items, seed):
            if seed == 1 and sum(i.tokens for i in items) == 16:
                raise RuntimeError("no such example")
            return super().example(items, seed)

    graphs = captured(PlainPlugin(), Fragile(budgets=BUDGETS))
    assert dropped(graphs) == [16]


def test_a_comparison_that_fails_drops_the_graph_not_the_server(monkeypatch):
    def lost(*_: object) -> Difference:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(Difference, "between", lost)
    graphs = captured(PlainPlugin(), self_check="quick")
    assert dropped(graphs) == list(BUDGETS)
    reasons = {line.reason for line in graphs.report.dropped}
    assert reasons == {"self-check: RuntimeError: the device is lost"}


def test_a_graph_that_was_dropped_is_not_tried_again():
    class FragileOneShort(ToyEncoder):
        def example(self, items, seed):
            if seed == 1 and [i.tokens for i in items] in ([7], [15]):
                raise RuntimeError("no such example")
            return super().example(items, seed)

    graphs = captured(PlainPlugin(), FragileOneShort(budgets=BUDGETS))
    assert dropped(graphs) == [8, 16]
    assert len(graphs.report.dropped) == 2


def test_no_step_to_be_entered_drops_the_graphs():
    plugin = PlainPlugin(closed=True)
    graphs = captured(plugin)
    assert dropped(graphs) == list(BUDGETS)
    assert "another capture is running" in graphs.report.dropped[0].reason


def test_a_tolerance_can_be_set():
    nudge = only(8, lambda output: output.mul_(1.001))
    assert dropped(captured(PlainPlugin(after_replay=nudge))) == [8]
    assert dropped(captured(PlainPlugin(after_replay=nudge), tolerance=1e-2)) == []
    assert dropped(captured(PlainPlugin(after_replay=nudge), tolerance=1e-4)) == [8]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_every_dtype_has_a_tolerance_that_its_own_rounding_keeps(dtype):
    graphs = captured(PlainPlugin(), ToyEncoder(budgets=BUDGETS, dtype=dtype))
    assert dropped(graphs) == []
    assert graphs.run(images(3, dtype=dtype))[0].dtype is dtype


def test_the_pool_is_poisoned_where_the_platform_can():
    poisoned = []
    plugin = PlainPlugin()
    platform = plain_platform(plugin)

    def capture(request):
        graph = plugin.graphhal_capture(request)
        graph.poison = lambda: poisoned.append(request.key.size)
        return graph

    graphs = EncoderGraphs(
        ToyEncoder(budgets=BUDGETS), replace(platform, capture=capture), Settings()
    )
    graphs.capture()
    assert set(poisoned) == set(BUDGETS)
    assert len(poisoned) == plugin.count("replay")


# Difference ----------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(1, 6), st.floats(0, 0.5), st.integers(0, 9))
def test_the_difference_is_what_its_names_say(tokens, width, noise, seed):
    generator = torch.Generator().manual_seed(seed)
    eager = torch.randn(tokens, width, generator=generator, dtype=torch.float64) + 3
    ours = eager + noise * torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    found = Difference.between(ours, eager)
    by_token = [float((o - e).norm() / e.norm()) for o, e in zip(ours, eager, strict=True)]
    assert found.relative_l2 == pytest.approx(float((ours - eager).norm() / eager.norm()))
    assert found.worst_token == pytest.approx(max(by_token), rel=1e-6, abs=1e-12)
    assert found.bit_equal == torch.equal(ours, eager)
    assert -1.000001 <= found.min_cosine <= 1.000001


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_not_finite_disagrees_even_with_itself(bad, side):
    sides = [torch.ones(3, 2), torch.ones(3, 2)]
    sides[side][1, 1] = bad
    assert Difference.between(*sides).exceeds(0.99)
    both = sides[side]
    assert Difference.between(both, both.clone()).exceeds(0.99)


@pytest.mark.parametrize(
    ("whole", "token", "disagrees"),
    [
        (1e-2, TOKEN_FACTOR * 1e-2, False),
        (1.1e-2, 0.0, True),
        (0.0, TOKEN_FACTOR * 1.1e-2, True),
        (float("nan"), 0.0, True),
        (0.0, float("nan"), True),
    ],
)
def test_the_whole_and_every_token_have_a_tolerance(whole, token, disagrees):
    assert Difference(whole, token, 1.0, False).exceeds(1e-2) == disagrees


def test_tokens_near_zero_do_not_raise_an_alarm():
    eager = torch.ones(4, 3, dtype=torch.float64)
    eager[2] = 0
    ours = eager.clone()
    ours[2] = 1e-9
    assert not Difference.between(ours, eager).exceeds(1e-5)
    assert not Difference.between(torch.zeros(2, 2), torch.zeros(2, 2)).exceeds(1e-9)


def test_outputs_are_compared_part_by_part_as_they_are_whole(monkeypatch):
    generator = torch.Generator().manual_seed(5)
    eager = torch.randn(37, 8, generator=generator)
    graph = eager + 1e-3 * torch.randn(37, 8, generator=generator)
    whole = Difference.between(graph, eager)
    seen = []
    by_token = self_check._by_token
    monkeypatch.setattr(self_check, "COMPARED", 40)
    monkeypatch.setattr(
        self_check,
        "_by_token",
        lambda ours, theirs: seen.append(len(ours)) or by_token(ours, theirs),
    )
    parts = Difference.between(graph, eager)
    assert seen == [5] * 7 + [2]
    assert parts.relative_l2 == pytest.approx(whole.relative_l2, rel=1e-12)
    assert (parts.worst_token, parts.min_cosine) == (whole.worst_token, whole.min_cosine)
    graph[36, 7] = float("nan")
    assert Difference.between(graph, eager).exceeds(1.0)


class Failing(ToyEncoder):
    """Cannot say what its graphs must get right."""

    failing = ""

    def worst_cases(self, capacity):
        if self.failing == "always" or (self.failing == "once captured" and capacity.tokens == 8):
            raise ZeroDivisionError("adapter bug")
        return super().worst_cases(capacity)

    def example(self, items, seed):
        if self.failing == "below an item" and sum(item.tokens for item in items) < 5:
            raise ZeroDivisionError("no rows")
        return super().example(items, seed)


def test_a_graph_too_small_for_any_item_costs_no_other():
    """As a budget of 128 for Gemma 3, whose pictures have 256 tokens."""
    adapter = Failing()
    adapter.failing = "below an item"
    graphs = EncoderGraphs(adapter, plain_platform(), Settings())
    assert graphs.output_kind() == (graphs.run(images(3))[0].shape[1], torch.float32)
    profile = graphs.profile_memory()
    assert [key.size for key in profile.per_graph] == [16, 8]
    report = graphs.capture()
    assert [(line.key.size, line.reason) for line in report.dropped] == [
        (4, "ZeroDivisionError: no rows")
    ]
    assert [line.key.size for line in report.captured] == [16, 8]
    assert report.num_bytes == profile.settled_bytes


def test_an_adapter_without_worst_cases_runs_eagerly_and_stops_no_start_up():
    adapter = Failing()
    adapter.failing = "always"
    graphs = EncoderGraphs(adapter, plain_platform(), Settings())
    report = graphs.capture()
    assert report.captured == []
    assert {line.reason for line in report.dropped} == {
        "an eager example failed: ZeroDivisionError: adapter bug"
    }
    assert len(graphs.run(images(3))) == 1
    assert graphs.stats()["misses"] == {"image": {"no graph is captured": 1}}


@pytest.mark.parametrize("mode", ["full", "quick"])
def test_a_graph_that_none_of_its_worst_cases_fits_is_dropped(mode):
    class OnlyCaptured(ToyEncoder):
        def capture_case(self, capacity):
            return next(iter(super().worst_cases(capacity)))

        def worst_cases(self, capacity):
            return () if capacity.key.size == 8 else super().worst_cases(capacity)

    graphs = captured(PlainPlugin(), OnlyCaptured(budgets=BUDGETS), self_check=mode)
    (line,) = graphs.report.dropped
    assert (line.key.size, line.reason) == (8, "self-check: none of its worst cases fits")


def test_a_graph_whose_worst_cases_fail_in_the_check_is_dropped(monkeypatch):
    adapter = Failing()
    check = self_check.check

    def failing(*arguments):
        adapter.failing = "once captured"
        return check(*arguments)

    monkeypatch.setattr(self_check, "check", failing)
    graphs = EncoderGraphs(adapter, plain_platform(), Settings())
    report = graphs.capture()
    assert [(line.key.size, line.reason) for line in report.dropped] == [
        (8, "self-check: no worst cases: ZeroDivisionError: adapter bug")
    ]
    assert sorted(line.key.size for line in report.captured) == [4, 16]
