"""What vLLM's memory profile is told, and how much graphs may take, on an imagined card."""

import types
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from graphhal.errors import SettingsError  # noqa: E402
from graphhal.settings import Settings  # noqa: E402
from graphhal.vllm_worker import memory  # noqa: E402

MIB = 2**20


class Model:
    """Something that can be referred to weakly, as a module can."""


class Card:
    def __init__(self, free: int) -> None:
        self.free = free


class Graphs:
    """Captures by taking memory of the card: much for the largest graph, little for each other."""

    def __init__(
        self, card: Card, sizes: list[int], first: int, each: int, kept: int | None = None
    ) -> None:
        self.card, self.first, self.each, self.kept = card, first, each, kept
        self.sizes = sizes
        self.captured: list[str] = []
        self.taken = 0
        self.platform = types.SimpleNamespace(
            info=types.SimpleNamespace(name="imagined", free_bytes=lambda: card.free)
        )
        self.adapter = types.SimpleNamespace(device=torch.device("cpu"))

    def ladder(self) -> list[Any]:
        return [types.SimpleNamespace(key=str(n), rows=n, tokens=n) for n in self.sizes]

    def keys(self) -> list[str]:
        return self.captured

    def capture(self, progress: Any = None, keys: Any = None) -> Any:
        self.card.free += self.taken
        self.taken, self.captured = 0, []
        wanted = sorted(self.sizes, reverse=True)
        for done, size in enumerate(n for n in wanted if keys is None or str(n) in keys):
            if self.kept is not None and len(self.captured) >= self.kept:
                break
            cost = self.each if self.captured else self.first
            self.card.free -= cost
            self.taken += cost
            self.captured.append(str(size))
            if progress is not None:
                progress(done + 1, len(wanted), str(size))
        return types.SimpleNamespace(num_bytes=self.taken)


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_profiled", weakref.WeakKeyDictionary())
    monkeypatch.setattr(memory, "_settle", lambda: None)


def test_the_sample_and_the_held_block_are_what_capture_takes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    card, model = Card(8000 * MIB), Model()
    graphs = Graphs(card, list(range(1, 65)), first=600 * MIB, each=2 * MIB)
    before = card.free
    held = memory.sample(model, [graphs])
    assert len(graphs.captured) == memory.SAMPLED
    told = before - card.free + held.nbytes
    graphs.card.free += graphs.taken
    graphs.taken = 0
    with caplog.at_level("INFO", logger=memory.log.name):
        memory.capture_all(model, [graphs])
    taken = before - card.free
    assert taken == 600 * MIB + 63 * 2 * MIB
    assert told == pytest.approx(taken, rel=0.05)
    assert "726 MiB were expected (+0.0 %)" in caplog.text


def test_short_ladders_are_captured_whole() -> None:
    card = Card(8000 * MIB)
    graphs = Graphs(card, [1, 2, 3], first=100 * MIB, each=MIB)
    assert memory.sample(Model(), [graphs]) is None
    assert graphs.captured == ["3", "2", "1"]


def test_where_the_limit_drops_graphs_everything_is_tried() -> None:
    card = Card(8000 * MIB)
    graphs = Graphs(card, list(range(1, 20)), first=100 * MIB, each=MIB, kept=2)
    assert memory.sample(Model(), [graphs]) is None
    assert len(graphs.captured) == 2


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
        info=types.SimpleNamespace(name="imagined", free_bytes=lambda: free)
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
    platform = types.SimpleNamespace(info=types.SimpleNamespace(name="cpu", free_bytes=None))
    assert memory.limit_bytes(config(), Model(), Settings(), platform) is None
    with pytest.raises(SettingsError, match="platform cpu cannot say"):
        memory.limit_bytes(config(), Model(), Settings(memory_limit=0.5), platform)
