"""graphhal inside vllm-ascend: on opt-in, at known hook points, with the towers that vLLM has."""

import gc
import importlib
import sys
import types
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from vllm.model_executor.models import qwen2_vl
from vllm.utils.mem_utils import MemorySnapshot
from vllm_ascend.worker.encoder_acl_graph import EncoderAclGraphManager

from graphhal.self_check import Difference
from graphhal.vllm_worker import ascend, plugin, towers
from graphhal.vllm_worker.executor import EncoderGraphExecutor
from tests.ascend_simulated import simulator
from tests.vllm_worker import small_models, vllm_on_cpu

DEVICE = "npu:0"
GRIDS = ([[1, 4, 8], [1, 8, 8]], [[1, 4, 4]], [[1, 8, 4], [1, 4, 12], [1, 4, 4]])


def small(name: str, config: Any) -> Any:
    model = getattr(vllm_on_cpu, name)(config)
    model.to(DEVICE)
    return model


def manager(config: Any, model: Any) -> Any:
    """What vllm-ascend's runner constructs."""
    return EncoderAclGraphManager(config, torch.device(DEVICE), torch.float32, model)


def on_device(group: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.to(DEVICE) if value.is_floating_point() else value
        for name, value in group.items()
    }


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl"])  # DeepStack; windowed layers
def test_towers_of_vllm_are_served_as_they_compute_eagerly(opted_in: Any, name: str) -> None:
    model = small(name, opted_in)
    made = manager(opted_in, model)
    assert isinstance(made, EncoderGraphExecutor)
    made.capture(None)
    assert not made.stats()["dropped"], made.stats()["dropped"][0][1]
    groups = [vllm_on_cpu.image_group(model, grids, seed) for seed, grids in enumerate(GRIDS * 3)]
    groups.append(vllm_on_cpu.video_group(model, [[2, 4, 8], [3, 4, 4]]))
    for group in map(on_device, groups):
        outputs = made.execute(group)
        assert outputs is not None
        for ours, theirs in zip(outputs, model.embed_multimodal(**group), strict=True):
            assert Difference.between(ours.cpu(), theirs.cpu()).relative_l2 < 1e-5
    assert made.stats()["graph_misses"] == 0
    made.clear()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3_vl", {}),
        ("qwen2_5_vl", {"platform": "npu", "vllm_adapter": "protocol"}),
    ],
    ids=["no opt-in", "boundaries that sizes do not tell"],
)
def test_otherwise_vllm_ascends_own_manager_serves(
    opted_in: Any, name: str, options: dict[str, Any]
) -> None:
    opted_in.additional_config = {"graphhal": options}
    assert type(manager(opted_in, small(name, opted_in))) is EncoderAclGraphManager


def test_boundaries_that_a_model_makes_otherwise_are_left_to_its_manager(
    opted_in: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Derived(qwen2_vl.Qwen2VLForConditionalGeneration):
        def prepare_encoder_cudagraph_replay_buffers(self, *args: Any, **options: Any) -> Any:
            prepared = super().prepare_encoder_cudagraph_replay_buffers(*args, **options)
            ends = prepared.values["cu_seqlens"]
            prepared.values["cu_seqlens"] = torch.stack((ends[0], ends[-1]))
            return prepared

    model, _ = small_models.qwen2_vl(opted_in)
    model.__class__ = Derived
    with vllm_on_cpu.log_of("graphhal.vllm_worker", caplog):
        made = manager(opted_in, model.to(DEVICE))
    assert type(made) is EncoderAclGraphManager
    assert "its boundaries are (52,), its inputs' sizes make (8, 12, 36, 52)" in caplog.text


def test_a_replay_waits_no_more_than_the_models_own_code(
    opted_in: Any, trace: "simulator.Trace"
) -> None:
    model, groups = small_models.qwen2_vl(opted_in)
    made = manager(opted_in, model.to(DEVICE))
    made.capture(None)

    def waits(name: str, action: Callable[[], object]) -> int:
        torch.npu.synchronize()
        simulator.mark(f"{name} begins")
        action()
        simulator.mark(f"{name} ends")
        lines = trace.between(f"{name} begins", f"{name} ends")
        return sum(line.startswith("sync") for line in lines)

    for number, group in enumerate(map(on_device, groups)):
        made.execute(group)  # its plan is made
        own = waits(
            f"preparing {number}",
            partial(model.prepare_encoder_cudagraph_replay_buffers, group, 4, 8),
        )
        assert waits(f"replay {number}", partial(made.execute, group)) == own
    made.clear()


def test_a_model_whose_code_for_graphs_fails_keeps_its_manager(
    opted_in: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(towers, "limits_of", broken)
    with vllm_on_cpu.log_of("graphhal.vllm_worker", caplog):
        assert type(manager(opted_in, small("qwen3_vl", opted_in))) is EncoderAclGraphManager
    assert "its own code for graphs fails: ValueError('broken')" in caplog.text


def test_another_release_of_vllm_ascend_keeps_its_manager(
    opted_in: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ascend, "RELEASES", ("0.9",))
    with vllm_on_cpu.log_of("graphhal.vllm_worker", caplog):
        made = manager(opted_in, small("qwen3_vl", opted_in))
    assert type(made) is EncoderAclGraphManager
    assert "vllm-ascend 0.9 was expected, found 0.26" in caplog.text


def test_a_hook_point_that_changed_keeps_its_manager(
    opted_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_ascend.ops.mm_encoder_attention import AscendMMEncoderAttention

    def forward_oot(self: Any, query: Any, lengths: Any) -> None: ...

    model = small("qwen3_vl", opted_in)
    monkeypatch.setattr(AscendMMEncoderAttention, "forward_oot", forward_oot)
    assert type(manager(opted_in, model)) is EncoderAclGraphManager


def test_layers_that_are_dispatched_otherwise_keep_their_manager(opted_in: Any) -> None:
    model = small("qwen3_vl", opted_in)
    layer = model.visual.blocks[0].attn.attn
    layer._forward_method = layer.forward_native
    assert type(manager(opted_in, model)) is EncoderAclGraphManager


def test_outside_graphhals_forwards_a_layer_does_what_it_did(opted_in: Any) -> None:
    model = small("qwen3_vl", opted_in)
    group = on_device(vllm_on_cpu.image_group(model, GRIDS[0]))
    before = [out.cpu() for out in model.embed_multimodal(**group)]
    assert ascend.reach_attention(model) is None
    assert ascend.reach_attention(model) is None  # once is enough, twice is harmless
    after = [out.cpu() for out in model.embed_multimodal(**group)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.fixture
def worker_class(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """vllm-ascend's, whose module is imported as a worker that starts imports it."""
    for name in ("acl", "acl.rt"):  # CANN's Python package, which its device allocator copies with
        stand_in = types.ModuleType(name)
        stand_in.memcpy = None
        monkeypatch.setitem(sys.modules, name, stand_in)
    monkeypatch.delitem(sys.modules, plugin.ASCEND_WORKER, raising=False)

    def start(vllm_config: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(plugin.ASCEND_WORKER)

    return start(engine).NPUWorker


def a_worker(worker_class: Any, config: Any, model: Any, explicit: int | None) -> Any:
    """A worker before its KV cache is sized."""
    torch.npu.synchronize()
    torch.npu.empty_cache()
    worker = worker_class.__new__(worker_class)
    worker.__dict__.update(
        vllm_config=config,
        device=torch.device(DEVICE),
        cache_config=types.SimpleNamespace(kv_cache_memory_bytes=explicit),
        model_runner=types.SimpleNamespace(
            get_model=lambda: model, model_memory_usage=0, profile_run=lambda: None
        ),
        init_snapshot=MemorySnapshot(device=DEVICE),
        requested_memory=10**9,
    )
    worker.init_snapshot.free_memory += 1  # it must have fallen
    return worker


def settled_free() -> int:
    gc.collect()
    torch.npu.synchronize()
    torch.npu.empty_cache()
    return int(torch.npu.mem_get_info()[0])


def test_graphs_are_set_aside_before_the_kv_cache_unless_it_has_a_size(
    opted_in: Any, worker_class: Any
) -> None:
    opted_in.additional_config["graphhal"]["memory_limit"] = "1GiB"
    model = small("qwen3_vl", opted_in)

    def available(explicit: int | None) -> int:
        worker = a_worker(worker_class, opted_in, model, explicit)
        return int(worker.determine_available_memory())

    ascend.prepare_worker(opted_in)  # once is enough, twice is harmless
    assert available(5 * 10**8) == 5 * 10**8
    available(None)  # what is made once and kept
    free = settled_free()
    theirs = worker_class.determine_available_memory.graphhal_original
    taken = theirs(a_worker(worker_class, opted_in, model, None)) - available(None)
    assert abs(settled_free() - free) < 2**16
    made = manager(opted_in, model)
    made.capture(None)
    needed = free - settled_free()
    assert needed > 2**20
    assert abs(needed - taken) < 2**14  # torch_npu keeps the word of an external event
    made.clear()


def test_without_opt_in_a_worker_is_left_alone(engine: Any, worker_class: Any) -> None:
    assert engine.additional_config == {}
    ascend.prepare_worker(engine)
    assert not hasattr(worker_class.determine_available_memory, "graphhal_original")
