"""Tensor-parallel weights: ranks capture alike, decide alike, and never wait for ever."""

import random
from dataclasses import replace
from datetime import timedelta
from itertools import count
from time import monotonic, sleep
from typing import Any

import pytest
import torch
import torch.distributed as dist

from graphhal import EncoderGraphs, Settings, graph_set, open_platform, self_check
from graphhal.errors import CaptureError, PeersError, ReplayError
from graphhal.peers import DistributedPeers
from graphhal.platform import CaptureRequest
from tests.ranks.processes import run_ranks
from tests.ranks.sharded_encoder import ShardedToyEncoder
from tests.toy_encoder import ToyEncoder, request

pytestmark = pytest.mark.slow  # every test starts processes
SHORT = timedelta(seconds=20)


def graphs_of(
    rank: int, options: dict[str, Any] | None = None, wait: timedelta = SHORT, **knobs: Any
) -> EncoderGraphs:
    adapter = ShardedToyEncoder(dist.group.WORLD, **knobs)
    peers = DistributedPeers(dist.group.WORLD, wait)
    return EncoderGraphs(adapter, open_platform("cpu"), Settings(**(options or {})), peers)


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
    graphs = graphs_of(rank, {"memory_limit": None if rank == 0 else 1})
    report = graphs.capture()
    return [str(c.key) for c in report.captured], {d.reason for d in report.dropped}


def test_the_smallest_memory_limit_counts_for_every_rank():
    outcomes = run_ranks(2, less_memory)
    assert [keys for keys, _ in outcomes] == [[], []]
    assert all("memory_limit" in reason for _, reasons in outcomes for reason in reasons)


def unlike_cards(rank: int, size: int) -> Any:
    mib = 2**20
    options = {"memory_limit": 42 * mib, "self_check": "off"}
    graphs = graphs_of(rank, options, budgets=range(4, 65, 4))
    capture = graphs.platform.capture

    def weighed(asked: CaptureRequest) -> Any:
        graph = capture(asked)
        shared = asked.key.size * (rank + 1) * mib // 4 if asked.pool is None else 0
        graph.num_bytes = shared + 2 * mib
        return graph

    object.__setattr__(graphs.platform, "capture", weighed)
    report = graphs.capture()
    return [c.key.size for c in report.captured], len(report.dropped), report.num_bytes <= 42 * mib


def test_ranks_keep_what_the_one_with_the_least_room_keeps():
    """16 graphs take a pool of 16, 32 or 48 MiB on the largest, and 32 MiB besides."""
    outcomes = run_ranks(3, unlike_cards)
    keys, dropped, within = outcomes[0]
    assert outcomes == [(keys, dropped, within)] * 3
    assert within and keys[-1] == 4 and keys == list(range(keys[0], 0, -4))
    assert 28 <= keys[0] <= 36 and len(keys) + dropped == 16


def other_ladder(rank: int, size: int) -> Any:
    graphs_of(rank, budgets=(4, 8) if rank == 1 else (4, 16)).capture()


def test_ranks_with_other_ladders_are_refused_by_name():
    for kind, text, _ in run_ranks(2, other_ladder):
        assert kind == "PeersError"
        assert text.startswith("ladder to capture: rank 1 has ")
        assert "toy/image[8]" in text and "toy/image[16]" in text


def other_order(rank: int, size: int) -> Any:
    graphs = graphs_of(rank)
    capacities = graphs.adapter.capacities
    if rank == 1:
        graphs.adapter.capacities = lambda settings: capacities(settings)[::-1]
    graphs.capture()


def test_another_capture_order_is_refused():
    for kind, text, _ in run_ranks(2, other_order):
        assert kind == "PeersError"
        assert text.startswith("ladder to capture: rank 1 has ['toy/image[16]', 'toy/image[8]', ")


def elsewhere(rank: int, size: int) -> Any:
    DistributedPeers(dist.group.WORLD, SHORT).exchange(f"capture of toy[{4 * rank}]", None)


def test_a_rank_at_another_key_is_refused_by_name():
    for kind, text, _ in run_ranks(2, elsewhere):
        assert kind == "PeersError"
        assert text.startswith(
            "rank 1 is at 'capture of toy[4]' while rank 0 is at 'capture of toy[0]'"
        )


DECIDES = {
    "policy": "policy: rank 1 has packed, rank 0 has single; start every rank with",
    "exact_only": "exact_only: rank 1 has True, rank 0 has False",
    "self_check": "self_check: rank 1 has quick, rank 0 has full",
    "max_seqlen": "bounds of the ladder: rank 1 has [(",
    "name": "platform: rank 1 has other, rank 0 has cpu",
    "allow_empty": "platform's allow_empty: rank 1 has False, rank 0 has True",
    "capabilities": "platform's collectives: rank 1 has False, rank 0 has True",
}


@pytest.mark.parametrize("what", DECIDES)
def test_ranks_that_would_decide_otherwise_are_refused(what):
    for kind, text, _ in run_ranks(2, decides_otherwise, what):
        assert kind == "PeersError"
        assert text.startswith(DECIDES[what])


def decides_otherwise(rank: int, size: int, what: str) -> Any:
    options = {"policy": "packed", "exact_only": True, "self_check": "quick"}
    of_platform = {"name": "other", "allow_empty": False, "capabilities": frozenset()}
    graphs = graphs_of(rank, {what: options[what]} if rank == 1 and what in options else {})
    if rank == 1 and what == "max_seqlen":
        capacities = graphs.adapter.capacities
        graphs.adapter.capacities = lambda settings: tuple(
            replace(c, sequences={n: replace(b, max_seqlen=12) for n, b in c.sequences.items()})
            for c in capacities(settings)
        )
    if rank == 1 and what in of_platform:
        object.__setattr__(graphs.platform.info, what, of_platform[what])
    graphs.capture()


def no_memory_for_buffers(rank: int, size: int) -> Any:
    graphs = graphs_of(rank)
    arena, left = graph_set.Arena, [1 if rank == 1 else 0]

    def allocate(*args: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("planted")
        return arena(*args)

    graph_set.Arena = allocate
    began = monotonic()
    report = graphs.capture()
    dropped = [(str(d.key), d.reason) for d in report.dropped]
    return [str(c.key) for c in report.captured], dropped, monotonic() - began


def test_a_rank_without_memory_for_its_buffers_keeps_no_other_waiting_in_a_collective():
    for keys, dropped, seconds in run_ranks(2, no_memory_for_buffers):
        assert keys == ["toy/image[8]", "toy/image[4]"]
        ((key, reason),) = dropped
        assert key == "toy/image[16]"
        assert reason.startswith("rank 1: out of memory for its inputs and outputs")
        assert seconds < 20


def weights_moved(rank: int, size: int) -> Any:
    graphs = graphs_of(rank)
    graphs.capture()
    assert graphs.check_weights()
    if rank == 1:  # the other rank's allocator gave the new weights the old addresses
        weight = graphs.adapter.tower.mergers[0].weight
        weight.data = weight.data.clone()
    return graphs.check_weights(), graphs.keys()


def test_weights_that_moved_on_one_rank_are_every_rank_s():
    assert run_ranks(2, weights_moved) == [(False, [])] * 2


def hooked(rank: int, size: int, ranks: tuple[int, ...]) -> Any:
    graphs = graphs_of(rank, wait=timedelta(seconds=3))
    graphs.capture()
    if rank not in ranks:
        sleep(8)  # it would be replaying
        return "replays"
    graphs.adapter.tower.mergers[0].register_forward_hook(lambda module, args, output: output)
    outputs = graphs.run(request([(1, 16)], 0, torch.float32))
    return graphs.stats()["misses"], bool(torch.isfinite(outputs[0]).all())


def test_weights_that_moved_on_every_rank_run_eagerly_on_every_rank():
    missed = {"image": {"weights were rebound after capture": 1}}
    assert run_ranks(2, hooked, (0, 1)) == [(missed, True)] * 2


def test_a_rank_whose_weights_alone_moved_ends_and_encodes_nothing_beside_replays():
    replays, (kind, text, _) = run_ranks(2, hooked, (1,))
    assert replays == "replays"
    assert kind == "PeersError"
    assert text.startswith("rank 1 waited 0:00:03 at 'weights moved' for 2 ranks: ")


def failing_replay(rank: int, size: int) -> Any:
    graphs = graphs_of(rank)
    graphs.capture()

    def failing(graph: Any) -> None:
        raise RuntimeError("planted")

    object.__setattr__(graphs.platform, "replay", failing)
    with pytest.raises(ReplayError, match="planted"):
        graphs.run(request([(1, 16)], 0, torch.float32))
    return graphs.stats()["misses"], len(graphs.keys())


def test_a_replay_that_fails_is_an_error_and_no_eager_call_that_others_would_wait_for():
    assert run_ranks(2, failing_replay) == [({}, 3)] * 2


def stays_away(rank: int, size: int) -> Any:
    peers = DistributedPeers(dist.group.WORLD, timedelta(seconds=2))
    began = monotonic()
    if rank == 1:
        sleep(8)
        return "late"
    with pytest.raises(PeersError) as error:
        peers.exchange("capture of toy[8]", None)
    return str(error.value), monotonic() - began


def test_a_rank_that_stays_away_is_named_within_the_wait():
    outcomes = run_ranks(3, stays_away)
    text, seconds = outcomes[0]
    assert text.startswith("rank 0 waited 0:00:02 at 'capture of toy[8]' for 3 ranks: ")
    assert "Ranks 1 failed to pass monitoredBarrier" in text
    assert seconds < 7
    text, seconds = outcomes[2]
    assert text.startswith("rank 2 waited 0:00:02 at 'capture of toy[8]' for 3 ranks: ")
    assert seconds < 7


def test_agreements_need_a_group_on_the_host(monkeypatch):
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    with pytest.raises(PeersError, match=r"^agreements need a gloo process group, got nccl; make"):
        DistributedPeers(object())


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


def one_is_slow(rank: int, size: int) -> Any:
    if rank == 1:
        ticks = count(step=1000)
        self_check.perf_counter = lambda: next(ticks)
    else:
        self_check.perf_counter = lambda: 0.0
    graphs = graphs_of(rank)
    replay = graphs.platform.replay
    sizes: list[int] = []

    def noted(graph: Any) -> None:
        sizes.append(graph.key.size)
        replay(graph)

    object.__setattr__(graphs.platform, "replay", noted)
    graphs._execution._platform = graphs.platform
    graphs.capture()
    return sizes


def test_a_self_check_ends_on_all_ranks_where_one_is_out_of_time():
    quick, slow = run_ranks(2, one_is_slow)
    assert quick == slow and len(quick) == 7


def test_a_verdict_of_one_rank_is_every_rank_s():
    for keys, reasons in run_ranks(2, self_check_differs):
        assert keys == ["toy/image[16]", "toy/image[8]"]
        assert len(reasons) == 1 and reasons[0].startswith("rank 1: self-check")
