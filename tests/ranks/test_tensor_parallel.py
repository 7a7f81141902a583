"""Tensor-parallel weights: ranks capture alike, decide alike, and never wait for ever."""

import random
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from graphhal import EncoderGraphs, Settings, open_platform
from graphhal.errors import CaptureError
from graphhal.peers import DistributedPeers
from graphhal.platform import CaptureRequest
from tests.ranks.processes import run_ranks
from tests.ranks.sharded_encoder import ShardedToyEncoder
from tests.toy_encoder import ToyEncoder, request

pytestmark = pytest.mark.slow  # every test starts processes
SHORT = timedelta(seconds=20)


def graphs_of(rank: int, limit: int | None = None, **knobs: Any) -> EncoderGraphs:
    adapter = ShardedToyEncoder(dist.group.WORLD, **knobs)
    peers = DistributedPeers(dist.group.WORLD, knobs.pop("wait", SHORT))
    return EncoderGraphs(adapter, open_platform("cpu"), Settings(memory_limit=limit), peers)


def groups(count: int, seed: int) -> list[list[tuple[int, int]]]:
    rng = random.Random(seed)
    return [[(1, 2 * rng.randint(1, 10)) for _ in range(rng.randint(1, 5))] for _ in range(count)]


def serve(rank: int, size: int, count: int) -> Any:
    graphs = graphs_of(rank)
    report = graphs.capture()
    alone = ToyEncoder()
    single = EncoderGraphs(alone, open_platform("cpu"), Settings())
    worst = 0.0
    for number, grids in enumerate(groups(count, seed=5)):
        asked = request(grids, number, torch.float32)
        ours = torch.cat(graphs.run(asked))
        worst = max(worst, float((ours - torch.cat(single.run_eager(asked))).abs().max()))
    stats = graphs.stats()
    return [str(c.key) for c in report.captured], worst, stats["hits"], stats["misses"]


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_replay_together_and_equal_one_process(size):
    outcomes = run_ranks(size, serve, 60)
    keys, _, hits, misses = outcomes[0]
    assert len(keys) == 3 and sum(hits.values()) > 20 and misses
    assert all(outcome[0] == keys and outcome[2:] == (hits, misses) for outcome in outcomes)
    assert all(outcome[1] < 1e-4 for outcome in outcomes)


def one_rank_fails(rank: int, size: int) -> Any:
    graphs = graphs_of(rank)
    capture = graphs.platform.capture

    def failing(asked: CaptureRequest) -> Any:
        if rank == 1 and asked.key.size == 8:
            asked.forward()  # it gets as far as the others, then fails
            asked.forward()
            asked.forward()
            raise CaptureError("planted")
        return capture(asked)

    object.__setattr__(graphs.platform, "capture", failing)
    graphs.settings.model_copy()
    report = graphs.capture()
    asked = request([(1, 16)], 0, torch.float32)
    graphs.run(asked)
    return [str(c.key) for c in report.captured], [d.reason for d in report.dropped], graphs.stats()


def test_a_graph_that_one_rank_lacks_is_dropped_on_every_rank():
    outcomes = run_ranks(3, one_rank_fails)
    for keys, dropped, stats in outcomes:
        assert keys == ["toy/image[16]", "toy/image[4]"]
        assert dropped == ["rank 1: planted"]
        assert stats["replays"] == {"toy/image[16]": 1}


def less_memory(rank: int, size: int) -> Any:
    graphs = graphs_of(rank, limit=None if rank == 0 else 1)
    report = graphs.capture()
    return [str(c.key) for c in report.captured], {d.reason for d in report.dropped}


def test_the_smallest_memory_limit_counts_for_every_rank():
    outcomes = run_ranks(2, less_memory)
    assert [keys for keys, _ in outcomes] == [[], []]
    assert all("memory_limit" in reason for _, reasons in outcomes for reason in reasons)


def other_ladder(rank: int, size: int) -> Any:
    graphs_of(rank, budgets=(4, 8) if rank == 1 else (4, 16)).capture()


def test_ranks_with_other_ladders_are_refused_by_name():
    for kind, text, _ in run_ranks(2, other_ladder):
        assert kind == "PeersError"
        assert text.startswith("ladder to capture: rank 1 has ")
        assert "toy/image[8]" in text and "toy/image[16]" in text


def missing(rank: int, size: int) -> Any:
    graphs = graphs_of(rank)
    if rank == 2:
        return "left"
    graphs.capture()
    return "captured"


def test_a_rank_that_never_comes_is_named_within_the_wait():
    outcomes = run_ranks(3, missing)
    assert outcomes[2] == "left"
    kind, text, _ = outcomes[0]
    assert kind == "PeersError" and "ladder to capture" in text and "2" in text
    assert outcomes[1][0] == "PeersError"


def no_collectives(rank: int, size: int) -> Any:
    graphs = graphs_of(rank)
    info = graphs.platform.info
    object.__setattr__(info, "capabilities", info.capabilities - {"collectives"})
    report = graphs.capture()
    output = torch.cat(graphs.run(request([(1, 16)], 0, torch.float32)))
    return [d.reason for d in report.dropped], bool(output.isfinite().all()), graphs.stats()["hits"]


def test_a_platform_that_cannot_capture_collectives_runs_the_whole_tower_eagerly():
    for reasons, finite, hits in run_ranks(2, no_collectives):
        assert len(reasons) == 3 and finite and not hits
        assert reasons[0] == "platform cpu cannot capture collectives, and this tower runs some"


def self_check_differs(rank: int, size: int) -> Any:
    graphs = graphs_of(rank)
    replay = graphs.platform.replay

    def wrong(graph: Any) -> None:
        replay(graph)
        if rank == 1 and graph.key.size == 4:
            graph.request.output.add_(1.0)

    object.__setattr__(graphs.platform, "replay", wrong)
    graphs._execution._platform = graphs.platform
    report = graphs.capture()
    return [str(c.key) for c in report.captured], [d.reason for d in report.dropped]


def test_a_verdict_of_one_rank_is_every_rank_s():
    for keys, reasons in run_ranks(2, self_check_differs):
        assert keys == ["toy/image[16]", "toy/image[8]"]
        assert len(reasons) == 1 and reasons[0].startswith("rank 1: self-check")
