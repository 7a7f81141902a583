"""vLLM's and vllm-ascend's Python files over the simulated runtime: `ci/cells/ascend_peer.sh`."""

import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

INSTALLED = all(importlib.util.find_spec(name) for name in ("torch_npu", "vllm_ascend"))
REPOSITORY = Path(__file__).resolve().parent.parent.parent

if INSTALLED:
    os.environ.update(TORCHDYNAMO_DISABLE="1", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1")
    sys.path.insert(0, str(REPOSITORY / "ci" / "vllm_shim"))
    import torch
    import torchvision_schemas  # noqa: F401

    with warnings.catch_warnings():  # what others' modules do when they are imported
        warnings.simplefilter("ignore")
        import vllm_ascend.ops  # noqa: F401  (first, or the runner's imports go round in a circle)
        import vllm_omni.platforms.npu.worker.npu_ar_model_runner  # noqa: F401
    # The runner's module allows them; the simulator has no kernels for them.
    torch.npu.config.allow_internal_format = False

    from tests.ascend_simulated.conftest import trace  # noqa: F401
else:
    collect_ignore = ["test_runners.py", "test_worker.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "ascend_peer" in str(item.path):
            item.add_marker(pytest.mark.simulated)
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def engine() -> Iterator[Any]:
    """vLLM's configuration on one rank of the simulated device, encoder graphs on."""
    from tests.ascend_peer.engines import engine_on_device

    with engine_on_device() as config:
        yield config


@pytest.fixture
def opted_in(engine: Any) -> Iterator[Any]:
    """The same, with graphhal's platform named."""
    engine.additional_config = {"graphhal": {"self_check": "quick", "platform": "npu"}}
    yield engine
    engine.additional_config = {}
