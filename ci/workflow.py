"""Writes the hosted workflow from the matrix, so that the two cannot disagree.

python -m ci.workflow --write     after a change of ci/matrix.toml
python -m ci.workflow --check     exit 1 where the file is not what the matrix says
"""

import argparse
import sys
from collections.abc import Sequence

from ci.matrix import Cell, load
from ci.run import ROOT

WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
HEAD = """\
# Written by `python -m ci.workflow --write` from ci/matrix.toml; do not edit.
name: ci
on:
  push:
  pull_request:
permissions:
  contents: read
concurrency:
  group: ci-${{ github.ref }}
  cancel-in-progress: true
jobs:
"""
JOB = """\
  {job}:
    name: {name}
    runs-on: {runner}
    timeout-minutes: {minutes}
    env:
      CI_EXTENDED: "1"
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "{python}"
      - run: python -m ci.run --cell {name}{require}
"""


def job(cell: Cell) -> str:
    """One job: a device cell goes to a self-hosted machine that has the device, and must run."""
    device = cell.kind == "device"
    return JOB.format(
        job=cell.name.replace(".", "-"),
        name=cell.name,
        runner=f"[self-hosted, {cell.platform}]" if device else "ubuntu-24.04",
        minutes=cell.minutes + 5,
        python=cell.python,
        require=f" --require-platform {cell.platform}" if cell.platform != "-" else "",
    )


def workflow(cells: Sequence[Cell]) -> str:
    """Text of the hosted workflow."""
    return HEAD + "\n".join(job(cell) for cell in cells if cell.hosted)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m ci.workflow")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true")
    mode.add_argument("--check", action="store_true")
    wanted = workflow(load())
    if parser.parse_args(arguments).write:
        WORKFLOW.parent.mkdir(parents=True, exist_ok=True)
        WORKFLOW.write_text(wanted)
        return 0
    if not WORKFLOW.exists() or WORKFLOW.read_text() != wanted:
        print(
            f"{WORKFLOW.relative_to(ROOT)} is not what ci/matrix.toml says. "
            "Run: python -m ci.workflow --write",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
