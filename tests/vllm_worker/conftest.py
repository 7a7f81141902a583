"""Real vLLM on a CPU, where it is installed: `ci/cells/vllm_cpu.sh` makes such an environment."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
SHIM = REPOSITORY / "ci" / "vllm_shim"
INSTALLED = importlib.util.find_spec("vllm") is not None

sys.path.insert(0, str(HERE))
if INSTALLED:
    os.environ.update(
        VLLM_TARGET_DEVICE="cpu",
        TORCHDYNAMO_DISABLE="1",
        VLLM_LOGGING_LEVEL="ERROR",
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        GRAPHHAL_PLATFORM="cpu",
        PYTHONPATH=os.pathsep.join([str(REPOSITORY), str(SHIM), str(HERE)]),
    )
    sys.path.insert(0, str(SHIM))
    import torch

    if "+cpu" in torch.__version__:
        import torchvision_schemas  # noqa: F401

needs_vllm = pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE not in item.path.parents:
            continue
        # vLLM and what it imports warn by the dozen; graphhal's own warnings are tested elsewhere.
        item.add_marker(pytest.mark.filterwarnings("default"))
        if item.get_closest_marker("vllm"):
            item.add_marker(needs_vllm)


@pytest.fixture(scope="session")
def watching() -> None:
    from graphhal.vllm_worker import plugin

    plugin.register()


@pytest.fixture
def engine(watching: None) -> Iterator[Any]:
    """One-rank vLLM with encoder graphs on: budgets 16, 32 and 64, four items a graph."""
    import vllm_on_cpu

    with vllm_on_cpu.engine_context(
        encoder_cudagraph_token_budgets=[16, 32, 64],
        encoder_cudagraph_max_vision_items_per_batch=4,
    ) as config:
        config.additional_config = {"graphhal": {"audio_chunks": "1-6", "self_check": "quick"}}
        yield config
