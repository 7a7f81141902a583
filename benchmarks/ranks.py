"""Several ranks, one process each: the Qwen3-Omni vision tower with tensor-parallel weights, and
with data-parallel items, eager against graph over random groups of pictures.

    python benchmarks/ranks.py --device cuda --ranks 2 --preset full      # NCCL, one GPU a rank
    python benchmarks/ranks.py --device cpu --ranks 2 --preset tiny       # gloo, platform cpu

Every rank compares every DeepStack level of every group; rank 0 prints the tables. Exit code 1
where a group differs by more than the tolerance, or ranks count differently.
"""

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from graphhal.data_parallel import DataParallelEncoder
from graphhal.discovery import find_adapters, open_platform
from graphhal.peers import DistributedPeers
from graphhal.runner import EncoderGraphs
from graphhal.self_check import Difference
from graphhal.settings import Settings

TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
WAIT = timedelta(seconds=120)


class RowParallelLinear(torch.nn.Module):
    """The part of a linear layer's input that this rank holds; the ranks' outputs are summed."""

    def __init__(self, whole: torch.nn.Linear, rank: int, size: int, group: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(whole.weight.chunk(size, dim=1)[rank].contiguous())
        self.bias = whole.bias
        self.group = group

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        summed = torch.nn.functional.linear(rows, self.weight)
        dist.all_reduce(summed, group=self.group)
        return summed + self.bias


def _keep(layer: torch.nn.Linear, rank: int, size: int, parts: int = 1) -> None:
    """Keep this rank's share of a layer's outputs; `parts` equal blocks are cut each."""
    for name in ("weight", "bias"):
        blocks = getattr(layer, name).data.chunk(parts, dim=0)
        kept = torch.cat([block.chunk(size, dim=0)[rank] for block in blocks]).contiguous()
        setattr(layer, name, torch.nn.Parameter(kept))


def shard(encoder: Any, rank: int, size: int, group: Any) -> None:
    """Tensor-parallel weights: heads and hidden units are spread over the ranks."""
    for block in encoder.blocks:
        _keep(block.attn.qkv, rank, size, parts=3)
        block.attn.num_heads //= size
        block.attn.proj = RowParallelLinear(block.attn.proj, rank, size, group)
        _keep(block.mlp.linear_fc1, rank, size)
        block.mlp.linear_fc2 = RowParallelLinear(block.mlp.linear_fc2, rank, size, group)


def groups(count: int, most: int, seed: int) -> list[list[tuple[int, int, int]]]:
    """Grids of random groups: one to four pictures of up to `most` merged tokens a side."""
    rng = random.Random(seed)
    return [
        [(1, 2 * rng.randint(1, most), 2 * rng.randint(1, most)) for _ in range(rng.randint(1, 4))]
        for _ in range(count)
    ]


def request(adapter: Any, grids: list[tuple[int, int, int]], seed: int) -> dict[str, Any]:
    """The same random patches on every rank."""
    generator = torch.Generator().manual_seed(seed)
    rows = sum(t * h * w for t, h, w in grids)
    pixels = torch.randn((rows, adapter.patch_width), generator=generator)
    return {
        "pixel_values": pixels.to(adapter.device, adapter.dtype),
        "image_grid_thw": torch.tensor(grids),
    }


def _milliseconds(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    times = []
    for _ in range(2 + repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        began = perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((perf_counter() - began) * 1e3)
    return median(times[2:])


def compare(
    adapter: Any,
    ours: Callable[[dict[str, Any]], list[torch.Tensor]],
    reference: Callable[[dict[str, Any]], list[torch.Tensor]],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Worst difference over all groups, whole outputs and every level apart."""
    worst = {"relative_l2": 0.0, "level_l2": 0.0, "bit_equal": 0}
    for number, grids in enumerate(groups(args.groups, args.most, seed=11)):
        asked = request(adapter, grids, number)
        got, wanted = torch.cat(ours(asked)), torch.cat(reference(asked))
        found = Difference.between(got, wanted)
        levels = 1 + len(adapter.encoder.deepstack_visual_indexes)
        apart = [
            Difference.between(a.contiguous(), b.contiguous()).relative_l2
            for a, b in zip(got.chunk(levels, 1), wanted.chunk(levels, 1), strict=True)
        ]
        worst["relative_l2"] = max(worst["relative_l2"], found.relative_l2)
        worst["level_l2"] = max(worst["level_l2"], *apart)
        worst["bit_equal"] += found.bit_equal
    return worst


def main_of(rank: int, args: argparse.Namespace, folder: str) -> None:
    """One rank."""
    device = torch.device("cuda", rank) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = dist.FileStore(str(Path(folder) / "store"), args.ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=args.ranks, timeout=WAIT)
    host_group = dist.new_group(backend="gloo", timeout=WAIT)
    platform = open_platform(args.device)
    factory = next(f for f in find_adapters() if f.name == "qwen3_omni_vision")
    budgets = (64, 128, 256) if args.preset == "full" else (16, 32)
    settings = Settings(token_budgets=budgets, max_items=4)
    result: dict[str, Any] = {"rank": rank}

    whole = factory.build(args.preset, device, dtype, 0)
    whole.modalities = ("image",)
    alone = EncoderGraphs(whole, platform, settings)
    report = alone.capture()
    encoder = DataParallelEncoder(alone, dist.group.WORLD)
    result["dp"] = compare(whole, encoder.run, alone.run_eager, args)
    stats = alone.stats()
    result["dp"] |= {"hits": stats["hits"], "misses": stats["misses"]}
    timed = request(whole, [(1, 14, 14)] * 4, 0)
    result["dp"]["ms"] = {
        "one rank, eager": _milliseconds(lambda: alone.run_eager(timed), device, args.repeats),
        "one rank, graph": _milliseconds(lambda: alone.run(timed), device, args.repeats),
        "all ranks, graph": _milliseconds(lambda: encoder.run(timed), device, args.repeats),
    }

    sharded = factory.build(args.preset, device, dtype, 0)
    sharded.modalities = ("image",)
    sharded.collectives = True
    shard(sharded.encoder, rank, args.ranks, dist.group.WORLD)
    graphs = EncoderGraphs(sharded, platform, settings, DistributedPeers(host_group, WAIT))
    report = graphs.capture()
    result["keys"] = [str(line.key) for line in report.captured]
    result["dropped"] = [f"{line.key}: {line.reason}" for line in report.dropped]
    result["tp"] = compare(sharded, graphs.run, graphs.run_eager, args)
    result["tp against one rank"] = compare(sharded, graphs.run, alone.run_eager, args)
    stats = graphs.stats()
    result["tp"] |= {"hits": stats["hits"], "misses": stats["misses"]}
    one = request(sharded, [(1, 14, 14)], 0)
    result["tp"]["ms"] = {
        "eager": _milliseconds(lambda: graphs.run_eager(one), device, args.repeats),
        "graph": _milliseconds(lambda: graphs.run(one), device, args.repeats),
    }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(result))
    graphs.clear()
    alone.clear()
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Start the ranks, print what they found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--preset", default="full")
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--most", type=int, default=10, help="merged tokens of a side, at most")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        context = mp.spawn(main_of, args=(args, folder), nprocs=args.ranks, join=False)
        while not context.join():
            pass
        ranks = [
            json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(args.ranks)
        ]
    if args.out is not None:
        args.out.write_text(json.dumps(ranks, indent=1))
    first = ranks[0]
    print(f"{args.ranks} ranks on {args.device}, preset {args.preset}, {args.groups} groups")
    print(f"tensor-parallel graphs: {first['keys']}; dropped {first['dropped']}")
    print("\n| mode | worst relative L2 | worst level | bit-equal groups | hits | misses |")
    print("|---|---|---|---|---|---|")
    for mode in ("tp", "tp against one rank", "dp"):
        found = first[mode]
        hits = [rank[mode].get("hits") for rank in ranks]
        misses = [rank[mode].get("misses") for rank in ranks]
        worst = max(rank[mode]["relative_l2"] for rank in ranks)
        level = max(rank[mode]["level_l2"] for rank in ranks)
        print(f"| {mode} | {worst:.2e} | {level:.2e} | {found['bit_equal']} | {hits} | {misses} |")
    for mode in ("tp", "dp"):
        print(mode, {name: round(ms, 3) for name, ms in first[mode]["ms"].items()}, "ms")
    allowed = TOLERANCE[torch.bfloat16 if args.device == "cuda" else torch.float32]
    worst = max(rank[m]["relative_l2"] for rank in ranks for m in ("tp", "dp"))
    same = all(
        rank["keys"] == first["keys"]
        and rank["tp"]["hits"] == first["tp"]["hits"]
        and rank["tp"]["misses"] == first["tp"]["misses"]
        for rank in ranks
    )
    print(f"worst {worst:.2e}, allowed {allowed:.0e}; ranks {'agree' if same else 'DIFFER'}")
    return 0 if worst <= allowed and same else 1


if __name__ == "__main__":
    sys.exit(main())
