#!/usr/bin/env python3
"""A real vLLM engine with encoder graphs by graphhal, by vLLM, and without: tokens, latency, hits.

    python benchmarks/vllm_engine.py suite --out DIR [--steps vl_v1,vl_v2,omni_v1,omni_v2]
    python benchmarks/vllm_engine.py run --model DIR --serve graphhal|vllm|eager --runner v1 ...

`suite` starts one process for each engine and prints its tables last. Towers are full size with
seeded random weights; pictures and speech are real; decoding is greedy, so that tokens can be
compared. `--model` folders come from `vllm_model_folder.py`, which `suite` calls itself.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

STEPS: dict[str, tuple[str, str, tuple[str, ...], dict[str, int]]] = {
    "vl_v1": ("qwen3_vl", "v1", ("graphhal", "vllm", "eager"), {"images": 1}),
    "vl_v2": ("qwen3_vl", "v2", ("graphhal", "vllm", "eager"), {"images": 1}),
    "omni_v1": ("qwen3_omni_thinker", "v1", ("graphhal", "eager"), {"images": 1, "audios": 1}),
    "omni_v2": ("qwen3_omni_thinker", "v2", ("graphhal", "eager"), {"images": 1, "audios": 1}),
    "speech": ("qwen3_omni_thinker", "v1", ("graphhal", "eager"), {"audios": 1}),
}
"""name: model, runner, contestants, inputs of a request."""

SIZES = ((448, 448), (640, 480), (1024, 768), (800, 600))
SECONDS = (0.0, 5.0, 15.0)
TIE = 0.05
"""Log-probability between the two best tokens below which bfloat16 may flip them."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    commands = parser.add_subparsers(dest="command", required=True)
    suite = commands.add_parser("suite")
    suite.add_argument("--steps", default="vl_v1")
    suite.add_argument("--contestants", default="", help="of graphhal,vllm,eager; all by default")
    suite.add_argument("--timeout", type=int, default=150, help="seconds for one engine")
    run = commands.add_parser("run")
    run.add_argument("--model", required=True)
    run.add_argument("--serve", choices=["graphhal", "vllm", "eager"], required=True)
    run.add_argument("--runner", choices=["v1", "v2"], default="v1")
    run.add_argument("--images", type=int, default=0)
    run.add_argument("--audios", type=int, default=0)
    run.add_argument("--speech", default=str(HERE / "speech"), help="folder with 16-bit .wav files")
    for command in (suite, run):
        command.add_argument("--out", required=True)
        command.add_argument("--requests", type=int, default=32)
        command.add_argument("--concurrency", default="1,8")
        command.add_argument("--max-tokens", type=int, default=16)
        command.add_argument("--kv-gib", type=float, default=0.0, help="0: vLLM profiles memory")
        command.add_argument("--backend", default="FLASH_ATTN", help="of the vision attention")
        command.add_argument(
            "--encoder-tokens", type=int, default=8192,
            help="largest graph of graphhal's: a wave of 8 groups 3500 tokens",
        )  # fmt: skip
        command.add_argument("--options", default="{}", help="JSON of graphhal's options")
    suite.add_argument("--speech", default=str(HERE / "speech"))
    return parser.parse_args()


# What runs in the worker; `self` is the worker.


def encoder_of(worker: Any) -> dict[str, Any]:
    import torch

    runner = worker.model_runner
    manager = getattr(runner, "encoder_cudagraph_manager", None)
    second = getattr(getattr(runner, "model_state", None), "encoder_runner", None)
    if manager is None and second is not None:
        manager = second.cudagraph_manager
    found = {
        "runner": type(runner).__module__,
        "manager": None if manager is None else type(manager).__name__,
        "reserved_gib": round(torch.cuda.memory_reserved() / 2**30, 3),
        "kv_blocks": worker.vllm_config.cache_config.num_gpu_blocks,
    }
    if manager is not None:
        found["stats"] = manager.get_cumulative_stats()
    return found


def refill(worker: Any) -> float:
    """Seeded weights in place: outputs depend on the inputs, and graphs read them by address."""
    import torch

    model = worker.model_runner.get_model()
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(0)
    norms = {
        id(parameter)
        for module in model.modules()
        if "norm" in type(module).__name__.lower()
        for parameter in module.parameters(recurse=False)
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            leaf = name.rsplit(".", 1)[-1]
            if id(parameter) in norms:
                parameter.fill_(0.0 if leaf == "bias" else 1.0)
            elif leaf == "bias" or parameter.dim() == 1:
                parameter.normal_(0, 0.01, generator=generator)
            else:
                scale = 1.0 if "embed_tokens" in name else 0.02
                parameter.normal_(0, scale, generator=generator)
        torch.accelerator.synchronize()
    return sum(float(p.float().sum()) for p in list(model.parameters())[:8])


# Inputs.


def pictures() -> list[Any]:
    import skimage
    from PIL import Image

    names = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg", "motorcycle_left.png",
             "retina.jpg", "camera.png", "coins.png")  # fmt: skip
    folder = Path(skimage.__file__).parent / "data"
    return [Image.open(folder / n).convert("RGB") for n in names if (folder / n).exists()]


def speech(folder: Path) -> list[Any]:
    import wave

    import numpy as np
    from scipy.signal import resample_poly

    found = []
    for path in sorted(folder.glob("*.wav")):
        if "Noise" in path.name:
            continue
        with wave.open(str(path)) as sound:
            raw = np.frombuffer(sound.readframes(sound.getnframes()), dtype=np.int16)
            mono = raw.reshape(-1, sound.getnchannels()).mean(1).astype(np.float32) / 32768
            rate = sound.getframerate()
        found.append(mono if rate == 16000 else resample_poly(mono, 16000, rate).astype("float32"))
    if not found:
        raise SystemExit(f"no speech in {folder}")
    return found


def requests(args: argparse.Namespace) -> list[dict[str, Any]]:
    import numpy as np
    from PIL import Image

    photos = pictures() if args.images else []
    sounds = speech(Path(args.speech)) if args.audios else []
    made = []
    for number in range(args.requests):
        body, data = "", {}
        for extra in range(args.images):
            at = number * args.images + extra
            # Shifted by a row each: equal pictures would be answered from the encoder cache.
            photo = photos[at % len(photos)].resize(SIZES[at % len(SIZES)])
            shifted = np.roll(np.asarray(photo), at + 1, axis=0)
            data.setdefault("image", []).append(Image.fromarray(shifted))
            body += "<|vision_start|><|image_pad|><|vision_end|>"
        for extra in range(args.audios):
            at = number * args.audios + extra
            sound, wanted = sounds[at % len(sounds)], int(SECONDS[at % len(SECONDS)] * 16000)
            sound = np.roll(np.resize(sound, max(wanted, len(sound)))[: wanted or None], 31 * at)
            data.setdefault("audio", []).append((sound, 16000))
            body += "<|audio_start|><|audio_pad|><|audio_end|>"
        question = f"{body}Request {number}: what is here?"
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        made.append({"prompt": text, "multi_modal_data": data})
    return made


# The engine.


def set_environment(args: argparse.Namespace) -> None:
    """Of this process, before it imports vLLM: offline, in one process, one of the runners."""
    os.environ.update(
        HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_NO_USAGE_STATS="1",
        TOKENIZERS_PARALLELISM="false", VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_USE_FLASHINFER_SAMPLER="0", VLLM_USE_DEEP_GEMM="0",
        VLLM_PLUGINS="graphhal" if args.serve == "graphhal" else "",
        VLLM_USE_V2_MODEL_RUNNER="1" if args.runner == "v2" else "0",
    )  # fmt: skip


def model_folder(out: Path, arch: str) -> str:
    """The folder of this model within `out`, made where it is not there."""
    folder = out / f"model_{arch}"
    if not (folder / "config.json").exists():
        command = [sys.executable, str(HERE / "vllm_model_folder.py"), str(folder), "--arch", arch]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return str(folder)


def rendered(llm: Any, args: argparse.Namespace) -> list[Any]:
    """`requests`, tokenised and processed where this release has a name for that."""
    render = getattr(llm, "_preprocess_cmpl_one", None)
    prompts = requests(args)
    return prompts if render is None else [render(prompt) for prompt in prompts]


def forget_items(llm: Any) -> None:
    """Empty the caches that would answer an item that comes again."""
    for reset in ("reset_encoder_cache", "reset_mm_cache"):
        getattr(llm.llm_engine, reset)()


def shut_down(llm: Any) -> None:
    core = getattr(llm.llm_engine, "engine_core", None)
    if hasattr(core, "shutdown"):
        core.shutdown()


def start(args: argparse.Namespace, **more: Any) -> Any:
    from vllm import LLM

    most = max(int(c) for c in args.concurrency.split(","))
    compilation: dict[str, Any] = {
        "cudagraph_mm_encoder": args.serve != "eager",
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": sorted({1, 2, 4, most}),
    }
    limit = {"image": args.images, "video": 0}
    omni = "thinker_config" in json.loads((Path(args.model) / "config.json").read_text())
    if omni:
        limit["audio"] = args.audios
    own = {
        "max_tokens": args.encoder_tokens, "audio_chunks": "1-64",
    }  # fmt: skip
    if omni:
        own["vllm_models"] = "qwen3_omni"
    options = {
        "model": args.model, "tokenizer": args.model, "load_format": "dummy", "dtype": "bfloat16",
        "seed": 0, "max_model_len": 8192, "max_num_batched_tokens": 8192,
        "max_num_seqs": max(4, most), "gpu_memory_utilization": 0.25, "limit_mm_per_prompt": limit,
        "mm_processor_cache_gb": 0, "enable_prefix_caching": False,
        "compilation_config": compilation, "disable_log_stats": False,
        "mm_encoder_attn_backend": args.backend,
        "additional_config": {"graphhal": own | json.loads(args.options)},
    }  # fmt: skip
    if args.kv_gib:
        options["kv_cache_memory_bytes"] = int(args.kv_gib * 2**30)
    return LLM(**options, **more)


def serve(llm: Any, prompts: list[Any], concurrency: int, max_tokens: int) -> list[dict[str, Any]]:
    """Waves of `concurrency` requests: the same grouping whoever encodes."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=0, detokenize=False,
        logprobs=2, output_kind=RequestOutputKind.CUMULATIVE,
    )  # fmt: skip
    engine, rows = llm.llm_engine, []
    for first in range(0, len(prompts), concurrency):
        wave = {}
        for offset, prompt in enumerate(prompts[first : first + concurrency]):
            name = f"c{concurrency}-{first + offset}-{time.monotonic_ns()}"
            engine.add_request(name, prompt, params)
            wave[name] = first + offset
        left = dict(wave)
        while left:
            for output in engine.step():
                name = next((n for n in left if output.request_id.startswith(n)), None)
                if name is not None and output.finished:
                    rows.append(row_of(left.pop(name), output))
    return sorted(rows, key=lambda row: row["number"])


def row_of(number: int, output: Any) -> dict[str, Any]:
    made = output.outputs[0]
    gaps = []
    for step in made.logprobs or []:
        best = sorted((entry.logprob for entry in step.values()), reverse=True)
        gaps.append(best[0] - best[1] if len(best) > 1 else None)
    metrics = output.metrics
    ttft = None
    if metrics is not None and getattr(metrics, "first_token_ts", 0):
        ttft = (metrics.first_token_ts - metrics.queued_ts) * 1e3
    return {"number": number, "tokens": list(made.token_ids), "gaps": gaps, "ttft_ms": ttft}


def run(args: argparse.Namespace) -> int:
    set_environment(args)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    started = time.perf_counter()
    llm = start(args)
    seconds = time.perf_counter() - started
    llm.collective_rpc(refill)
    prompts = rendered(llm, args)
    result: dict[str, Any] = {"args": vars(args), "start_s": seconds, "served": {}}
    for concurrency in (int(c) for c in args.concurrency.split(",")):
        serve(llm, prompts[: max(4, concurrency)], concurrency, args.max_tokens)
        forget_items(llm)
        before = llm.collective_rpc(encoder_of)[0].get("stats", {})
        rows = serve(llm, prompts, concurrency, args.max_tokens)
        after = llm.collective_rpc(encoder_of)[0].get("stats", {})
        ttft = [row["ttft_ms"] for row in rows if row["ttft_ms"] is not None]
        result["served"][str(concurrency)] = {
            "rows": rows,
            "ttft_ms": statistics.median(ttft) if ttft else float("nan"),
            "hits": after.get("graph_hits", 0) - before.get("graph_hits", 0),
            "misses": after.get("graph_misses", 0) - before.get("graph_misses", 0),
            "reasons": new_misses(before.get("misses", {}), after.get("misses", {})),
        }
        forget_items(llm)
    result["encoder"] = llm.collective_rpc(encoder_of)[0]
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    Path(args.out).write_text(json.dumps(result, default=str))
    shut_down(llm)
    return 0


def new_misses(
    before: dict[str, dict[str, int]], after: dict[str, dict[str, int]]
) -> dict[str, int]:
    """Misses since `before`, by modality and reason."""
    return {
        f"{modality}: {reason}": count - before.get(modality, {}).get(reason, 0)
        for modality, reasons in after.items()
        for reason, count in reasons.items()
        if count > before.get(modality, {}).get(reason, 0)
    }


# Comparison.


def differences(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> tuple[int, int, int]:
    """Requests with equal tokens, near ties, and differences that nothing explains."""
    equal = ties = unexplained = 0
    for one, two in zip(ours, theirs, strict=True):
        if one["tokens"] == two["tokens"]:
            equal += 1
            continue
        pairs = zip(one["tokens"], two["tokens"], strict=False)
        at = next((n for n, (a, b) in enumerate(pairs) if a != b), 0)
        gaps = [row["gaps"][at] for row in (one, two) if at < len(row["gaps"])]
        if any(gap is not None and gap <= TIE for gap in gaps):
            ties += 1
        else:
            unexplained += 1
    return equal, ties, unexplained


def suite(args: argparse.Namespace) -> int:
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    lines, status = [], 0
    for step in args.steps.split(","):
        arch, runner, contestants, inputs = STEPS[step]
        wanted = args.contestants.split(",") if args.contestants else contestants
        contestants = tuple(name for name in contestants if name in wanted)
        model = model_folder(out, arch)
        results = {}
        for contestant in contestants:
            file = out / f"{step}_{contestant}.json"
            chosen = {
                "model": model, "serve": contestant, "runner": runner, "out": file,
                "requests": args.requests, "concurrency": args.concurrency,
                "max-tokens": args.max_tokens, "kv-gib": args.kv_gib, "backend": args.backend,
                "options": args.options, "speech": args.speech,
                "encoder-tokens": args.encoder_tokens, **inputs,
            }  # fmt: skip
            command = [sys.executable, __file__, "run"]
            for name, value in chosen.items():
                command += [f"--{name}", str(value)]
            log = out / f"{step}_{contestant}.log"
            began = time.perf_counter()
            with log.open("w") as stream:
                try:
                    code = subprocess.run(
                        command, stdout=stream, stderr=subprocess.STDOUT, timeout=args.timeout,
                        check=False,
                    ).returncode  # fmt: skip
                except subprocess.TimeoutExpired:
                    code = -1
            took = time.perf_counter() - began
            print(f"# {step} {contestant}: exit {code}, {took:.0f} s", flush=True)
            status |= code != 0
            text = log.read_text(errors="replace").splitlines()
            lines += [
                f"  {line[-260:]}"
                for line in text
                if "graphhal" in line and contestant == "graphhal"
            ][:14]
            if code != 0 or not file.exists():
                lines += [f"{step} {contestant}: FAILED, exit {code}", *text[-25:]]
                continue
            results[contestant] = json.loads(file.read_text())
        lines += report(step, results)
    print("\n".join(lines), flush=True)
    return status


def report(step: str, results: dict[str, dict[str, Any]]) -> list[str]:
    lines = [f"## {step}: median engine TTFT ms | hits/misses | manager | reserved GiB | start s"]
    for contestant, result in results.items():
        encoder = result["encoder"]
        served = result["served"]
        cells = [
            f"c={c}: {one['ttft_ms']:.1f} {one['hits']}/{one['misses']}"
            for c, one in served.items()
        ]
        lines.append(
            f"{contestant:9} {'  '.join(cells)} | {encoder['manager']} | {encoder['reserved_gib']} "
            f"| {result['start_s']:.0f}"
        )
    ours = results.get("graphhal")
    for other, result in results.items():
        if ours is None or other == "graphhal":
            continue
        for c, one in result["served"].items():
            mine = ours["served"][c]
            equal, ties, unexplained = differences(mine["rows"], one["rows"])
            distinct = len({tuple(row["tokens"]) for row in mine["rows"]})
            ratio = mine["ttft_ms"] / one["ttft_ms"]
            lines.append(
                f"graphhal / {other}, c={c}: TTFT x {ratio:.3f}; tokens equal {equal}, near ties "
                f"{ties}, unexplained {unexplained}; {distinct} distinct answers"
            )
    if ours is not None:
        lines += own_lines(ours)
    return lines


def own_lines(ours: dict[str, Any]) -> list[str]:
    """What graphhal says of itself: misses by reason, dropped graphs, memory told and taken."""
    stats = ours["encoder"].get("stats", {})
    lines = []
    for c, one in ours["served"].items():
        reasons = ", ".join(f"{count} {reason}" for reason, count in one["reasons"].items())
        lines.append(f"graphhal misses, c={c}: {reasons or 'none'}")
    lines.append(
        f"graphhal: {stats.get('graph_count')} graphs, "
        f"capture {stats.get('capture_seconds', 0):.1f} s, "
        f"self-check {stats.get('self_check_seconds', 0):.1f} s, "
        f"dropped: {str(stats.get('dropped'))[:300]}"
    )
    mib = {
        name: (stats.get(f"{name}_bytes") or 0) / 2**20
        for name in ("expected", "counted", "allocator", "graph", "limit")
    }
    off = 100 * (mib["expected"] / mib["counted"] - 1) if mib["counted"] else float("nan")
    lines.append(
        f"graphhal memory, MiB: expected {mib['expected']:.0f}, counted {mib['counted']:.0f} "
        f"(estimate {off:+.1f} %), of these by PyTorch's allocator {mib['allocator']:.0f}; graphs "
        f"hold {mib['graph']:.0f}; limit {mib['limit']:.0f}"
    )
    return lines


if __name__ == "__main__":
    chosen = arguments()
    try:
        code = suite(chosen) if chosen.command == "suite" else run(chosen)
    except Exception:  # noqa: BLE001  (a benchmark's process: everything is reported)
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.exit(code)
