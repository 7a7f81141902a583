"""Runs a function in several gloo processes, and returns what each of them returned."""

import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WAIT = timedelta(seconds=60)
"""For collectives of a rank that never comes; agreements have a shorter one of their own."""


def _main(
    rank: int, size: int, folder: str, body: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=WAIT)
    try:
        outcome: Any = body(rank, size, *args)
    except Exception as error:  # noqa: BLE001  (the test looks at it)
        outcome = (type(error).__name__, str(error), traceback.format_exc())
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(outcome))


def run_ranks(size: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """`body(rank, size, *args)` in `size` processes; failures come back as (type, text, trace)."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        ranks = [
            context.Process(target=_main, args=(rank, size, folder, body, args))
            for rank in range(size)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(100)
        alive = [number for number, rank in enumerate(ranks) if rank.is_alive()]
        for rank in ranks:
            rank.kill()
        assert not alive, f"ranks {alive} hang"
        return [pickle.loads((Path(folder) / str(r)).read_bytes()) for r in range(size)]
