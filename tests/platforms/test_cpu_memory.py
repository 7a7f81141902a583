"""Bytes of the reference platform: one pool as large as its largest graph; release, profile."""

import gc
import weakref
from typing import Any

import pytest
import torch

from graphhal.cpu import plugin
from graphhal.cpu.memory import Pool, peak_bytes, poison
from graphhal.errors import ReplayError
from graphhal.platform import CaptureRequest, HostUpdate
from tests.platforms.cpu_case import Case, request_for

KIB = 1024


def chain(rows: int, pool: Any = None) -> CaptureRequest:
    """A graph whose intermediates take two times `rows` KiB at once."""
    x, output = torch.zeros(rows, 256), torch.zeros(rows, 256)
    return request_for(lambda: output.copy_(((x + 1) * 2).neg()), output, pool=pool)


def test_pool_shared_largest_first_costs_the_largest() -> None:
    largest = plugin.graphhal_capture(chain(64))
    assert largest.num_bytes == 2 * 64 * KIB
    for rows in (32, 8):
        graph = plugin.graphhal_capture(chain(rows, largest.pool))
        assert graph.num_bytes == 0
        assert graph.pool is largest.pool


def test_pool_shared_smallest_first_grows() -> None:
    first = plugin.graphhal_capture(chain(8))
    second = plugin.graphhal_capture(chain(64, first.pool))
    assert first.num_bytes + second.num_bytes == second.pool.num_bytes == 2 * 64 * KIB


def test_profile_measures_what_capture_then_takes_and_keeps_nothing() -> None:
    requests = [chain(64), chain(80), chain(32)]
    for request, name in zip(requests, "abc", strict=True):
        object.__setattr__(request, "key", type(request.key)("toy", name, 1))
    before = [request.output.clone() for request in requests]
    profile = plugin.graphhal_profile_memory(requests)
    assert profile.settled_bytes == 2 * 80 * KIB
    assert list(profile.per_graph.values()) == [128 * KIB, 32 * KIB, 0]
    assert profile.transient_bytes == 80 * KIB  # the copy of the output that capture wrote
    pool: Pool | None = None
    for request in requests:
        object.__setattr__(request, "pool", pool)
        graph = plugin.graphhal_capture(request)
        pool = graph.pool
        assert graph.num_bytes == profile.per_graph[request.key]
    assert len(before) == 3


def test_profile_counts_a_refused_graph_as_nothing() -> None:
    good = chain(8)
    bad = request_for(lambda: good.output.tolist(), good.output)
    object.__setattr__(bad, "key", type(bad.key)("toy", "bad", 1))
    profile = plugin.graphhal_profile_memory([bad, good])
    assert profile.per_graph == {bad.key: 0, good.key: 16 * KIB}


def test_profile_of_nothing_is_nothing() -> None:
    profile = plugin.graphhal_profile_memory([])
    assert (profile.settled_bytes, profile.transient_bytes) == (0, 0)


def test_views_and_in_place_updates_take_no_memory() -> None:
    x, output = torch.zeros(64, 256), torch.zeros(64, 256)

    def forward() -> None:
        result = x + 1
        result.view(-1)[:10].add_(1)
        output.copy_(result.t().t().relu_())

    assert plugin.graphhal_capture(request_for(forward, output)).num_bytes == 64 * KIB


@pytest.mark.parametrize(
    ("spans", "peak"),
    [
        ([], 0),
        ([(5, 0, 0)], 5),
        ([(5, 0, 1), (7, 1, 2)], 12),
        ([(5, 0, 1), (7, 2, 3)], 7),
        ([(5, 0, 9), (7, 2, 3), (8, 4, 5)], 13),
    ],
)
def test_peak_counts_what_lives_at_once(spans: list[tuple[int, int, int]], peak: int) -> None:
    assert peak_bytes(spans) == peak


def test_release_twice_and_replay_after_release() -> None:
    request = chain(8)
    graph = plugin.graphhal_capture(request)
    plugin.graphhal_release([graph, graph])
    plugin.graphhal_release([graph])
    plugin.graphhal_release([])
    words = r"^toy/image\[1\] was released; capture it again"
    with pytest.raises(ReplayError, match=words):
        plugin.graphhal_replay(graph)
    with pytest.raises(ReplayError, match=words):
        plugin.graphhal_update_boundaries(graph, HostUpdate({}, request.packed))


def test_release_lets_go_of_weights() -> None:
    weight = torch.ones(8)
    storage = weakref.ref(weight.untyped_storage())
    x, output = torch.zeros(8), torch.zeros(8)
    holder = {"weight": weight}
    graph = plugin.graphhal_capture(
        request_for(lambda: output.copy_(x + holder.get("weight", x)), output)
    )
    aliases = [t for t in graph.handle.registers if isinstance(t, torch.Tensor)]
    assert any(alias.data_ptr() == weight.data_ptr() for alias in aliases)
    watched = [weakref.ref(alias) for alias in aliases]
    del aliases, storage
    plugin.graphhal_release([graph])
    gc.collect()
    assert all(ref() is None for ref in watched)


def test_a_capture_leaves_nothing_that_refers_to_weights_but_the_graph() -> None:
    weight = torch.nn.Parameter(torch.ones(8, 8))
    gc.disable()
    try:
        case = Case(lambda x: torch.cat([x @ weight, x]), torch.ones(2, 8))
        assert not weakref.getweakrefs(weight)  # torch.utils.swap_tensors refuses them
        aliases = [t for t in case.graph.handle.registers if isinstance(t, torch.Tensor)]
        watched = [weakref.ref(alias) for alias in aliases]
        del aliases
        plugin.graphhal_release([case.graph])
        assert watched
        assert all(ref() is None for ref in watched)
    finally:
        gc.enable()


def test_clear_and_recapture_into_the_same_pool() -> None:
    graph = plugin.graphhal_capture(chain(8))
    pool = graph.pool
    plugin.graphhal_release([graph])
    again = plugin.graphhal_capture(chain(8, pool))
    plugin.graphhal_replay(again)
    assert (again.request.output == -2).all()


def test_update_copies_the_block_to_the_packed_buffer_in_place() -> None:
    request = chain(8)
    graph = plugin.graphhal_capture(request)
    place = request.packed.data_ptr()
    block = torch.arange(64, dtype=torch.uint8)
    plugin.graphhal_update_boundaries(graph, HostUpdate({}, block))
    assert torch.equal(request.packed, block)
    assert request.packed.data_ptr() == place


def test_static_memory_made_in_inference_mode_can_be_written_outside_it() -> None:
    with torch.inference_mode():
        request = chain(8)
        graph = plugin.graphhal_capture(request)
    plugin.graphhal_update_boundaries(graph, HostUpdate({}, torch.ones(64, dtype=torch.uint8)))
    plugin.graphhal_replay(graph)
    assert (request.output == -2).all()


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64],
)
def test_poison_of_floats_is_nan(dtype: torch.dtype) -> None:
    tensor = poison(torch.zeros(3, 2).to(dtype)[1:])
    assert tensor.to(torch.complex64).isnan().all()
    assert tensor._base is None or tensor._base.to(torch.complex64).isnan().all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64, torch.uint16])
def test_poison_of_integers_is_out_of_any_range(dtype: torch.dtype) -> None:
    assert poison(torch.zeros(3, dtype=dtype)).tolist() == [torch.iinfo(dtype).max] * 3
