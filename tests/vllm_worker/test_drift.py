"""A vLLM in which a touched name vanished or changed: its own behaviour stays, nothing crashes."""

import abc
import importlib
import types
from collections.abc import Iterator
from typing import Any

import pytest

from graphhal.vllm_worker import touched

pytestmark = pytest.mark.vllm

LOOKED_UP_LATE = (
    "vllm.distributed.parallel_state:get_tp_group",
    "vllm.distributed.parallel_state:get_pp_group",
    "vllm.distributed.parallel_state:model_parallel_is_initialized",
)
"""Names whose signature is not compared."""


def changed(*_: Any, renamed: Any) -> None:
    """Nobody that is not new could call it."""


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """Lines that an operator sees, as if none had been said before."""
    import vllm_on_cpu as on_cpu

    from graphhal.vllm_worker import vllms_log

    monkeypatch.setattr(vllms_log, "_said", set())
    with on_cpu.log_of("graphhal", caplog):
        yield lambda: [
            r.getMessage()
            for r in caplog.records
            if r.levelname == "WARNING" and r.name.startswith("graphhal")
        ]


def replace(monkeypatch: pytest.MonkeyPatch, name: str, how: str) -> None:
    module, _, qualname = name.partition(":")
    owner: Any = importlib.import_module(module)
    *path, attribute = qualname.split(".")
    for part in path:
        owner = getattr(owner, part)
    if how == "vanished":
        monkeypatch.delattr(owner, attribute)
    else:
        monkeypatch.setattr(owner, attribute, changed)


def constructed(engine: Any, model: Any) -> Any:
    """As runners make a manager; vLLM's own needs no more than its `__new__` here."""
    import torch
    from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager as Manager

    arguments = {"vllm_config": engine, "device": torch.device("cpu"), "dtype": torch.float32}
    return Manager.__new__(Manager, model=model, **arguments)


@pytest.mark.parametrize("how", ["vanished", "changed"])
def test_a_name_that_is_not_as_it_was_leaves_vllms_own_manager(
    engine: Any, how: str, monkeypatch: pytest.MonkeyPatch, warnings: Any
) -> None:
    import vllm_on_cpu as on_cpu
    from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

    from graphhal.vllm_worker import vllms_log

    methods = [name for name in (*touched.MANAGER, *touched.PROTOCOL) if "." in name.split(":")[1]]
    model = on_cpu.qwen3_vl(engine)
    for number, name in enumerate([*methods, *LOOKED_UP_LATE]):
        with monkeypatch.context() as patch:
            replace(patch, name, how)
            patch.setattr(vllms_log, "_said", set())
            for _ in range(2):
                assert type(constructed(engine, model)) is EncoderCudaGraphManager, name
        lines = warnings()
        assert len(lines) == number + 1, name
        assert "vLLM's own encoder graphs serve it: " in lines[-1]
        if name not in LOOKED_UP_LATE:
            assert f"{name} was expected as " in lines[-1]


@pytest.mark.parametrize("known", [True, False])
def test_a_constructor_with_other_arguments_is_left_to_vllm(
    engine: Any, known: bool, monkeypatch: pytest.MonkeyPatch, warnings: Any
) -> None:
    import vllm_on_cpu as on_cpu
    from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

    def __init__(self: Any, vllm_config: Any, model: Any, pool: Any) -> None:
        self.pool = pool

    monkeypatch.setattr(EncoderCudaGraphManager, "__init__", __init__)
    model = on_cpu.qwen3_vl(engine) if known else types.SimpleNamespace()

    def make(vllm_config: Any) -> Any:
        return EncoderCudaGraphManager(vllm_config, pool=7, model=model)

    manager = make(engine)
    if not known:  # it has no protocol: vLLM's own could not serve it
        assert manager.execute({"pixel_values": 1}) is None
        (reason,) = manager.stats()["misses"]["image"]
        assert "__init__ was expected as (self, vllm_config, device, dtype, model)" in reason
        return
    assert type(manager) is EncoderCudaGraphManager
    assert manager.pool == 7
    (line,) = warnings()
    assert "__init__ was expected as (self, vllm_config, device, dtype, model), found" in line


@pytest.mark.parametrize("known", [True, False])
def test_a_manager_that_another_package_derived_is_left_to_it(
    engine: Any, known: bool, warnings: Any
) -> None:
    """Its runner may call what graphhal's executor does not have."""
    import torch
    import vllm_on_cpu as on_cpu
    from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

    def __init__(self: Any, vllm_config: Any, device: Any, dtype: Any, model: Any) -> None:
        self.device = device

    derived = type(
        "DerivedManager", (EncoderCudaGraphManager,), {"__module__": "x.y", "__init__": __init__}
    )
    model = on_cpu.qwen3_vl(engine) if known else types.SimpleNamespace()
    manager = derived(engine, torch.device("cpu"), torch.float32, model)
    (line,) = warnings()
    assert line.endswith("x.y.DerivedManager is derived from vLLM's manager, and was not read")
    if known:
        assert type(manager) is derived
        assert manager.device == torch.device("cpu")
    else:  # it has no protocol: none but graphhal's could serve it
        assert manager.execute({"pixel_values": 1}) is None
    engine.compilation_config.cudagraph_mm_encoder = False
    assert type(derived(engine, torch.device("cpu"), torch.float32, model)) is derived


def test_a_manager_of_another_name_is_left_to_vllm(
    engine: Any, monkeypatch: pytest.MonkeyPatch, warnings: Any
) -> None:
    import vllm.v1.worker.encoder_cudagraph as module

    from graphhal.vllm_worker import plugin

    monkeypatch.delattr(module, "EncoderCudaGraphManager")
    plugin.install(engine)
    (line,) = warnings()
    assert "vLLM is as it was: no EncoderCudaGraphManager in " in line


@pytest.mark.parametrize("how", ["vanished", "changed"])
@pytest.mark.parametrize(
    "name",
    [touched.MANAGER[0], touched.PROTOCOL[-1], f"{touched.INTERFACES}:SupportsEncoderCudaGraph"],
)
def test_no_class_gains_the_protocol_in_a_vllm_that_was_not_read(
    engine: Any, name: str, how: str, monkeypatch: pytest.MonkeyPatch, warnings: Any
) -> None:
    """It runs eagerly by vLLM itself, whose own manager could not serve it."""
    from vllm.model_executor.models import interfaces, qwen3_omni_moe_thinker

    from graphhal.vllm_worker import towers

    protocol = interfaces.SupportsEncoderCudaGraph
    before = len(abc._get_dump(protocol)[0])  # type: ignore[attr-defined]
    engine.additional_config["graphhal"]["vllm_models"] = "qwen3_omni"
    monkeypatch.setattr(towers, "_declared", set())
    thinker = type("Qwen3OmniMoeThinkerForConditionalGeneration", (), {})
    monkeypatch.setattr(qwen3_omni_moe_thinker, thinker.__name__, thinker)
    replace(monkeypatch, name, how)
    for _ in range(2):
        towers.admit(engine)
    (line,) = warnings()
    assert "is not served, it runs eagerly: " in line
    assert len(abc._get_dump(protocol)[0]) == before  # type: ignore[attr-defined]
