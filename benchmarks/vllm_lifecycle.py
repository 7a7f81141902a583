#!/usr/bin/env python3
"""What happens to graphs over the life of a real vLLM engine: sleep, wake, new weights, metrics.

    python benchmarks/vllm_lifecycle.py --out DIR [--runner v1|v2]

One engine with a full-size Qwen3-VL tower (seeded random weights, a text model of four layers),
graphhal's own adapter, sleep mode on. After every event eight photographs are encoded through the
engine, and a random group by the manager and by the model's own eager code. Prints a table and
ends with 0 only if every line is right.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import vllm_engine as engine

SIDES = (14, 28, 20)
TOLERANCE = 2e-2


def parity(worker: Any) -> dict[str, Any]:
    """A group by the manager and by the model's own code: relative L2, and how it was served."""
    import torch

    runner = worker.model_runner
    second = getattr(getattr(runner, "model_state", None), "encoder_runner", None)
    manager = getattr(runner, "encoder_cudagraph_manager", None) or second.cudagraph_manager
    model = runner.get_model()
    grid = torch.tensor([[1, side, side] for side in SIDES])
    rows = sum(side * side for side in SIDES)
    weight = model.visual.patch_embed.proj.weight
    pixels = torch.randn(rows, weight[0].numel(), device=weight.device, dtype=weight.dtype)
    group = {"pixel_values": pixels, "image_grid_thw": grid}
    before = manager.stats()
    with torch.inference_mode():
        expected = torch.cat(list(model.embed_multimodal(**group))).double()
        made = manager.execute(dict(group))
        found = expected if made is None else torch.cat(made).double()
    after = manager.stats()
    return {
        "l2": float((found - expected).norm() / expected.norm()),
        "hits": after["graph_hits"] - before["graph_hits"],
        "reasons": engine.new_misses(before["misses"], after["misses"]),
        "finite": bool(torch.isfinite(found).all()),
    }


def change_in_place(worker: Any) -> None:
    """What a trainer does: other values at the same addresses."""
    import torch

    with torch.no_grad():
        for parameter in worker.model_runner.get_model().visual.parameters():
            parameter.mul_(1.05)


def rebind(worker: Any) -> None:
    """Other storage under one weight of many, with other values; a reload takes a moment."""
    time.sleep(0.2)
    weight = worker.model_runner.get_model().visual.merger.linear_fc2.weight
    weight.data = weight.data.clone().mul_(1.5)


def recapture(worker: Any) -> None:
    """Capture again, as an operator does after a reload."""
    runner = worker.model_runner
    second = getattr(getattr(runner, "model_state", None), "encoder_runner", None)
    manager = getattr(runner, "encoder_cudagraph_manager", None) or second.cudagraph_manager
    manager.capture(None)


def free_gib(worker: Any) -> float:
    """Free memory of the card."""
    import torch

    return float(torch.cuda.mem_get_info()[0] / 2**30)


class Life:
    """An engine, and the lines of the table."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.llm = engine.start(args, enable_sleep_mode=True)
        self.llm.collective_rpc(engine.refill)
        self.prompts = engine.requests(args)
        self.lines: list[str] = []
        self.failed = False

    def worker(self, call: Any) -> Any:
        return self.llm.collective_rpc(call)[0]

    def encode(self) -> tuple[list[list[int]], int, dict[str, int]]:
        """Tokens of the photographs, hits, misses by reason."""
        engine.forget_items(self.llm)
        before = self.worker(engine.encoder_of)["stats"]
        rows = engine.serve(self.llm, self.prompts, 1, self.args.max_tokens)
        after = self.worker(engine.encoder_of)["stats"]
        hits = after["graph_hits"] - before["graph_hits"]
        reasons = engine.new_misses(before["misses"], after["misses"])
        return [row["tokens"] for row in rows], hits, reasons

    def note(self, event: str, right: bool, found: str) -> None:
        self.failed |= not right
        self.lines.append(f"| {event} | {'right' if right else 'WRONG'} | {found} |")
        print(self.lines[-1], flush=True)

    def look(self, event: str, replayed: bool, same_as: list[list[int]] | None) -> list[list[int]]:
        """Encode both ways and judge; `replayed`: whether graphs have to serve."""
        own = self.worker(parity)
        tokens, hits, reasons = self.encode()
        wanted = len(self.prompts) if replayed else 0
        right = own["finite"] and own["l2"] <= TOLERANCE and hits == wanted
        right &= (own["hits"] > 0) is replayed
        if same_as is not None:
            right &= tokens == same_as
        told = "" if same_as is None else f", {sum(map(list.__eq__, tokens, same_as))} answers same"
        why = ", ".join(reasons) or "none"
        self.note(event, right, f"L2 {own['l2']:.1e}, {hits} hits, misses: {why}{told}")
        return tokens


def run(args: argparse.Namespace) -> int:
    folder = Path(args.out)
    metrics = tempfile.mkdtemp()
    engine.set_environment(args)
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = metrics
    args.model = engine.model_folder(folder, "qwen3_vl")
    stats_file = folder / "stats-{pid}.json"
    args.options = json.dumps({"stats_file": str(stats_file), "log_seconds": 5})
    life = Life(args)

    tokens = life.look("captured", True, None)
    awake = life.worker(free_gib)
    life.llm.sleep(level=1)
    asleep = life.worker(free_gib)
    life.llm.wake_up()
    life.note("sleep, level 1", asleep > awake, f"{asleep - awake:.1f} GiB given back")
    life.look("wake", True, tokens)
    life.llm.sleep(level=2)
    life.llm.wake_up()
    life.worker(engine.refill)
    life.look("sleep, level 2, and weights loaded again", True, tokens)
    life.worker(change_in_place)
    changed = life.look("weights changed in place", True, None)
    life.note("", changed != tokens, "other weights give other answers")
    life.worker(rebind)
    rebound = life.look("one weight of many rebound", False, None)
    life.worker(recapture)
    life.look("captured again", True, rebound)
    time.sleep(5)  # a thread publishes every two seconds
    life.note("metrics", *published(metrics))

    engine.shut_down(life.llm)
    dumped = [p for p in folder.glob("stats-*.json") if json.loads(p.read_text())]
    life.note("JSON at shutdown", bool(dumped), f"{len(dumped)} file")
    return int(life.failed)


def published(folder: str) -> tuple[bool, str]:
    """graphhal's samples as a server's /metrics would show them."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=folder)  # type: ignore[no-untyped-call]
    lines = generate_latest(registry).decode().splitlines()
    ours = [line for line in lines if line.startswith("graphhal_")]
    hits = [line for line in ours if line.startswith("graphhal_encoder_hits")]
    return bool(hits), f"{len(ours)} samples, {'; '.join(hits)}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", required=True)
    parser.add_argument("--runner", choices=["v1", "v2"], default="v1")
    parser.add_argument("--backend", default="FLASH_ATTN")
    parser.set_defaults(
        serve="graphhal", images=1, audios=0, requests=8, concurrency="1", max_tokens=8,
        kv_gib=4.0, encoder_tokens=2048,
    )  # fmt: skip
    return parser.parse_args()


if __name__ == "__main__":
    code = run(arguments())
    sys.stdout.flush()
    sys.exit(code)
