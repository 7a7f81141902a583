#!/usr/bin/env bash
# Real torch_npu on a simulated CANN runtime: conformance, then tests in eager, lazy and shuffled
# scheduling.
#
#   ci/cells/ascend_simulated.sh [pytest arguments]
#
# PYTHON: interpreter to use. ASCEND_VENV: environment to make or reuse; torch_npu must never share
# one with other platforms, since torch loads it by itself. SIMULATED_GROUPS: random groups a tower
# (by default 200, and 5 of the slow one).
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
venv=${ASCEND_VENV:-.ci-work/ascend-simulated}
for tool in gcc g++ readelf; do
    command -v "$tool" >/dev/null || { echo "error: the simulator needs $tool" >&2; exit 2; }
done
if [ ! -x "$venv/bin/python" ]; then
    "$python" -m venv "$venv"
fi
if ! "$venv/bin/python" -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ("torch_npu", "pytest_timeout", "transformers"))))'; then
    "$venv/bin/pip" install -q -r ci/ascend_requirements.txt
fi
"$venv/bin/pip" install -q --no-deps -e .
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
simulator=$(cd "$venv" && pwd)/cann
"$venv/bin/python" ci/ascend_simulator/make_stubs.py "$site" "$simulator"
export LD_LIBRARY_PATH=$simulator OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONPATH=$PWD
"$venv/bin/python" -c 'import torch; assert torch.npu.is_available(), "the simulated device is not there"'
for lazy in 0 1; do  # the conformance suite, on a fast device and on a busy one
    CANN_SIM_LAZY=$lazy "$venv/bin/python" -W ignore -m graphhal.testing --platform npu
done
exec "$venv/bin/python" -m pytest -q tests/ascend_simulated "$@"
