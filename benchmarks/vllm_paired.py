#!/usr/bin/env python3
"""TTFT of graphhal, of vLLM's own manager and of eager in one vLLM engine, wave by wave in turns.

    python benchmarks/vllm_paired.py --out DIR [--runner v1|v2] [--model omni]

Two processes differ by more than their encoders do (`vllm_engine.py`); here one engine has
graphhal's graphs and vLLM's, and each wave of requests is served by every contestant, one after
another, in an order that rotates. Inputs and engine are those of `vllm_engine.py`. Tokens must be
equal but for near ties.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import vllm_engine as engine

MODELS = {"vl": ("qwen3_vl", 0), "omni": ("qwen3_omni_thinker", 1)}
"""name: architecture, clips in a request."""


def prepare(worker: Any) -> list[str]:
    """Capture vLLM's own graphs beside graphhal's, where it has some; the contestants' names."""
    import torch
    from vllm.distributed.parallel_state import graph_capture
    from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

    runner = worker.model_runner
    owner, name = place(runner)
    ours = getattr(owner, name)
    model = runner.get_model()
    contestants = {"graphhal": ours, "eager": None}
    if hasattr(type(model), "encoder_cudagraph_forward"):
        theirs: Any = object.__new__(EncoderCudaGraphManager)
        device = next(model.parameters()).device
        theirs.__init__(worker.vllm_config, device, runner.dtype, model)
        with torch.inference_mode(), graph_capture(device=device):
            theirs.capture(graph_pool=torch.cuda.graph_pool_handle())
            torch.accelerator.synchronize()
        contestants["vllm"] = theirs
    worker.contestants = contestants
    worker.host_ms = {contestant: [] for contestant in contestants}
    for contestant, manager in contestants.items():
        if manager is not None:
            time_calls(manager, worker.host_ms[contestant])
    return list(contestants)


def place(runner: Any) -> tuple[Any, str]:
    """The attribute in which a runner keeps its manager."""
    second = getattr(getattr(runner, "model_state", None), "encoder_runner", None)
    if second is not None:
        return second, "cudagraph_manager"
    return runner, "encoder_cudagraph_manager"


def time_calls(manager: Any, into: list[float]) -> None:
    """Note the host milliseconds of every `execute`."""
    execute = manager.execute

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return execute(*args, **kwargs)
        finally:
            into.append((time.perf_counter() - began) * 1e3)

    manager.execute = timed


def choose(worker: Any, name: str) -> None:
    owner, attribute = place(worker.model_runner)
    setattr(owner, attribute, worker.contestants[name])


def told(worker: Any) -> dict[str, Any]:
    """Hits and misses of each manager, and its host milliseconds so far."""
    found = {}
    for name, manager in worker.contestants.items():
        stats = {} if manager is None else manager.get_cumulative_stats()
        found[name] = {
            "hits": stats.get("graph_hits", 0),
            "misses": stats.get("graph_misses", 0),
            "host_ms": list(worker.host_ms[name]),
        }
    return found


def in_turns(
    llm: Any, prompts: list[Any], names: list[str], concurrency: int, max_tokens: int
) -> dict[str, list[list[dict[str, Any]]]]:
    """Rows of each contestant, by wave."""
    rows: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in names}
    for number, first in enumerate(range(0, len(prompts), concurrency)):
        wave = prompts[first : first + concurrency]
        for turn in range(len(names)):
            name = names[(number + turn) % len(names)]
            llm.collective_rpc(choose, args=(name,))
            rows[name].append(engine.serve(llm, wave, len(wave), max_tokens))
            engine.forget_items(llm)
    return rows


def medians(waves: list[list[dict[str, Any]]]) -> list[float]:
    """Median TTFT of each wave, milliseconds."""
    return [statistics.median(row["ttft_ms"] for row in wave) for wave in waves]


def run(args: argparse.Namespace) -> int:
    engine.set_environment(args)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    arch, args.audios = MODELS[args.model]
    args.model = engine.model_folder(out, arch)
    began = time.perf_counter()
    llm = engine.start(args)
    start_seconds = time.perf_counter() - began
    llm.collective_rpc(engine.refill)
    names = llm.collective_rpc(prepare)[0]
    prompts = engine.rendered(llm, args)
    result: dict[str, Any] = {"args": vars(args), "start_s": start_seconds, "served": {}}
    stats = llm.collective_rpc(engine.encoder_of)[0]["stats"]
    print(
        f"# {arch}, runner {args.runner}: engine started in {start_seconds:.0f} s, of it capture "
        f"{stats['capture_seconds']:.1f} s of {stats['graph_count']} graphs and self-check "
        f"{stats['self_check_seconds']:.1f} s, in {stats['graph_bytes'] / 2**20:.0f} MiB"
    )
    print("| at a time | contestant | median TTFT ms | host ms of its call | hits / misses |")
    print("|---|---|---|---|---|")
    lines, unexplained = [], 0
    for concurrency in (int(c) for c in args.concurrency.split(",")):
        in_turns(llm, prompts[: 2 * concurrency], names, concurrency, args.max_tokens)
        before = llm.collective_rpc(told)[0]
        rows = in_turns(llm, prompts, names, concurrency, args.max_tokens)
        after = llm.collective_rpc(told)[0]
        result["served"][str(concurrency)] = rows
        for name in names:
            host = after[name]["host_ms"][len(before[name]["host_ms"]) :]
            hits, misses = (after[name][key] - before[name][key] for key in ("hits", "misses"))
            ttft = statistics.median(medians(rows[name]))
            took = f"{statistics.median(host):.3f}" if host else "–"
            print(f"| {concurrency} | {name} | {ttft:.2f} | {took} | {hits} / {misses} |")
        for other in (name for name in names if name != "graphhal"):
            pairs = zip(medians(rows["graphhal"]), medians(rows[other]), strict=True)
            ratios = sorted(ours / theirs for ours, theirs in pairs)
            low, middle, high = statistics.quantiles(ratios, n=4)
            flat = [[row for wave in rows[name] for row in wave] for name in ("graphhal", other)]
            equal, ties, strange = engine.differences(*flat)
            unexplained += strange
            lines.append(
                f"graphhal / {other}, {concurrency} at a time: TTFT {middle:.3f} "
                f"[{low:.3f}, {high:.3f}] of {len(ratios)} waves; tokens equal {equal}, near ties "
                f"{ties}, unexplained {strange}"
            )
    print("\n".join(lines), flush=True)
    (out / f"paired_{arch}_{args.runner}.json").write_text(json.dumps(result, default=str))
    engine.shut_down(llm)
    return 1 if unexplained else 0


def main() -> int:
    """Serve and print; 1 where tokens differ and nothing explains it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--runner", choices=["v1", "v2"], default="v1")
    parser.add_argument("--model", choices=sorted(MODELS), default="vl")
    parser.add_argument("--backend", default="FLASH_ATTN")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--concurrency", default="1,8")
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--encoder-tokens", type=int, default=8192)
    parser.add_argument("--speech", default=str(engine.HERE / "speech"))
    parser.add_argument("--options", default="{}")
    parser.set_defaults(serve="graphhal", images=1, kv_gib=0.0)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
