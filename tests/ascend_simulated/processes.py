"""Programs in processes of their own, forked from one that has imported everything and opened no
device: each opens its own and ends as any does, and none spends seconds on imports."""

import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

PRINTED = ("stdout", "stderr")


class Processes:
    """Runs programs, one at a time.

    Args:
        folder: for what they print.
    """

    def __init__(self, folder: Path) -> None:
        self._printed = [folder / name for name in PRINTED]
        self._parent = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", __name__, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self, program: str, seconds: int = 100, **environment: str
    ) -> "subprocess.CompletedProcess[str]":
        """Run a program with these variables added to the environment; end it after `seconds`."""
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        asked = {"program": textwrap.dedent(program), "seconds": seconds, "added": environment}
        self._parent.stdin.write(json.dumps(asked) + "\n")
        self._parent.stdin.flush()
        status = int(self._parent.stdout.readline())
        stdout, stderr = (printed.read_text() for printed in self._printed)
        return subprocess.CompletedProcess(program, status, stdout, stderr)

    def close(self) -> None:
        """End the process that the others are forked from."""
        self._parent.communicate()


def _fork_for_each_line(folder: Path) -> None:
    """Run the program of every line of the input; prints its exit status."""
    statuses = os.dup(1)
    os.dup2(2, 1)  # what imports print
    import tests.ascend_simulated.faults  # noqa: F401  (imports what programs need)

    gc.freeze()  # or each process copies all of that, to collect none of it at its end
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run(folder, **json.loads(line))
            return
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(statuses, f"{status}\n".encode())


def _run(folder: Path, program: str, seconds: int, added: dict[str, str]) -> None:
    signal.alarm(seconds)
    os.environ.update(added)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in enumerate(PRINTED, start=1):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    exec(program, {"__name__": "program"})


if __name__ == "__main__":
    _fork_for_each_line(Path(sys.argv[1]))
