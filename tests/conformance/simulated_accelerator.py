"""`torch.accelerator` on host memory: its graphs record operators, its streams are none.

Enough to run the example plugin under the conformance suite; it proves the plugin's logic, not a
device.
"""

from typing import ClassVar

import torch

from tests.broken_platforms.tape_platform import RefuseHostMethods, Tape


class Graph:
    """Records between `capture_begin` and `capture_end`, as strict as the tape platform."""

    pools: ClassVar[dict[tuple[int, int], int]] = {}

    def __init__(self, *, pool=None, capture_error_mode="default"):
        self.pool_id = pool or (len(Graph.pools) + 1, 0)
        self.mode = capture_error_mode

    def capture_begin(self):
        self.refusal, self.tape = RefuseHostMethods(), Tape()
        self.refusal.__enter__()
        self.tape.__enter__()

    def capture_end(self):
        self.tape.__exit__(None, None, None)
        self.refusal.__exit__(None, None, None)
        needed = sum(tensor.nbytes for tensor in self.tape.memory)
        Graph.pools[self.pool_id] = max(needed, Graph.pools.get(self.pool_id, 0))

    def replay(self):
        self.tape.run()

    def reset(self):
        self.tape = None

    def pool(self):
        return self.pool_id


class Stream:
    def __init__(self, device=None):
        self.device = device

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def wait_stream(self, other):
        pass

    def wait_event(self, event):
        pass

    def record_event(self):
        return object()


def install(monkeypatch):
    """Let PyTorch report the host as an accelerator."""
    host = torch.device("cpu")
    total = lambda *_: sum(Graph.pools.values())  # noqa: E731
    answers = {
        "Graph": Graph,
        "current_accelerator": lambda: host,
        "is_available": lambda: True,
        "current_stream": lambda _=None: Stream(host),
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "memory_reserved": total,
        "max_memory_reserved": total,
        "reset_peak_memory_stats": lambda: None,
        "get_memory_info": lambda *_: (2**30, 2**31),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.accelerator, name, answer)
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(Graph, "pools", {})
