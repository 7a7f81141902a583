"""vLLM's and vllm-ascend's Python files over the simulated runtime: `ci/cells/ascend_peer.sh`."""

import importlib.util
import os
import sys
import tempfile
import types
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


class Sparse(types.SimpleNamespace):
    """A configuration of which most is unset."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


@pytest.fixture(scope="session")
def engine() -> Iterator[Any]:
    """vLLM's configuration on one rank of the simulated device, encoder graphs on."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.config.compilation import CUDAGraphMode
    from vllm.config.multimodal import MultiModalConfig
    from vllm.distributed import parallel_state
    from vllm_ascend.ascend_config import init_ascend_config
    from vllm_ascend.utils import register_ascend_customop

    from graphhal.vllm_worker import plugin

    plugin.register()
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    config.model_config = Sparse(
        multimodal_config=MultiModalConfig(limit_per_prompt={"image": 8, "video": 2, "audio": 8}),
        dtype=torch.float32,
        max_model_len=4096,
        is_multimodal_model=True,
        enforce_eager=False,
    )
    compilation = config.compilation_config
    compilation.cudagraph_mm_encoder = True
    compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    compilation.encoder_cudagraph_token_budgets = [16, 32, 64]
    compilation.encoder_cudagraph_max_vision_items_per_batch = 4
    with (
        tempfile.TemporaryDirectory() as folder,
        set_current_vllm_config(config),
        torch.inference_mode(),
    ):
        parallel_state.init_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            backend="gloo",
            distributed_init_method=f"file://{folder}/rendezvous",
        )
        parallel_state.initialize_model_parallel(1, 1)
        register_ascend_customop()
        init_ascend_config(config)
        yield config
        parallel_state.destroy_model_parallel()


@pytest.fixture
def opted_in(engine: Any) -> Iterator[Any]:
    """The same, with graphhal's platform named."""
    engine.additional_config = {"graphhal": {"self_check": "quick", "platform": "npu"}}
    yield engine
    engine.additional_config = {}
