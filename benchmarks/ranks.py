"""Several ranks, one process each: the Qwen3-Omni vision tower with tensor-parallel weights, and
with data-parallel items, eager against graph over random groups of pictures.

    python benchmarks/ranks.py --device cuda --ranks 2 --preset full      # NCCL, one GPU a rank
    python benchmarks/ranks.py --device cpu --ranks 2 --preset tiny       # gloo, platform cpu

Groups need different budgets one after the other, and some are too large for any, so that they must
fall back as a whole; then the same with another ladder. Every rank compares every DeepStack level
of every group and notes what it decided. Rank 0 prints the tables. Exit code 1 where a group
differs by more than the tolerance, ranks decide or count differently, too few groups fell back, or
a budget was hardly used.
"""

import argparse
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from math import isqrt
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
MOST_PICTURES = 4
LADDERS = {"full": ((64, 128, 256), (96, 192)), "tiny": ((16, 32), (24,))}
SIDES = {"full": 14, "tiny": 5}  # so that about one group in eight fits no graph

Grids = list[tuple[int, int, int]]
Encode = Callable[[dict[str, Any]], list[torch.Tensor]]


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


def groups(count: int, most: int, seed: int) -> list[Grids]:
    """Grids of random groups: pictures of up to `most` merged tokens a side."""
    rng = random.Random(seed)
    return [
        [
            (1, 2 * rng.randint(1, most), 2 * rng.randint(1, most))
            for _ in range(rng.randint(1, MOST_PICTURES))
        ]
        for _ in range(count)
    ]


def request(adapter: Any, grids: Grids, seed: int) -> dict[str, Any]:
    """The same random patches on every rank."""
    generator = torch.Generator().manual_seed(seed)
    rows = sum(t * h * w for t, h, w in grids)
    pixels = torch.randn((rows, adapter.patch_width), generator=generator)
    return {
        "pixel_values": pixels.to(adapter.device, adapter.dtype),
        "image_grid_thw": torch.tensor(grids),
    }


class Decisions:
    """What a rank's encoder did with a call: the graphs it replayed, or why it ran eagerly."""

    def __init__(self, graphs: EncoderGraphs) -> None:
        self._statistics = graphs.statistics

    def of(self, call: Callable[[], Any]) -> tuple[str, Any]:
        """(decision, result of the call); the decision of a rank without items is "no item"."""
        counters = (self._statistics.replays, self._statistics.eager_calls)
        before = [Counter(counter) for counter in counters]
        result = call()
        replays, eager = (now - then for now, then in zip(counters, before, strict=True))
        done = [*replays.elements(), *(f"eager: {reason}" for reason in eager.elements())]
        return " + ".join(done) or "no item", result


def times(
    call: Callable[[], Any], device: torch.device, repeats: int, host_group: Any
) -> dict[str, float]:
    """Median milliseconds of a call that all ranks begin together, the device idle before it.

    `device` is between two events around the whole call (on the CPU: the call); `wall` until the
    result is there.
    """
    found: dict[str, list[float]] = {"device": [], "wall": []}
    on_gpu = device.type == "cuda"
    for _ in range(2 + repeats):
        if on_gpu:
            torch.cuda.synchronize()
        dist.barrier(host_group)
        began = perf_counter()
        if on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
        else:
            call()
        found["wall"].append((perf_counter() - began) * 1e3)
        found["device"].append(start.elapsed_time(end) if on_gpu else found["wall"][-1])
    return {name: median(values[2:]) for name, values in found.items()}


def compare(
    adapter: Any, graphs: EncoderGraphs, ours: Encode, reference: Encode, asked_for: list[Grids]
) -> dict[str, Any]:
    """Worst difference over all groups, whole outputs and every level apart; every decision."""
    worst: dict[str, Any] = {"relative_l2": 0.0, "level_l2": 0.0, "bit_equal": 0}
    decisions, levels = [], 1 + len(adapter.encoder.deepstack_visual_indexes)
    statistics = graphs.statistics
    counted = statistics.hits.total(), statistics.misses.total()
    for number, grids in enumerate(asked_for):
        asked = request(adapter, grids, number)
        decision, outputs = Decisions(graphs).of(lambda asked=asked: ours(asked))
        decisions.append(decision)
        got, wanted = torch.cat(outputs), torch.cat(reference(asked))
        found = Difference.between(got, wanted)
        apart = [
            Difference.between(a.contiguous(), b.contiguous()).relative_l2
            for a, b in zip(got.chunk(levels, 1), wanted.chunk(levels, 1), strict=True)
        ]
        worst["relative_l2"] = max(worst["relative_l2"], found.relative_l2)
        worst["level_l2"] = max(worst["level_l2"], *apart)
        worst["bit_equal"] += found.bit_equal
    return worst | {
        "decisions": decisions,
        "hits": statistics.hits.total() - counted[0],
        "misses": statistics.misses.total() - counted[1],
        "items": sum(map(len, asked_for)),
    }


class Rank:
    """One rank: builds the tower whole and sharded, compares and times both modes."""

    def __init__(self, rank: int, args: argparse.Namespace, folder: str) -> None:
        self.rank, self.args = rank, args
        on_gpu = args.device == "cuda"
        self.device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)
        store = dist.FileStore(str(Path(folder) / "store"), args.ranks)
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=store,
            rank=rank,
            world_size=args.ranks,
            timeout=WAIT,
        )
        self.host_group = dist.new_group(backend="gloo", timeout=WAIT)
        self.platform = open_platform(args.device)
        self.factory = next(f for f in find_adapters() if f.name == "qwen3_omni_vision")

    def tower(self) -> Any:
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        tower = self.factory.build(self.args.preset, self.device, dtype, 0)
        tower.modalities = ("image",)
        return tower

    def settings(self, budgets: Sequence[int]) -> Settings:
        return Settings(token_budgets=tuple(budgets), max_items=MOST_PICTURES)

    def time(self, adapter: Any, calls: dict[str, tuple[EncoderGraphs, Encode]]) -> Any:
        """Each call on a small picture, four of them, a large one, and a group too large."""
        budgets, args = self.args.budgets, self.args
        small, large = 2 * (isqrt(budgets[0]) - 1), 2 * (isqrt(budgets[-1]) - 2)
        inputs: dict[str, Grids] = {
            "one small": [(1, small, small)],
            "four small": [(1, small, small)] * MOST_PICTURES,
            "one large": [(1, large, large)],
            "four large": [(1, large, large)] * MOST_PICTURES,
        }
        rows = []
        for name, grids in inputs.items():
            asked = request(adapter, grids, 0)
            tokens = sum(h * w // 4 for _, h, w in grids)
            row: dict[str, Any] = {"input": name, "tokens": tokens}
            for label, (graphs, encode) in calls.items():
                decision, _ = Decisions(graphs).of(lambda: encode(asked))  # noqa: B023
                found = times(
                    lambda: encode(asked),  # noqa: B023
                    self.device,
                    args.repeats,
                    self.host_group,
                )
                row[label] = found | {"decision": decision}
            rows.append(row)
        return rows

    def work(self) -> dict[str, Any]:
        args, result = self.args, {"rank": self.rank}
        whole = self.tower()
        alone = EncoderGraphs(whole, self.platform, self.settings(args.budgets))
        alone.capture()
        encoder = DataParallelEncoder(alone, dist.group.WORLD)
        # A rank has a share of a group: pictures are larger, so that shares fall back, too.
        shared = groups(args.groups, args.most * 3 // 2, seed=12)
        result["dp"] = compare(whole, alone, encoder.run, alone.run_eager, shared)
        result["dp times"] = self.time(
            whole,
            {
                "one rank eager": (alone, alone.run_eager),
                "one rank graph": (alone, alone.run),
                "all ranks graph": (alone, encoder.run),
            },
        )
        sharded = self.tower()
        sharded.collectives = True
        shard(sharded.encoder, self.rank, args.ranks, dist.group.WORLD)
        peers = DistributedPeers(self.host_group, WAIT)
        graphs = EncoderGraphs(sharded, self.platform, self.settings(args.budgets), peers)
        result["report"] = _report(graphs)
        asked_for = groups(args.groups, args.most, seed=11)
        result["tp"] = compare(sharded, graphs, graphs.run, graphs.run_eager, asked_for)
        result["tp against one rank"] = compare(
            sharded, graphs, graphs.run, alone.run_eager, asked_for
        )
        result["tp times"] = self.time(
            sharded, {"eager": (graphs, graphs.run_eager), "graph": (graphs, graphs.run)}
        )
        graphs.clear()
        other = EncoderGraphs(sharded, self.platform, self.settings(args.then), peers)
        result["then report"] = _report(other)
        fewer = groups(max(8, args.groups // 4), args.most, seed=13)
        result["tp then"] = compare(sharded, other, other.run, other.run_eager, fewer)
        other.clear()
        alone.clear()
        return result


def _report(graphs: EncoderGraphs) -> dict[str, Any]:
    report = graphs.capture()
    return {
        "keys": [str(line.key) for line in report.captured],
        "dropped": [f"{line.key}: {line.reason}" for line in report.dropped],
    }


def main_of(rank: int, args: argparse.Namespace, folder: str) -> None:
    """One rank's process."""
    found = Rank(rank, args, folder).work()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def problems(ranks: list[dict[str, Any]], args: argparse.Namespace) -> list[str]:
    """What is not as it must be, in words."""
    first, found = ranks[0], []
    allowed = TOLERANCE[torch.bfloat16 if args.device == "cuda" else torch.float32]
    for mode in ("tp", "tp then", "dp"):
        worst = max(rank[mode]["relative_l2"] for rank in ranks)
        if not worst <= allowed:
            found.append(f"{mode}: relative L2 {worst:.2e}, allowed {allowed:.0e}")
    for mode in ("tp", "tp against one rank", "tp then"):
        for rank in ranks[1:]:
            pairs = zip(first[mode]["decisions"], rank[mode]["decisions"], strict=True)
            other = [(number, *pair) for number, pair in enumerate(pairs) if pair[0] != pair[1]]
            if other:
                found.append(f"{mode}: rank {rank['rank']} decided otherwise: {other[:3]}")
    for name in ("report", "then report"):
        if any(rank[name]["keys"] != first[name]["keys"] for rank in ranks):
            found.append(f"{name}: ranks captured other keys")
        if first[name]["dropped"]:
            found.append(f"{name}: dropped {first[name]['dropped']}")
    counted = sum(rank["dp"]["hits"] + rank["dp"]["misses"] for rank in ranks)
    if counted != first["dp"]["items"]:
        found.append(f"dp: {first['dp']['items']} items, {counted} counted over all ranks")
    for mode, ladder in (("tp", args.budgets), ("tp then", args.then)):
        decisions = first[mode]["decisions"]
        least = max(1, len(decisions) // 20)
        fell_back = sum(decision.startswith("eager") for decision in decisions)
        if fell_back < least:
            found.append(f"{mode}: {fell_back} groups fell back, {least} should have")
        used = Counter(decisions)
        found += [
            f"{mode}: budget {budget} served fewer than {least} groups"
            for budget in ladder
            if sum(used[d] for d in used if d.endswith(f"[{budget}]")) < least
        ]
    if not any(d.startswith("eager") for rank in ranks for d in rank["dp"]["decisions"]):
        found.append("dp: no share fell back")
    return found


def show(ranks: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """The tables."""
    first = ranks[0]
    print(f"{args.ranks} ranks on {args.device}, preset {args.preset}, {args.groups} groups")
    for name in ("report", "then report"):
        print(f"tensor-parallel graphs: {first[name]['keys']}; dropped {first[name]['dropped']}")
    print(
        "\n| mode | groups | fell back | budget changes | worst relative L2 | worst level "
        "| bit-equal groups | items hit | items missed |\n" + "|---" * 9 + "|"
    )
    for mode in ("tp", "tp against one rank", "tp then", "dp"):
        decisions = [rank[mode]["decisions"] for rank in ranks]
        fell = [sum(d.startswith("eager") for d in each) for each in decisions]
        changes = [sum(a != b for a, b in pairwise(each)) for each in decisions]
        worst = max(rank[mode]["relative_l2"] for rank in ranks)
        level = max(rank[mode]["level_l2"] for rank in ranks)
        hits, misses = ([rank[mode][what] for rank in ranks] for what in ("hits", "misses"))
        print(
            f"| {mode} | {len(decisions[0])} | {fell} | {changes} | {worst:.2e} | {level:.2e} "
            f"| {first[mode]['bit_equal']} | {hits} | {misses} |"
        )
    for mode in ("tp", "tp then", "dp"):
        print(f"{mode}, rank 0: {dict(sorted(Counter(first[mode]['decisions']).items()))}")
    for mode in ("tp times", "dp times"):
        labels = [name for name in first[mode][0] if name not in ("input", "tokens")]
        head = " | ".join(f"{label}, device ms (wall)" for label in labels)
        ratios = " | ".join(f"eager over {label}" for label in labels[1:])
        print(f"\n{mode}, rank 0\n\n| input | tokens | {head} | {ratios} | served by |")
        print("|---" * (2 + 2 * len(labels)) + "|")
        for row in first[mode]:
            cells = [f"{row[label]['device']:.3f} ({row[label]['wall']:.3f})" for label in labels]
            eager = row[labels[0]]["device"]
            cells += [f"× {eager / row[label]['device']:.2f}" for label in labels[1:]]
            cells.append(row[labels[-1]]["decision"])
            print(f"| {row['input']} | {row['tokens']} | {' | '.join(cells)} |")


def main() -> int:
    """Start the ranks, print what they found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--preset", default="full", choices=list(LADDERS))
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--budgets", type=int, nargs="+", help="tokens of the graphs")
    parser.add_argument("--then", type=int, nargs="+", help="tokens of the second ladder's graphs")
    parser.add_argument("--most", type=int, help="merged tokens of a side, at most")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, help="everything, as JSON")
    args = parser.parse_args()
    args.budgets = sorted(args.budgets or LADDERS[args.preset][0])
    args.then = sorted(args.then or LADDERS[args.preset][1])
    args.most = args.most or SIDES[args.preset]
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
    show(ranks, args)
    found = problems(ranks, args)
    print(
        "\n" + ("\n".join(f"WRONG: {each}" for each in found) or "all ranks agree; nothing wrong")
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
