"""Runs a function in several gloo processes, and returns what each of them returned."""

import faulthandler
import multiprocessing as mp
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

WAIT = timedelta(seconds=60)
"""For collectives of a rank that never comes; agreements have a shorter one of their own."""

HANGS = 150
"""Seconds after which a rank that still runs is said to hang; it prints where."""

IMPORTED_ONCE = [
    "tests.ranks.test_tensor_parallel",
    "tests.ranks.test_data_parallel",
    "torch._dynamo",  # a dispatch mode imports it on first use
]
"""By the process that all ranks are forked from: they take ten seconds of processor time."""


def _main(
    rank: int, size: int, folder: str, body: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    faulthandler.dump_traceback_later(HANGS - 5)
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=WAIT)
    try:
        outcome: Any = body(rank, size, *args)
    except Exception as error:  # noqa: BLE001  (the test looks at it)
        outcome = (type(error).__name__, str(error), traceback.format_exc())
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(outcome))
    dist.destroy_process_group()


def run_ranks(size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """`body(rank, size, *args)` in `size` processes; failures come back as (type, text, trace).

    Raises:
        AssertionError: a rank hangs, or ended other than with exit code 0.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_main, args=(rank, size, folder, body, args))
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        until = monotonic() + HANGS
        for process in ranks:
            process.join(max(0.0, until - monotonic()))
        alive = [number for number, process in enumerate(ranks) if process.is_alive()]
        for process in ranks:
            process.kill()
        assert not alive, f"ranks {alive} hang"
        assert [process.exitcode for process in ranks] == [0] * size
        return [pickle.loads((Path(folder) / str(r)).read_bytes()) for r in range(size)]
