"""Controls the simulated runtime of this process, and reads its trace."""

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_library = ctypes.CDLL("libcann_stub.so")
_library.cann_sim_all_calls.restype = ctypes.c_char_p
_library.cann_sim_calls.restype = ctypes.c_long

SCHEDULES = {"eager": (0, 0), "lazy": (1, 0), "shuffled": (1, 20261129)}


def schedule(name: str) -> None:
    """When queued work runs: at once, where the host waits, or there in random order."""
    _library.cann_sim_schedule(*SCHEDULES[name])


def arm(spec: str = "") -> None:
    """Fail `call:nth[:code]`, counted from now; nothing for an empty spec."""
    _library.cann_sim_arm(spec.encode())


def calls() -> dict[str, int]:
    """Runtime calls since the last `arm`."""
    lines = _library.cann_sim_all_calls().decode().splitlines()
    return {name: int(count) for name, count in (line.split() for line in lines)}


class Trace:
    """Lines that the runtime wrote while the trace was open."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def lines(self) -> list[str]:
        return self.path.read_text().splitlines()

    def matching(self, pattern: str) -> list[str]:
        return [line for line in self.lines if re.search(pattern, line)]

    def hazards(self) -> list[str]:
        return self.matching("HAZARD|HANG|DEVICE ERROR")

    def between(self, first: str, last: str) -> list[str]:
        """Lines from one mark to another."""
        lines = self.lines
        return lines[lines.index(f"MARK {first}") + 1 : lines.index(f"MARK {last}")]


def mark(text: str) -> None:
    """Write a line into the trace."""
    _library.cann_sim_mark(text.encode())


@contextmanager
def traced(path: Path) -> Iterator[Trace]:
    """Trace into a file for as long as the block runs."""
    path.touch()
    _library.cann_sim_trace_to(str(path).encode())
    try:
        yield Trace(path)
    finally:
        _library.cann_sim_trace_to(b"")
