"""Real towers, real runners of vLLM, the cpu platform: hits, fallback, equality with the peer."""

import threading
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.vllm


def worst(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    assert [part.shape for part in ours] == [part.shape for part in theirs]
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))


def assert_as_eager(
    model: Any, engine: Any, manager: Any, groups: list[tuple[str, dict[str, Any]]], within: float
) -> None:
    """Each runner beside itself without a manager: they order the outputs of a step differently."""
    import vllm_on_cpu as on_cpu

    eager = on_cpu.run_v1(model, engine, None, groups)
    assert worst(on_cpu.run_v1(model, engine, manager, groups), eager) < within
    eager = on_cpu.run_v2(model, None, groups)
    assert worst(on_cpu.run_v2(model, manager, groups), eager) < within


def groups_of(model: Any) -> list[tuple[str, dict[str, Any]]]:
    import vllm_on_cpu as on_cpu

    groups = [
        ("image", on_cpu.image_group(model, [[1, 8, 8], [1, 4, 8]])),
        ("video", on_cpu.video_group(model, [[2, 4, 8]])),
    ]
    if hasattr(model, "audio_tower"):
        groups.append(("audio", on_cpu.audio_group(model, [230, 100])))
    return groups


@pytest.mark.parametrize("adapter", ["own", "protocol"])
@pytest.mark.parametrize("tower", ["qwen3_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_are_replayed_by_both_runners(
    engine: Any, tower: str, adapter: str, dtype: torch.dtype
) -> None:
    import vllm_on_cpu as on_cpu

    engine.additional_config["graphhal"]["vllm_adapter"] = adapter
    model = getattr(on_cpu, tower)(engine, dtype)
    manager = on_cpu.make_manager(engine, model)
    assert type(manager).__name__ == "EncoderGraphExecutor"
    assert not manager.is_captured()
    manager.capture(graph_pool=None)
    assert manager.is_captured()
    groups = [
        (modality, {k: v.to(dtype) if v.is_floating_point() else v for k, v in group.items()})
        for modality, group in groups_of(model)
    ]
    assert_as_eager(model, engine, manager, groups, 1e-5 if dtype == torch.float32 else 2e-2)
    stats = manager.get_cumulative_stats()
    assert stats["hits"] == {"image": 4, "video": 2}
    assert stats["graph_misses"] == 0
    assert stats["dropped"] == []
    assert stats["encoders"][0].startswith("vllm_qwen" if adapter == "own" else "Qwen")


def test_thinker_has_graphs_for_pictures_films_and_speech_on_opt_in(engine: Any) -> None:
    import vllm_on_cpu as on_cpu

    from graphhal.vllm_worker import plugin

    model = on_cpu.qwen3_omni(engine)
    engine.additional_config["graphhal"]["vllm_models"] = "qwen3_omni"
    plugin.install(engine)
    manager = on_cpu.make_manager(engine, model)
    # The thinker's audio graphs have their own sizes: vLLM's vision budgets do not bound them.
    manager.capture(graph_pool=None)
    groups = groups_of(model)
    assert_as_eager(model, engine, manager, groups, 1e-5)
    stats = manager.get_cumulative_stats()
    assert stats["hits"] == {"image": 4, "video": 2, "audio": 4}
    assert stats["graph_misses"] == 0


def test_a_group_of_several_modalities_is_whole_and_in_the_models_order(engine: Any) -> None:
    """Runners make no such groups; the model's outputs come in the order of their keys."""
    import vllm_on_cpu as on_cpu

    from graphhal.vllm_worker import plugin

    model = on_cpu.qwen3_omni(engine)
    engine.additional_config["graphhal"] |= {"vllm_models": "qwen3_omni", "audio_chunks": "3-4"}
    plugin.install(engine)
    manager = on_cpu.make_manager(engine, model)
    manager.capture(graph_pool=None)
    parts = {modality[0]: group for modality, group in groups_of(model)}
    for order in ("iv", "vi", "ia", "ai", "va", "av", "vai"):
        group: dict[str, Any] = {}
        for letter in order:
            group |= parts[letter]
        eager = list(model.embed_multimodal(**group))
        missed = manager.stats()["graph_misses"]
        ours = manager.execute(group)
        if "a" in order:
            assert ours is None, order
            reasons = {why for of in manager.stats()["misses"].values() for why in of}
            assert reasons == {"no encoder takes these inputs"}, order
            assert manager.stats()["graph_misses"] > missed, order
        else:
            assert worst(ours, eager) < 1e-5, order


@pytest.mark.parametrize("share", [(0,), (2,), (0, 2), (1,), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("lengths", [[50, 300, 21], [50, 30, 21]])
def test_a_ranks_share_of_the_clips_is_encoded_as_in_the_whole_group(
    engine: Any, lengths: list[int], share: tuple[int, ...]
) -> None:
    """The tower pads every window to the longest of its call, which may be another rank's."""
    from dataclasses import replace

    import vllm_on_cpu as on_cpu

    from graphhal import EncoderGraphs, Settings, open_platform
    from graphhal.vllm_worker.qwen_audio import VllmQwenAudio

    model = on_cpu.qwen3_omni(engine)
    for parameter in model.audio_tower.parameters():
        parameter.mul_(3)  # clips differ by more than their tokens have in common
    adapter = VllmQwenAudio(model.audio_tower)
    graphs = EncoderGraphs(adapter, open_platform("cpu"), Settings())
    group = on_cpu.audio_group(model, lengths)
    items = adapter.item_specs(group)
    mine = tuple(replace(items[index], index=number) for number, index in enumerate(share))
    eager = model.embed_multimodal(**group)
    assert worst(graphs.run_items(group, mine), [eager[index] for index in share]) < 1e-6


def test_what_no_graph_holds_goes_to_embed_multimodal(engine: Any) -> None:
    import vllm_on_cpu as on_cpu

    model = on_cpu.qwen3_vl(engine)
    manager = on_cpu.make_manager(engine, model)
    manager.capture(graph_pool=None)
    group = on_cpu.image_group(model, [[1, 18, 18]])
    assert manager.execute(group) is None
    eager = on_cpu.run_v1(model, engine, None, [("image", group)])
    assert torch.equal(on_cpu.run_v1(model, engine, manager, [("image", group)])[0], eager[0])
    assert manager.stats()["misses"] == {"image": {"more rows than the largest graph": 2}}


@pytest.mark.parametrize("adapter", ["own", "protocol"])
@pytest.mark.parametrize("free", [True, False])
def test_a_step_of_many_pictures_is_replayed_where_slots_are_free(
    engine: Any, monkeypatch: pytest.MonkeyPatch, adapter: str, free: bool
) -> None:
    import vllm_on_cpu as on_cpu

    from graphhal.vllm_worker import limits

    if free:
        monkeypatch.setattr(limits, "FREE_SLOTS", ("TORCH_SDPA None",))
    engine.compilation_config.encoder_cudagraph_max_vision_items_per_batch = 0
    engine.additional_config["graphhal"]["vllm_adapter"] = adapter
    model = on_cpu.qwen3_vl(engine)
    manager = on_cpu.make_manager(engine, model)
    manager.capture(graph_pool=None)
    assert not manager.stats()["dropped"]
    group = on_cpu.image_group(model, [[1, 4, 4], [1, 2, 2]] * 12)
    ours, eager = manager.execute(group), model.embed_multimodal(**group)
    assert (ours is not None) == free
    assert ours is None or worst(ours, eager) < 1e-5


@pytest.mark.parametrize(("asked", "passes"), [({}, 1), ({"warmups": 3}, 3)])
def test_graphs_are_warmed_up_once_or_as_often_as_asked(
    engine: Any, asked: dict[str, int], passes: int
) -> None:
    import vllm_on_cpu as on_cpu

    engine.additional_config["graphhal"] |= asked
    manager = on_cpu.make_manager(engine, on_cpu.qwen3_vl(engine))
    manager.capture(graph_pool=None)
    (graphs,) = manager._graphs()
    made = {entry.graph.request.warmups for entry in graphs._graphs.entries.values()}
    assert made == {passes}


@pytest.mark.parametrize("policy", ["single", "packed"])
@pytest.mark.parametrize("tower", ["qwen3_vl", "qwen2_5_vl", "qwen3_omni"])
def test_exact_only_is_equal_to_eager_bit_by_bit_or_is_eager(
    engine: Any, tower: str, policy: str
) -> None:
    """Positions that are interpolated in another order than the tower's round otherwise."""
    import vllm_on_cpu as on_cpu

    from graphhal.vllm_worker import plugin

    own = {"exact_only": True, "policy": policy, "vllm_models": "qwen3_omni"}
    engine.additional_config["graphhal"] |= own
    model = getattr(on_cpu, tower)(engine)
    plugin.install(engine)
    manager = on_cpu.make_manager(engine, model)
    manager.capture(graph_pool=None)
    groups = [
        on_cpu.image_group(model, [[1, 8, 8]]),
        on_cpu.image_group(model, [[1, 4, 8], [1, 8, 12]]),
        on_cpu.video_group(model, [[2, 4, 8]]),
    ]
    if tower == "qwen3_omni":
        groups.append(on_cpu.audio_group(model, [300, 100]))
    for group in groups:
        ours, eager = manager.execute(dict(group)), model.embed_multimodal(**group)
        for one, other in zip(ours or (), eager, strict=ours is not None):
            assert torch.equal(one, other)
    stats = manager.stats()
    if tower == "qwen3_omni":
        assert stats["hits"] == {"audio": 2}
        assert "exact_only" in next(iter(stats["misses"]["image"]))
    else:
        assert stats["hits"] == {"image": 3, "video": 1}


@pytest.mark.parametrize("adapter", ["own", "protocol"])
def test_an_empty_list_of_budgets_asks_for_no_graph(
    engine: Any, adapter: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As for a model whose other encoder alone shall have graphs; it is no fault of the model's."""
    import vllm_on_cpu as on_cpu

    engine.compilation_config.encoder_cudagraph_token_budgets = []
    engine.additional_config["graphhal"] |= {"vllm_adapter": adapter, "token_budgets": []}
    model = on_cpu.qwen3_vl(engine)
    with on_cpu.log_of("graphhal", caplog):
        manager = on_cpu.make_manager(engine, model)
        manager.capture(graph_pool=None)
        assert manager.execute(on_cpu.image_group(model, [[1, 8, 8]])) is None
    assert "its own code" not in caplog.text
    assert manager.stats()["misses"] == {"image": {"no graph is captured": 1}}
    assert manager.token_budgets == []


def test_pre_computed_embeddings_are_never_replayed(engine: Any) -> None:
    import vllm_on_cpu as on_cpu

    model = on_cpu.qwen3_vl(engine)
    manager = on_cpu.make_manager(engine, model)
    manager.capture(graph_pool=None)
    group = {"image_embeds": torch.zeros(16, 144), "image_grid_thw": torch.tensor([[1, 8, 8]])}
    assert manager.execute(group) is None
    assert manager.stats()["misses"] == {"image": {"pre-computed embeddings": 1}}


def test_a_wrong_modality_name_is_said_aloud(engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    import vllm_on_cpu as on_cpu

    model = on_cpu.qwen3_vl(engine)
    config = model.get_encoder_cudagraph_config()
    config.modalities = ["images"]
    model.get_encoder_cudagraph_config = lambda: config
    with on_cpu.log_of("graphhal.vllm_worker.towers", caplog):
        manager = on_cpu.make_manager(engine, model)
    assert not manager.supports_modality("image")
    assert "'images'" in caplog.text
    assert "vLLM asks for one of audio, image" in caplog.text


@pytest.mark.parametrize("adapter", ["own", "protocol"])
def test_outputs_survive_later_replays(engine: Any, adapter: str) -> None:
    import vllm_on_cpu as on_cpu

    engine.additional_config["graphhal"]["vllm_adapter"] = adapter
    model = on_cpu.qwen3_vl(engine)
    manager = on_cpu.make_manager(engine, model)
    manager.capture(graph_pool=None)
    first = manager.execute(on_cpu.image_group(model, [[1, 8, 8]], seed=1))
    kept = first[0].clone()
    manager.execute(on_cpu.image_group(model, [[1, 8, 8]], seed=2))
    assert torch.equal(first[0], kept)


def test_captured_bound_is_a_guard(engine: Any) -> None:
    """A sequence longer than the baked `max_seqlen` must not be replayed."""
    import vllm_on_cpu as on_cpu

    engine.additional_config["graphhal"]["vllm_adapter"] = "protocol"
    model = on_cpu.qwen3_vl(engine)
    manager = on_cpu.make_manager(engine, model)
    manager.capture(graph_pool=None)
    group = on_cpu.image_group(model, [[1, 8, 8]])
    assert manager.execute(group) is not None
    prepare = model.prepare_encoder_cudagraph_replay_buffers

    def with_a_longer_sequence(*args: Any) -> Any:
        buffers = prepare(*args)
        buffers.values["max_seqlen"] = torch.tensor(6400, dtype=torch.int32)
        return buffers

    model.prepare_encoder_cudagraph_replay_buffers = with_a_longer_sequence
    assert manager.execute(group) is None
    misses = manager.stats()["misses"]
    assert misses == {"image": {"the adapter does not replay such a group": 1}}
    model.prepare_encoder_cudagraph_replay_buffers = prepare
    assert manager.execute(group) is not None, "the graph must not be given up for one request"


def test_clear_and_capture_again(engine: Any) -> None:
    import vllm_on_cpu as on_cpu

    model = on_cpu.qwen3_vl(engine)
    manager = on_cpu.make_manager(engine, model)
    group = on_cpu.image_group(model, [[1, 8, 8]])
    for _ in range(2):
        manager.capture(graph_pool=None)
        assert manager.execute(group) is not None
        manager.clear()
        manager.clear()
        assert not manager.is_captured()
        assert manager.execute(group) is None


@pytest.mark.parametrize("adapter", ["own", "protocol"])
def test_patches_that_are_not_the_grids_are_for_eager_to_refuse(engine: Any, adapter: str) -> None:
    """A graph would take zeros for what is missing, and leave out what is too much."""
    import vllm_on_cpu as on_cpu

    engine.additional_config["graphhal"]["vllm_adapter"] = adapter
    model = on_cpu.qwen3_vl(engine)
    manager = on_cpu.make_manager(engine, model)
    manager.capture(graph_pool=None)
    right = on_cpu.image_group(model, [[1, 8, 8]])
    for rows in (63, 65):
        pixels = torch.cat([right["pixel_values"]] * 2)[:rows]
        assert manager.execute(right | {"pixel_values": pixels}) is None, rows
    assert manager.stats()["graph_misses"] == 2
    assert manager.execute(right) is not None


@pytest.mark.parametrize(("items", "frames", "more"), [(64, 0, 0), (8, 64, 0.03)])
def test_graphs_of_the_protocol_are_no_larger_than_their_budgets(
    engine: Any, items: int, frames: int, more: float
) -> None:
    """The model prepares room for each item alike: 64 in 208 tokens were a graph of 256."""
    import vllm_on_cpu as on_cpu

    engine.compilation_config.encoder_cudagraph_token_budgets = []
    engine.compilation_config.encoder_cudagraph_max_vision_items_per_batch = items
    engine.compilation_config.encoder_cudagraph_max_frames_per_batch = frames
    engine.additional_config["graphhal"] |= {"vllm_adapter": "protocol", "max_tokens": 512}
    model = on_cpu.qwen3_vl(engine)
    (graphs,) = on_cpu.make_manager(engine, model)._graphs()
    rows = {
        capacity.key.size: graphs.adapter.buffers(capacity)["pixel_values"].shape[0]
        for capacity in graphs.ladder()
    }
    assert len(rows) > 20
    assert all(4 * budget <= found <= (1 + more) * 4 * budget for budget, found in rows.items())


@pytest.mark.parametrize(("items", "frames"), [(4, 0), (4, 8), (64, 64)])
def test_graphs_of_the_protocol_have_no_room_to_pad_where_only_exact_ones_count(
    engine: Any, items: int, frames: int
) -> None:
    import vllm_on_cpu as on_cpu

    engine.compilation_config.encoder_cudagraph_token_budgets = [17, 18, 45, 62]
    engine.compilation_config.encoder_cudagraph_max_vision_items_per_batch = items
    engine.compilation_config.encoder_cudagraph_max_frames_per_batch = frames
    engine.additional_config["graphhal"] |= {"vllm_adapter": "protocol", "exact_only": True}
    (graphs,) = on_cpu.make_manager(engine, on_cpu.qwen3_vl(engine))._graphs()
    for capacity in graphs.ladder():
        rows = graphs.adapter.buffers(capacity)["pixel_values"].shape[0]
        assert rows == 4 * capacity.key.size


@pytest.mark.timeout(120)
def test_a_fork_of_the_worker_ends_without_its_graphs(engine: Any) -> None:
    """Another thread may be serving while the worker forks: its lock is never given back."""
    import atexit
    import multiprocessing

    import vllm_on_cpu as on_cpu

    manager = on_cpu.make_manager(engine, on_cpu.qwen3_vl(engine))
    manager.capture(graph_pool=None)
    (graphs,) = manager._graphs()
    held, done = threading.Event(), threading.Event()

    def serve() -> None:
        with graphs._lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=serve)
    thread.start()
    held.wait()
    child = multiprocessing.get_context("fork").Process(target=atexit._run_exitfuncs)
    child.start()
    child.join(timeout=30)
    hangs = child.is_alive()
    child.kill()
    done.set()
    thread.join()
    assert not hangs


def test_rebound_weights_are_noticed_and_in_place_updates_work(engine: Any) -> None:
    import vllm_on_cpu as on_cpu

    model = on_cpu.qwen3_vl(engine)
    manager = on_cpu.make_manager(engine, model)
    manager.capture(graph_pool=None)
    group = on_cpu.image_group(model, [[1, 8, 8]])
    with torch.no_grad():
        for parameter in model.visual.parameters():
            parameter.mul_(1.25)
    eager = on_cpu.run_v1(model, engine, None, [("image", group)])
    assert worst(manager.execute(group), eager) < 1e-5
    model.visual.pos_embed.weight.data = model.visual.pos_embed.weight.data.clone()
    assert manager.check_weights() is False
    assert manager.execute(group) is None
    manager.capture(graph_pool=None)
    assert manager.execute(group) is not None


@pytest.mark.parametrize("adapter", ["own", "protocol"])
def test_a_tower_that_is_replaced_as_a_whole_is_noticed(engine: Any, adapter: str) -> None:
    import vllm_on_cpu as on_cpu

    engine.additional_config["graphhal"]["vllm_adapter"] = adapter
    model = on_cpu.qwen3_vl(engine)
    manager = on_cpu.make_manager(engine, model)
    manager.capture(graph_pool=None)
    group = on_cpu.image_group(model, [[1, 8, 8]])
    assert manager.execute(group) is not None
    model.visual = on_cpu.filled(on_cpu.qwen3_vl(engine).visual, seed=9)
    assert manager.execute(group) is None
    assert manager.stats()["misses"] == {"image": {"weights were rebound after capture": 1}}
    manager.capture(graph_pool=None)
    eager = on_cpu.run_v1(model, engine, None, [("image", group)])
    ours = manager.execute(group)  # an adapter of the old tower stays eager
    assert ours is None if adapter == "own" else worst(ours, eager) < 1e-5


@pytest.mark.parametrize("tower", ["qwen3_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("adapter", ["own", "protocol"])
def test_equal_to_vllms_own_manager(
    engine: Any, tower: str, adapter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm_on_cpu as on_cpu
    from vllm.config.multimodal import MultiModalConfig

    # With videos, vLLM's manager leaves a tail of zeros in cu_seqlens, which no CPU kernel takes.
    engine.model_config.multimodal_config = MultiModalConfig(limit_per_prompt={"video": 0})
    engine.additional_config["graphhal"]["vllm_adapter"] = adapter
    model = getattr(on_cpu, tower)(engine)
    group = on_cpu.image_group(model, [[1, 8, 8], [1, 4, 8], [1, 4, 4]])
    peer = on_cpu.peer_manager(engine, model, monkeypatch)
    theirs = peer.execute(dict(group))
    assert peer.graph_hits == 3
    monkeypatch.undo()
    manager = on_cpu.make_manager(engine, model)
    manager.capture(graph_pool=None)
    ours = manager.execute(dict(group))
    assert ours is not None
    assert worst(ours, theirs) < 1e-5
