"""Eager against graph against bare replay, full-size Qwen3-Omni towers on one accelerator.

    python benchmarks/towers.py [--preset full] [--platform cuda] [--out results.json] [--quick]

Every figure of a row comes from this one process, the three ways in turn. Device time is between
two events around the whole call, on an idle device; host time is the call itself, without waiting.
Prints Markdown tables; writes every number as JSON.
"""

import argparse
import json
import platform as host
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from graphhal.discovery import find_adapters, open_platform
from graphhal.runner import EncoderGraphs
from graphhal.self_check import Difference
from graphhal.settings import Settings

IMAGE_TOKENS = (49, 98, 196, 256, 784, 1024, 1600, 4096)
IMAGE_GROUPS = (
    (49, 2),
    (49, 4),
    (49, 8),
    (196, 2),
    (196, 4),
    (196, 8),
    (256, 2),
    (256, 4),
    (256, 8),
)
FILMS = (
    (2, 20, 20),
    (10, 16, 20),
    (20, 16, 20),
    (64, 8, 8),
    (2, 40, 40),
    (4, 40, 40),
    (3, 64, 64),
    (20, 32, 32),
)
"""Frames, and patches high and wide."""
AUDIO_CHUNKS = (1, 3, 8, 15, 30, 60, 64)
AUDIO_FRAMES = (
    (100, 101),
    (300, 250, 130),
    (1500,),
    (3001,),
    (800, 650),
    (205, 150),
    (1500, 3000),
    (100,) * 8,
)
ROUND = 6
"""Calls of one kind in a row."""
LARGE_ROWS = 6000
"""Groups of more input rows than this are timed fewer times."""


def grid_of(tokens: int) -> tuple[int, int, int]:
    """(t, h, w) of one image of so many tokens, as square as whole numbers allow."""
    side = int(tokens**0.5)
    while tokens % side:
        side -= 1
    return (1, 2 * side, 2 * (tokens // side))


def image_request(adapter: Any, grids: list[tuple[int, int, int]], seed: int) -> dict[str, Any]:
    """Random patches for these grids, on the encoder's device."""
    generator = torch.Generator(adapter.device).manual_seed(seed)
    rows = sum(t * h * w for t, h, w in grids)
    shape = (rows, adapter.patch_width)
    pixels = torch.randn(shape, generator=generator, device=adapter.device, dtype=adapter.dtype)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)}


def film_request(adapter: Any, grid: tuple[int, int, int], seed: int) -> dict[str, Any]:
    """Random patches for one film of this grid."""
    pixels, grids = image_request(adapter, [grid], seed).values()
    return {"pixel_values_videos": pixels, "video_grid_thw": grids}


def audio_request(adapter: Any, frames: tuple[int, ...], seed: int) -> dict[str, Any]:
    """Random mel features for clips of these lengths, on the encoder's device."""
    generator = torch.Generator(adapter.device).manual_seed(seed)
    shape = (adapter.mel, sum(frames))
    features = torch.randn(shape, generator=generator, device=adapter.device, dtype=adapter.dtype)
    return {"input_features": features, "feature_lens": torch.tensor(frames)}


def timed(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, Any]:
    """Median and quartiles of device ms and host µs of each call.

    The calls take turns in rounds of `ROUND`; the first of a round is not counted: it pays for the
    caches that the other calls left cold, and after an eager call for a look at the graph pool.
    """
    device: dict[str, list[float]] = {name: [] for name in calls}
    submit: dict[str, list[float]] = {name: [] for name in calls}
    turns = [
        (n % ROUND, name)
        for _ in range(1 + -(-repeats // (ROUND - 1)))
        for name in calls
        for n in range(ROUND)
    ]
    for number, (position, name) in enumerate(turns):
        call = calls[name]
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        began = perf_counter()
        kept = call()
        ended = perf_counter()
        end.record()
        torch.cuda.synchronize()
        del kept
        if position and number >= ROUND * len(calls):
            device[name].append(start.elapsed_time(end))
            submit[name].append((ended - began) * 1e6)
    queued: dict[str, list[float]] = {name: [] for name in calls}
    for name in (name for _ in range(3) for name in calls if name in ("graph", "replay")):
        torch.cuda.synchronize()
        for _ in range(ROUND):
            began = perf_counter()
            kept = calls[name]()
            queued[name].append((perf_counter() - began) * 1e6)
            del kept
    torch.cuda.synchronize()
    return {
        name: {
            "queued_us": median(queued[name] or submit[name]),
            "device_ms": median(device[name]),
            "device_ms_low": sorted(device[name])[len(device[name]) // 4],
            "device_ms_high": sorted(device[name])[(3 * len(device[name])) // 4],
            "host_us": median(submit[name]),
        }
        for name in calls
    }


def as_shipped(tower: str, args: argparse.Namespace) -> Callable[[dict[str, Any]], Any]:
    """The same tower as transformers ships it (`sdpa`), called as its model calls it: sizes in a
    device tensor. What a user has who does not use graphhal."""
    encoder = build(tower, args).encoder

    def call(request: dict[str, Any]) -> Any:
        values, sizes = request.values()
        return encoder(values, sizes, return_dict=True)

    return call


def on_device(request: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The request with its sizes on the device too."""
    return {key: value.to(device) for key, value in request.items()}


def row(
    label: str,
    graphs: EncoderGraphs,
    request: dict[str, Any],
    repeats: int,
    shipped: Callable[[dict[str, Any]], Any],
) -> dict[str, Any]:
    """One line of the table: parity first, then the four timings."""
    items = graphs.adapter.item_specs(request)
    before = sum(graphs.statistics.hits.values())
    found = Difference.between(torch.cat(graphs.run(request)), torch.cat(graphs.run_eager(request)))
    hit = sum(graphs.statistics.hits.values()) > before
    group = graphs._plans.of(items)  # to time the bare replay of the very graph that runs
    moved = on_device(request, graphs.adapter.device)
    calls: dict[str, Callable[[], Any]] = {
        "shipped": lambda: shipped(moved),
        "eager": lambda: graphs.run_eager(request),
        "graph": lambda: graphs.run(request),
    }
    keys = [step.entry.capacity.key for step in group.steps if hasattr(step, "entry")]
    if hit and len(set(keys)) == 1:  # another graph would read what was staged for this one
        replays = [step.entry.graph for step in group.steps if hasattr(step, "entry")]
        calls["replay"] = lambda: [graphs.platform.replay(graph) for graph in replays]
    if sum(item.rows for item in items) > LARGE_ROWS:
        repeats = max(5, repeats // 3)
    figures = timed(calls, repeats)
    return {
        "input": label,
        "tokens": sum(item.tokens for item in items),
        "keys": [str(key) for key in keys],
        "exact": all(step.entry.capacity.is_exact_for(step.items) for step in group.steps)
        if hit
        else False,
        "hit": hit,
        "reason": None if hit else str(group.steps[0].reason),
        "bit_equal": found.bit_equal,
        "relative_l2": found.relative_l2,
        "min_cosine": found.min_cosine,
        **figures,
    }


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """A Markdown table of rows."""
    print(f"\n### {title}\n")
    print(
        "| input | tokens | graph | as shipped ms | eager ms (host µs) | run ms (host µs, queued) "
        "| bare replay ms | × shipped | × eager | run over replay | parity |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|"
    )
    for r in rows:
        replay = r.get("replay")
        over = "–"
        if replay:
            extra = r["graph"]["device_ms"] - replay["device_ms"]
            over = f"{extra:+.3f} ms, {100 * extra / replay['device_ms']:+.1f} %"
        parity = (
            "bit-equal" if r["bit_equal"] else f"{r['relative_l2']:.1e}, cos {r['min_cosine']:.4f}"
        )
        hosts = f"{r['graph']['host_us']:.0f}, {r['graph']['queued_us']:.0f}"
        key = r["keys"][0].split("[")[-1].rstrip("]") if r["keys"] else f"miss: {r['reason']}"
        key += f" and {len(r['keys']) - 1} more" if len(r["keys"]) > 1 else ""
        ours = r["graph"]["device_ms"]
        print(
            f"| {r['input']} | {r['tokens']} | {key}{' exact' if r['exact'] else ''} "
            f"| {r['shipped']['device_ms']:.2f} "
            f"| {r['eager']['device_ms']:.2f} ({r['eager']['host_us']:.0f}) | {ours:.3f} ({hosts}) "
            f"| {format(replay['device_ms'], '.3f') if replay else '–'} "
            f"| {r['shipped']['device_ms'] / ours:.2f} | {r['eager']['device_ms'] / ours:.2f} "
            f"| {over} | {parity} |"
        )


def build(tower: str, args: argparse.Namespace) -> Any:
    """The tower's adapter with seeded random weights."""
    factory = next(f for f in find_adapters() if f.name == tower)
    return factory.build(args.preset, torch.device(args.device), torch.bfloat16, 0)


def free() -> int:
    """Free device bytes, after everything settled."""
    import gc

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def ladder_memory(adapter: Any, active: Any, settings: Settings) -> dict[str, Any]:
    """Free-memory difference of a whole ladder, and of its largest graph alone."""
    result: dict[str, Any] = {}
    for name in ("warm", "largest", "ladder", "ladder, no self-check"):
        off = {"self_check": "off"} if "no self-check" in name else {}
        chosen = settings.model_copy(update=off)
        graphs = EncoderGraphs(adapter, active, chosen)
        keys = None
        if "ladder" not in name:
            keys = [max(graphs.ladder(), key=lambda c: c.rows).key]
        before = free()
        report = graphs.capture(keys=keys)
        taken = before - free()
        if name != "warm":
            result[name] = {
                "graphs": len(report.captured),
                "dropped": [f"{d.key}: {d.reason}" for d in report.dropped],
                "free_difference_mib": taken / 2**20,
                "reported_mib": report.num_bytes / 2**20,
                "capture_s": report.seconds,
                "self_check_s": report.self_check_seconds,
            }
        graphs.clear()
        del graphs
    return result


def table(
    title: str,
    adapter: Any,
    active: Any,
    settings: Settings,
    requests: dict[str, dict[str, Any]],
    args: argparse.Namespace,
    shipped: Callable[[dict[str, Any]], Any],
) -> dict[str, Any]:
    """Capture with these settings, time each request, and print the rows."""
    graphs = EncoderGraphs(adapter, active, settings)
    report = graphs.capture()
    print(
        f"\n{title}: {len(report.captured)} graphs in {report.seconds:.1f} s, self-check "
        f"{report.self_check_seconds:.1f} s, {report.num_bytes / 2**20:.0f} MiB, dropped: "
        f"{[f'{d.key}: {d.reason}' for d in report.dropped]}"
    )
    rows = [
        row(label, graphs, request, args.repeats, shipped) for label, request in requests.items()
    ]
    show(title, rows)
    graphs.clear()
    return {"rows": rows, "capture": report.as_dict()}


@torch.no_grad()  # as a server runs it
def main() -> int:
    """Run everything and print the tables; 1 where a row disagrees beyond bf16's 2e-2."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="full")
    parser.add_argument("--platform", default="cuda")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="a few rows only")
    parser.add_argument("--only", default="", help="tables whose title holds these words")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    active = open_platform(args.platform)
    machine = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": host.python_version(),
        "date": date.today().isoformat(),
        "preset": args.preset,
    }
    print(json.dumps(machine))
    results: dict[str, Any] = {"machine": machine}

    vision, shipped = build("qwen3_omni_vision", args), as_shipped("qwen3_omni_vision", args)
    vision.modalities = ("image",)
    dense = Settings()
    if args.only in "memory":
        results["image_memory"] = ladder_memory(vision, active, dense)
    exact = Settings(token_budgets=sorted({*IMAGE_TOKENS, *(t * n for t, n in IMAGE_GROUPS)}))
    measured = Settings(policy="measured")
    few = 3 if args.quick else None
    images = {f"{t} tokens": ([grid_of(t)], t) for t in IMAGE_TOKENS[:few]} | {
        f"{n} × {t} tokens": ([grid_of(t)] * n, t) for t, n in IMAGE_GROUPS[:few]
    }
    requests = {label: image_request(vision, *sizes) for label, sizes in images.items()}
    for title, settings in (
        ("images, exact budgets", exact),
        ("images, default dense ladder", dense),
        ("images, default dense ladder, policy measured", measured),
    ):
        if args.only in title:
            results[title] = table(title, vision, active, settings, requests, args, shipped)
    vision.modalities = ("video",)
    requests = {
        f"{t} frames of {h} x {w}": film_request(vision, (t, h, w), t) for t, h, w in FILMS[:few]
    }
    for title, settings in (("films", dense), ("films, policy measured", measured)):
        if args.only in title:
            results[title] = table(title, vision, active, settings, requests, args, shipped)
    del vision, shipped, requests

    audio, shipped = build("qwen3_omni_audio", args), as_shipped("qwen3_omni_audio", args)
    if args.only in "memory":
        results["audio_memory"] = ladder_memory(audio, active, Settings())
    clips = {f"{c} chunks": ((c * audio.width,), c) for c in AUDIO_CHUNKS[:few]} | {
        f"frames {'+'.join(map(str, f))}": (f, 7) for f in AUDIO_FRAMES[:few]
    }
    requests = {label: audio_request(audio, *lengths) for label, lengths in clips.items()}
    for title, settings in (
        ("audio, 64 chunk counts", Settings()),
        ("audio, policy measured", measured),
    ):
        if args.only in title:
            results[title] = table(title, audio, active, settings, requests, args, shipped)
    print("\n### memory\n\n| ladder | graphs | MiB by free memory | MiB reported | capture s |")
    print("|---|---|---|---|---|")
    for name in ("image_memory", "audio_memory"):
        for which, m in results.get(name, {}).items():
            print(
                f"| {name.split('_')[0]}, {which} | {m['graphs']} | {m['free_difference_mib']:.0f} "
                f"| {m['reported_mib']:.0f} | {m['capture_s']:.1f} |"
            )
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1))
    rows = [row for table in results.values() for row in table.get("rows", ())]
    worst = max((row["relative_l2"] for row in rows), default=0.0)
    print(f"\nworst relative L2: {worst:.2e}")
    return 0 if worst <= 2e-2 else 1


if __name__ == "__main__":
    sys.exit(main())
