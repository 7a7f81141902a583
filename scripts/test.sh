#!/bin/sh
# Set-up and tests: a virtual environment, graphhal with its test extra, and the test suite.
# Arguments go to pytest.
set -eu
cd "$(dirname "$0")/.."
VENV="${VENV:-.venv}"
[ -x "$VENV/bin/python" ] || "${PYTHON:-python3}" -m venv "$VENV"
"$VENV/bin/python" -m pip install -q --no-compile -c constraints.txt -e ".[cpu,test]"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$VENV/bin/python" -m pytest -n "${JOBS:-auto}" "$@"
