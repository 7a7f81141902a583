"""Nothing that was returned is ever overwritten by a later request."""

import random
import weakref

import pytest
import torch

from graphhal.cpu import plugin as cpu
from graphhal.discovery import bind
from graphhal.errors import ReplayError
from graphhal.runner import EncoderGraphs
from graphhal.settings import Policy, Settings
from tests.plain_platform import PlainPlugin, plain_platform
from tests.toy_encoder import ToyEncoder, request


def random_request(random_: random.Random, seed: int):
    grids = [
        (1, 2 * random_.randint(1, 20), "image")
        if random_.random() < 0.7
        else (random_.randint(1, 5), 2 * random_.randint(1, 4), "video")
        for _ in range(random_.randint(1, 3))
    ]
    return request(grids, seed)


def hold_and_compare(graphs: EncoderGraphs, requests: int, held: int) -> None:
    """Keep `held` outputs, and copies of them, over so many requests; compare at the end."""
    draw = random.Random(5)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for seed in range(requests):
        outputs = graphs.run(random_request(draw, seed))
        for output in outputs:
            if len(kept) < held:
                kept.append((output, output.clone()))
            elif draw.random() < 0.1:
                kept[draw.randrange(held)] = (output, output.clone())
    assert len(kept) == held
    for output, copy in kept:
        assert torch.equal(output, copy)
        assert output.isfinite().all()


@pytest.fixture(params=["plain", "cpu"])
def platform(request):
    return plain_platform() if request.param == "plain" else bind(cpu, cpu.graphhal_probe(), "cpu")


def serve(platform, **options) -> EncoderGraphs:
    graphs = EncoderGraphs(
        ToyEncoder(paths=("image", "video")), platform, Settings(self_check="quick", **options)
    )
    graphs.capture()
    return graphs


@pytest.mark.parametrize("policy", [Policy.SINGLE, Policy.PACKED])
def test_held_outputs_survive_later_requests(platform, policy):
    graphs = serve(platform, policy=policy)
    hold_and_compare(graphs, requests=120, held=40)
    counted = graphs.stats()
    assert counted["hits"]
    assert counted["misses"]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_thousand_held_outputs_survive_ten_thousand_requests():
    platform = bind(cpu, cpu.graphhal_probe(), "cpu")
    hold_and_compare(serve(platform, policy="packed"), requests=10_000, held=1_000)


def test_no_output_shares_memory_with_a_graph(platform):
    graphs = serve(platform, policy="packed")
    static = {
        tensor.untyped_storage().data_ptr()
        for entry in graphs._graphs.entries.values()
        for tensor in (
            entry.graph.request.output,
            entry.graph.request.packed,
            *entry.graph.request.inputs.values(),
        )
    }
    for grids in ([(1, 8)], [(1, 8), (1, 4)], [(1, 60)], [(9, 4)], [(1, 8), (2, 4)]):
        outputs = graphs.run(request(grids)) + graphs.run(request(grids))
        assert static.isdisjoint({out.untyped_storage().data_ptr() for out in outputs})


def test_writing_into_an_output_changes_nothing_else(platform):
    graphs = serve(platform)
    first = graphs.run(request([(1, 8), (1, 4)]))
    second = first[1].clone()
    first[0].fill_(float("nan"))
    assert torch.equal(first[1], second)
    again = graphs.run(request([(1, 8), (1, 4)]))
    assert again[0].isfinite().all()
    assert torch.equal(again[1], second)


def test_outputs_survive_clear_recapture_and_drop(platform):
    graphs = serve(platform)
    kept = graphs.run(request([(1, 8), (2, 4)]))
    copies = [output.clone() for output in kept]
    graphs.capture()
    graphs.run(request([(1, 8), (2, 4)], seed=1))
    graphs.drop(graphs.keys()[0], "for a test")
    graphs.clear()
    assert all(map(torch.equal, kept, copies))


def test_outputs_survive_a_replay_that_failed_half_way():
    plugin = PlainPlugin()
    graphs = serve(plain_platform(plugin), policy="packed")
    asked = request([(1, 32), (1, 32), (1, 8)])
    expected = graphs.run_eager(asked)
    held = graphs.run(asked)
    plugin.after_replay = lambda graph: graph.request.output.fill_(float("nan"))
    plugin.replay_errors[16] = ReplayError("lost after it wrote")
    graphs.run(request([(1, 32), (1, 32)], seed=3))
    for output, reference in zip(held, expected, strict=True):
        torch.testing.assert_close(output, reference)


def test_the_engine_keeps_no_output_alive(platform):
    graphs = serve(platform)
    output = graphs.run(request([(1, 8)]))[0]
    watcher = weakref.ref(output)
    del output
    assert watcher() is None
