"""What vLLM's memory profile is told, and how much graphs may take, on an imagined card."""

import gc
import types
import weakref
from collections.abc import Container, Iterator
from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from scripted_card import MIB, PIECE, Card, scripted  # noqa: E402

from graphhal import self_check  # noqa: E402
from graphhal.discovery import open_platform  # noqa: E402
from graphhal.errors import SettingsError  # noqa: E402
from graphhal.peers import Peers  # noqa: E402
from graphhal.runner import EncoderGraphs  # noqa: E402
from graphhal.settings import Settings  # noqa: E402
from graphhal.testing.toy_encoder import ToyEncoder  # noqa: E402
from graphhal.vllm_worker import memory  # noqa: E402


class Model:
    """Something that can be referred to weakly, as a module can."""


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_profiled", weakref.WeakKeyDictionary())


@pytest.fixture(autouse=True, scope="module")
def old_objects() -> Iterator[None]:
    """Are of no collection here: there are as many as pytest and PyTorch make."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def collector_off() -> Iterator[None]:
    """As vLLM has it while it captures."""
    gc.disable()
    yield
    gc.enable()


def encoder(
    card: Card,
    graphs: int,
    first: float,
    each: float,
    garbage: float = 0.0,
    loads: float = 0.0,
    growth: float = 0.0,
    grows: int = 12,
    kept: float = 0.0,
    workspace: float = 0.0,
    shrinks: bool = False,
    fails: Container[int] = (),
    peers: Peers | None = None,
    **options: Any,
) -> EncoderGraphs:
    settings = Settings(**{"platform": "cpu", "self_check": "quick", **options})
    budgets = range(12, 12 + 4 * graphs, 4)
    platform = scripted(
        open_platform("cpu", settings),
        card, first, each, garbage, loads, growth, grows, kept, workspace,
        largest=budgets[-1] if shrinks else 0, fails=fails,
    )  # fmt: skip
    toy = ToyEncoder(torch.device("cpu"), torch.float32, budgets)
    return EncoderGraphs(toy, platform, settings, peers)


def told_and_taken(
    card: Card, encoders: list[EncoderGraphs], limit: int | None = None
) -> tuple[int, memory.Taken]:
    """What vLLM's profile sees, and what capture takes afterwards."""
    model, before = Model(), card.free_bytes()
    held = memory.sample(model, encoders, limit)
    told = before - card.free_bytes() + (0 if held is None else held.nbytes)
    del held
    with memory.giving_back(model, encoders):
        for graphs in encoders:
            graphs.clear()
    gc.collect()
    assert card.free_bytes() <= before  # less what the driver has loaded for good
    return told, memory.capture_all(model, encoders, limit)


@pytest.mark.parametrize(
    ("graphs", "first", "each", "garbage"),
    [
        (44, 570, 0.3, 0),
        (44, 570, 0.9, 160),
        (52, 976, 1.0, 300),
        (64, 234, 0.5, 0),
        (44, 570, 2.5, 160),
        (24, 100, 0, 0),
    ],
)
def test_the_estimate_is_what_capture_takes(
    graphs: int,
    first: float,
    each: float,
    garbage: float,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Graphs of 570 MiB were once expected to take 3691 MiB, and counted as 7632 MiB."""
    card = Card(60000 * MIB)
    one = encoder(card, graphs, first * MIB, each * MIB, garbage * MIB)
    with caplog.at_level("INFO", logger=memory.log.name), memory.collecting():
        told, taken = told_and_taken(card, [one])
    assert len(one.keys()) == graphs
    real = (first + (graphs - 1) * each) * MIB
    assert taken.counted == pytest.approx(real, abs=PIECE)
    assert taken.expected == pytest.approx(taken.counted, rel=0.01)
    assert told == pytest.approx(taken.expected, abs=PIECE)
    assert f"{taken.expected / MIB:.0f} MiB were expected (" in caplog.text


def test_garbage_does_not_pile_up_while_vllm_has_the_collector_off() -> None:
    with memory.collecting():
        assert gc.isenabled()
    assert not gc.isenabled()


def test_what_the_driver_loads_on_the_way_is_no_graphs_memory() -> None:
    """Kernels for new shapes once made 60 graphs of 2002 MiB an expected 3215 MiB."""
    card = Card(60000 * MIB)
    one = encoder(card, 60, 1860 * MIB, 2 * MIB, loads=20 * MIB)
    model = Model()
    assert memory.sample(model, [one]) is not None
    for _ in range(2):  # everything is loaded the second time
        one.clear()
        gc.collect()
        taken = memory.capture_all(model, [one])
    assert taken.expected == pytest.approx(taken.counted, rel=0.01)


@pytest.mark.parametrize("each", [0, 0.5, 1.2, 4])
def test_a_pool_that_grew_once_does_not_grow_for_every_graph(each: float) -> None:
    """124 graphs of 2152 MiB were once expected to take 2285 MiB."""
    card = Card(60000 * MIB)
    one = encoder(card, 60, 800 * MIB, each * MIB, growth=20 * MIB)
    _, taken = told_and_taken(card, [one])
    assert taken.expected == pytest.approx(taken.counted, rel=0.03)
    assert taken.expected >= taken.counted - PIECE


@pytest.mark.parametrize("kept", [0.5, 1.32, 3.5])
def test_what_the_driver_keeps_of_the_sample_is_of_the_graphs(
    kept: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """44 graphs that took 256 MiB were said to take 240: the driver had kept 16 of the sample."""
    card = Card(60000 * MIB)
    monkeypatch.setattr(memory, "_reserved", lambda: int(card.reserved))
    one = encoder(card, 44, 200 * MIB, 0, kept=kept * MIB)
    told, taken = told_and_taken(card, [one])
    real = (200 + 44 * kept) * MIB
    assert taken.counted == pytest.approx(real, abs=2 * PIECE)
    assert taken.expected == pytest.approx(real, rel=0.02)
    assert told == pytest.approx(real, rel=0.02)


def test_the_driver_keeps_what_a_profile_left_once() -> None:
    """What others gave back meanwhile is not counted, nor anything after the profile."""
    card = Card(60000 * MIB)
    card.used = 500 * MIB
    one, model = encoder(card, 44, 200 * MIB, 0, kept=MIB), Model()
    memory.sample(model, [one])
    with memory.giving_back(model, [one]):
        one.clear()
        card.give(500 * MIB)
    with memory.giving_back(model, [one]):
        pass
    taken = memory.capture_all(model, [one])
    assert taken.counted == pytest.approx((200 + 32) * MIB, abs=2 * PIECE)


def test_a_librarys_workspace_is_no_graphs_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the allocator took beside the graphs once made the estimate negative."""
    card = Card(60000 * MIB)
    monkeypatch.setattr(memory, "_reserved", lambda: int(card.reserved))
    one = encoder(card, 44, 200 * MIB, 1.3 * MIB, growth=2 * MIB, grows=2, workspace=256 * MIB)
    told, taken = told_and_taken(card, [one])
    assert taken.expected == pytest.approx(taken.counted, rel=0.03)
    assert told == pytest.approx(taken.counted + 256 * MIB, rel=0.03)


def test_the_workspaces_of_the_hosts_streams_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM captures on a new stream each time: 44 graphs that took 285 MiB were said to have taken
    318, where 293 were expected."""
    card = Card(60000 * MIB)
    card.of_stream = 32 * MIB
    monkeypatch.setattr(memory, "_reserved", lambda: int(card.reserved))
    monkeypatch.setattr(memory, "take_workspaces", card.use_stream)
    one, model = encoder(card, 44, 200 * MIB, MIB), Model()
    memory.sample(model, [one])
    with memory.giving_back(model, [one]):
        one.clear()
    card.stream_is_new = True
    taken = memory.capture_all(model, [one])
    assert taken.counted == pytest.approx(243 * MIB, abs=2 * PIECE)
    assert taken.expected == pytest.approx(taken.counted, rel=0.01)


@pytest.mark.parametrize("grows", [2, 3, 5])
def test_pieces_that_the_pool_grows_by_are_not_every_graphs(
    grows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two in eleven graphs of a sample made it grow: 44 graphs of 256 MiB were expected to take
    266, and 60 of some 425 were expected to take 448."""
    card = Card(60000 * MIB)
    monkeypatch.setattr(memory, "_reserved", lambda: int(card.reserved))
    one = encoder(card, 44, 200 * MIB, 1.3 * MIB, growth=2 * MIB, grows=grows)
    _, taken = told_and_taken(card, [one])
    assert taken.expected == pytest.approx(taken.counted, rel=0.03)


def test_graphs_of_all_sizes_are_captured_for_the_profile() -> None:
    card = Card(60000 * MIB)
    one = encoder(card, 26, 100 * MIB, MIB)
    held = memory.sample(Model(), [one])
    sizes = sorted(key.size for key in set(one.keys()))
    assert len(sizes) == memory.SAMPLED
    assert (sizes[0], *sizes[-2:]) == (12, 108, 112)
    assert max(b - a for a, b in pairwise(sizes)) <= 12
    assert held is not None
    assert held.nbytes == 14 * MIB


@pytest.mark.parametrize("asked", ["full", "quick", "off"])
def test_a_profile_checks_no_more_than_it_must(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graphs never serve; those that do are checked as the operator asks."""
    seen: list[str] = []
    plain = self_check.check

    def check(adapter: Any, execution: Any, graphs: Any, mode: Any, *rest: Any) -> Any:
        seen.append(mode.value)
        return plain(adapter, execution, graphs, mode, *rest)

    monkeypatch.setattr(self_check, "check", check)
    one = encoder(Card(60000 * MIB), 20, 100 * MIB, MIB, self_check=asked)
    told_and_taken(Card(60000 * MIB), [one])
    assert seen == ["off", asked]
    assert one.settings.self_check == asked


def test_short_ladders_are_captured_whole() -> None:
    card = Card(60000 * MIB)
    one = encoder(card, memory.SAMPLED, 100 * MIB, MIB)
    assert memory.sample(Model(), [one]) is None
    assert len(one.keys()) == memory.SAMPLED


def test_where_the_limit_drops_graphs_everything_is_tried() -> None:
    card = Card(60000 * MIB)
    one = encoder(card, 20, 100 * MIB, MIB)
    told, taken = told_and_taken(card, [one], limit=int(102.5 * MIB))
    assert told == taken.counted == 102 * MIB
    assert len(one.keys()) == 3


def test_where_graphs_of_the_sample_fail_everything_is_tried() -> None:
    card = Card(60000 * MIB)
    one = encoder(card, 44, 100 * MIB, 2 * MIB, fails=range(120, 180))
    told, taken = told_and_taken(card, [one])
    assert len(one.keys()) == 44 - 15
    assert taken.counted == pytest.approx((100 + 28 * 2) * MIB, rel=0.01)
    assert [told, taken.expected] == pytest.approx([taken.counted] * 2, rel=0.01)


class OtherRank(Peers):
    """One that says so of everything, and agrees with this one otherwise."""

    size = 2

    def __init__(self, beyond: bool) -> None:
        self.beyond = beyond

    def exchange(self, what: str, value: Any) -> list[Any]:
        return [value, self.beyond if what == "beyond the limit" else value]


@pytest.mark.parametrize("beyond", [False, True])
def test_ranks_go_on_with_the_one_whose_graphs_exceed_the_limit(beyond: bool) -> None:
    """Each graph's capture is agreed on: a rank that sampled only would be waited for."""
    card = Card(60000 * MIB)
    one = encoder(card, 30, 100 * MIB, 2 * MIB, peers=OtherRank(beyond))
    held = memory.sample(Model(), [one], 500 * MIB)
    assert (held is None) == beyond
    assert len(one.keys()) == (30 if beyond else memory.SAMPLED)


def test_the_estimate_never_exceeds_the_limit() -> None:
    """The sample fits; the ladder does not."""
    card = Card(60000 * MIB)
    one = encoder(card, 30, 100 * MIB, 4 * MIB)
    told, taken = told_and_taken(card, [one], limit=150 * MIB)
    assert taken.counted == pytest.approx(150 * MIB, abs=4 * MIB)
    assert told == pytest.approx(taken.counted, rel=0.05)
    assert 0 < len(one.keys()) < 30


@pytest.mark.parametrize(
    ("limit", "vision", "audio"), [(500, 30, 20), (437, 29, 20), (300, 20, 13), (150, 9, 6)]
)
def test_encoders_of_one_model_share_the_limit(limit: int, vision: int, audio: int) -> None:
    """Pictures would take all of it, and speech would have no graph."""
    card = Card(60000 * MIB)
    encoders = [
        encoder(card, 30, 240 * MIB, 2 * MIB, shrinks=True),
        encoder(card, 20, 100 * MIB, 2 * MIB, shrinks=True),
    ]
    told, taken = told_and_taken(card, encoders, limit=limit * MIB)
    assert taken.counted is not None
    assert taken.counted <= limit * MIB
    assert told == pytest.approx(taken.counted, rel=0.05)
    assert [len(each.keys()) for each in encoders] == pytest.approx([vision, audio], abs=1)
    for unprofiled in (Model(),) * 2:  # vLLM with an explicit KV cache; then again, as after sleep
        for graphs in encoders:
            graphs.clear()
        taken = memory.capture_all(unprofiled, encoders, limit * MIB)
        assert taken.expected == 0
        assert taken.counted is not None
        assert taken.counted <= limit * MIB
        assert [len(each.keys()) for each in encoders] == pytest.approx([vision, audio], abs=1)


def test_a_limit_leaves_an_encoder_what_the_others_do_not_take() -> None:
    card = Card(60000 * MIB)
    too_large = encoder(card, 12, 200 * MIB, 2 * MIB)
    other = encoder(card, 12, 50 * MIB, 2 * MIB)
    told_and_taken(card, [too_large, other], limit=150 * MIB)
    assert (len(too_large.keys()), len(other.keys())) == (0, 12)


def test_a_block_that_does_not_fit_stops_no_start_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    card = Card(60000 * MIB)
    one = encoder(card, 20, 100 * MIB, MIB)

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    capture = one.capture

    def then_full(*given: Any, **options: Any) -> Any:
        report = capture(*given, **options)
        monkeypatch.setattr(torch, "empty", full)
        return report

    monkeypatch.setattr(one, "capture", then_full)
    assert memory.sample(Model(), [one]) is None
    assert "are not free" in caplog.text


def test_a_hosts_memory_is_no_measure() -> None:
    """Other processes take it, too."""
    settings = Settings(platform="cpu", self_check="quick")
    platform = open_platform("cpu", settings)
    one = EncoderGraphs(ToyEncoder(torch.device("cpu"), torch.float32), platform, settings)
    model = Model()
    assert memory.limit_bytes(config(), model, settings, platform) is None
    assert memory.sample(model, [one]) is None
    taken = memory.capture_all(model, [one])
    assert taken == memory.Taken(one.report.num_bytes, None)


def test_profiling_is_recognised_by_who_calls() -> None:
    def profile_cudagraph_memory() -> bool:
        return memory.is_profiling()

    def capture_model() -> bool:
        return memory.is_profiling()

    assert profile_cudagraph_memory() is True
    assert capture_model() is False


def config(layers: dict[str, Any] | None = None, **cache: Any) -> Any:
    return types.SimpleNamespace(
        cache_config=types.SimpleNamespace(gpu_memory_utilization=0.9, **cache),
        compilation_config=types.SimpleNamespace(static_forward_context=layers or {}),
        model_config=types.SimpleNamespace(max_model_len=4096),
    )


def layer(num_bytes: int) -> Any:
    spec = types.SimpleNamespace(max_memory_usage_bytes=lambda vllm_config: num_bytes)
    return types.SimpleNamespace(get_kv_cache_spec=lambda vllm_config: spec)


@pytest.fixture
def card_of_80_gib(monkeypatch: pytest.MonkeyPatch) -> Any:
    total, free = 80 * 1024 * MIB, 20 * 1024 * MIB
    for name, value in (
        ("get_memory_info", (free, total)),
        ("memory_allocated", 0),
        ("max_memory_allocated", 0),
        ("memory_reserved", 0),
    ):
        monkeypatch.setattr(torch.accelerator, name, lambda value=value: value, raising=False)
    return types.SimpleNamespace(
        info=types.SimpleNamespace(name="imagined", reference=False, free_bytes=lambda: free)
    )


def test_default_limit_is_a_tenth_of_the_kv_cache(card_of_80_gib: Any) -> None:
    room = 20 * 1024 * MIB - (80 * 1024 * MIB - int(80 * 1024 * MIB * 0.9))
    found = memory.limit_bytes(config(), Model(), Settings(), card_of_80_gib)
    assert found == int(0.1 * room)


def test_one_request_must_still_fit(card_of_80_gib: Any) -> None:
    """The server that did not start: 6.0 GiB a request, 7.58 left, 6.39 taken by graphs."""
    room = 20 * 1024 * MIB - (80 * 1024 * MIB - int(80 * 1024 * MIB * 0.9))
    request = room - 100 * MIB
    vllm_config = config({"a": layer(request // 2), "b": layer(request - request // 2)})
    unknown = types.SimpleNamespace(get_kv_cache_spec=lambda vllm_config: {}["size"])
    vllm_config.compilation_config.static_forward_context["c"] = unknown
    assert memory.request_bytes(vllm_config) == request
    assert memory.limit_bytes(vllm_config, Model(), Settings(), card_of_80_gib) == 100 * MIB
    vllm_config = config({"a": layer(2 * room)})
    assert memory.limit_bytes(vllm_config, Model(), Settings(), card_of_80_gib) == 0


def test_graphs_live_beside_an_explicit_kv_cache(card_of_80_gib: Any) -> None:
    vllm_config = config(kv_cache_memory_bytes=18 * 1024 * MIB)
    found = memory.limit_bytes(vllm_config, Model(), Settings(), card_of_80_gib)
    assert found == 1024 * MIB


def test_the_limit_is_found_once_for_a_model(card_of_80_gib: Any) -> None:
    """Later the KV cache has taken the memory; the answer must not shrink with it."""
    model = Model()
    first = memory.limit_bytes(config(), model, Settings(), card_of_80_gib)
    card_of_80_gib.info.free_bytes = lambda: 0
    assert memory.limit_bytes(config(), model, Settings(), card_of_80_gib) == first
    share = Model()
    card_of_80_gib.info.free_bytes = lambda: 1000 * MIB
    quarter = Settings(memory_limit="25%")
    assert memory.limit_bytes(config(), share, quarter, card_of_80_gib) == 250 * MIB
    card_of_80_gib.info.free_bytes = lambda: 0
    assert memory.limit_bytes(config(), share, quarter, card_of_80_gib) == 250 * MIB


def test_bytes_are_taken_as_they_are(card_of_80_gib: Any) -> None:
    settings = Settings(memory_limit="650MiB")
    assert memory.limit_bytes(config(), Model(), settings, card_of_80_gib) == 650 * MIB


def test_a_fraction_of_what_nobody_knows_is_an_error() -> None:
    platform = types.SimpleNamespace(
        info=types.SimpleNamespace(name="cpu", reference=True, free_bytes=None)
    )
    assert memory.limit_bytes(config(), Model(), Settings(), platform) is None
    with pytest.raises(SettingsError, match="platform cpu cannot say"):
        memory.limit_bytes(config(), Model(), Settings(memory_limit=0.5), platform)
