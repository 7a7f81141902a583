"""Groups of pictures, films and sound through the V1 runners of vllm-ascend and of vLLM-Omni."""

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.v1.worker.workspace import init_workspace_manager
from vllm_ascend.worker import model_runner_v1
from vllm_omni.platforms.npu.worker.npu_ar_model_runner import NPUARModelRunner

from graphhal.self_check import Difference
from graphhal.vllm_worker import plugin
from graphhal.vllm_worker.executor import EncoderGraphExecutor
from tests.ascend_peer import engines
from tests.ascend_simulated import simulator
from tests.vllm_worker import small_models, vllm_on_cpu

DEVICE = "npu:0"
Groups = list[tuple[str, dict[str, Any]]]


def omni_thinker(config: Any) -> Any:
    """vLLM-Omni's Qwen3-Omni thinker."""
    from vllm_omni.model_executor.models.qwen3_omni import qwen3_omni_moe_thinker as thinker

    return vllm_on_cpu.qwen3_omni(config, thinker=thinker)


def pictures(model: Any) -> Groups:
    grids = ([[1, 8, 8], [1, 4, 8]], [[1, 4, 4]], [[1, 8, 4], [1, 4, 12], [1, 4, 4]])
    return [("image", vllm_on_cpu.image_group(model, g, i)) for i, g in enumerate(grids)]


def films(model: Any) -> Groups:
    return [("video", vllm_on_cpu.video_group(model, [[2, 4, 8]]))]


def sound(model: Any) -> Groups:
    return [("audio", vllm_on_cpu.audio_group(model, n)) for n in ([100], [230], [7, 100])]


def crops(_: Any) -> Groups:
    return [("image", group) for group in engines.crops()]


def clips(model: Any) -> Groups:
    frames = 2 * model.encoder.config.max_source_positions
    return [
        ("audio", {"audio_features": torch.randn(len(n), 16, frames),
                   "audio_num_tokens": torch.tensor(n)})
        for n in ([12], [5, 12], [1, 7])
    ]  # fmt: skip


def captured(config: Any, model: Any, runner_class: type) -> Any:
    """The manager of a runner whose own `capture_model` ran; there is no text model to capture."""
    init_workspace_manager(torch.device(DEVICE))
    runner: Any = runner_class.__new__(runner_class)
    runner.__dict__.update(
        compilation_config=config.compilation_config,
        cudagraph_dispatcher=types.SimpleNamespace(get_capture_descs=list),
        device=torch.device(DEVICE),
        dtype=torch.float32,
        encoder_cudagraph_manager=None,
        has_talker_mtp=False,
        model=model,
        supports_mm_inputs=True,
        update_stream=torch.npu.Stream(),
        vllm_config=config,
    )
    assert runner.capture_model() > 0
    return runner.encoder_cudagraph_manager


def worst(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(Difference.between(a.cpu(), b.cpu()).relative_l2 for a, b in pairs)


CASES: dict[str, tuple[Any, list[Any], dict[str, Any]]] = {
    "own adapter, DeepStack": (vllm_on_cpu.qwen3_vl, [pictures, films], {"platform": "npu"}),
    "own adapter, windows": (vllm_on_cpu.qwen2_5_vl, [pictures, films], {"platform": "npu"}),
    "vLLM's protocol": (engines.gemma3, [crops], {"platform": "npu"}),
    "vLLM's thinker": (
        vllm_on_cpu.qwen3_omni,
        [pictures, films, sound],
        {"vllm_models": ["qwen3_omni"], "audio_chunks": "1-4"},
    ),
    "vLLM-Omni's thinker": (
        omni_thinker,
        [pictures, films, sound],
        {"vllm_models": ["qwen3_omni"], "audio_chunks": "1-4"},
    ),
    "vLLM-Omni's CoVo-Audio": (vllm_on_cpu.covo_stage, [clips], {"vllm_models": ["covo_audio"]}),
}


@pytest.mark.parametrize("runner", [model_runner_v1.NPUModelRunner, NPUARModelRunner])
@pytest.mark.parametrize("case", CASES)
def test_a_runner_gets_from_graphs_what_it_gets_eagerly(
    engine: Any, case: str, runner: type, trace: "simulator.Trace"
) -> None:
    make, kinds, options = CASES[case]
    model = make(engine).to(DEVICE)
    groups = [group for kind in kinds for group in kind(model)]
    replays_as_eager(engine, model, groups, options, runner, trace)


@pytest.mark.parametrize("make", small_models.WITH_BOUNDARIES)
def test_boundaries_of_the_protocol_come_from_the_host(
    engine: Any, make: Callable[[Any], small_models.Made], trace: "simulator.Trace"
) -> None:
    model, requests = make(engine)
    groups = [("video" if "video_grid_thw" in each else "image", each) for each in requests]
    runner = model_runner_v1.NPUModelRunner
    replays_as_eager(engine, model.to(DEVICE), groups, {"platform": "npu"}, runner, trace)


def replays_as_eager(
    engine: Any, model: Any, groups: Groups, options: Any, runner: type, trace: Any
) -> None:
    engine.additional_config = {"graphhal": {"self_check": "quick", **options}}
    plugin.install(engine)
    made = captured(engine, model, runner)
    assert type(made) is EncoderGraphExecutor
    assert made.stats()["dropped"] == []
    for schedule in simulator.SCHEDULES:
        simulator.schedule(schedule)
        for group in groups:
            eager = vllm_on_cpu.run_v1(model, engine, None, [group], runner, DEVICE)
            replayed = vllm_on_cpu.run_v1(model, engine, made, [group], runner, DEVICE)
            assert worst(replayed, eager) < 1e-5, (schedule, group[0])
        torch.npu.synchronize()
    simulator.schedule("eager")
    assert set(made.stats()["hits"]) == {modality for modality, _ in groups}
    assert made.stats()["misses"] == {}
    assert trace.hazards() == []
    made.clear()
    engine.additional_config = {}
