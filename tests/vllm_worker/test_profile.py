"""vLLM's own memory profile of both runners, with graphs on an imagined card."""

import contextlib
import gc
import types
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.vllm

FIRST, EACH = 570, 0.9


@pytest.fixture
def card(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replaces the device's memory below vLLM's runners and below graphhal's platform."""
    from scripted_card import MIB, Card, scripted

    from graphhal.vllm_worker import executor

    imagined = Card(100_000 * MIB)
    held: list[Any] = []
    plain_open, plain_empty = executor.open_platform, torch.empty

    def open_platform(*args: Any) -> Any:
        return scripted(plain_open(*args), imagined, FIRST * MIB, EACH * MIB, 40 * MIB)

    def empty(*shape: Any, **options: Any) -> Any:
        if options.get("dtype") is not torch.uint8 or not shape or shape[0] < MIB:
            return plain_empty(*shape, **options)  # no block that is held for the profile
        block = plain_empty(1, **options)
        held.append(shape[0])
        imagined.take(shape[0], block)
        return block

    monkeypatch.setattr(executor, "open_platform", open_platform)
    monkeypatch.setattr("graphhal.vllm_worker.memory.torch.empty", empty)
    for name, value in (
        ("get_memory_info", lambda *_: (imagined.free_bytes(), imagined.total)),
        ("memory_allocated", lambda *_: 0),
        ("max_memory_allocated", lambda *_: 0),
        ("memory_reserved", lambda *_: 0),
        ("synchronize", lambda *_: None),
        ("empty_cache", lambda *_: None),
    ):
        monkeypatch.setattr(torch.accelerator, name, value)
    engine.compilation_config.encoder_cudagraph_token_budgets = []
    engine.additional_config["graphhal"]["max_tokens"] = 256
    imagined.held = held  # type: ignore[attr-defined]
    yield imagined
    gc.collect()


def v1_runner(engine: Any, model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    from vllm.v1.worker import gpu_model_runner as module

    monkeypatch.setattr(module, "graph_capture", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(
        type(module.current_platform),
        "graph_pool_handle",
        classmethod(lambda cls: None),
        raising=False,
    )
    runner = module.GPUModelRunner.__new__(module.GPUModelRunner)
    runner.__dict__.update(
        vllm_config=engine,
        compilation_config=engine.compilation_config,
        supports_mm_inputs=True,
        device=torch.device("cpu"),
        dtype=torch.float32,
        model=model,
        lora_config=None,
        encoder_cudagraph_manager=None,
        cudagraph_dispatcher=types.SimpleNamespace(get_capture_descs=list, cudagraph_keys={}),
        maybe_remove_all_loras=lambda _: None,
        _init_minimal_kv_cache_for_profiling=lambda: None,
        _cleanup_profiling_kv_cache=gc.collect,
    )
    return runner


def v2_runner(engine: Any, model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A V2 runner around the encoder runner, which is real and holds the manager."""
    import vllm_on_cpu as on_cpu
    from vllm.distributed import parallel_state
    from vllm.v1.worker.gpu import cudagraph_utils as module
    from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
    from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    monkeypatch.setattr(parallel_state, "graph_capture", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(
        type(module.current_platform),
        "graph_pool_handle",
        classmethod(lambda cls: None),
        raising=False,
    )
    monkeypatch.setattr(type(module.current_platform), "_global_graph_pool", None, raising=False)
    monkeypatch.setattr(module, "_init_minimal_kv_cache_for_profiling", lambda runner: None)
    encoders = EncoderRunner(
        model, 32, 144, EncoderCache(), torch.float32, torch.device("cpu"),
        cudagraph_manager=on_cpu.make_manager(engine, model),
    )  # fmt: skip
    decoder = types.SimpleNamespace(
        needs_capture=lambda: True, use_breakable_cg=False, capture=lambda *_, **__: None,
        captured_token_counts=list, _capture_descs={}, pool=None,
    )  # fmt: skip
    runner = GPUModelRunner.__new__(GPUModelRunner)
    runner.__dict__.update(
        vllm_config=engine,
        compilation_config=engine.compilation_config,
        model=model,
        model_state=types.SimpleNamespace(supports_mm_inputs=True, encoder_runner=encoders),
        cudagraph_manager=decoder,
        speculator=None,
        adaptive_verification=None,
        pcp_manager=None,
        lora_config=None,
        input_buffers=None,
        intermediate_tensors=None,
        block_tables=None,
        attn_groups=[],
        kv_caches=[],
        kv_cache_config=None,
        use_aux_hidden_state_outputs=False,
        kv_connector=types.SimpleNamespace(reset_capture_state=lambda: None),
        cache_config=types.SimpleNamespace(num_gpu_blocks=None),
        maybe_setup_dummy_loras=lambda _: contextlib.nullcontext(),
        maybe_remove_all_loras=lambda _: None,
    )
    return runner


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_the_profile_is_told_what_capture_takes_and_keeps_nothing(
    engine: Any, card: Any, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm_on_cpu as on_cpu

    model = on_cpu.qwen3_vl(engine)
    make = v1_runner if version == "v1" else v2_runner
    runner = make(engine, model, monkeypatch)
    before = card.free_bytes()
    told = runner.profile_cudagraph_memory()
    assert card.held, "nothing was held for the graphs that the profile did not capture"
    assert card.free_bytes() == before, "the profile must give everything back"
    if version == "v1":
        assert runner.encoder_cudagraph_manager is None
        runner._maybe_init_encoder_cudagraph_manager()
        manager = runner.encoder_cudagraph_manager
        manager.capture(graph_pool=None)
    else:
        runner.cudagraph_manager = types.SimpleNamespace(
            needs_capture=lambda: False, capture=lambda *_, **__: None
        )
        monkeypatch.setattr(
            "vllm.v1.worker.gpu.model_runner.lock_workspace", lambda: None, raising=False
        )
        assert runner.capture_model() == before - card.free_bytes()
        manager = runner.model_state.encoder_runner.cudagraph_manager
    stats = manager.stats()
    assert stats["graph_count"] > 20
    assert stats["dropped"] == []
    taken = before - card.free_bytes()
    assert stats["counted_bytes"] == taken
    assert told == pytest.approx(taken, rel=0.05)
    assert stats["expected_bytes"] == pytest.approx(told, rel=0.01)
    manager.clear()


@pytest.mark.parametrize("fails", ["sample", "capture_all"])
def test_an_engine_starts_though_memory_cannot_be_told(
    engine: Any,
    card: Any,
    fails: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A wrong estimate once ended it. Graphs that no profile counted are not captured either."""
    import vllm_on_cpu as on_cpu

    from graphhal.vllm_worker import memory

    def failing(*_: Any) -> Any:
        real(*_)
        raise RuntimeError("this allocator tells nothing")

    real = getattr(memory, fails)
    monkeypatch.setattr(memory, fails, failing)
    engine.additional_config["graphhal"]["max_tokens"] = 32
    model = on_cpu.qwen3_vl(engine)
    runner, before = v1_runner(engine, model, monkeypatch), card.free_bytes()
    runner.profile_cudagraph_memory()
    gc.collect()
    assert card.free_bytes() == before
    runner._maybe_init_encoder_cudagraph_manager()
    manager = runner.encoder_cudagraph_manager
    for _ in range(2):
        manager.capture(graph_pool=None)
    gc.collect()
    assert card.free_bytes() == before, "no graphs are kept beside the KV cache"
    assert caplog.text.count("code failed in capture") == 1
    grids = [[1, 8, 8]]
    served = on_cpu.run_v1(model, engine, manager, [("image", on_cpu.image_group(model, grids))])
    expected = on_cpu.run_v1(model, engine, None, [("image", on_cpu.image_group(model, grids))])
    torch.testing.assert_close(served, expected)
    (reason,) = manager.stats()["misses"]["image"]
    assert reason.startswith("graphhal's own code failed in capture: RuntimeError('this allocator")
    manager.clear()


def test_an_instance_that_only_encodes_has_graphs(
    engine: Any, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--mm-encoder-only`: a runner of its own, which has no KV cache and profiles nothing."""
    import vllm_on_cpu as on_cpu
    from vllm.v1.worker import mm_encoder_model_runner as module

    monkeypatch.setattr(module, "lock_workspace", lambda: None)
    engine.additional_config["graphhal"]["max_tokens"] = 32
    model = on_cpu.qwen3_vl(engine)
    runner = v2_runner(engine, model, monkeypatch)
    runner.__class__ = module.MMEncoderModelRunner
    before = card.free_bytes()
    assert runner.capture_model() == before - card.free_bytes() > 0
    encoders = runner.model_state.encoder_runner
    items = on_cpu.as_items("image", on_cpu.image_group(model, [[1, 8, 8], [1, 4, 4]]))
    ours = encoders.execute_mm_encoder([("image", item) for item in items])
    manager, encoders.cudagraph_manager = encoders.cudagraph_manager, None
    eager = encoders.execute_mm_encoder([("image", item) for item in items])
    for one, other in zip(ours, eager, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert manager.stats()["hits"] == {"image": 2}
    manager.clear()


@pytest.mark.parametrize("why", ["NONE", "eager", "no modality"])
def test_nothing_is_told_and_nothing_taken_without_graphs(
    engine: Any, card: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm_on_cpu as on_cpu
    from vllm.config.compilation import CUDAGraphMode
    from vllm.config.multimodal import MultiModalConfig

    if why == "NONE":
        engine.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    elif why == "eager":
        engine.model_config.enforce_eager = True
    else:
        limits = {"image": 0, "video": 0, "audio": 0}
        engine.model_config.multimodal_config = MultiModalConfig(limit_per_prompt=limits)
    model = on_cpu.qwen3_vl(engine)
    runner = v1_runner(engine, model, monkeypatch)
    before = card.free_bytes()
    assert runner.profile_cudagraph_memory() == 0
    runner._maybe_init_encoder_cudagraph_manager()
    runner.encoder_cudagraph_manager.capture(graph_pool=None)
    assert card.free_bytes() == before
    assert card.held == []
    assert runner.encoder_cudagraph_manager.get_num_graphs_to_capture() == 0
