"""What must never be replayed, through vLLM's real classes: eager, right, and counted."""

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.vllm


def tower_lora(engine: Any, model: Any) -> None:
    from vllm.config import LoRAConfig

    engine.lora_config = LoRAConfig(max_lora_rank=16, enable_tower_connector_lora=True)


def pruning(engine: Any, model: Any) -> None:
    model.is_multimodal_pruning_enabled = True


def dynamic_fp8(engine: Any, model: Any) -> None:
    from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention

    layer = next(part for part in model.modules() if isinstance(part, MMEncoderAttention))
    assert layer._fp8_dynamic_scale is False
    layer._fp8_dynamic_scale = True


def eager_enforced(engine: Any, model: Any) -> None:
    engine.model_config.enforce_eager = True


def later_stage(engine: Any, model: Any) -> None:
    from vllm.distributed import parallel_state

    parallel_state.get_pp_group().ranks = [-1, *parallel_state.get_pp_group().ranks]


def derived(engine: Any, model: Any) -> None:
    def louder(self: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        return tuple(2 * part for part in kind.embed_multimodal(self, **kwargs))

    kind = type(model)
    model.__class__ = type("Louder", (kind,), {"embed_multimodal": louder})


def parsing_anew(engine: Any, model: Any) -> None:
    def darker(self: Any, **kwargs: Any) -> Any:
        pixels = kwargs.pop("pixel_values") / 2
        return kind._parse_and_validate_image_input(self, pixel_values=pixels, **kwargs)

    kind = type(model)
    model.__class__ = type("Darker", (kind,), {"_parse_and_validate_image_input": darker})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (tower_lora, "LoRA is enabled for towers"),
        (pruning, "multimodal pruning is enabled"),
        (dynamic_fp8, "dynamic scales"),
        (eager_enforced, "enforce_eager is on"),
        (later_stage, "only the first pipeline rank encodes"),
        (derived, "Louder.embed_multimodal is its own"),
        (parsing_anew, "Darker._parse_and_validate_image_input is its own"),
    ],
)
def test_refused_engines_run_eagerly_and_count_why(
    engine: Any, change: Callable[[Any, Any], None], said: str
) -> None:
    import vllm_on_cpu as on_cpu

    model = on_cpu.qwen3_vl(engine)
    change(engine, model)
    manager = on_cpu.make_manager(engine, model)
    assert said in manager.refusal
    manager.capture(graph_pool=None)
    assert manager.get_num_graphs_to_capture() == 0
    groups = [("image", on_cpu.image_group(model, [[1, 8, 8], [1, 4, 4]]))]
    eager = on_cpu.run_v2(model, None, groups)
    ours = on_cpu.run_v2(model, manager, groups)
    assert all(torch.equal(a, b) for a, b in zip(ours, eager, strict=True))
    assert manager.stats()["misses"] == {"image": {manager.refusal: 2}}


def test_what_a_configuration_does_not_say_means_no_aloud(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A guard that took a missing field for `False` once let weights that change into graphs."""
    import vllm_on_cpu as on_cpu

    engine.lora_config = types.SimpleNamespace(max_lora_rank=16)
    model = on_cpu.qwen3_vl(engine)
    with on_cpu.log_of("graphhal.vllm_worker.executor", caplog):
        manager = on_cpu.make_manager(engine, model)
    manager.capture(graph_pool=None)
    group = on_cpu.image_group(model, [[1, 8, 8]])
    assert manager.execute(group) is None
    reason = "enable_tower_connector_lora is unknown"
    assert manager.stats()["misses"] == {"image": {reason: 1}}
    ((level, line),) = [(r.levelname, r.getMessage()) for r in caplog.records]
    assert (level, reason in line) == ("WARNING", True)


def test_a_class_that_brings_its_own_code_for_graphs_is_served(engine: Any) -> None:
    """Or mixes it in, as DeepSeek V4.1 and MiniMax M3 do."""
    import vllm_on_cpu as on_cpu
    from vllm.model_executor.models.interfaces import SupportsMultiModal

    from graphhal.vllm_worker.refusals import _outgrown

    model = on_cpu.qwen3_vl(engine)
    kind = type(model)
    new = {
        "embed_multimodal": lambda self, **_: (),
        "encoder_cudagraph_forward": lambda self, *_: None,
    }
    graphs = {"encoder_cudagraph_forward": lambda self, *_: None}
    mixed = [
        type("Mixed", (type("Graphs", bases, graphs),), {"embed_multimodal": lambda self, **_: ()})
        for bases in ((), (SupportsMultiModal,))  # with vLLM's stubs of what it does not bring
    ]
    for made in (kind, type("Whole", (kind,), new), type("Same", (kind,), {}), *mixed):
        assert _outgrown(made) is None, made


def test_vllms_own_model_that_takes_sound_beside_pictures_is_served(engine: Any) -> None:
    """MiniCPM-o parses sound too, before code for graphs that it inherits with its pictures."""
    from vllm.model_executor.models import gemma4_unified, minicpmo

    from graphhal.vllm_worker.refusals import engine_refusal

    def refusal(kind: type) -> str | None:
        model = kind.__new__(kind)
        torch.nn.Module.__init__(model)
        return engine_refusal(engine, model, is_first_stage=True)

    assert refusal(minicpmo.MiniCPMO2_6) is None
    parse = {"_parse_and_validate_multimodal_inputs": lambda self, **_: {}}
    assert "is its own" in str(refusal(type("Other", (minicpmo.MiniCPMO2_6,), parse)))
    assert "_process_image_input is its own" in str(
        refusal(gemma4_unified.Gemma4UnifiedForConditionalGeneration)
    )


@pytest.mark.parametrize("step", ["embed_multimodal", "_parse_and_validate_audio_input"])
def test_a_thinker_that_is_derived_and_encodes_in_its_own_way_has_no_graphs(
    engine: Any, step: str
) -> None:
    import vllm_on_cpu as on_cpu

    from graphhal.vllm_worker import plugin

    engine.additional_config["graphhal"]["vllm_models"] = "qwen3_omni"
    model = on_cpu.qwen3_omni(engine)
    plugin.install(engine)
    kind = type(model)
    own = getattr(kind, step)
    model.__class__ = type("Derived", (kind,), {step: lambda self, **kwargs: own(self, **kwargs)})
    manager = on_cpu.make_manager(engine, model)
    manager.capture(graph_pool=None)
    assert manager.refusal == f"Derived.{step} is not the one that was read"
    assert manager.execute(on_cpu.audio_group(model, [230])) is None


@pytest.mark.parametrize("refused", ["image", "audio"])
def test_one_encoder_that_cannot_be_served_is_said_and_counted_and_the_other_is_served(
    engine: Any, refused: str, caplog: pytest.LogCaptureFixture
) -> None:
    import types

    import vllm_on_cpu as on_cpu

    from graphhal.vllm_worker import plugin

    engine.additional_config["graphhal"]["vllm_models"] = "qwen3_omni"
    model = on_cpu.qwen3_omni(engine)
    if refused == "image":
        model.visual.attn_backend = types.SimpleNamespace(name="FLASHINFER")
        name, reason = "vision", "attention FLASHINFER reads boundaries in another way"
    else:
        model.audio_tower.n_window_infer = 10
        name, reason = "audio", "vllm_qwen3_omni_audio: n_window_infer is shorter than one window"
    plugin.install(engine)
    with on_cpu.log_of("graphhal", caplog):
        manager = on_cpu.make_manager(engine, model)
    said = [r.getMessage() for r in caplog.records if r.name.startswith("graphhal.vllm_worker")]
    assert f"graphhal: vllm_qwen3_omni_{name} runs eagerly: {reason}" in said
    assert not any("protocol is used" in line for line in said)  # it has none
    manager.capture(graph_pool=None)
    groups = {
        "image": on_cpu.image_group(model, [[1, 8, 8], [1, 4, 4]]),
        "audio": on_cpu.audio_group(model, [230]),
    }
    for modality, group in groups.items():
        assert manager.supports_modality(modality)
        assert (manager.execute(group) is None) == (modality == refused)
    count = 2 if refused == "image" else 1
    assert manager.stats()["misses"] == {refused: {reason: count}}
    assert manager.stats()["graph_hits"] == 3 - count


@pytest.mark.parametrize("tower", ["qwen3_vl", "qwen2_5_vl"])
def test_a_derived_model_with_code_for_graphs_of_its_own_goes_through_the_protocol(
    engine: Any, tower: str
) -> None:
    """graphhal's own adapter would leave out what it does."""
    import vllm_on_cpu as on_cpu

    model = getattr(on_cpu, tower)(engine)
    kind = type(model)

    def louder(step: str) -> Callable[..., Any]:
        own = getattr(kind, step)

        def twice(self: Any, *args: Any, **options: Any) -> Any:
            made = own(self, *args, **options)
            return 2 * made if isinstance(made, torch.Tensor) else tuple(2 * each for each in made)

        return twice

    steps = ("embed_multimodal", "encoder_cudagraph_forward", "encoder_eager_forward")
    model.__class__ = type("Louder", (kind,), {step: louder(step) for step in steps})
    manager = on_cpu.make_manager(engine, model)
    manager.capture(graph_pool=None)
    assert manager.stats()["encoders"] == ["Louder"]
    groups = [("image", on_cpu.image_group(model, [[1, 8, 8], [1, 4, 4]]))]
    eager = on_cpu.run_v2(model, None, groups)
    for ours, theirs in zip(on_cpu.run_v2(model, manager, groups), eager, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert manager.stats()["graph_hits"] == 2


def test_a_tower_of_another_attention_goes_through_the_protocol(engine: Any) -> None:
    import types

    import vllm_on_cpu as on_cpu

    model = on_cpu.qwen3_vl(engine)
    model.visual.attn_backend = types.SimpleNamespace(name="FLEX_ATTENTION")
    manager = on_cpu.make_manager(engine, model)
    assert manager.stats()["encoders"] == ["Qwen3VLForConditionalGeneration"]
    assert manager.refusal is None


def test_a_model_whose_only_encoder_is_refused_counts_why(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm_on_cpu as on_cpu

    from graphhal.errors import AdapterError
    from graphhal.vllm_worker.held_tower import HeldTower

    def prepare(self: Any, platform: Any) -> None:
        raise AdapterError("its boundaries are somewhere else")

    monkeypatch.setattr(HeldTower, "prepare", prepare)
    model = on_cpu.qwen3_vl(engine)
    manager = on_cpu.make_manager(engine, model)
    manager.capture(graph_pool=None)
    groups = [("image", on_cpu.image_group(model, [[1, 8, 8], [1, 4, 4]]))]
    eager = on_cpu.run_v2(model, None, groups)
    ours = on_cpu.run_v2(model, manager, groups)
    assert all(torch.equal(a, b) for a, b in zip(ours, eager, strict=True))
    assert manager.stats()["misses"] == {"image": {"its boundaries are somewhere else": 2}}


@pytest.mark.parametrize(
    ("group", "modality"),
    [
        ({"pixel_values": 1}, "image"),
        ({"pixel_values_videos": 1, "image_embeds": None}, "video"),
        ({"input_audio_features": 1}, "audio"),
        ({"input_features": 1}, "audio"),
        ({"something": 1}, "unknown"),
    ],
)
def test_keys_tell_the_modality_of_a_miss(
    engine: Any, group: dict[str, Any], modality: str
) -> None:
    import vllm_on_cpu as on_cpu

    engine.model_config.enforce_eager = True
    manager = on_cpu.make_manager(engine, on_cpu.qwen3_vl(engine))
    assert manager.execute(group) is None
    assert list(manager.stats()["misses"]) == [modality]


@pytest.mark.parametrize(
    ("group", "items"),
    [
        ({"image_embeds": [torch.zeros(4, 8)] * 3}, 3),
        ({"image_embeds": torch.zeros(2, 4, 8)}, 2),
        ({"image_embeds": torch.zeros(9, 8), "image_grid_thw": torch.ones(3, 3)}, 3),
        ({"video_embeds": torch.zeros(9, 8)}, 1),
        ({"image_embeds": torch.zeros(9, 8), "image_num_patches": torch.ones(2)}, 2),
        ({"pixel_values": torch.zeros(9, 8), "image_grid_thw": torch.tensor(5)}, 1),
        ({"pixel_values": torch.zeros(9, 8), "num_patches": 5}, 1),
    ],
)
def test_every_item_of_a_group_that_nobody_sized_counts(
    engine: Any, group: dict[str, Any], items: int
) -> None:
    import vllm_on_cpu as on_cpu

    manager = on_cpu.make_manager(engine, on_cpu.qwen3_vl(engine))
    assert manager.execute(group) is None
    assert manager.stats()["graph_misses"] == items
