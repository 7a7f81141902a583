"""Data-parallel encoders: items are spread by load, gathered, and come back in order."""

import random
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from graphhal import EncoderGraphs, Settings, open_platform
from graphhal.data_parallel import DataParallelEncoder
from graphhal.errors import PeersError
from graphhal.peers import Peers, spread
from tests.ranks.processes import run_ranks
from tests.toy_encoder import ToyEncoder, request


def serve(rank: int, size: int, count: int) -> Any:
    graphs = EncoderGraphs(ToyEncoder(), open_platform("cpu"), Settings())
    graphs.capture()
    encoder = DataParallelEncoder(graphs, dist.group.WORLD)
    rng = random.Random(3)
    worst, items = 0.0, 0
    for number in range(count):
        grids = [(1, 2 * rng.randint(1, 10)) for _ in range(rng.randint(1, 6))]
        asked = request(grids, number, torch.float32)
        ours, alone = encoder.run(asked), graphs.run_eager(asked)
        assert [o.shape for o in ours] == [a.shape for a in alone]
        worst = max(worst, float((torch.cat(ours) - torch.cat(alone)).abs().max()))
        items += len(grids)
    stats = graphs.statistics
    return worst, stats.hits.total() + stats.misses.total(), items


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_shards_equal_one_process_and_each_item_is_counted_once(size):
    outcomes = run_ranks(size, serve, 40)
    assert all(worst < 1e-5 for worst, _, _ in outcomes)
    assert sum(counted for _, counted, _ in outcomes) == outcomes[0][2]


def wrong_item(rank: int, size: int) -> Any:
    encoder = DataParallelEncoder(
        EncoderGraphs(ToyEncoder(), open_platform("cpu"), Settings()), dist.group.WORLD
    )
    encoder.run({"grids": [(1, 2), (1, 3)], "pixels": torch.zeros(5, 6)})


@pytest.mark.slow
def test_a_wrong_item_is_named_on_every_rank_and_nobody_waits():
    for kind, text, _ in run_ranks(2, wrong_item):
        assert (kind, text[:7]) == ("InputError", "item 1:")


def one_rank_fails(rank: int, size: int) -> Any:
    graphs = EncoderGraphs(ToyEncoder(), open_platform("cpu"), Settings())
    graphs.output_kind()
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2))
    encoder = DataParallelEncoder(graphs, group)
    if rank == 1:
        graphs.adapter.forward = None
        with pytest.raises(TypeError):
            encoder.run(request([(1, 8), (1, 4), (1, 2)], 0, torch.float32))
        sleep(6)
        return "failed"
    began = monotonic()
    with pytest.raises(PeersError) as error:
        encoder.run(request([(1, 8), (1, 4), (1, 2)], 0, torch.float32))
    return str(error.value), monotonic() - began


@pytest.mark.slow
def test_a_rank_that_fails_in_its_items_keeps_nobody_waiting_for_ever():
    (text, seconds), *_ = run_ranks(2, one_rank_fails)
    assert text.startswith(
        "rank 0 waited at the gather of 3 items, rank 0 of 1 items, rank 1 of 2 items; a rank that "
    )
    assert seconds < 6


def one_item_for_four(rank: int, size: int) -> Any:
    graphs = EncoderGraphs(ToyEncoder(), open_platform("cpu"), Settings())
    graphs.capture()
    encoder = DataParallelEncoder(graphs, dist.group.WORLD)
    asked = request([(1, 8)], 0, torch.float32)
    ours, alone = encoder.run(asked), graphs.run_eager(asked)
    stats = graphs.stats()
    return torch.equal(ours[0], alone[0]), stats["hits"], stats["misses"]


@pytest.mark.slow
def test_ranks_without_an_item_take_part_in_the_gather():
    outcomes = run_ranks(4, one_item_for_four)
    assert outcomes == [(True, {"image": 1}, {}), *[(True, {}, {})] * 3]


def test_an_empty_request_needs_no_rank():
    encoder = object.__new__(DataParallelEncoder)
    encoder._graphs = EncoderGraphs(ToyEncoder(), open_platform("cpu"), Settings())
    assert encoder.run({"grids": [], "pixels": torch.zeros(0, 6)}) == []


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(1, 8))
def test_every_item_goes_to_one_rank_and_no_rank_is_left_far_behind(loads, ranks):
    shares = spread(loads, ranks)
    assert len(shares) == ranks
    assert sorted(index for share in shares for index in share) == list(range(len(loads)))
    assert all(list(share) == sorted(share) for share in shares)
    totals = [sum(loads[index] for index in share) for share in shares]
    assert max(totals) - min(totals) <= max(loads, default=0)


def test_a_rank_alone_agrees_with_itself():
    alone = Peers()
    assert alone.exchange("x", 3) == [3]
    assert alone.all_have("x", 3) == 3
    assert alone.first_problem("x", "broken") == "broken"


def test_values_that_differ_are_shown():
    class Two(Peers):
        size = 2

        def exchange(self, what, value):
            return [value, "other"]

    with pytest.raises(PeersError, match=r"^ladder: rank 1 has other, rank 0 has mine; start"):
        Two().all_have("ladder", "mine")
    assert Two().first_problem("x", None) == "rank 1: other"
