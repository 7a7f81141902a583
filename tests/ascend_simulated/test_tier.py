"""Says, wherever the suite runs, whether the simulated tier runs there."""

import importlib.util

import pytest


def test_the_simulated_tier_runs_here() -> None:
    if importlib.util.find_spec("torch_npu") is None:
        pytest.skip("torch_npu is not installed; run ci/cells/ascend_simulated.sh")
    import torch

    assert torch.npu.is_available(), "run ci/cells/ascend_simulated.sh, which builds the runtime"
