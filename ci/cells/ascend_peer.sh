#!/usr/bin/env bash
# The same scenarios through vllm-ascend's own encoder-graph manager and through graphhal, and
# graphhal inside vllm-ascend, on the simulated CANN runtime.
#
#   ci/cells/ascend_peer.sh [--json FILE]
#
# PYTHON: interpreter to use (3.11). ASCEND_PEER_VENV: environment to make or reuse (3 GB).
# Only the Python files of vLLM and vllm-ascend are used: vllm-ascend pins another torch, and the
# kernels of both are for devices that are not here, so both come without their dependencies.
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
if ! "$venv/bin/python" -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ("torch_npu", "vllm", "vllm_ascend"))))'; then
    "$venv/bin/pip" install -q -r ci/ascend_requirements.txt -r ci/vllm_requirements.txt
    grep -E '^(apache-tvm-ffi|llguidance|torchvision|xgrammar)=' ci/vllm_requirements_bare.txt |
        "$venv/bin/pip" install -q --no-deps -r /dev/stdin vllm==0.26.0 vllm-ascend==0.26.0rc1
    find "$venv"/lib/python3*/site-packages/vllm "$venv"/lib/python3*/site-packages/vllm_ascend \
        -name '*.so' -delete
fi
"$venv/bin/pip" install -q --no-deps -e .
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
simulator=$(cd "$venv" && pwd)/cann
"$venv/bin/python" ci/ascend_simulator/make_stubs.py "$site" "$simulator"
export LD_LIBRARY_PATH=$simulator OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONPATH=$PWD:$PWD/ci/vllm_shim
export VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-ERROR} TORCHDYNAMO_DISABLE=1
"$venv/bin/python" -m pytest -q tests/ascend_peer
exec "$venv/bin/python" -m tests.ascend_peer.side_by_side "$@"
