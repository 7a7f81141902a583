"""vLLM-Omni's own classes and runner: `VLLM_OMNI=1 ci/cells/vllm_cpu.sh -k omni`."""

import importlib.util
from typing import Any

import pytest
from test_runners import groups_of, worst

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm_omni") is None, reason="vLLM-Omni is not installed"
    ),
]


@pytest.fixture
def runner_class() -> Any:
    """The runner of vLLM-Omni's autoregressive stages."""
    from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner

    return GPUARModelRunner


def served(engine: Any, model: Any, runner_class: Any, name: str) -> Any:
    """The manager that vLLM-Omni's runner makes for the model, opted in and captured."""
    import vllm_on_cpu as on_cpu

    from graphhal.vllm_worker import plugin

    engine.additional_config["graphhal"]["vllm_models"] = name
    plugin.install(engine)
    manager = on_cpu.make_manager(engine, model, runner_class)
    assert manager is not None
    manager.capture(graph_pool=None)
    return manager


def test_omni_thinker_is_replayed_by_omnis_runner(engine: Any, runner_class: Any) -> None:
    import vllm_on_cpu as on_cpu
    from vllm_omni.model_executor.models.qwen3_omni import qwen3_omni_moe_thinker as thinker

    model = on_cpu.qwen3_omni(engine, thinker=thinker)
    assert type(model).__module__.startswith("vllm_omni.")
    manager = served(engine, model, runner_class, "qwen3_omni")
    groups = groups_of(model)
    eager = on_cpu.run_v1(model, engine, None, groups, runner_class)
    replayed = on_cpu.run_v1(model, engine, manager, groups, runner_class)
    assert worst(replayed, eager) < 1e-5
    stats = manager.get_cumulative_stats()
    assert stats["hits"] == {"image": 2, "video": 1, "audio": 2}
    assert stats["graph_misses"] == 0
    assert stats["dropped"] == []


def test_omni_model_around_the_thinker_is_known(engine: Any, runner_class: Any) -> None:
    """The pipeline's class holds the thinker; its other stages encode nothing."""
    import vllm_on_cpu as on_cpu
    from vllm_omni.model_executor.models.qwen3_omni import qwen3_omni
    from vllm_omni.model_executor.models.qwen3_omni import qwen3_omni_moe_thinker as thinker

    whole = qwen3_omni.Qwen3OmniMoeForConditionalGeneration
    outer = whole.__new__(whole)
    torch.nn.Module.__init__(outer)
    outer.thinker = on_cpu.qwen3_omni(engine, thinker=thinker)
    manager = served(engine, outer, runner_class, "qwen3_omni")
    group = on_cpu.image_group(outer.thinker, [[1, 4, 4], [1, 4, 8]])
    outputs = manager.execute(group)
    eager = outer.thinker.embed_multimodal(**group)
    assert worst(list(outputs), list(eager)) < 1e-5


def covo_stage(config: Any) -> Any:
    """vLLM-Omni's CoVo-Audio stage 0 around a small Whisper encoder; the text model is left out."""
    import vllm_on_cpu as on_cpu
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder
    from vllm_omni.model_executor.models.covo_audio import covo_audio_llm

    whisper = WhisperConfig(
        d_model=32,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=64,
        num_mel_bins=16,
        max_source_positions=96,
    )
    model_class = covo_audio_llm.CovoAudioLLMForConditionalGeneration
    model = model_class.__new__(model_class)
    torch.nn.Module.__init__(model)
    model.encoder = on_cpu.filled(WhisperEncoder(whisper))
    model.audio_adapter = on_cpu.filled(covo_audio_llm.AudioAdapter(32, 24, 8), seed=1)
    model.vllm_config = config
    return model


@pytest.mark.parametrize("wrapped", [False, True])
def test_omni_covo_audio_is_replayed(engine: Any, runner_class: Any, wrapped: bool) -> None:
    from vllm_omni.model_executor.models.covo_audio import covo_audio

    stage = model = covo_stage(engine)
    if wrapped:
        whole = covo_audio.CovoAudioForConditionalGeneration
        model = whole.__new__(whole)
        torch.nn.Module.__init__(model)
        model.fused_thinker_talker = stage
    manager = served(engine, model, runner_class, "covo_audio")
    frames = 2 * stage.encoder.config.max_source_positions
    generator = torch.Generator().manual_seed(3)
    for counts in ([12], [5, 12], [1, 7], [3, 12, 9]):
        features = torch.randn(len(counts), 16, frames, generator=generator)
        group = {"audio_features": features, "audio_num_tokens": torch.tensor(counts)}
        outputs, eager = manager.execute(group), stage.embed_multimodal(**group)
        if len(counts) > 2:
            assert outputs is None  # two clips a graph; the host runs all three at once
            continue
        assert [len(one) for one in outputs] == counts
        assert worst(list(outputs), list(eager)) < 1e-5
    stats = manager.get_cumulative_stats()
    assert stats["hits"] == {"audio": 5}
