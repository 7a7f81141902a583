#!/bin/sh
# Set-up and main job: a virtual environment, graphhal with its two towers, and eager against
# graph on a real photograph and a real speech clip. Arguments go to `graphhal bench`.
set -eu
cd "$(dirname "$0")/.."
VENV="${VENV:-.venv}"
[ -x "$VENV/bin/python" ] || "${PYTHON:-python3}" -m venv "$VENV"
echo "installing into $VENV, which takes a minute or two"
"$VENV/bin/python" -m pip install -q --no-compile -c constraints.txt -e ".[cpu,bench]"
exec "$VENV/bin/graphhal" bench --platform cpu --preset tiny --report report.html "$@"
