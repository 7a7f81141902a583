"""`EncoderGraphs`: every request equals eager, and every decision is counted under its reason."""

import gc
import json
import logging
import os
import re
import signal
import weakref
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event, Thread
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphhal import execution, group_plans
from graphhal.bench import measure
from graphhal.cpu import plugin as cpu
from graphhal.discovery import bind
from graphhal.errors import AdapterError, InputError, RefusedError, ReplayError, SettingsError
from graphhal.plan import GraphKey, MissReason
from graphhal.runner import EncoderGraphs
from graphhal.settings import Policy, SelfCheck, Settings
from tests.plain_platform import PlainPlugin, plain_platform
from tests.test_weights import REBINDINGS
from tests.toy_encoder import FULL, WINDOWED, ToyEncoder, images, request


def both_paths(**options) -> ToyEncoder:
    return ToyEncoder(paths=("image", "video"), **options)


def open_by_name(name: str):
    return plain_platform() if name == "plain" else bind(cpu, cpu.graphhal_probe(), "cpu")


@pytest.fixture(params=["plain", "cpu"])
def platform(request):
    return open_by_name(request.param)


def serve(platform, adapter: ToyEncoder | None = None, keys=None, **options) -> EncoderGraphs:
    """A captured toy encoder; what the self-check finds has tests of its own."""
    options = {"self_check": "quick", **options}
    graphs = EncoderGraphs(adapter or ToyEncoder(), platform, Settings(**options))
    report = graphs.capture(keys=keys)
    assert not report.dropped, report.dropped
    return graphs


def key(size: int, path: str = "image") -> GraphKey:
    return GraphKey("toy", path, size)


def assert_equals_eager(graphs: EncoderGraphs, asked, outputs=None) -> None:
    outputs = graphs.run(asked) if outputs is None else outputs
    expected = graphs.run_eager(asked)
    assert len(outputs) == len(expected) == len(asked["grids"])
    for ours, reference in zip(outputs, expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-4)  # of values to 20


def misses(graphs: EncoderGraphs) -> dict[MissReason, int]:
    counted: Counter[MissReason] = Counter()
    for (_, reason), count in graphs.statistics.misses.items():
        counted[MissReason(reason)] += count
    return dict(counted)


# Whatever is asked ---------------------------------------------------------------------------

_served: dict[tuple[str, Policy], EncoderGraphs] = {}
grids = st.lists(
    st.one_of(
        st.tuples(st.just(1), st.integers(1, 9).map(lambda n: 2 * n), st.just("image")),
        st.tuples(st.integers(1, 7), st.integers(1, 6).map(lambda n: 2 * n), st.just("video")),
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("name", ["plain", "cpu"])
@settings(max_examples=15)
@given(asked=grids, seed=st.integers(0, 99))
def test_any_request_equals_eager(name, policy, asked, seed):
    if (name, policy) not in _served:
        _served[name, policy] = serve(open_by_name(name), both_paths(), policy=policy)
    assert_equals_eager(_served[name, policy], request(asked, seed))


def test_equal_sizes_of_other_contents_are_not_mixed_up(platform):
    graphs = serve(platform)
    for seed in range(3):
        assert_equals_eager(graphs, images(3, 4, seed=seed))
    assert graphs.statistics.hits.total() == 6


def test_some_items_of_a_request_read_their_own_rows(platform):
    graphs = serve(platform)
    asked = images(3, 3)
    items = graphs.adapter.item_specs(asked)
    for item, expected in zip(items, graphs.run_eager(asked), strict=True):
        (output,) = graphs.run_items(asked, (replace(item, index=0),))
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    assert graphs.stats()["hits"] == {"image": 2}


def test_outputs_come_in_request_order(platform):
    graphs = serve(platform, both_paths(), policy="packed")
    asked = request([(1, 16), (3, 4), (1, 2), (1, 30), (6, 8), (1, 6)])
    assert [len(out) for out in graphs.run(asked)] == [8, 6, 1, 15, 24, 3]
    assert_equals_eager(graphs, asked)


def test_levels_stand_side_by_side(platform):
    one, two = (
        serve(platform, ToyEncoder(levels=levels), max_items=2).run(images(3))[0].shape[1]
        for levels in (1, 2)
    )
    assert two == 2 * one


def test_outputs_are_the_callers_where_a_step_allocates_as_usual():
    graphs = serve(plain_platform(capabilities=frozenset({"ordinary_outputs"})), both_paths())
    asked = [images(3), images(8, 1), request([(1, 4, "image"), (2, 4, "video")]), images(16)]
    held = [graphs.run(each) for each in asked]
    kept = [[output.clone() for output in outputs] for outputs in held]
    for each, outputs, before in zip(asked, held, kept, strict=True):
        assert_equals_eager(graphs, each, outputs)
        assert all(map(torch.equal, outputs, before))
        static = graphs._graphs.arena.output
        addresses = {output.untyped_storage().data_ptr() for output in outputs}
        assert static.untyped_storage().data_ptr() not in addresses
    assert graphs.stats()["misses"] == {}


def test_a_hosts_autocast_changes_nothing_that_is_staged(platform):
    class Projecting(ToyEncoder):
        def stage(self, mm_kwargs, items, inputs):
            projected = mm_kwargs["pixels"] @ torch.eye(6) / 3
            super().stage({**mm_kwargs, "pixels": projected}, items, inputs)

    graphs = serve(platform, Projecting())
    expected = graphs.run(images(3, 2))
    with torch.autocast("cpu", torch.bfloat16):
        served = graphs.run(images(3, 2))
    assert all(map(torch.equal, served, expected))
    assert not misses(graphs)


@pytest.mark.parametrize("where", ["capture", "requests"])
def test_a_hosts_autocast_changes_nothing(platform, where):
    adapter = ToyEncoder()
    expected = EncoderGraphs(adapter, platform).run(images(3, 4))
    with torch.autocast("cpu", torch.bfloat16, enabled=where == "capture"):
        graphs = serve(platform, adapter)
    with torch.autocast("cpu", torch.bfloat16, enabled=where == "requests"):
        for asked in (images(3, 4), images(17)):
            outputs = graphs.run(asked)
            assert {output.dtype for output in outputs} == {torch.float32}
            assert_equals_eager(graphs, asked, outputs)
        torch.testing.assert_close(graphs.run(images(3, 4)), expected)
    assert graphs.stats()["hits"] == {"image": 4}


def test_strided_pixels_and_pixels_with_gradients_are_taken(platform):
    graphs = serve(platform)
    asked = images(3, 4)
    expected = graphs.run(asked)
    strided = asked["pixels"].t().contiguous().t()
    assert not strided.is_contiguous()
    for pixels in (strided, asked["pixels"].clone().requires_grad_()):
        outputs = graphs.run({**asked, "pixels": pixels})
        assert all(map(torch.equal, outputs, expected))
        assert not any(output.requires_grad for output in outputs)


def test_no_forward_records_gradients(platform):
    class Asks(ToyEncoder):
        def forward(self, inputs, max_seqlen):
            recorded.append(torch.is_grad_enabled())
            return super().forward(inputs, max_seqlen)

    recorded = []
    graphs = serve(platform, Asks())
    for call in (graphs.run, graphs.run_eager):
        call(images(3))
    assert recorded
    assert not any(recorded)


def test_an_empty_group_is_empty(platform):
    graphs = serve(platform)
    nothing = {"pixels": torch.zeros((0, 6)), "grids": []}
    assert graphs.run(nothing) == graphs.try_replay(nothing) == graphs.run_eager(nothing) == []
    assert graphs.stats()["hits"] == graphs.stats()["misses"] == {}


@pytest.mark.parametrize("grid", [(0, 4), (1, 0), (1, 3), (-1, 4)])
def test_a_bad_item_is_named_alike_on_both_paths(platform, grid):
    graphs = serve(platform)
    asked = {"pixels": torch.zeros((8, 6)), "grids": [(1, 4), grid]}
    for call in (graphs.run, graphs.try_replay, graphs.run_eager):
        with pytest.raises(InputError, match=r"^item 1: ") as caught:
            call(asked)
        assert caught.value.item == 1
    assert graphs.stats()["hits"] == graphs.stats()["misses"] == {}
    assert_equals_eager(graphs, images(4))


@pytest.mark.parametrize("sets", [(FULL, WINDOWED), ()])
def test_a_step_says_which_device_it_is_on(sets):
    """Where a process has several, the current one need not be the encoder's."""
    plugin = PlainPlugin()
    platform, devices = plain_platform(plugin), []

    def step(kind, graph, inputs, boundaries):
        devices.append({tensor.device for tensor in inputs.values()})
        return platform.step(kind, graph, inputs, boundaries)

    class Bare(ToyEncoder):
        """Without any packed buffer, where it has no boundary sets."""

        def buffers(self, capacity):
            specs = super().buffers(capacity)
            return specs if sets else {"pixels": specs["pixels"]}

        def metadata(self, items):
            return super().metadata(items) if sets else {}

        def forward(self, inputs, max_seqlen):
            if sets:
                return super().forward(inputs, max_seqlen)
            assert set(inputs) == {"pixels"}
            return inputs["pixels"][::2]

    graphs = EncoderGraphs(Bare(sets=sets), replace(platform, step=step))
    graphs.capture()
    graphs.run(images(3))
    graphs.run_eager(images(3))
    graphs.run(images(40))
    assert devices
    assert all(found == {torch.device("cpu")} for found in devices)


@pytest.mark.parametrize(
    ("method", "value", "told"),
    [
        ("item_specs", 7, "item_specs must return a tuple of ItemSpec, got 7"),
        ("item_specs", "specs", "item_specs must return a tuple of ItemSpec, got 'specs'"),
        ("item_specs", [(1, 2)], r"item_specs must return a tuple of ItemSpec, got \[\(1, 2\)\]"),
        ("item_specs", {}, r"item_specs must return a tuple of ItemSpec, got \{\}"),
        ("metadata", None, "metadata must return arrays by name, got None"),
        ("stager", None, "stager must return a function, got None"),
    ],
)
def test_an_answer_of_another_kind_is_the_adapters_fault(platform, method, value, told):
    graphs = serve(platform)
    right = getattr(graphs.adapter, method)
    setattr(graphs.adapter, method, lambda *_: value)
    with pytest.raises(AdapterError, match=f"^toy: {told}"):
        graphs.run(images(3))
    if method != "stager":  # eager calls ask for none
        with pytest.raises(AdapterError, match=f"^toy: {told}"):
            graphs.run_eager(images(3))
    setattr(graphs.adapter, method, right)
    assert_equals_eager(graphs, images(3))
    assert graphs.stats()["hits"] == {"image": 1}


@pytest.mark.parametrize(
    ("method", "value", "told"),
    [
        ("buffers", None, "buffers must return a BufferSpec for each name, got None"),
        ("buffers", {"pixels": (4, 3)}, "buffers must return a BufferSpec for each name, got {'"),
        ("eager_inputs", None, "eager_inputs must return tensors by name, got None"),
    ],
)
def test_an_eager_call_tells_an_answer_of_another_kind(platform, method, value, told):
    graphs = EncoderGraphs(ToyEncoder(), platform, Settings())
    setattr(graphs.adapter, method, lambda *_: value)
    graphs.capture()
    assert told in graphs.report.dropped[0].reason
    with pytest.raises(AdapterError, match=f"^toy: {re.escape(told)}"):
        graphs.run(images(3))


def test_modules_that_are_no_tuple_are_named(platform):
    graphs = EncoderGraphs(ToyEncoder(), platform, Settings())
    graphs.adapter.modules = lambda: graphs.adapter.tower
    graphs.capture()
    told = "toy: modules must return a tuple of modules, got "
    assert {line.reason[: len(told)] for line in graphs.report.dropped} == {told}
    assert_equals_eager(graphs, images(3))


@pytest.mark.parametrize("value", [None, 7, (1, 2)])
def test_capacities_that_are_none_are_the_adapters_fault(platform, value):
    graphs = EncoderGraphs(ToyEncoder(), platform, Settings())
    graphs.adapter.capacities = lambda _: value
    told = f"toy: capacities must return a tuple of Capacity, got {value}"
    with pytest.raises(AdapterError, match=f"^{re.escape(told)}"):
        graphs.capture()


@pytest.mark.parametrize("call", ["run", "try_replay", "run_eager"])
def test_specs_that_were_not_returned_are_no_empty_group(call):
    class Forgetful(ToyEncoder):
        def item_specs(self, mm_kwargs):
            super().item_specs(mm_kwargs)

    with pytest.raises(AdapterError, match=r"^toy: item_specs must return .*, got None"):
        getattr(serve(plain_platform(), Forgetful()), call)(images(3))


def test_a_boundary_set_that_no_graph_has_is_named():
    class Further(ToyEncoder):
        def item_specs(self, mm_kwargs):
            items = super().item_specs(mm_kwargs)
            return tuple(replace(i, sequences={**i.sequences, "more": (i.rows,)}) for i in items)

    graphs = serve(plain_platform(), Further())
    with pytest.raises(AdapterError, match=r"boundary set 'more', capacities only \['cu_seqlens"):
        graphs.run(images(3))


def test_items_out_of_order_are_the_adapters_fault():
    class Shuffled(ToyEncoder):
        def item_specs(self, mm_kwargs):
            return tuple(reversed(super().item_specs(mm_kwargs)))

    graphs = serve(plain_platform(), Shuffled())
    with pytest.raises(AdapterError, match=r"^toy: item_specs must come in request order"):
        graphs.run(images(2, 3))


@pytest.mark.parametrize("extra", [-1, 1])
def test_a_forward_of_more_or_fewer_tokens_is_the_adapters_fault(extra):
    class Miscounting(ToyEncoder):
        def forward(self, inputs, max_seqlen):
            levels = super().forward(inputs, max_seqlen)
            return [torch.cat([x, x])[: len(x) + extra] for x in levels]

    graphs = EncoderGraphs(Miscounting(), plain_platform(), Settings())
    with pytest.raises(
        AdapterError, match=rf"^toy: forward made {3 + extra} tokens for items of 3; "
    ):
        graphs.run(images(3))


def test_a_forward_of_another_dtype_than_the_adapters_is_told_once(platform, caplog):
    class Wider(ToyEncoder):
        def forward(self, inputs, max_seqlen):
            return [level.double() for level in super().forward(inputs, max_seqlen)]

    graphs = serve(platform, Wider())
    outputs = graphs.run(images(3, 2))
    assert [output.dtype for output in outputs] == [torch.float64] * 2
    told = [line for line in caplog.messages if "outputs are" in line]
    assert len(told) == 1
    assert told[0].startswith("toy: its outputs are torch.float64, but its dtype is torch.float32;")


# Policies and reasons ------------------------------------------------------------------------


def test_single_is_one_replay_or_one_eager_call():
    plugin = PlainPlugin()
    graphs = serve(plain_platform(plugin))
    plugin.calls.clear()
    graphs.run(images(2, 3, 3))
    assert plugin.calls == [("step", "replay"), ("update", 8), ("replay", 8)]
    plugin.calls.clear()
    graphs.run(images(9, 9, 2))
    assert plugin.calls == [("step", "eager")]
    assert graphs.stats()["replays"] == {"toy/image[8]": 1}
    assert graphs.stats()["eager_calls"] == {str(MissReason.TOO_MANY_ROWS): 1}
    assert misses(graphs) == {MissReason.TOO_MANY_ROWS: 3}
    assert graphs.stats()["hits"] == {"image": 3}


def test_packed_replays_what_fits_and_runs_the_rest_eagerly(platform):
    graphs = serve(platform, policy="packed")
    assert_equals_eager(graphs, images(16, 2, 17, 3))
    counted = graphs.stats()
    assert counted["hits"] == {"image": 3}
    assert misses(graphs) == {MissReason.TOO_MANY_ROWS: 1}
    assert counted["replays"] == {"toy/image[16]": 1, "toy/image[8]": 1}
    assert counted["padding_waste"] == pytest.approx(1 - 21 / 24)


def test_measured_prices_everything_it_captured(platform):
    graphs = serve(platform, both_paths(), policy="measured")
    for asked in (images(3), images(4, 4), images(16, 16), request([(9, 4)])):
        assert_equals_eager(graphs, asked)
    assert graphs.statistics.hits.total() + graphs.statistics.misses.total() == 6


def test_measured_serves_without_prices_where_measuring_fails():
    class Worn(PlainPlugin):
        def graphhal_replay(self, graph):
            super().graphhal_replay(graph)
            if self.count("replay") > 3:
                raise ReplayError("worn out")

    plugin = PlainPlugin()
    graphs = EncoderGraphs(
        ToyEncoder(), plain_platform(plugin), Settings(policy="measured", self_check="off")
    )
    plugin.replay_errors[4] = ReplayError("worn out")
    report = graphs.capture()
    assert len(report.captured) == 3
    assert_equals_eager(graphs, images(7))
    assert graphs.stats()["hits"] == {"image": 1}


@pytest.mark.parametrize(
    ("reason", "adapter", "asked", "options"),
    [
        (MissReason.TOO_MANY_ROWS, {}, images(17), {}),
        (MissReason.TOO_MANY_ITEMS, {}, images(1, 1, 1), {"max_items": 2}),
        (MissReason.SEQUENCE_TOO_LONG, {"max_seqlen": 8}, images(5), {}),
        (MissReason.NOT_EXACT, {}, images(3), {"exact_only": True}),
        (MissReason.NO_GRAPHS, {}, request([(2, 4)]), {}),
        (MissReason.REFUSED, {}, images(4), {}),
    ],
    ids=lambda value: value.name if isinstance(value, MissReason) else "",
)
def test_what_no_graph_holds_runs_eagerly_under_its_reason(
    platform, reason, adapter, asked, options
):
    made = ToyEncoder(**adapter)
    made.refused = "pruned" if reason is MissReason.REFUSED else None
    graphs = serve(platform, made, **options)
    assert_equals_eager(graphs, asked)
    assert misses(graphs) == {reason: len(asked["grids"])}
    assert graphs.statistics.hits.total() == 0
    assert graphs.try_replay(asked) is None
    assert misses(graphs) == {reason: 2 * len(asked["grids"])}


def test_a_kernel_without_empty_sequences_misses_what_would_leave_a_slot_empty():
    adapter = ToyEncoder(budgets=(4, 8), sets=("cu_seqlens",))
    graphs = EncoderGraphs(adapter, plain_platform(allow_empty=False), Settings(max_items=4))
    report = graphs.capture()
    assert not [line for line in report.dropped if "raise" in line.reason]
    for tokens in ((1, 1), (8,), (4, 4), (2, 2, 2, 2), (3,)):
        assert_equals_eager(graphs, images(*tokens))
    assert MissReason.EMPTY_SLOT in misses(graphs)
    assert graphs.statistics.hits.total() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_images_beside_films_are_bit_equal_too(platform, dtype):
    graphs = serve(platform, both_paths(dtype=dtype), exact_only=True)
    for seed, films in enumerate(([(3, 4)], [(2, 4)], [(5, 2), (2, 6)], [(7, 2)])):
        for tokens in (4, 5, 7, 8):
            grids = [(1, 2 * tokens), *films]
            asked = request(grids, seed, dtype)
            outputs = graphs.run(asked)
            assert all(map(torch.equal, outputs, graphs.run_eager(asked)))
    assert graphs.stats()["hits"]["image"] == 8


def test_exact_only_is_bit_equal_or_eager(platform):
    graphs = serve(platform, exact_only=True)
    for tokens in ((4,), (8,), (3, 5), (16,), (7,), (9, 7)):
        asked = images(*tokens)
        assert all(map(torch.equal, graphs.run(asked), graphs.run_eager(asked)))
    assert set(misses(graphs)) == {MissReason.NOT_EXACT}
    assert graphs.statistics.rows_used == graphs.statistics.rows_replayed


def test_eager_calls_of_one_reason_are_counted_apart():
    graphs = EncoderGraphs(both_paths(), plain_platform(), Settings())
    graphs.run(request([(1, 4), (2, 4), (1, 6)]))
    assert graphs.stats()["eager_calls"] == {str(MissReason.NO_GRAPHS): 2}
    assert graphs.stats()["misses"] == {
        "image": {str(MissReason.NO_GRAPHS): 2},
        "video": {str(MissReason.NO_GRAPHS): 1},
    }


def test_a_video_cut_into_replays_is_one_hit(platform):
    graphs = serve(platform, both_paths())
    assert_equals_eager(graphs, request([(9, 8)]))
    assert graphs.stats()["hits"] == {"video": 1}
    assert graphs.statistics.replays.total() > 1


def test_a_video_is_one_miss_though_several_of_its_replays_fail():
    plugin = PlainPlugin()
    graphs = serve(plain_platform(plugin), both_paths())
    plugin.replay_errors.update({4: ReplayError("gone"), 16: ReplayError("gone")})
    assert_equals_eager(graphs, request([(9, 8)]))
    assert graphs.stats()["hits"] == {}
    assert misses(graphs) == {MissReason.REPLAY_FAILED: 1}


def test_try_replay_counts_and_leaves_the_rest_to_the_host(platform):
    graphs = serve(platform)
    assert_equals_eager(graphs, images(3, 4), graphs.try_replay(images(3, 4)))
    assert graphs.try_replay(images(17, 3)) is None
    assert graphs.stats()["hits"] == {"image": 2}
    assert misses(graphs) == {MissReason.TOO_MANY_ROWS: 2}


def test_statistics_are_plain_data(platform):
    graphs = serve(platform)
    graphs.run(images(3, 20))
    graphs.run(images(3))
    counted = json.loads(json.dumps(graphs.stats()))
    assert counted["adapter"] == "toy"
    assert counted["graph_count"] == len(counted["capture"]["graphs"]) == 3
    assert counted["graph_bytes"] == counted["capture"]["bytes"] > 0
    assert counted["item_tokens"] == {"16": 2, "32": 1}


# Replays that fail ---------------------------------------------------------------------------


def test_a_failed_replay_runs_eagerly_and_the_graph_is_dropped(caplog):
    plugin = PlainPlugin()
    graphs = serve(plain_platform(plugin))
    plugin.replay_errors[4] = ReplayError("the device lost it")
    with caplog.at_level(logging.CRITICAL):
        assert_equals_eager(graphs, images(3))
    assert misses(graphs) == {MissReason.REPLAY_FAILED: 1}
    assert graphs.keys() == [key(8), key(16)]
    assert ("release", 4) in plugin.calls
    assert [line.reason for line in graphs.report.dropped] == ["replay failed: the device lost it"]
    assert key(4) not in [line.key for line in graphs.report.captured]
    assert_equals_eager(graphs, images(3))
    assert graphs.stats()["replays"] == {"toy/image[8]": 1}
    assert graphs.stats()["hits"] == {"image": 1}


@pytest.mark.parametrize("hook", ["replay", "update_boundaries", "step", "enter", "leave"])
def test_whatever_a_platform_raises_during_a_replay_runs_eagerly(hook):
    plugin = PlainPlugin()
    platform, failing = plain_platform(plugin), []

    def trouble(*arguments):
        if failing:
            raise ValueError("vendor trouble")

    class Scope:
        def __init__(self, scope):
            self.scope = scope

        def __enter__(self):
            if hook == "enter":
                trouble()
            return self.scope.__enter__()

        def __exit__(self, *error):
            self.scope.__exit__(*error)
            if hook == "leave":
                trouble()

    def spoiled(kind, *arguments):
        scope = platform.step(kind, *arguments)
        if kind != "replay":
            return scope
        if hook == "step":
            trouble()
        return Scope(scope)

    def hooked(name):
        def call(*arguments):
            trouble()
            return getattr(platform, name)(*arguments)

        return call

    changed = {"step": spoiled} if hook in ("step", "enter", "leave") else {hook: hooked(hook)}
    graphs = serve(replace(platform, **changed))
    failing.append(True)
    assert_equals_eager(graphs, images(3))
    assert graphs.try_replay(images(7)) is None
    failing.clear()
    assert misses(graphs) == {MissReason.REPLAY_FAILED: 2}
    assert graphs.keys() == [key(16)]
    assert "ValueError: vendor trouble" in graphs.report.dropped[0].reason
    assert_equals_eager(graphs, images(3))


def test_memory_that_runs_out_in_a_replay_fails_that_request_and_costs_no_graph():
    plugin = PlainPlugin()
    graphs = serve(plain_platform(plugin))
    plugin.replay_errors[4] = torch.OutOfMemoryError("none left")
    with pytest.raises(torch.OutOfMemoryError, match=r"^none left"):
        graphs.run(images(3))
    plugin.replay_errors.clear()
    assert_equals_eager(graphs, images(3))
    assert graphs.stats()["hits"] == {"image": 1}
    assert misses(graphs) == {}


def test_try_replay_gives_none_where_the_replay_fails():
    plugin = PlainPlugin()
    graphs = serve(plain_platform(plugin))
    plugin.replay_errors[4] = ReplayError("the device lost it")
    assert graphs.try_replay(images(3)) is None
    assert misses(graphs) == {MissReason.REPLAY_FAILED: 1}
    assert_equals_eager(graphs, images(3), graphs.try_replay(images(3)))


def test_a_dropped_key_serves_from_a_larger_graph_or_eagerly(platform):
    graphs = serve(platform)
    assert_equals_eager(graphs, images(3))
    graphs.drop(key(4), "for a test")
    assert_equals_eager(graphs, images(3))
    graphs.drop(key(8), "for a test")
    graphs.drop(key(16), "for a test")
    assert_equals_eager(graphs, images(3))
    assert graphs.stats()["replays"] == {"toy/image[4]": 1, "toy/image[8]": 1}
    assert misses(graphs) == {MissReason.NO_GRAPHS: 1}
    graphs.drop(key(4), "twice")
    assert [line.reason for line in graphs.report.dropped] == ["for a test"] * 3


def test_while_an_outer_capture_runs_everything_is_eager_and_nothing_is_dropped():
    plugin = PlainPlugin()
    graphs = serve(plain_platform(plugin))
    plugin.closed = True
    plugin.calls.clear()
    assert_equals_eager(graphs, images(3, 4))
    assert graphs.try_replay(images(3)) is None
    assert {name for name, _ in plugin.calls} == {"step"}
    assert misses(graphs) == {MissReason.OUTER_CAPTURE: 3}
    assert not graphs.report.dropped
    plugin.closed = False
    assert_equals_eager(graphs, images(3, 4))
    assert graphs.stats()["hits"] == {"image": 2}


def test_what_an_outer_capture_copies_from_outlives_the_call(monkeypatch):
    made = []

    def host_block(num_bytes, device):
        block = torch.empty(num_bytes, dtype=torch.uint8)
        made.append(weakref.ref(block))
        return block

    monkeypatch.setattr(execution, "host_block", host_block)
    plugin = PlainPlugin()
    graphs = EncoderGraphs(ToyEncoder(), plain_platform(plugin), Settings())
    graphs.run(images(3))
    plugin.closed = True
    graphs.run(images(3))
    assert [block() is not None for block in made] == [False, True]


# Clear and recapture -------------------------------------------------------------------------


ASKED = {
    "clear": lambda graphs: graphs.clear(),
    "capture": lambda graphs: graphs.capture(keys=[key(4)]),
    "drop": lambda graphs: graphs.drop(key(4), "of no use"),
    "run": lambda graphs: graphs.run(images(2)),
    "try_replay": lambda graphs: graphs.try_replay(images(2)),
}


@pytest.mark.parametrize("asked", ASKED)
def test_what_another_thread_asks_for_waits_until_a_request_is_served(platform, asked):
    class Busy(ToyEncoder):
        other: Thread | None = None

        def stage(self, mm_kwargs, items, inputs):
            super().stage(mm_kwargs, items, inputs)
            other, self.other = self.other, None
            if other is not None:
                other.start()
                other.join(0.05)

    graphs = serve(platform, Busy())
    expected = graphs.run_eager(images(3))
    other = graphs.adapter.other = Thread(target=ASKED[asked], args=(graphs,))
    outputs = graphs.run(images(3))
    other.join()
    assert torch.allclose(outputs[0], expected[0], atol=1e-4)
    assert misses(graphs) == {}


@pytest.mark.parametrize("fails", [False, True])
def test_a_request_within_a_request_takes_nothing_from_it(platform, fails):
    class Asks(ToyEncoder):
        inner = None

        def stage(self, mm_kwargs, items, inputs):
            super().stage(mm_kwargs, items, inputs)
            ask, self.inner = self.inner, None
            if ask is not None:
                answers.append(ask())
                if fails:
                    raise RefusedError("after all")

    answers = []
    graphs = serve(platform, Asks())
    graphs.adapter.inner = lambda: graphs.run(images(3, 2, seed=5))
    outputs = graphs.run(images(4, seed=1))
    assert_equals_eager(graphs, images(3, 2, seed=5), answers[0])
    assert_equals_eager(graphs, images(4, seed=1), outputs)
    expected = {MissReason.NESTED: 2} | ({MissReason.REFUSED: 1} if fails else {})
    assert misses(graphs) == expected
    graphs.adapter.inner = lambda: graphs.try_replay(images(3))
    graphs.run(images(4))
    assert answers[1] is None
    assert_equals_eager(graphs, images(8))
    assert sum(misses(graphs).values()) == 3 + 2 * fails, "later requests replay again"


def test_clear_is_safe_twice_and_leaves_eager(platform):
    graphs = serve(platform)
    graphs.run(images(3))
    for _ in range(2):
        graphs.clear()
        assert graphs.keys() == []
        assert graphs.stats()["graph_count"] == graphs.stats()["graph_bytes"] == 0
        assert graphs.stats()["capture"]["graphs"] == []
        assert_equals_eager(graphs, images(3))
    assert misses(graphs) == {MissReason.NO_GRAPHS: 2}
    graphs.capture()
    assert_equals_eager(graphs, images(3))
    assert graphs.stats()["hits"] == {"image": 2}


def test_nothing_is_captured_before_it_is_asked_for(platform):
    graphs = EncoderGraphs(ToyEncoder(), platform, Settings())
    assert_equals_eager(graphs, images(3))
    assert graphs.stats()["graph_bytes"] == 0
    assert misses(graphs) == {MissReason.NO_GRAPHS: 1}


def test_recapture_releases_every_graph_before():
    plugin = PlainPlugin()
    graphs = serve(plain_platform(plugin))
    graphs.run(images(3))
    for _ in range(2):
        graphs.capture()
        assert plugin.live == 3
        assert_equals_eager(graphs, images(3))
    graphs.clear()
    assert plugin.live == 0


def test_capture_of_some_keys_only(platform):
    graphs = serve(platform, both_paths(), keys=[key(8), key(4, "video")])
    assert graphs.keys() == [key(8), key(4, "video")]
    assert [line.key for line in graphs.report.captured] == [key(8), key(4, "video")]
    assert_equals_eager(graphs, images(3))
    assert graphs.stats()["replays"] == {"toy/image[8]": 1}
    assert serve(platform, keys=[]).keys() == []
    with pytest.raises(SettingsError, match=r"^toy offers no graph toy/image\[5\] .*image\[8\]"):
        graphs.capture(keys=[key(8), key(5)])
    assert graphs.keys() == [key(8), key(4, "video")]


def test_progress_counts_every_graph():
    seen = []
    graphs = EncoderGraphs(ToyEncoder(), plain_platform(), Settings())
    graphs.capture(progress=lambda done, total, at: seen.append((done, total, at.size)))
    assert seen == [(1, 3, 16), (2, 3, 8), (3, 3, 4)]


def test_an_interrupted_capture_leaves_nothing_behind():
    plugin = PlainPlugin()
    graphs = EncoderGraphs(ToyEncoder(), plain_platform(plugin), Settings())

    def interrupt(done, total, at):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        graphs.capture(progress=interrupt)
    assert plugin.live == 0
    assert graphs.stats()["graph_bytes"] == 0
    assert_equals_eager(graphs, images(3))


@pytest.mark.parametrize("asked", ["clear", "capture", "drop"])
def test_an_interrupted_release_leaves_plans_of_what_is_left(monkeypatch, asked):
    graphs = serve(plain_platform())
    graphs.run(images(3))

    def interrupt(graphs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(graphs._graphs, "_release", interrupt)
        with pytest.raises(KeyboardInterrupt):
            graphs.drop(graphs.keys()[0], "no") if asked == "drop" else getattr(graphs, asked)()
    for tokens in range(1, 17):
        assert_equals_eager(graphs, images(tokens))
    graphs.capture()
    assert_equals_eager(graphs, images(3))


def test_graphs_captured_in_inference_mode_serve_outside_of_it(platform):
    with torch.inference_mode():
        graphs = serve(platform)
    assert_equals_eager(graphs, images(3, 4))
    with torch.inference_mode():
        graphs.run(images(3, 4))
    assert_equals_eager(graphs, images(3, 4))
    assert graphs.stats()["hits"] == {"image": 6}


def test_two_capacities_of_one_key_are_refused():
    graphs = EncoderGraphs(ToyEncoder(budgets=(4, 8, 4)), plain_platform(), Settings())
    with pytest.raises(AdapterError, match=r"^toy: every capacity needs its own key"):
        graphs.capture()


def test_sizes_that_come_again_are_planned_once():
    class Counting(ToyEncoder):
        planned = 0

        def metadata(self, items):
            self.planned += 1
            return super().metadata(items)

    adapter = Counting()
    graphs = serve(plain_platform(), adapter)
    adapter.planned = 0
    for _ in range(3):
        graphs.run(images(3, 4))
        graphs.run(images(4, 3))
    assert adapter.planned == 2
    graphs.drop(key(4), "for a test")
    graphs.run(images(3, 4))
    assert adapter.planned == 3


def test_a_refusal_that_comes_and_goes_is_asked_for_on_every_request(platform):
    graphs = serve(platform, both_paths())
    asked = request([(1, 4, "image"), (2, 4, "video")])
    graphs.run(asked)
    graphs.adapter.refused = "LoRA is on"
    assert graphs.try_replay(asked) is None
    assert_equals_eager(graphs, asked)
    assert graphs.stats()["hits"] == {"image": 1, "video": 1}
    graphs.adapter.refused = None
    assert_equals_eager(graphs, asked)
    assert graphs.stats()["hits"] == {"image": 2, "video": 2}


def test_a_refusal_that_comes_while_a_group_is_planned_is_not_missed(platform):
    class Flipping(ToyEncoder):
        asked = None

        def refusal(self, items):
            if self.asked is not None:
                self.asked += 1
            return "LoRA is on" if self.asked is not None and self.asked > 1 else None

    graphs = serve(platform, Flipping())
    graphs.adapter.asked = 0
    for _ in range(3):
        assert_equals_eager(graphs, images(3))
    assert misses(graphs) == {MissReason.REFUSED: 3}


def test_what_an_adapter_refuses_while_staging_runs_eagerly_and_costs_no_graph(platform):
    class Refusing(ToyEncoder):
        refusing = False

        def stage(self, mm_kwargs, items, inputs):
            super().stage(mm_kwargs, items, inputs)
            if self.refusing:
                raise RefusedError("a value is above the baked one")

        def eager_inputs(self, mm_kwargs, items):
            self.refusing, was = False, self.refusing
            try:
                return super().eager_inputs(mm_kwargs, items)
            finally:
                self.refusing = was

    graphs = serve(platform, Refusing())
    graphs.adapter.refusing = True
    assert_equals_eager(graphs, images(3))
    assert graphs.try_replay(images(3)) is None
    assert misses(graphs) == {MissReason.REFUSED: 2}
    graphs.adapter.refusing = False
    assert_equals_eager(graphs, images(3))
    assert graphs.stats()["replays"] == {"toy/image[4]": 1}


def test_an_adapter_that_cannot_stage_a_request_fails_it_alone(platform):
    class Failing(ToyEncoder):
        def stage(self, mm_kwargs, items, inputs):
            if mm_kwargs.get("broken"):
                raise RuntimeError("no such tensor")
            super().stage(mm_kwargs, items, inputs)

    graphs = serve(platform, Failing())
    with pytest.raises(RuntimeError, match="no such tensor"):
        graphs.run({**images(3), "broken": True})
    assert len(graphs.keys()) == 3
    assert_equals_eager(graphs, images(3))
    assert graphs.stats()["hits"] == {"image": 1}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sequences": {"cu_seqlens": (), "cu_window_seqlens": (4,)}}, "item 0 needs a row"),
        ({"sequences": {"cu_seqlens": (4, 0), "cu_window_seqlens": (4,)}}, "item 0 needs a row"),
        ({"tokens": -1}, "item 0 needs a row"),
        ({"rows": 0}, "item 0 needs a row"),
        ({"frames": 0, "splittable": True}, "item 0 needs a row and a frame"),
        ({"rows": torch.tensor(4)}, "sizes of item 0 must be host integers"),
        ({"tokens": torch.tensor(2)}, "sizes of item 0 must be host integers"),
        ({"tokens": 2.0}, "sizes of item 0 must be host integers"),
        ({"sequences": {FULL: (4.0,), WINDOWED: (4,)}}, "sizes of item 0 must be host integers"),
        ({"signature": [4]}, "signatures of items must be hashable"),
        ({"sequences": {"cu_seqlens": (4,)}}, "items of one path have the same boundary sets"),
    ],
)
def test_specs_that_no_plan_could_hold_are_the_adapters_fault(platform, change, words):
    class Odd(ToyEncoder):
        odd = False

        def item_specs(self, mm_kwargs):
            first, *rest = super().item_specs(mm_kwargs)
            return (replace(first, **change) if self.odd else first, *rest)

    graphs = serve(platform, Odd())
    graphs.adapter.odd = True
    with pytest.raises(AdapterError, match=words):
        graphs.run(images(2, 2))
    if "signature" not in change:
        with pytest.raises(AdapterError, match=words):
            graphs.run_eager(images(2, 2))
    graphs.adapter.odd = False
    assert_equals_eager(graphs, images(2, 2))


def test_kept_plans_are_bounded(monkeypatch):
    graphs = serve(plain_platform())
    monkeypatch.setattr(group_plans, "PREPARED_GROUPS", 5)
    for tokens in range(1, 40):
        graphs.run(images(tokens))
    assert len(graphs._plans) == 5
    monkeypatch.setattr(group_plans, "PREPARED_BYTES", 0)
    for tokens in (1, 2, 3):
        assert_equals_eager(graphs, images(tokens))
        assert len(graphs._plans) == 1


def test_kept_plans_of_many_items_are_bounded_too(monkeypatch):
    """A group that runs eagerly has no packed block, but its items are kept."""
    graphs = serve(plain_platform())
    monkeypatch.setattr(group_plans, "PREPARED_BYTES", 3 * 30 * group_plans.ITEM_BYTES)
    for tokens in range(1, 9):
        graphs.run(images(*[1] * 29, tokens))
    assert graphs.stats()["misses"]
    assert len(graphs._plans) == 3
    for graphs.adapter.refused in ("LoRA is on", None) * 4:  # each time it is planned anew
        graphs.run(images(*[1] * 29, 8))
    assert len(graphs._plans) == 3


def test_specs_that_come_again_are_planned_without_a_look_at_them(monkeypatch):
    class Keeping(ToyEncoder):
        def item_specs(self, mm_kwargs):
            return self.kept

    graphs = serve(plain_platform(), Keeping())
    graphs.adapter.kept = ToyEncoder.item_specs(graphs.adapter, images(2, 3))
    assert_equals_eager(graphs, images(2, 3))
    looked = []
    of_equal_sizes = graphs._plans._of_equal_sizes
    monkeypatch.setattr(
        graphs._plans, "_of_equal_sizes", lambda i: looked.append(i) or of_equal_sizes(i)
    )
    assert_equals_eager(graphs, images(2, 3))
    graphs.adapter.refused = "LoRA is on"
    graphs.run(images(2, 3))
    assert misses(graphs) == {MissReason.REFUSED: 2}
    graphs.adapter.refused = None
    assert_equals_eager(graphs, images(2, 3))
    assert looked == []


def test_equal_signatures_of_other_sequences_are_not_mixed_up(platform):
    class Coarse(ToyEncoder):
        def item_specs(self, mm_kwargs):
            (item,) = super().item_specs(mm_kwargs)
            cut = mm_kwargs.get("cut")
            sequences = dict.fromkeys(self.sets, cut) if cut else item.sequences
            return (replace(item, sequences=sequences),)

    graphs = serve(platform, Coarse())
    for cut in (None, (4, 4), None, (4, 4)):
        assert_equals_eager(graphs, {**images(4), "cut": cut})
    assert graphs.stats()["hits"] == {"image": 4}


def test_the_plan_used_longest_ago_is_dropped_first(monkeypatch):
    graphs = serve(plain_platform())
    monkeypatch.setattr(group_plans, "PREPARED_GROUPS", 2)
    for tokens in (1, 2, 1, 3):
        graphs.run(images(tokens))
    made = []
    make = graphs._plans._made
    monkeypatch.setattr(graphs._plans, "_made", lambda *args: made.append(args) or make(*args))
    graphs.run(images(1))
    assert made == []
    graphs.run(images(2))
    assert len(made) == 1


def test_a_list_of_specs_that_holds_others_later_is_looked_at_again(platform):
    class Listing(ToyEncoder):
        kept: ClassVar[list] = []

        def item_specs(self, mm_kwargs):
            self.kept[:] = super().item_specs(mm_kwargs)
            return self.kept

    graphs = serve(platform, Listing())
    for asked in (images(2, 3), images(4, 1), images(1), images(2, 3)):
        assert_equals_eager(graphs, asked)


class Growing(ToyEncoder):
    """Its tower keeps a buffer as long as the longest group yet, or makes it anew always."""

    anew = False

    def forward(self, inputs, max_seqlen):
        rows = len(inputs["pixels"])
        if self.anew or len(getattr(self.tower, "table", ())) < rows:
            self.tower.register_buffer("table", torch.ones(rows))
        return super().forward(inputs, max_seqlen)


def test_a_table_that_grows_while_a_ladder_is_captured_costs_no_graph(platform, caplog):
    caplog.set_level("INFO")
    graphs = serve(platform, Growing())
    assert_equals_eager(graphs, images(3, 2))
    assert graphs.stats()["hits"] == {"image": 2}
    assert caplog.text.count("captured again") == 1
    graphs.capture()
    assert caplog.text.count("captured again") == 1
    assert_equals_eager(graphs, images(3, 2))
    assert misses(graphs) == {}


def test_a_table_that_is_always_made_anew_ends_the_captures(platform):
    graphs = EncoderGraphs(Growing(), platform, Settings(self_check="off"))
    graphs.adapter.anew = True
    graphs.capture()
    assert_equals_eager(graphs, images(3))
    assert misses(graphs) == {MissReason.WEIGHTS_MOVED: 1}


# Boundaries ----------------------------------------------------------------------------------


def updates_while(plugin: PlainPlugin, call) -> int:
    before = plugin.count("update")
    call()
    return plugin.count("update") - before


def test_boundaries_are_sent_again_only_when_something_changed():
    plugin = PlainPlugin()
    graphs = serve(plain_platform(plugin))
    run = graphs.run
    assert updates_while(plugin, lambda: run(images(3, 4))) == 1  # the self-check came before
    assert updates_while(plugin, lambda: run(images(3, 4, seed=1))) == 0
    assert updates_while(plugin, lambda: run(images(4, 3))) == 1
    assert updates_while(plugin, lambda: run(images(3, 4))) == 1
    run(images(3))  # another graph
    assert updates_while(plugin, lambda: run(images(3, 4))) == 1
    graphs.run_eager(images(3, 4))
    assert updates_while(plugin, lambda: run(images(3, 4))) == 1
    run(images(20))  # a miss
    assert updates_while(plugin, lambda: run(images(3, 4))) == 1
    graphs.profile_memory()
    assert updates_while(plugin, lambda: run(images(3, 4))) == 1
    assert_equals_eager(graphs, images(3, 4))


class WritesItsInputs(ToyEncoder):
    """Shifts its positions and spoils its boundaries in place, as eager may: its are fresh."""

    def forward(self, inputs, max_seqlen):
        inputs["position_ids"].add_(1)
        output = super().forward(inputs, max_seqlen)
        inputs[FULL].zero_()
        inputs["pixels"].mul_(3)
        return output


@pytest.mark.parametrize("self_check", list(SelfCheck))
def test_what_a_forward_writes_to_its_inputs_is_gone_at_the_next_replay(platform, self_check):
    graphs = serve(platform, WritesItsInputs(), self_check=self_check)
    for asked in (images(3, 4), images(8), images(3, 4)):
        replayed = [graphs.run(asked) for _ in range(3)]  # no eager call comes between
        for outputs in replayed:
            assert_equals_eager(graphs, asked, outputs)
    assert graphs.stats()["hits"] == {"image": 15}


def test_boundaries_are_sent_again_after_recapture():
    plugin = PlainPlugin()
    graphs = serve(plain_platform(plugin), self_check="off")
    for _ in range(2):
        assert updates_while(plugin, lambda: graphs.run(images(3, 4))) == 1
        assert updates_while(plugin, lambda: graphs.run(images(3, 4))) == 0
        graphs.capture()
    assert_equals_eager(graphs, images(3, 4))


def test_boundaries_are_sent_each_time_where_they_do_not_persist():
    plugin = PlainPlugin()
    graphs = serve(plain_platform(plugin, boundaries_persist=False))
    for _ in range(3):
        assert updates_while(plugin, lambda: graphs.run(images(3, 4))) == 1


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_boundaries_are_sent_again_after_an_update_that_failed_half_way(error):
    plugin = PlainPlugin()
    platform = plain_platform(plugin)
    failing = []

    def update(graph, host):
        plugin.graphhal_update_boundaries(graph, host)
        if failing:
            graph.request.packed.zero_()
            raise error("half way")

    graphs = serve(replace(platform, update_boundaries=update))
    graphs.run(images(3, 4))
    failing.append(True)
    if error is RuntimeError:
        assert_equals_eager(graphs, images(4, 3))
        assert misses(graphs) == {MissReason.REPLAY_FAILED: 2}
    else:
        with pytest.raises(error):
            graphs.run(images(4, 3))  # and costs no graph
    failing.clear()
    assert_equals_eager(graphs, images(3, 4))
    assert graphs.stats()["hits"] == {"image": 4}


@pytest.mark.parametrize(
    ("order", "expected"),
    [("before", ["step", "update", "replay"]), ("after", ["step", "replay", "update"])],
)
def test_the_update_comes_where_the_platform_wants_it(order, expected):
    plugin = PlainPlugin()
    graphs = serve(plain_platform(plugin, boundary_order=order), self_check="off")
    plugin.calls.clear()
    graphs.run(images(3, 4))
    assert [name for name, _ in plugin.calls] == expected


# Weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rebind", REBINDINGS, ids=lambda rebind: rebind.__name__)
def test_rebound_weights_run_eagerly_until_recapture(platform, rebind):
    graphs = serve(platform, ToyEncoder(budgets=(4,)))
    graphs.run(images(3))
    rebind(graphs.adapter.tower)
    works = rebind.__name__ in {
        "replace_plain_tensor",
        "rebind_plain_tensor",
        "change_a_number",
        "replace_parameter",
        "rebind_data",
        "rebind_nested",
        "replace_buffer",
        "replace_module",
        "replace_list_entry",
        "hook",
        "hook_before",
        "patch_forward",
        "patch_call",
        "give_another_class",
        "transpose_the_data",
        "transpose_in_place",
        "append_a_module",
        "swap_tensors",
    }
    for _ in range(2):
        if works:
            assert_equals_eager(graphs, images(3))
        else:
            assert graphs.try_replay(images(3)) is None
    assert misses(graphs) == {MissReason.WEIGHTS_MOVED: 2}
    assert graphs.keys() == []
    assert all(line.reason.startswith("weights were rebound") for line in graphs.report.dropped)
    assert len(graphs.report.dropped) == 1
    if works:
        graphs.capture()
        assert_equals_eager(graphs, images(3))
        assert graphs.stats()["hits"] == {"image": 2}


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_process_forked_while_another_thread_encodes_encodes_too():
    graphs = serve(open_by_name("cpu"))
    held, done = Event(), Event()
    stage = graphs.adapter.stage

    def wait_and_stage(mm_kwargs, items, inputs):
        graphs.adapter.stage = stage
        held.set()
        done.wait()
        stage(mm_kwargs, items, inputs)

    graphs.adapter.stage = wait_and_stage
    thread = Thread(target=graphs.run, args=(images(4),))
    thread.start()
    held.wait()
    try:
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)  # ends it where it waits
            torch.set_num_threads(1)  # those of the parent's OpenMP are not here
            os._exit(0 if graphs.run(images(3)) and not misses(graphs) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        done.set()
        thread.join()


def test_weights_that_move_between_the_replays_of_one_request(platform):
    graphs = serve(platform, ToyEncoder(budgets=(8,), paths=("video",)))
    asked = request([(2, 8), (2, 8), (2, 8)], seed=4)
    seen = []
    stage = graphs.adapter.stage

    def rebind_during_the_first(mm_kwargs, items, inputs):
        stage(mm_kwargs, items, inputs)
        seen.append(items)
        if len(seen) == 1:
            graphs.adapter.tower.scale = graphs.adapter.tower.scale.clone()

    graphs.adapter.stage = rebind_during_the_first
    assert_equals_eager(graphs, asked)
    assert graphs.stats()["hits"] == {}, "the first was staged before and launched after"
    assert misses(graphs) == {MissReason.WEIGHTS_MOVED: 3}


def test_weights_updated_in_place_are_seen_by_the_graphs(platform):
    graphs = serve(platform)
    before = graphs.run(images(3))
    with torch.no_grad():
        graphs.adapter.tower.embed.weight.mul_(2)
        graphs.adapter.tower.scale.add_(1)
    after = graphs.run(images(3))
    assert not torch.equal(before[0], after[0])
    assert_equals_eager(graphs, images(3))
    assert misses(graphs) == {}


def test_weights_made_by_the_first_forward_are_not_rebound(platform):
    class Lazy(ToyEncoder):
        def forward(self, inputs, max_seqlen):
            if not hasattr(self.tower, "ready"):
                self.tower.scale = self.tower.scale.clone()
                self.tower.ready = True
            return super().forward(inputs, max_seqlen)

    graphs = serve(platform, Lazy())
    assert_equals_eager(graphs, images(3))
    assert misses(graphs) == {}


class Notes(ToyEncoder):
    """Its forward notes on the tower what it did last, and reads what it noted."""

    where = "tensor"

    def forward(self, inputs, max_seqlen):
        tower = self.tower
        first = not hasattr(tower, "noted") and "noted" not in tower._buffers
        noted = torch.ones(1) if first else tower.noted
        tower.calls = getattr(tower, "calls", 0) + 1
        tower.last = inputs["pixels"] * 2
        noted = noted * 1  # another tensor of the same value
        if first and self.where == "buffer":
            tower.register_buffer("noted", noted)
        tower.noted = noted
        levels = super().forward(inputs, max_seqlen)
        return [level * noted for level in levels]


def test_what_a_forward_notes_on_its_modules_moves_nothing(platform):
    graphs = serve(platform, Notes())
    for _ in range(3):
        assert_equals_eager(graphs, images(3))
    assert misses(graphs) == {}


def test_attributes_of_a_hosts_whole_model_change_with_every_step():
    adapter = ToyEncoder()
    adapter.whole_model = True
    adapter.tower.mask = torch.ones(1)
    graphs = serve(open_by_name("cpu"), adapter)
    cache = weakref.ref(adapter.tower.mask)
    adapter.tower.mask, adapter.tower.step = torch.zeros(1), 2
    assert cache() is None, "a graph must not keep a host's cache"
    graphs.run(images(3))
    assert misses(graphs) == {}


@pytest.mark.parametrize("where", ["tensor", "buffer"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_capture_leaves_the_modules_what_they_noted_before(where, fails):
    """What the captured call notes lies in a graph's memory, and holds garbage."""
    adapter = Notes(budgets=(4,))
    adapter.where = where
    graphs = EncoderGraphs(adapter, open_by_name("cpu"), Settings())
    expected = graphs.run_eager(images(3))
    if fails:
        forward, calls = adapter.forward, []

        def failing(inputs, max_seqlen):
            levels = forward(inputs, max_seqlen)
            calls.append(levels)
            if len(calls) == 3:  # of an example, one warm-up and the rehearsal
                levels[0].sum().item()
            return levels

        adapter.forward = failing
    graphs.capture()
    assert bool(graphs.keys()) != fails
    assert torch.isfinite(adapter.tower.noted).all()
    assert torch.isfinite(adapter.tower.last).all()
    for ours, reference in zip(graphs.run_eager(images(3)), expected, strict=True):
        assert torch.equal(ours, reference)


def test_a_capture_leaves_the_lists_of_modules_what_they_held_before(platform):
    class NotesInAList(ToyEncoder):
        def forward(self, inputs, max_seqlen):
            entries = vars(self.tower).setdefault("entries", [torch.ones(1)])
            entries[0] = entries[0] * 1  # another tensor of the same value
            return [level * entries[0] for level in super().forward(inputs, max_seqlen)]

    adapter = NotesInAList()
    expected = EncoderGraphs(adapter, platform).run_eager(images(3))
    graphs = serve(platform, adapter)
    assert torch.equal(graphs.run_eager(images(3))[0], expected[0])
    assert_equals_eager(graphs, images(3))
    assert misses(graphs) == {}


def test_a_memory_profile_leaves_the_modules_what_they_noted_before():
    graphs = EncoderGraphs(Notes(), open_by_name("cpu"), Settings())
    expected = graphs.run_eager(images(3))
    graphs.profile_memory()
    assert torch.equal(graphs.run_eager(images(3))[0], expected[0])


@pytest.mark.parametrize(
    "within", [lambda kept: kept, lambda kept: (len(kept), kept)], ids=["tensor", "tuple"]
)
def test_what_a_forward_keeps_by_size_lives_as_long_as_the_graph_that_reads_it(platform, within):
    class Keeps(ToyEncoder):
        def forward(self, inputs, max_seqlen):
            rows = len(inputs["pixels"])
            held = getattr(self.tower, "kept", None)
            kept = held[1] if isinstance(held, tuple) else held
            if kept is None or len(kept) != rows:
                kept = torch.zeros(rows, 1)
                self.tower.kept = within(kept)
                made[rows].append(weakref.ref(kept))
            return super().forward({**inputs, "pixels": inputs["pixels"] + kept}, max_seqlen)

    made = defaultdict(list)
    graphs = serve(platform, Keeps(budgets=(4, 8)))
    assert_equals_eager(graphs, images(3))
    assert_equals_eager(graphs, images(7))
    assert misses(graphs) == {}
    assert all(any(ref() is not None for ref in made[rows]) for rows in (8, 16))
    graphs.clear()
    gc.collect()
    assert not any(ref() is not None for ref in made[16]), "a smaller one took its place"


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_whose_weights_nobody_sees_runs_eagerly(platform):
    class Scripted(ToyEncoder):
        def modules(self):
            return (self.tower, torch.jit.trace(torch.nn.Linear(2, 2), torch.zeros(1, 2)))

    graphs = EncoderGraphs(Scripted(), platform, Settings())
    graphs.capture()
    assert_equals_eager(graphs, images(3))
    assert misses(graphs) == {MissReason.NO_GRAPHS: 1}
    assert "keeps its weights where nobody sees them move" in graphs.report.dropped[0].reason


def test_check_weights_tells_and_clears(platform):
    graphs = serve(platform)
    assert graphs.check_weights()
    graphs.adapter.tower.scale = graphs.adapter.tower.scale * 2
    assert not graphs.check_weights()
    assert graphs.keys() == []
    assert graphs.check_weights()
    assert_equals_eager(graphs, images(3))
    assert misses(graphs) == {MissReason.WEIGHTS_MOVED: 1}


# Memory profile ------------------------------------------------------------------------------


@pytest.mark.parametrize("warmups", [1, 2])
def test_a_memory_profile_counts_arenas_and_stages_each_example(platform, warmups):
    graphs = EncoderGraphs(both_paths(), platform, Settings(warmups=warmups))
    profile = graphs.profile_memory()
    assert set(profile.per_graph) == {capacity.key for capacity in graphs.ladder()}
    arenas = profile.settled_bytes - sum(profile.per_graph.values())
    assert graphs.keys() == []
    report = graphs.capture()
    assert profile.settled_bytes == report.num_bytes
    assert arenas == report.num_bytes - sum(line.num_bytes for line in report.captured)


@pytest.mark.parametrize("fits", [0, 1, 2, 3])
def test_a_memory_profile_counts_what_the_limit_leaves(fits):
    # Of 8, 16 and 32 rows the largest is captured first; the smallest fit below it.
    plugin = PlainPlugin(graph_bytes=lambda size: 1000 * size)
    full = EncoderGraphs(ToyEncoder(), plain_platform(plugin), Settings()).profile_memory()
    arenas = full.settled_bytes - 28_000
    limit = (3_999, arenas + 4_000, arenas + 12_000, arenas + 28_000)[fits]
    graphs = EncoderGraphs(ToyEncoder(), plain_platform(plugin), Settings(memory_limit=limit))
    profile = graphs.profile_memory()
    assert len(profile.per_graph) == fits
    report = graphs.capture()
    assert report.num_bytes <= profile.settled_bytes == limit
    assert list(profile.per_graph) == [line.key for line in report.captured]


def test_a_memory_profile_disturbs_no_captured_graph(platform):
    graphs = serve(platform)
    graphs.run(images(3, 4))
    graphs.profile_memory()
    assert_equals_eager(graphs, images(3, 4))
    assert graphs.stats()["hits"] == {"image": 4}


# Threads -------------------------------------------------------------------------------------


def test_eight_threads_get_their_own_outputs(platform):
    graphs = serve(platform, policy="packed")
    groups = [(3,), (3, 4), (16, 2), (17, 1), (8,), (1, 1, 1), (5, 5), (4,)]
    asked = [images(*groups[n % len(groups)], seed=n) for n in range(24)]
    expected = [graphs.run_eager(each) for each in asked]

    def hammer(start: int) -> list[str]:
        wrong = []
        for turn in range(15):
            at = (start * 7 + turn) % len(asked)
            outputs = graphs.run(asked[at])
            for ours, reference in zip(outputs, expected[at], strict=True):
                if not torch.allclose(ours, reference, rtol=1e-5, atol=1e-5):
                    wrong.append(f"request {at}")
            if turn == 7 and start == 0:
                graphs.capture()
            if turn == 10 and start == 1:
                graphs.drop(key(8), "for a test")
            graphs.keys()
            graphs.stats()
        return wrong

    with ThreadPoolExecutor(8) as pool:
        assert [each for wrong in pool.map(hammer, range(8)) for each in wrong] == []
    items = sum(len(asked[(s * 7 + t) % 24]["grids"]) for s in range(8) for t in range(15))
    assert graphs.statistics.hits.total() + graphs.statistics.misses.total() == items


def test_an_eager_call_that_runs_out_of_memory_is_tried_once_more(monkeypatch):
    graphs = EncoderGraphs(ToyEncoder(), plain_platform(PlainPlugin()))
    asked = images(3)
    expected = torch.cat(graphs.run_eager(asked))
    forward, failures = graphs.adapter.forward, []

    def failing(*arguments):
        if not failures:
            failures.append(True)
            raise torch.OutOfMemoryError("planted")
        return forward(*arguments)

    monkeypatch.setattr(graphs.adapter, "forward", failing)
    assert torch.equal(torch.cat(graphs.run(asked)), expected)
    assert failures


@pytest.mark.parametrize("name", ["places", "path", "refusal"])
def test_an_attribute_that_hides_a_method_is_named(name: str) -> None:
    encoder = ToyEncoder()
    setattr(encoder, name, 1500)
    with pytest.raises(AdapterError, match=f"its attribute '{name}' hides the method"):
        EncoderGraphs(encoder, plain_platform())


@pytest.mark.parametrize(
    ("device", "told"),
    [
        (torch.device("meta"), "^toy is on meta, but platform plain serves cpu; move the tower"),
        ("cpu", "^toy: its device must be a torch.device, got 'cpu'"),
    ],
)
def test_a_tower_that_is_not_where_the_platform_serves_is_named(device, told):
    encoder = ToyEncoder()
    encoder.device, encoder.attention = device, None
    with pytest.raises(AdapterError, match=told):
        EncoderGraphs(encoder, plain_platform())
    assert encoder.attention is None  # it was not prepared


def test_bench_judges_by_the_dtype_that_outputs_have(platform, monkeypatch):
    class Rougher(ToyEncoder):
        def forward(self, inputs, max_seqlen):
            return [level.bfloat16() for level in super().forward(inputs, max_seqlen)]

    graphs = serve(platform, Rougher())
    monkeypatch.setattr(measure, "SECONDS_PER_INPUT", 0.0)
    monkeypatch.setattr(graphs, "run", lambda kw: [x * 1.01 for x in graphs.run_eager(kw)])
    assert measure.measure_input(graphs, "toy", images(3), 3).agrees
