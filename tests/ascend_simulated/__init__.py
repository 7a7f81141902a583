"""Real torch_npu on a simulated CANN runtime: `ci/cells/ascend_simulated.sh` runs these tests."""
