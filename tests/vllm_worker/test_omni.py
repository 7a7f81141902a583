"""vLLM-Omni's own classes and runner: `VLLM_OMNI=1 ci/cells/vllm_cpu.sh -k omni`."""

import importlib.util
from typing import Any

import pytest
from test_plugin import PRELUDE, python
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


def pipeline(module_name: str, class_name: str, stage: str, model: Any) -> Any:
    """vLLM-Omni's class around a stage, which was made."""
    module = importlib.import_module(f"vllm_omni.model_executor.models.{module_name}")
    whole = getattr(module, class_name)
    outer = whole.__new__(whole)
    torch.nn.Module.__init__(outer)
    setattr(outer, stage, model)
    outer.model, outer.model_stage = model, stage
    return outer


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("qwen3_omni", "qwen3_omni.qwen3_omni:Qwen3OmniMoeForConditionalGeneration"),
        ("covo_audio", "covo_audio.covo_audio:CovoAudioForConditionalGeneration"),
        ("covo_audio", "covo_audio.covo_audio_llm:CovoAudioLLMForConditionalGeneration"),
    ],
)
def test_omni_classes_gain_the_protocol_after_the_runner_was_imported(
    name: str, place: str
) -> None:
    """V2 runners import encoder graphs before any model, so nothing looks at the classes later."""
    code = (
        PRELUDE
        + """
import types
from importlib import import_module
from graphhal.vllm_worker import plugin
plugin.register()
import vllm.v1.worker.encoder_cudagraph
def load(vllm_config):
    module, _, name = PLACE.partition(":")
    return getattr(import_module("vllm_omni.model_executor.models." + module), name)
model_class = load(types.SimpleNamespace(
    compilation_config=types.SimpleNamespace(cudagraph_mm_encoder=True),
    additional_config={"graphhal": {"vllm_models": NAME}},
))
from vllm.model_executor.models.interfaces import supports_encoder_cudagraph
print(supports_encoder_cudagraph(object.__new__(model_class)))
""".replace("PLACE", repr(place)).replace("NAME", repr(name))
    )
    assert python(code).split()[-1] == "True"


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


def whole_thinker(engine: Any) -> Any:
    import vllm_on_cpu as on_cpu
    from vllm_omni.model_executor.models.qwen3_omni import qwen3_omni_moe_thinker as thinker

    model = on_cpu.qwen3_omni(engine, thinker=thinker)
    name = "Qwen3OmniMoeForConditionalGeneration"
    return pipeline("qwen3_omni.qwen3_omni", name, "thinker", model)


def test_omni_model_around_the_thinker_is_known(engine: Any, runner_class: Any) -> None:
    """The pipeline's class holds the thinker; its other stages encode nothing."""
    import vllm_on_cpu as on_cpu

    outer = whole_thinker(engine)
    manager = served(engine, outer, runner_class, "qwen3_omni")
    group = on_cpu.image_group(outer.thinker, [[1, 4, 4], [1, 4, 8]])
    outputs = manager.execute(group)
    eager = outer.thinker.embed_multimodal(**group)
    assert worst(list(outputs), list(eager)) < 1e-5


@pytest.mark.parametrize("name", ["thinker", "model"])
def test_omni_thinker_that_is_replaced_in_its_pipeline_is_noticed(
    engine: Any, runner_class: Any, name: str
) -> None:
    import vllm_on_cpu as on_cpu

    outer = whole_thinker(engine)
    manager = served(engine, outer, runner_class, "qwen3_omni")
    groups = groups_of(outer.thinker)
    assert all(manager.execute(group) is not None for _, group in groups)
    setattr(outer, name, on_cpu.filled(whole_thinker(engine).thinker, seed=9))
    assert all(manager.execute(group) is None for _, group in groups)
    reason = "weights were rebound after capture"
    assert manager.stats()["misses"] == {
        "image": {reason: 2}, "video": {reason: 1}, "audio": {reason: 2}
    }  # fmt: skip


@pytest.mark.parametrize("tower", ["Qwen3OmniMoeAudioEncoder", "Qwen3Omni_VisionTransformer"])
def test_omni_tower_of_another_signature_is_said_in_one_line_and_counted(
    engine: Any,
    runner_class: Any,
    tower: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """vLLM-Omni has towers of its own under the names of vLLM's."""
    import vllm_on_cpu as on_cpu
    from vllm_omni.model_executor.models.qwen3_omni import qwen3_omni_moe_thinker as thinker

    outer = whole_thinker(engine)
    groups = groups_of(outer.thinker)
    monkeypatch.setattr(getattr(thinker, tower), "forward", lambda self, renamed: None)
    with on_cpu.log_of("graphhal", caplog):
        manager = served(engine, outer, runner_class, "qwen3_omni")
    (line,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert f"{thinker.__name__}:{tower}.forward was expected as (self, " in line
    assert line.endswith("found (self, renamed)")
    for modality, group in groups:
        assert manager.supports_modality(modality)  # else nobody would ask, nor count
        assert manager.execute(group) is None
    misses = manager.stats()["misses"]
    assert {kind: list(of.values()) for kind, of in misses.items()} == {
        "image": [2], "video": [1], "audio": [2]
    }  # fmt: skip


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("modality", ["image", "video", "audio"])
def test_omni_thinker_that_is_derived_and_encodes_in_its_own_way_has_no_graphs(
    engine: Any, runner_class: Any, modality: str, wrapped: bool
) -> None:
    outer = whole_thinker(engine)
    step = f"_process_{modality}_input"
    own = getattr(type(outer.thinker), step)

    def louder(self: Any, *args: Any) -> tuple[Any, ...]:
        return tuple(2 * part for part in own(self, *args))

    outer.thinker.__class__ = type("Derived", (type(outer.thinker),), {step: louder})
    model = outer if wrapped else outer.thinker
    manager = served(engine, model, runner_class, "qwen3_omni")
    for _, group in groups_of(outer.thinker):
        assert manager.execute(group) is None
    refused = f"Derived.{step} is not the one that was read"
    assert {why for of in manager.stats()["misses"].values() for why in of} == {refused}


def whole_covo(stage: Any) -> Any:
    name = "CovoAudioForConditionalGeneration"
    return pipeline("covo_audio.covo_audio", name, "fused_thinker_talker", stage)


@pytest.mark.parametrize("wrapped", [False, True])
def test_omni_covo_audio_is_replayed(engine: Any, runner_class: Any, wrapped: bool) -> None:
    import vllm_on_cpu as on_cpu

    stage = model = on_cpu.covo_stage(engine)
    if wrapped:
        model = whole_covo(stage)
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


def clips(stage: Any, counts: list[int]) -> dict[str, Any]:
    frames = 2 * stage.encoder.config.max_source_positions
    features = torch.randn(len(counts), 16, frames, generator=torch.Generator().manual_seed(3))
    return {"audio_features": features, "audio_num_tokens": torch.tensor(counts)}


@pytest.mark.parametrize("name", ["encoder", "audio_adapter", "fused_thinker_talker"])
def test_omni_covo_module_that_is_replaced_is_noticed(
    engine: Any, runner_class: Any, name: str
) -> None:
    import vllm_on_cpu as on_cpu

    stage = on_cpu.covo_stage(engine)
    whole = whole_covo(stage)
    manager = served(engine, whole, runner_class, "covo_audio")
    group = clips(stage, [5, 12])
    assert manager.execute(group) is not None
    other = on_cpu.filled(on_cpu.covo_stage(engine), seed=9)
    if name == "fused_thinker_talker":
        whole.fused_thinker_talker = other
    else:
        setattr(stage, name, getattr(other, name))
    assert manager.execute(group) is None
    assert manager.stats()["misses"] == {"audio": {"weights were rebound after capture": 2}}


def test_omni_covo_that_does_more_than_was_read_has_no_graphs(
    engine: Any, runner_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm_on_cpu as on_cpu

    stage = on_cpu.covo_stage(engine)
    own = type(stage).embed_multimodal

    def louder(self: Any, **kwargs: Any) -> list[Any]:
        return [2 * part for part in own(self, **kwargs)]

    monkeypatch.setattr(type(stage), "embed_multimodal", louder)
    manager = served(engine, stage, runner_class, "covo_audio")
    assert manager.execute(clips(stage, [5, 12])) is None
    stats = manager.stats()
    assert stats["graph_count"] == 0
    assert {key for key, _ in stats["dropped"]} == {"covo_audio/audio[12]", "covo_audio/audio[24]"}


@pytest.mark.parametrize("counts", [[13], [5, -1], [1, 2, 13]])
def test_omni_covo_counts_outside_a_clip_are_named_by_the_runner(
    engine: Any, runner_class: Any, counts: list[int]
) -> None:
    """vLLM-Omni's own code would cut tokens off in silence."""
    import vllm_on_cpu as on_cpu

    stage = on_cpu.covo_stage(engine)
    manager = served(engine, stage, runner_class, "covo_audio")
    wrong = next(item for item, count in enumerate(counts) if not 0 <= count <= 12)
    with pytest.raises(ValueError, match=rf"^item {wrong}: audio_num_tokens is {counts[wrong]};"):
        on_cpu.run_v1(stage, engine, manager, [("audio", clips(stage, counts))], runner_class)


def covo_processor() -> Any:
    """vLLM-Omni's processor, without a model folder."""
    import types

    from vllm_omni.model_executor.models.covo_audio import covo_audio

    info = covo_audio.CovoAudioProcessingInfo.__new__(covo_audio.CovoAudioProcessingInfo)
    info.get_tokenizer = lambda: types.SimpleNamespace(encode=lambda prompt: [1])
    made = covo_audio.CovoAudioMultiModalProcessor.__new__(covo_audio.CovoAudioMultiModalProcessor)
    made.info = info
    return made


@pytest.fixture
def own_processor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class, put back as it was afterwards."""
    from vllm_omni.model_executor.models.covo_audio import covo_audio

    own = covo_audio.CovoAudioMultiModalProcessor._call_hf_processor
    own = getattr(own, "__wrapped__", own)
    monkeypatch.setattr(covo_audio.CovoAudioMultiModalProcessor, "_call_hf_processor", own)
    return covo_audio.CovoAudioMultiModalProcessor


def tokens_of(*samples: int) -> list[int]:
    import numpy as np

    clips = [np.zeros(n, np.float32) for n in samples]
    made = covo_processor()._call_hf_processor("hello", {"audios": clips}, {}, {})
    counts: list[int] = made["audio_num_tokens"].tolist()
    return counts


def test_omni_covo_processor_refuses_clips_that_do_not_fit(
    engine: Any, runner_class: Any, own_processor: Any
) -> None:
    """Left alone it drops the end in silence, and later announces 189 tokens of 188."""
    from graphhal.errors import InputError
    from graphhal.vllm_worker import towers

    assert tokens_of(480_001, 481_600) == [188, 189]
    engine.additional_config["graphhal"]["vllm_models"] = "covo_audio"
    for _ in range(2):
        towers.admit(engine)
    assert tokens_of(480_000, 16_000) == [188, 7]
    with pytest.raises(InputError, match=r"item 1.*30\.0001 s \(480001 samples\).*480000 samples"):
        tokens_of(16_000, 480_001)
    with pytest.raises(ValueError, match="no sample"):
        tokens_of(0)
    empty = covo_processor()._call_hf_processor("hello", {}, {}, {})
    assert "audio_num_tokens" not in empty


def test_omni_covo_processor_is_left_alone_without_opt_in(engine: Any, own_processor: Any) -> None:
    from graphhal.vllm_worker import towers

    before = own_processor._call_hf_processor
    engine.additional_config["graphhal"]["vllm_models"] = "qwen3_omni"
    towers.admit(engine)
    assert own_processor._call_hf_processor is before


def test_omni_covo_processor_that_has_changed_is_left_alone_loudly(
    engine: Any, own_processor: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    import vllm_on_cpu as on_cpu

    from graphhal.vllm_worker import towers

    def changed(self: Any, mm_items: Any) -> Any:
        raise NotImplementedError

    monkeypatch.setattr(own_processor, "_call_hf_processor", changed)
    engine.additional_config["graphhal"]["vllm_models"] = "covo_audio"
    with on_cpu.log_of("graphhal.vllm_worker.covo_processor", caplog):
        towers.admit(engine)
    assert own_processor._call_hf_processor is changed
    assert "was expected to take self, prompt, mm_data, found self, mm_items" in caplog.text
