#!/usr/bin/env bash
# graphhal inside vllm-ascend and in its runners, then the same scenarios through vllm-ascend's own
# encoder-graph manager and through graphhal, on the simulated CANN runtime.
#
#   ci/cells/ascend_peer.sh [--json FILE]
#
# PYTHON: interpreter to use (3.11). ASCEND_PEER_VENV: environment to make or reuse (3 GB).
# Only the Python files of vLLM, vllm-ascend and vLLM-Omni are used: vllm-ascend pins another torch,
# and the kernels are for devices that are not here, so all come without their dependencies.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
venv=${ASCEND_PEER_VENV:-.ci-work/ascend-peer}
for tool in gcc g++ readelf; do
    command -v "$tool" >/dev/null || { echo "error: the simulator needs $tool" >&2; exit 2; }
done
if [ ! -x "$venv/bin/python" ]; then
    "$python" -m venv "$venv"
fi
if ! "$venv/bin/python" -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ("torch_npu", "vllm", "vllm_ascend", "vllm_omni", "numba"))))'; then
    "$venv/bin/pip" install -q -r ci/ascend_requirements.txt -r ci/vllm_requirements.txt
    "$venv/bin/pip" install -q --no-deps -r ci/ascend_peer_requirements_bare.txt
    find "$venv"/lib/python3*/site-packages/vllm "$venv"/lib/python3*/site-packages/vllm_ascend \
        -name '*.so' -delete
fi
"$venv/bin/pip" install -q --no-deps -e .
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
simulator=$(cd "$venv" && pwd)/cann
"$venv/bin/python" ci/ascend_simulator/make_stubs.py "$site" "$simulator"
export LD_LIBRARY_PATH=$simulator OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONPATH=$PWD:$PWD/ci/vllm_shim
export VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-CRITICAL} TORCHDYNAMO_DISABLE=1
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}
"$venv/bin/python" -m pytest -q tests/ascend_peer
exec "$venv/bin/python" -m tests.ascend_peer.side_by_side "$@"
