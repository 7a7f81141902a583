"""Capture of a ladder: order, shared arenas, limits, failures; nothing of it stops a server."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from graphhal import graph_set
from graphhal.arena import Arena
from graphhal.errors import (
    CaptureError,
    HostReadError,
    PluginError,
    ResourceExhaustedError,
    SettingsError,
)
from graphhal.graph_set import GraphSet
from graphhal.hookspecs import hookimpl
from graphhal.peers import Peers
from graphhal.plan import GraphKey
from graphhal.platform import CapturedGraph, CaptureRequest, MemoryProfile
from graphhal.runner import EncoderGraphs
from graphhal.settings import Settings
from tests.plain_platform import PlainPlugin, plain_platform
from tests.toy_encoder import ToyEncoder, images

BUDGETS = (4, 8, 16, 32)
KIB = 2**10


def graphs_on(plugin: PlainPlugin, adapter: ToyEncoder | None = None, info=None, **options):
    adapter = adapter or ToyEncoder(budgets=BUDGETS)
    options = {"self_check": "off", **options}
    return EncoderGraphs(adapter, plain_platform(plugin, **(info or {})), Settings(**options))


def sizes(lines) -> list[int]:
    return [line.key.size for line in lines]


def assert_still_serves(graphs: EncoderGraphs) -> None:
    for tokens in ((3,), (8,), (20,), (40,)):
        asked = images(*tokens)
        for ours, reference in zip(graphs.run(asked), graphs.run_eager(asked), strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-5)


def arena_bytes(budget: int) -> int:
    graphs = graphs_on(PlainPlugin(), ToyEncoder(budgets=(budget,)))
    return graphs.capture().num_bytes


# Order and memory ----------------------------------------------------------------------------


def test_the_largest_graph_comes_first():
    plugin = PlainPlugin()
    report = graphs_on(plugin, ToyEncoder(budgets=(8, 32, 4, 16))).capture()
    assert [size for name, size in plugin.calls if name == "capture"] == [32, 16, 8, 4]
    assert sizes(report.captured) == [32, 16, 8, 4]


def test_all_graphs_share_one_pool_and_the_largest_graphs_arenas():
    graphs = graphs_on(PlainPlugin())
    report = graphs.capture()
    entries = graphs._graphs.entries.values()
    assert len({id(entry.graph.pool) for entry in entries}) == 1
    requests = [entry.graph.request for entry in entries]
    for pick in (
        lambda r: r.packed,
        lambda r: r.output,
        lambda r: r.inputs["pixels"],
        lambda r: r.inputs["cu_seqlens"],
    ):
        assert len({pick(r).untyped_storage().data_ptr() for r in requests}) == 1
    assert report.num_bytes == arena_bytes(32)


def test_a_dense_ladder_costs_no_more_than_its_largest_graph():
    graphs = graphs_on(PlainPlugin(), ToyEncoder(budgets=range(1, 33)))
    assert graphs.capture().num_bytes == arena_bytes(32)


def test_graph_bytes_are_added_to_the_arenas():
    plugin = PlainPlugin(graph_bytes=lambda size: size * KIB)
    report = graphs_on(plugin).capture()
    assert report.num_bytes == arena_bytes(32) + sum(BUDGETS) * KIB
    assert {line.key.size: line.num_bytes for line in report.captured} == {
        size: size * KIB for size in BUDGETS
    }


def test_the_request_reads_what_the_report_says(caplog):
    plugin = PlainPlugin()
    graphs = graphs_on(plugin, warmups=3)
    graphs.capture()
    for entry in graphs._graphs.entries.values():
        made, capacity = entry.graph.request, entry.capacity
        assert made.warmups == 3
        assert made.output.shape[0] == capacity.tokens
        assert set(made.boundaries) == set(capacity.sequences)
        for name, bounds in made.boundaries.items():
            assert bounds.rows == capacity.sequences[name].rows
            assert made.inputs[name].numel() == capacity.sequences[name].slots + 1


@pytest.mark.parametrize(
    ("order", "fits", "longest"), [("before", True, 8), ("before", False, 16), ("after", True, 16)]
)
def test_graphs_are_captured_with_the_adapters_cheap_case(order, fits, longest):
    """Unless it does not fit, or kernels are captured with the boundaries themselves."""

    class Cheap(ToyEncoder):
        def capture_case(self, capacity):
            rows = [8] * (capacity.rows // 8) if fits else [capacity.rows + 8]
            return self._group(capacity.key.path, rows)

    graphs = graphs_on(PlainPlugin(), Cheap(budgets=(8,)), info={"boundary_order": order})
    assert not graphs.capture().dropped
    (entry,) = graphs._graphs.entries.values()
    found = {name: max(b.lengths) for name, b in entry.graph.request.boundaries.items()}
    assert found["cu_seqlens"] == longest


# Memory limits -------------------------------------------------------------------------------


def test_a_limit_drops_the_largest_and_names_them(caplog):
    plugin = PlainPlugin(graph_bytes=lambda size: size * KIB)
    limit = arena_bytes(16) + (16 + 8 + 4) * KIB
    graphs = graphs_on(plugin, memory_limit=limit)
    with caplog.at_level(logging.WARNING):
        report = graphs.capture()
    assert sizes(report.captured) == [16, 8, 4]
    assert sizes(report.dropped) == [32]
    assert report.dropped[0].reason.startswith("memory_limit: ")
    assert str(limit) in report.dropped[0].reason
    assert "graphs that are not used: 1 (toy/image[32]): memory_limit" in caplog.text
    assert report.num_bytes == limit
    assert plugin.live == 3
    assert_still_serves(graphs)


class Pooled(PlainPlugin):
    """The first graph of a pool brings a KiB a token, which others share; each takes two more, and
    one of them more than anyone has."""

    def __init__(self, excessive: int = 0) -> None:
        super().__init__()
        own = {excessive: 10**9}
        self.graph_bytes = lambda size: own.get(size, 2 * KIB) + (self.live <= 1) * size * KIB

    @hookimpl
    def graphhal_profile_memory(self, requests: Sequence[CaptureRequest]) -> MemoryProfile:
        per_graph = {request.key: 2 * KIB for request in requests}
        per_graph[requests[0].key] += requests[0].key.size * KIB
        return MemoryProfile(sum(per_graph.values()), 0, per_graph)


class PooledByRows(PlainPlugin):
    """As `Pooled`, whatever units a path's sizes are in."""

    @hookimpl
    def graphhal_capture(self, request: CaptureRequest) -> CapturedGraph:
        graph = super().graphhal_capture(request)
        return replace(graph, num_bytes=2 * KIB + (self.live <= 1) * len(request.output) * KIB)

    @hookimpl
    def graphhal_profile_memory(self, requests: Sequence[CaptureRequest]) -> MemoryProfile:
        per_graph = {request.key: 2 * KIB for request in requests}
        per_graph[requests[0].key] += len(requests[0].output) * KIB
        return MemoryProfile(sum(per_graph.values()), 0, per_graph)


@pytest.mark.parametrize(
    ("room", "kept"),
    [(96, 16), (95, 15), (80, 13), (63, 10), (40, 6), (20, 3), (6, 1), (5, 0)],
)
def test_a_limit_leaves_the_smallest_graphs_which_gain_most(room, kept):
    """What did not fit beside a largest graph of nearly the limit were the smallest ones."""
    plugin, ladder = Pooled(), tuple(range(4, 65, 4))
    limit = arena_bytes(4 * kept or 4) + room * KIB
    graphs = graphs_on(plugin, ToyEncoder(budgets=ladder), memory_limit=limit)
    profile = graphs.profile_memory()
    report = graphs.capture()
    assert sizes(report.captured) == sorted(ladder[:kept], reverse=True)
    assert sorted(sizes(report.dropped)) == list(ladder[kept:])
    assert all(line.reason.startswith("memory_limit: ") for line in report.dropped)
    assert report.num_bytes <= limit
    assert plugin.live == kept
    assert abs(len(profile.per_graph) - kept) <= 1  # arenas are not quite in proportion
    assert_still_serves(graphs)


def test_a_largest_graph_beyond_all_limits_tells_nothing_of_the_others():
    limit = arena_bytes(24) + 40 * KIB
    report = graphs_on(
        Pooled(64), ToyEncoder(budgets=range(4, 65, 4)), memory_limit=limit
    ).capture()
    assert sizes(report.captured) == [24, 20, 16, 12, 8, 4]
    reasons = [line.reason for line in report.dropped]
    room = f"memory_limit: smaller graphs take its room within {limit} bytes"
    assert (len(reasons), reasons.count(room)) == (10, 1)
    assert set(reasons) == {room, f"memory_limit: it would take more than {limit} bytes"}


@pytest.mark.parametrize("back", [False, True])
def test_every_graph_has_one_line_however_often_a_ladder_is_begun_anew(back):
    """A pool that is half as large for a graph of half the size, and a fixed part beside; or one
    that is larger for the second beginning."""
    plugin, begun = PlainPlugin(), []

    def graph_bytes(size):
        if plugin.live > 1:
            return 2 * KIB
        begun.append(size)
        return (64 if back and size < 64 else 24 + size // 2 if back else 30 + size) * KIB

    plugin.graph_bytes = graph_bytes
    limit = arena_bytes(64) + 70 * KIB if back else arena_bytes(48) + 80 * KIB
    graphs = graphs_on(plugin, ToyEncoder(budgets=range(4, 65, 4)), memory_limit=limit)
    report = graphs.capture()
    assert sorted(sizes([*report.captured, *report.dropped])) == list(range(4, 65, 4))
    assert plugin.live == len(report.captured) == len(graphs.keys())
    assert len(begun) >= 3
    assert_still_serves(graphs)


def test_a_pool_that_does_not_shrink_is_not_captured_again_and_again():
    plugin = PlainPlugin()
    plugin.graph_bytes = lambda size: (plugin.live <= 1) * 64 * KIB + KIB
    limit = arena_bytes(64) + 68 * KIB
    report = graphs_on(plugin, ToyEncoder(budgets=range(4, 65, 4)), memory_limit=limit).capture()
    assert 4 <= len(report.captured) <= 6
    assert sizes(report.captured)[0] < 64
    assert plugin.count("capture") < 2 * 16


def test_a_beginning_that_leaves_fewer_graphs_is_given_up():
    """Memory in proportion to the size was expected, and smaller graphs take more."""
    plugin = PlainPlugin()
    first = {64: 64 * KIB}
    plugin.graph_bytes = lambda size: 2 * KIB if plugin.live > 1 else first.get(size, 10**6)
    limit = arena_bytes(64) + 68 * KIB
    seen = []
    graphs = graphs_on(plugin, ToyEncoder(budgets=range(4, 65, 4)), memory_limit=limit)
    report = graphs.capture(lambda done, total, key: seen.append((done, total)))
    assert sizes(report.captured) == [64, 60, 56]
    assert {line.reason for line in report.dropped} == {
        f"memory_limit: it would take more than {limit} bytes"
    }
    assert plugin.live == 3
    assert (16, 16) == seen[15] == seen[-1]
    assert_still_serves(graphs)


class OtherUnits(ToyEncoder):
    """Images are counted in chunks of four tokens."""

    def capacities(self, settings):
        for capacity in super().capacities(settings):
            chunks = capacity.key.path == "image"
            size = capacity.tokens // 4 if chunks else capacity.tokens
            yield replace(capacity, key=replace(capacity.key, size=size))


@pytest.mark.parametrize("room", [80, 60, 30])
def test_paths_whose_sizes_are_in_other_units_are_measured_alike(room):
    found = []
    for adapter in (ToyEncoder, OtherUnits):
        plugin = PooledByRows()
        toy = adapter(budgets=range(8, 65, 8), paths=("image", "video"))
        graphs = graphs_on(plugin, toy, memory_limit=room * KIB)
        profile, report = graphs.profile_memory(), graphs.capture()
        tokens = {each.key: (each.key.path, each.tokens) for each in graphs.ladder()}
        captured = [tokens[line.key] for line in report.captured]
        found.append((captured, [tokens[key] for key in profile.per_graph]))
    assert found[0][0]
    assert found[0] == found[1]


def test_graphs_that_are_dropped_alike_take_one_line(caplog):
    plugin = PlainPlugin(graph_bytes=lambda size: size * KIB)
    graphs = graphs_on(plugin, memory_limit=1)
    with caplog.at_level(logging.WARNING):
        report = graphs.capture()
    assert len(report.dropped) > 1
    (line,) = (record.getMessage() for record in caplog.records)
    assert f"not used: {len(report.dropped)} (toy/image[32], toy/image[16]," in line
    assert line.endswith("): memory_limit: it would take more than 1 bytes")


def test_a_graph_too_large_between_smaller_ones_is_left_out():
    plugin = PlainPlugin(graph_bytes=lambda size: 10**6 if size == 8 else KIB)
    graphs = graphs_on(plugin, memory_limit=arena_bytes(32) + 3 * KIB)
    report = graphs.capture()
    assert (sizes(report.captured), sizes(report.dropped)) == ([32, 16, 4], [8])
    assert_still_serves(graphs)


@pytest.mark.parametrize("limit", [0, 1, 0.0])
def test_no_memory_is_no_graphs_and_no_error(limit):
    plugin = PlainPlugin()
    graphs = graphs_on(plugin, info={"free_bytes": lambda: 10**9}, memory_limit=limit)
    report = graphs.capture()
    assert (report.captured, report.num_bytes) == ([], 0)
    assert sizes(report.dropped) == [32, 16, 8, 4]
    assert plugin.live == 0
    assert_still_serves(graphs)


@pytest.mark.parametrize("limit", [10**15, 1.0, "100%"])
def test_a_generous_limit_drops_nothing(limit):
    graphs = graphs_on(PlainPlugin(), info={"free_bytes": lambda: 10**9}, memory_limit=limit)
    assert graphs.capture().dropped == []


def test_a_fraction_counts_of_what_is_free():
    needed = arena_bytes(8) + 12 * KIB
    plugin = PlainPlugin(graph_bytes=lambda size: size * KIB)
    graphs = graphs_on(plugin, info={"free_bytes": lambda: 4 * needed}, memory_limit=0.25)
    report = graphs.capture()
    assert sizes(report.captured) == [8, 4]
    assert report.num_bytes == needed


def test_a_fraction_of_unknown_memory_names_the_option_and_what_to_set():
    with pytest.raises(SettingsError, match=r"^memory_limit is a fraction, but platform plain"):
        graphs_on(PlainPlugin(), memory_limit=0.25)


@pytest.mark.parametrize("free", [lambda: None, lambda: 1 / 0, lambda: float("nan")])
def test_a_fraction_of_what_nobody_knows_is_no_graphs_and_no_error(free, caplog):
    graphs = graphs_on(PlainPlugin(), info={"free_bytes": free}, memory_limit=0.25)
    assert graphs.capture().captured == []
    assert "free device memory is unknown, no graphs" in caplog.text
    assert_still_serves(graphs)


# Failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [None, 7, "bytes"])
def test_a_capture_that_returns_no_graph_is_named_and_stops_no_start_up(answer):
    plain = plain_platform()

    def capture(request):
        graph = plain.capture(request)
        graph.num_bytes = answer
        return graph if answer == "bytes" else answer

    graphs = EncoderGraphs(ToyEncoder(budgets=BUDGETS), replace(plain, capture=capture), Settings())
    report = graphs.capture()
    assert report.captured == []
    said = "PluginError: graphhal_capture must return a CapturedGraph of so many bytes, got "
    assert all(line.reason.startswith(said) for line in report.dropped)
    assert_still_serves(graphs)


@pytest.mark.parametrize("answer", [None, MemoryProfile(8, 0, {GraphKey("toy", "image", 5): 8})])
def test_a_profile_that_is_none_or_of_other_graphs_is_named(answer):
    odd = replace(plain_platform(), profile_memory=lambda requests: answer)
    graphs = EncoderGraphs(ToyEncoder(budgets=BUDGETS), odd, Settings(memory_limit=1))
    with pytest.raises(PluginError, match=r"^graphhal_profile_memory must return a .* asked for"):
        graphs.profile_memory()


def test_a_release_that_fails_costs_no_request_and_is_told(caplog):
    def release(released):
        raise RuntimeError("the device is gone")

    plugin = PlainPlugin()
    platform = replace(plain_platform(plugin), release=release)
    graphs = EncoderGraphs(ToyEncoder(budgets=BUDGETS), platform, Settings())
    assert sizes(graphs.capture().captured) == [32, 16, 8, 4]
    plugin.replay_errors |= {size: RuntimeError("the device is gone") for size in (4, 8, 16, 32)}
    assert_still_serves(graphs)
    graphs.clear()
    assert graphs.keys() == []
    assert "not released, their memory is lost: RuntimeError('the device is gone')" in caplog.text


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (HostReadError("item() inside capture"), "item() inside capture"),
        (RuntimeError("vendor trouble"), "RuntimeError: vendor trouble"),
    ],
)
@pytest.mark.parametrize("size", [4, 32])
def test_one_graph_that_cannot_be_captured_is_named_and_the_others_serve(size, error, reason):
    plugin = PlainPlugin(capture_errors={size: error})
    graphs = graphs_on(plugin)
    report = graphs.capture()
    assert sizes(report.captured) == [each for each in (32, 16, 8, 4) if each != size]
    assert [(line.key.size, line.reason) for line in report.dropped] == [(size, reason)]
    assert_still_serves(graphs)


@pytest.mark.parametrize(
    "error", [ResourceExhaustedError("no streams left"), torch.OutOfMemoryError("no memory")]
)
def test_exhausted_resources_stop_growth_and_keep_what_there_is(error):
    plugin = PlainPlugin(capture_errors={8: error})
    graphs = graphs_on(plugin)
    report = graphs.capture()
    assert sizes(report.captured) == [32, 16]
    assert sizes(report.dropped) == [8, 4]
    assert report.dropped[1].reason.startswith("capture stopped: ")
    assert ("capture", 4) not in plugin.calls
    assert_still_serves(graphs)


def test_exhausted_by_the_largest_goes_on_with_smaller_ones():
    plugin = PlainPlugin(capture_errors={32: ResourceExhaustedError("no memory")})
    graphs = graphs_on(plugin)
    report = graphs.capture()
    assert sizes(report.captured) == [16, 8, 4]
    assert report.num_bytes == arena_bytes(16)
    assert_still_serves(graphs)


def test_arenas_that_do_not_fit_drop_the_largest_graphs(monkeypatch):
    class Small(Arena):
        def __init__(self, device, bulk_bytes, packed_bytes, output):
            if len(output) > 8:
                raise torch.OutOfMemoryError("no memory")
            super().__init__(device, bulk_bytes, packed_bytes, output)

    monkeypatch.setattr(graph_set, "Arena", Small)
    graphs = graphs_on(PlainPlugin())
    report = graphs.capture()
    assert sizes(report.captured) == [8, 4]
    assert [line.reason.startswith("out of memory") for line in report.dropped] == [True, True]
    assert_still_serves(graphs)


def test_everything_failing_is_a_server_without_graphs():
    plugin = PlainPlugin(capture_errors={size: CaptureError("refused") for size in BUDGETS})
    graphs = graphs_on(plugin)
    report = graphs.capture()
    assert report.captured == []
    assert sizes(report.dropped) == [32, 16, 8, 4]
    assert report.num_bytes == 0
    assert_still_serves(graphs)


def test_a_graph_without_a_worst_case_that_fits_is_dropped():
    class Careless(ToyEncoder):
        def worst_cases(self, capacity):
            return () if capacity.key.size in self.careless else super().worst_cases(capacity)

    for careless in ((4,), (16,), BUDGETS):
        adapter = Careless(budgets=BUDGETS)
        adapter.careless = careless
        graphs = graphs_on(PlainPlugin(), adapter)
        report = graphs.capture()
        assert sorted(sizes(report.dropped)) == sorted(careless)
        assert "no worst case of toy fits" in report.dropped[0].reason
        assert_still_serves(graphs)


def test_graphs_whose_buffers_the_adapter_cannot_name_are_dropped_and_the_others_serve():
    class Careless(ToyEncoder):
        def buffers(self, capacity):
            if capacity.key.path and capacity.tokens in (8, 32) and capacity.items > 1:
                raise ZeroDivisionError("adapter bug")
            return super().buffers(capacity)

    graphs = graphs_on(PlainPlugin(), Careless(budgets=BUDGETS))
    report = graphs.capture()
    assert sizes(report.dropped) == [32, 8]
    assert {line.reason for line in report.dropped} == {
        "no buffers: ZeroDivisionError: adapter bug"
    }
    assert sizes(report.captured) == [16, 4]
    assert_still_serves(graphs)


def test_modules_that_the_adapter_cannot_name_are_a_server_without_graphs():
    class Careless(ToyEncoder):
        def modules(self):
            raise ZeroDivisionError("adapter bug")

    graphs = graphs_on(PlainPlugin(), Careless(budgets=BUDGETS))
    report = graphs.capture()
    assert (report.captured, len(report.dropped)) == ([], len(BUDGETS))
    assert "ZeroDivisionError: adapter bug" in report.dropped[0].reason
    assert_still_serves(graphs)


def test_a_forward_of_another_size_under_capture_is_dropped():
    class Forgetful(ToyEncoder):
        def forward(self, inputs, max_seqlen):
            levels = super().forward(inputs, max_seqlen)
            return [x[:1] for x in levels] if len(inputs["pixels"]) == 16 else levels

    graphs = graphs_on(PlainPlugin(), Forgetful(budgets=BUDGETS))
    report = graphs.capture()
    assert sizes(report.dropped) == [8]
    assert "AdapterError: toy: forward made 1 tokens" in report.dropped[0].reason


def test_releasing_and_dropping_twice_is_harmless():
    plugin = PlainPlugin()
    graphs = graphs_on(plugin)
    graphs.capture()
    kept = graphs._graphs
    kept.drop(GraphKey("toy", "image", 8))
    kept.drop(GraphKey("toy", "image", 8))
    kept.drop(GraphKey("toy", "image", 99))
    kept.close()
    kept.close()
    assert plugin.count("release") == 4
    assert plugin.live == 0
    assert kept.num_bytes == 0


def test_the_report_is_plain_data():
    plugin = PlainPlugin(capture_errors={8: CaptureError("refused")})
    report = graphs_on(plugin).capture().as_dict()
    assert [line["key"] for line in report["graphs"]] == [f"toy/image[{n}]" for n in (32, 16, 4)]
    assert report["dropped"] == [{"key": "toy/image[8]", "reason": "refused"}]
    assert report["seconds"] > 0


def test_poison_reaches_floats_and_the_pool_and_zeroes_integers():
    inputs = {
        name: torch.full((3,), 9, dtype=dtype)
        for name, dtype in (("a", torch.float32), ("b", torch.bfloat16), ("c", torch.int64))
    }
    poisoned = []
    graph = SimpleNamespace(
        request=SimpleNamespace(inputs=inputs, output=torch.zeros(2, 2)),
        poison=lambda: poisoned.append(True),
    )
    graphs = GraphSet(ToyEncoder(), plain_platform(), Settings(), Peers())
    graphs.poison(SimpleNamespace(graph=graph))
    assert inputs["a"].isnan().all()
    assert inputs["b"].isnan().all()
    assert graph.request.output.isnan().all()
    assert not inputs["c"].any()  # a stale index must not read outside a table
    assert poisoned == [True]
