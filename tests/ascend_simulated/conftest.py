"""A platform on the simulated runtime, in every schedule; no test may leave a hazard behind."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

AVAILABLE = importlib.util.find_spec("torch_npu") is not None

if not AVAILABLE:
    # `test_tier.py` stays and says why the others do not run.
    collect_ignore = [
        "test_attention.py",
        "test_failures.py",
        "test_hangs.py",
        "test_replay_order.py",
        "test_simulator.py",
        "test_towers.py",
    ]
else:
    import torch

    from graphhal.discovery import bind
    from graphhal.npu import plugin
    from graphhal.platform import Platform, PlatformInfo
    from tests.ascend_simulated import simulator
    from tests.ascend_simulated.processes import Processes

    _as_usual = torch.Tensor.__repr__

    def _shown(tensor: torch.Tensor, *arguments: Any, **options: Any) -> str:
        """A failing test prints its tensors; printing one computes on the device."""
        if tensor.device.type == "npu":
            return f"<{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}>"
        return _as_usual(tensor, *arguments, **options)

    torch.Tensor.__repr__ = _shown  # type: ignore[method-assign]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "ascend_simulated" in str(item.path):
            item.add_marker(pytest.mark.simulated)
            # torch_npu warns on first use of a pool, of a device without CANN's home, and so on.
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="session")
def platform() -> "Platform":
    info = plugin.graphhal_probe()
    assert isinstance(info, PlatformInfo), info
    return bind(plugin, info, "npu")


@pytest.fixture(scope="session")
def device() -> Any:
    return torch.device("npu:0")


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Processes"]:
    """Runs programs, each in a process of its own."""
    found = Processes(tmp_path_factory.mktemp("processes"))
    yield found
    found.close()


@pytest.fixture(params=["eager", "lazy", "shuffled"])
def schedule(request: pytest.FixtureRequest) -> Iterator[str]:
    """The schedule of queued work; back to eager afterwards, with nothing left to run."""
    torch.npu.synchronize()
    simulator.schedule(request.param)
    yield request.param
    torch.npu.synchronize()
    simulator.schedule("eager")


@pytest.fixture
def trace(tmp_path: Path) -> Iterator["simulator.Trace"]:
    """The runtime's trace of the test."""
    with simulator.traced(tmp_path / "trace") as opened:
        yield opened


@pytest.fixture(autouse=True)
def nothing_armed() -> Iterator[None]:
    if AVAILABLE:
        simulator.arm()
    yield
    if AVAILABLE:
        simulator.arm()
