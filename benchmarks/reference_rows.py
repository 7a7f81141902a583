"""The rows of the reference threads that can be run here, same shapes, ours beside them.

    python benchmarks/reference_rows.py [--out FILE.json] [--groups 200]

Host submission: a two-layer audio tower (width 128, bfloat16), the device idle before each call,
no wait for it after; also back to back. Staging: full-size windows (128 mel bins, 100 frames),
wall time with the device waited for, the bare copy of the same bytes beside it. Then images, clips
of CoVo-Audio, memory of three image graphs, and random groups of every tower, eager against graph.
"""

import argparse
import gc
import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeAudioEncoderConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

from graphhal.adapters.qwen3_omni_audio import FRAMES, Qwen3OmniAudio
from graphhal.discovery import find_adapters, open_platform
from graphhal.runner import EncoderGraphs
from graphhal.self_check import Difference
from graphhal.settings import Settings

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
PRESET = "full"
TOLERANCE = 2e-2


def spread(
    call: Callable[[], Any], repeats: int = 300, waited: bool = False, idle: bool = True
) -> str:
    """Median [quartiles] microseconds of a call."""
    times = []
    for number in range(20 + repeats):
        if idle or number % 20 == 0:
            torch.cuda.synchronize()
        began = perf_counter()
        call()
        if waited:
            torch.cuda.synchronize()
        times.append((perf_counter() - began) * 1e6)
    times = sorted(times[20:])
    return f"{median(times):.1f} [{times[len(times) // 4]:.1f}, {times[3 * len(times) // 4]:.1f}]"


def event_ms(call: Callable[[], Any]) -> float:
    """Device milliseconds between events around a call."""
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def eager_to_graph(graphs: EncoderGraphs, asked: dict[str, Any], repeats: int = 20) -> str:
    """Median device milliseconds of both, in turns: the host changes speed meanwhile."""
    turns = [
        (event_ms(lambda: graphs.run_eager(asked)), event_ms(lambda: graphs.run(asked)))
        for _ in range(3 + repeats)
    ]
    eager, graph = map(median, zip(*turns[3:], strict=True))
    return f"{eager:.2f} -> {graph:.2f} ms = {eager / graph:.2f} x"


def free_bytes() -> int:
    """Free device bytes with nothing cached."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def captured(adapter: Any, active: Any, settings: Settings) -> tuple[EncoderGraphs, float]:
    """A captured encoder, and the MiB of free memory that its second capture took: the first one
    pays for what libraries keep."""
    graphs = EncoderGraphs(adapter, active, settings)
    graphs.capture()
    graphs.clear()
    before = free_bytes()
    graphs.capture()
    return graphs, (before - free_bytes()) / 2**20


def audio_request(adapter: Any, lengths: list[int], seed: int = 0) -> dict[str, Any]:
    """Random features for clips of these lengths."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    shape = (adapter.mel, sum(lengths))
    features = torch.randn(shape, generator=generator, device=DEVICE, dtype=DTYPE)
    return {"input_features": features, "feature_lens": lengths}


def image_request(adapter: Any, grids: list[list[int]], seed: int = 0) -> dict[str, Any]:
    """Random patches for images of these grids."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    rows = sum(t * h * w for t, h, w in grids)
    shape = (rows, adapter.patch_width)
    pixels = torch.randn(shape, generator=generator, device=DEVICE, dtype=DTYPE)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)}


def host_submission(active: Any) -> dict[str, Any]:
    """Microseconds of one call of a two-layer tower."""
    config = Qwen3OmniMoeAudioEncoderConfig(
        encoder_layers=2,
        d_model=128,
        encoder_attention_heads=4,
        encoder_ffn_dim=512,
        output_dim=128,
    )
    config._attn_implementation = "sdpa"
    adapter = Qwen3OmniAudio(Qwen3OmniMoeAudioEncoder(config).to(DEVICE, DTYPE).eval())
    graphs = EncoderGraphs(adapter, active, Settings(audio_chunks="1-16"))
    graphs.capture()
    rows = {}
    for frames, reference in ((100, "24.8"), (101, "52.2"), (1500, "27.4")):
        asked = audio_request(adapter, [frames])
        group = graphs._plans.of(adapter.item_specs(asked))
        graph = group.steps[0].entry.graph
        rows[str(frames)] = {
            "reference µs": reference,
            "device idle": spread(lambda asked=asked: graphs.run(asked)),
            "back to back": spread(lambda asked=asked: graphs.run(asked), idle=False),
            "bare replay, idle": spread(lambda graph=graph: active.replay(graph)),
            "bare replay, back to back": spread(
                lambda graph=graph: active.replay(graph), idle=False
            ),
        }
    graphs.clear()
    return rows


def staging(audio: Any) -> dict[str, Any]:
    """Microseconds of staging into a graph's input, the device waited for."""
    rows = {}
    for lengths, reference in (([3000], "6.9"), ([3001], "26.4"), ([3001] * 4, "103")):
        asked = audio_request(audio, lengths)
        items = audio.item_specs(asked)
        chunks = sum(item.rows for item in items)
        target = torch.empty((audio.mel, chunks * audio.width), dtype=DTYPE, device=DEVICE)
        same = torch.empty_like(asked["input_features"])
        rows["+".join(map(str, lengths))] = {
            "reference µs": reference,
            "ours": spread(
                lambda a=asked, i=items, t=target: audio.stage(a, i, {FRAMES: t}), waited=True
            ),
            "ours, submission": spread(
                lambda a=asked, i=items, t=target: audio.stage(a, i, {FRAMES: t})
            ),
            "bare copy": spread(lambda s=same, a=asked: s.copy_(a["input_features"]), waited=True),
        }
    return rows


def parity(
    name: str, adapter: Any, active: Any, settings: Settings, requests: list[Any]
) -> dict[str, Any]:
    """Worst difference over random groups, hits, and misses by reason."""
    graphs = EncoderGraphs(adapter, active, settings)
    report = graphs.capture()
    worst, equal = 0.0, 0
    for asked in requests:
        found = Difference.between(torch.cat(graphs.run(asked)), torch.cat(graphs.run_eager(asked)))
        worst, equal = max(worst, found.relative_l2), equal + found.bit_equal
    stats = graphs.stats()
    graphs.clear()
    reasons: Counter[str] = Counter()
    for by_reason in stats["misses"].values():
        reasons.update(by_reason)
    return {
        "tower": name,
        "groups": len(requests),
        "worst relative L2": worst,
        "bit-equal": equal,
        "hits": sum(stats["hits"].values()),
        "misses": dict(reasons),
        "dropped": [f"{d.key}: {d.reason}" for d in report.dropped],
    }


def main() -> int:
    """Print everything; 1 where a group differs by more than the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--groups", type=int, default=200)
    args = parser.parse_args()
    active = open_platform("cuda")
    towers = {f.name: f for f in find_adapters()}
    print(torch.cuda.get_device_name(), torch.__version__)
    results: dict[str, Any] = {"host submission": host_submission(active)}
    audio = towers["qwen3_omni_audio"].build(PRESET, DEVICE, DTYPE, 0)
    results["staging"] = staging(audio)
    for title in ("host submission", "staging"):
        for case, row in results[title].items():
            print(f"{title} {case}: {row}")

    rng = random.Random(1)
    groups = [
        audio_request(
            audio,
            [
                rng.choice((rng.randint(1, 1200), 100 * rng.randint(1, 12)))
                for _ in range(rng.randint(1, 6))
            ],
            n,
        )
        for n in range(args.groups)
    ]
    results["parity"] = [parity("qwen3_omni_audio", audio, active, Settings(), groups)]
    del audio

    vision = towers["qwen3_omni_vision"].build(PRESET, DEVICE, DTYPE, 0)
    vision.modalities = ("image",)
    three = Settings(token_budgets=(64, 128, 256), max_items=4)
    graphs, taken = captured(vision, active, three)
    rows = {}
    for label, grids in (
        ("1 × 49", [[1, 14, 14]]),
        ("2 × 49", [[1, 14, 14]] * 2),
        ("1 × 98", [[1, 14, 28]]),
    ):
        asked = image_request(vision, grids)
        rows[label] = eager_to_graph(graphs, asked)
    results["images, budgets 64 128 256"] = rows | {"memory MiB": round(taken, 1)}
    print(results["images, budgets 64 128 256"])
    graphs.clear()
    settings = Settings(max_tokens=1024)
    groups = [
        image_request(
            vision,
            [
                [1, 2 * rng.randint(1, 14), 2 * rng.randint(1, 14)]
                for _ in range(rng.randint(1, 10))
            ],
            n,
        )
        for n in range(args.groups)
    ]
    results["parity"].append(parity("qwen3_omni_vision, images", vision, active, settings, groups))
    large = [
        image_request(
            vision,
            [[1, 2 * rng.randint(20, 64), 2 * rng.randint(20, 64)]]
            + [[1, 8, 8]] * rng.choice((0, 0, 1)),
            n,
        )
        for n in range(args.groups // 4)
    ]
    results["parity"].append(
        parity("qwen3_omni_vision, large images", vision, active, Settings(), large)
    )
    vision.modalities = ("video",)
    groups = [
        {
            "pixel_values_videos": image_request(vision, grids, n)["pixel_values"],
            "video_grid_thw": torch.tensor(grids),
        }
        for n in range(args.groups // 2)
        for grids in [
            [
                [rng.randint(1, 40), 2 * rng.randint(1, 8), 2 * rng.randint(1, 8)]
                for _ in range(rng.randint(1, 3))
            ]
        ]
    ]
    results["parity"].append(parity("qwen3_omni_vision, videos", vision, active, settings, groups))
    del vision, graphs  # both hold the tower, whose memory must not be freed while CoVo is measured

    covo = towers["covo_audio"].build(PRESET, DEVICE, DTYPE, 0)
    graphs, taken = captured(covo, active, Settings())
    rows = {}
    for clips in (1, 2, 3):
        items = covo.item_specs(_covo_request(covo, [35, 161, 188][:clips], 0))
        asked = covo.example(items, 0)
        rows[f"{clips} clips"] = eager_to_graph(graphs, asked)
    results["CoVo"] = rows | {
        "capture s": round(graphs.report.seconds, 3),
        "memory MiB": round(taken, 1),
    }
    print("CoVo", results["CoVo"])
    graphs.clear()
    groups = [
        _covo_request(
            covo, [rng.randint(1, covo.tokens_per_clip) for _ in range(rng.randint(1, 3))], n
        )
        for n in range(args.groups)
    ]
    results["parity"].append(parity("covo_audio", covo, active, Settings(), groups))
    for line in results["parity"]:
        print(line)
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1))
    worst = max(line["worst relative L2"] for line in results["parity"])
    print(f"worst relative L2 {worst:.2e}, allowed {TOLERANCE:.0e}")
    return 0 if worst <= TOLERANCE else 1


def _covo_request(covo: Any, counts: list[int], seed: int) -> dict[str, Any]:
    """Random mel features for clips of so many tokens."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    shape = (len(counts), covo.mel, covo.frames)
    features = torch.randn(shape, generator=generator, device=DEVICE, dtype=DTYPE)
    return {"audio_features": features, "audio_num_tokens": counts}


if __name__ == "__main__":
    sys.exit(main())
