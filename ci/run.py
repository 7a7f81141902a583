"""Runs cells of the platform matrix on this machine and prints what ran, what did not, and why.

python -m ci.run --list
python -m ci.run --cell tests --cell packaging
python -m ci.run --require-platform cuda
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from ci.matrix import Cell, MatrixError, load

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / ".ci-work"
DEVICE_FILES = {"cuda": "/dev/nvidiactl", "rocm": "/dev/kfd", "npu": "/dev/davinci_manager"}
CLOSING_LINE = re.compile(r"(\d+) (passed|failed|skipped|xfailed|errors?)\b")


@dataclass(slots=True)
class Result:
    """What became of one cell."""

    cell: str
    status: str
    reason: str = ""
    tests: int = 0
    skipped: int = 0
    seconds: float = 0.0


def find_python(version: str) -> str | None:
    """Path of an interpreter of this `major.minor` that starts, or None."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    named = shutil.which(f"python{version}")
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for candidate in [named, *sorted(pyenv.glob(f"{version}.*/bin/python3"), reverse=True)]:
        if candidate and _starts(str(candidate), version):
            return str(candidate)
    return None


def _starts(python: str, version: str) -> bool:
    code = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.returncode == 0 and done.stdout.strip() == version


def missing_need(cell: Cell) -> str | None:
    """Why this machine cannot run the cell, or None where it can."""
    for need in (f"python:{cell.python}", *cell.needs):
        kind, _, value = need.partition(":")
        if kind == "python" and find_python(value) is None:
            return f"no Python {value} here"
        if kind == "device" and not Path(DEVICE_FILES.get(value, f"/dev/{value}")).exists():
            return f"no {value} device here"
        if kind == "tool" and shutil.which(value) is None:
            return f"no {value} here"
        if kind == "env" and not os.environ.get(value):
            return f"set {value}=1 to run it"
        if kind == "file" and not (ROOT / value).exists():
            return f"{value} is not in this checkout"
    return None


def count_tests(output: str) -> tuple[int, int]:
    """(executed, skipped) over all pytest closing lines of an output."""
    executed = skipped = 0
    for line in output.splitlines():
        if re.search(r"\bin \d+(\.\d+)?s\b", line) and CLOSING_LINE.search(line):
            for number, word in CLOSING_LINE.findall(line):
                if word == "skipped":
                    skipped += int(number)
                else:
                    executed += int(number)
    return executed, skipped


def run_cell(cell: Cell, emit: Callable[[str], None] = print) -> Result:
    """Set a cell up and run it; its output goes through `emit` line by line."""
    started = time.monotonic()
    work = WORK / cell.name
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    environment = {
        **os.environ,
        "CELL_PYTHON": find_python(cell.python) or "",
        "CELL_VENV": str(work / "venv"),
        "CELL_WORK": str(work),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    result = Result(cell.name, "passed")
    for line in (*cell.setup, cell.command):
        emit(f"$ {line}")
        left = cell.minutes * 60 - (time.monotonic() - started)
        status, output = _stream(line, environment, left, emit)
        executed, skipped = count_tests(output)
        result.tests += executed
        result.skipped += skipped
        if status != 0:
            result.status = "failed"
            result.reason = (
                f"over its {cell.minutes} minutes"
                if status == 124
                else f"exit {status}: {line[:60]}"
            )
            break
    result.seconds = time.monotonic() - started
    return result


def _stream(
    line: str, environment: dict[str, str], limit: float, emit: Callable[[str], None]
) -> tuple[int, str]:
    """Exit status (124: over the limit) and output of one shell line."""
    lines = []
    over = threading.Event()
    with subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", line],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:

        def stop() -> None:
            over.set()
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(max(limit, 1), stop)
        timer.start()
        try:
            for text in process.stdout or ():
                lines.append(text)
                emit(text.rstrip("\n"))
            status = process.wait()
        finally:
            timer.cancel()
    return (124 if over.is_set() else status), "".join(lines)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Plain text columns; the first row is the header."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(t.ljust(w) for t, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def list_cells(cells: Sequence[Cell]) -> str:
    """The matrix as this machine sees it."""
    rows = [("cell", "kind", "platform", "python", "pytorch", "vllm", "here", "what")]
    rows += [
        (c.name, c.kind, c.platform, c.python, c.pytorch, c.vllm, missing_need(c) or "yes", c.title)
        for c in cells
    ]
    return table(rows)


def select(cells: Sequence[Cell], names: Sequence[str]) -> list[Cell]:
    """The named cells, in matrix order; all of them where none is named.

    Raises:
        MatrixError: no cell has that name.
    """
    known = [cell.name for cell in cells]
    for name in names:
        if name not in known:
            raise MatrixError(f"no cell is called {name!r}. Cells: {', '.join(known)}")
    return [cell for cell in cells if not names or cell.name in names]


def _check_platforms(names: Sequence[str]) -> None:
    platforms = sorted({cell.platform for cell in load()})
    for name in names:
        if name not in platforms:
            raise MatrixError(f"no cell tests platform {name!r}. Platforms: {platforms}")


def run(
    cells: Sequence[Cell],
    required: Sequence[str],
    jobs: int = 1,
    time_minutes: float = float("inf"),
) -> list[Result]:
    """Run every cell that this machine can; a skip of a required platform is a failure.

    Args:
        cells: to run, in order.
        required: platforms that must be here.
        jobs: cells at a time; with several, each cell's output is printed when it is done.
        time_minutes: cells that are for when there is time are not started after these.
    """
    printing = threading.Lock()
    began = time.monotonic()

    def one(cell: Cell) -> Result:
        reason = missing_need(cell)
        if reason is not None:
            if cell.platform in required:
                return Result(cell.name, "failed", f"required, but {reason}")
            return Result(cell.name, "skipped", reason)
        if cell.if_time and time.monotonic() - began > 60 * time_minutes:
            return Result(cell.name, "skipped", f"no time: {time_minutes:g} minutes are over")
        if jobs == 1:
            print(f"\n=== cell {cell.name}: {cell.title}", flush=True)
            return run_cell(cell, lambda text: print(text, flush=True))
        lines: list[str] = []
        print(f"started {cell.name}", flush=True)
        result = run_cell(cell, lines.append)
        with printing:
            print("\n".join(["", f"=== cell {cell.name}: {cell.title}", *lines]), flush=True)
        return result

    with ThreadPoolExecutor(max_workers=jobs) as pool:
        # What must run comes first, and of that the longest, so that no worker is left with one at
        # the end; told in the given order.
        order = sorted(cells, key=lambda c: (c.if_time, -c.minutes if jobs > 1 else 0))
        results = {result.cell: result for result in pool.map(one, order)}
    return [results[cell.name] for cell in cells]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; exit 0 where nothing failed, 1 where a cell did, 2 for a usage error."""
    parser = argparse.ArgumentParser(prog="python -m ci.run", description=__doc__.splitlines()[0])
    parser.add_argument("--cell", action="append", default=[], help="run this one (repeatable)")
    parser.add_argument("--list", action="store_true", help="print the matrix and stop")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time")
    parser.add_argument("--json", action="store_true", help="results as JSON at the end")
    parser.add_argument(
        "--minutes",
        type=float,
        default=float("inf"),
        help="after these, no cell is started that is for when there is time",
    )
    parser.add_argument(
        "--require-platform",
        action="append",
        default=[],
        metavar="NAME",
        help="a skipped cell of this platform is a failure (repeatable)",
    )
    options = parser.parse_args(arguments)
    try:
        cells = select(load(), options.cell)
        _check_platforms(options.require_platform)
    except MatrixError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.list:
        print(list_cells(cells))
        return 0
    results = run(cells, options.require_platform, options.jobs, options.minutes)
    rows = [("cell", "result", "tests", "skipped", "seconds", "reason")]
    rows += [
        (r.cell, r.status, str(r.tests), str(r.skipped), f"{r.seconds:.0f}", r.reason)
        for r in results
    ]
    print("\n" + table(rows))
    if options.json:
        print(json.dumps([asdict(result) for result in results]))
    return 1 if any(result.status == "failed" for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
