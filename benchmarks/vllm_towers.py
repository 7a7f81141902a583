#!/usr/bin/env python3
"""vLLM's own encoder-graph manager against graphhal, in one process, taking turns.

    python benchmarks/vllm_towers.py --backend FLASH_ATTN [--out FILE.json]      # some 100 s
    python benchmarks/vllm_towers.py --rounds 4 --images 1,8 --sides 7,28        # quick
    python benchmarks/vllm_towers.py --model omni       # the thinker's towers, eager and own
    python benchmarks/vllm_towers.py --groups 200       # random groups against eager, no timings
    python benchmarks/vllm_towers.py --dry      # a small tower on a CPU, graphs by stand-ins

The full-size Qwen3-VL vision tower with random weights, bfloat16. Contestants:
`peer 2^k`: vLLM's manager with its own ladder; `peer exact`: vLLM's manager with a budget for every
group; `protocol`: graphhal through the generic protocol; `own`: graphhal's own adapter.
They take turns in rotating order. Device time is between two events around the call, host time is
until the call returns. Before the first call of each group, static buffers and free memory of the
pools are filled with NaN (floating point only: an index that nobody wrote would end the process).
No group starts after `--seconds`; the tables say what was left out.
"""

import argparse
import contextlib
import gc
import json
import os
import random
import statistics
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()
parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--model", choices=["vl", "omni"], default="vl")
parser.add_argument("--backend", default="FLASH_ATTN", help="of vLLM's vision attention")
parser.add_argument("--dry", action="store_true", help="small tower, CPU, stand-in graphs")
parser.add_argument("--groups", type=int, default=0, help="random groups, instead of timings")
parser.add_argument("--rounds", type=int, default=8, help="timed calls of each contestant")
parser.add_argument("--images", default="1,2,4,8", help="pictures in a group")
parser.add_argument("--sides", default="7,10,14,20,28", help="tokens of a picture: side x side")
parser.add_argument("--mix", type=int, default=24, help="random groups that are summed in a row")
parser.add_argument("--top", type=int, default=0, help="largest budget; 0: the largest group")
parser.add_argument("--self-check", choices=["full", "quick", "off"], default="quick")
parser.add_argument("--seconds", type=float, default=140, help="no group starts after these")
parser.add_argument("--out", default="", help="JSON, rewritten after every group")
A = parser.parse_args()

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
if A.dry:
    os.environ.update(VLLM_TARGET_DEVICE="cpu", TORCHDYNAMO_DISABLE="1", GRAPHHAL_PLATFORM="cpu")
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "ci" / "vllm_shim"))
    import torchvision_schemas  # noqa: F401

import torch  # noqa: E402


class StandInGraph:
    """Replays by calling the captured function again, as a device graph re-runs its kernels."""

    def bind(self, model: Any, metadata: Any) -> None:
        self.replay = lambda: metadata.output_buffer.copy_(
            model.encoder_cudagraph_forward(dict(metadata.input_buffers))
        )


if A.dry:
    torch.cuda.CUDAGraph = StandInGraph  # type: ignore[assignment,misc]
    torch.cuda.graph = lambda *a, **k: contextlib.nullcontext()  # type: ignore[assignment,misc]

from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.config.multimodal import MultiModalConfig  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.forward_context import set_forward_context  # noqa: E402
from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager  # noqa: E402

from graphhal.vllm_worker import executor, plugin  # noqa: E402

if A.dry:
    from vllm.model_executor.layers.attention import mm_encoder_attention
    from vllm.v1.attention.ops.vit_attn_wrappers import apply_sdpa

    @torch.library.custom_op("graphhal_dry_run::sdpa_with_tail", mutates_args=())
    def sdpa_with_tail(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None,
        cu_seqlens: torch.Tensor, enable_gqa: bool,
    ) -> torch.Tensor:  # fmt: skip
        """vLLM's CPU attention refuses the rows past the last end that its manager leaves there."""
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
        lengths.append(q.shape[1] - sum(lengths))
        parts = zip(*(x.split(lengths, dim=1) for x in (q, k, v)), strict=True)
        done = [apply_sdpa(*part, scale=scale, enable_gqa=enable_gqa) for part in parts]
        return torch.cat(done, dim=1)

    def attention(q: Any, k: Any, v: Any, scale: Any, cu_seqlens: Any, enable_gqa: Any) -> Any:
        return sdpa_with_tail(q, k, v, scale, cu_seqlens, enable_gqa)

    mm_encoder_attention.vit_torch_sdpa_wrapper = attention

DEVICE = torch.device("cpu" if A.dry else "cuda")
DTYPE = torch.float32 if A.dry else torch.bfloat16
TOWER: dict[str, Any] = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16,
    "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 2048,
    "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24],
}  # fmt: skip
if A.dry:
    TOWER |= {"depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4,
              "out_hidden_size": 48, "deepstack_visual_indexes": [0, 1]}  # fmt: skip
    A.sides, A.images, A.rounds, A.mix = "2,4", "1,2", 2, 3
SIDES = [int(side) for side in A.sides.split(",")]
COUNTS = [int(count) for count in A.images.split(",")]
A.top = A.top or (2048 if A.groups else max(SIDES) ** 2 * (max(COUNTS) if A.model == "vl" else 1))
NAMES = ["peer exact", "peer 2^k", "protocol", "own"]


def synchronize() -> None:
    if not A.dry:
        torch.cuda.synchronize()


def elapsed() -> float:
    return time.perf_counter() - STARTED


def free_bytes() -> int:
    """With nothing running and nothing cached."""
    gc.collect()
    synchronize()
    if A.dry:
        return 0
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def reserved_bytes() -> int:
    return 0 if A.dry else torch.cuda.memory_reserved()


@contextlib.contextmanager
def engine(**options: Any) -> Iterator[Any]:
    config = VllmConfig()
    multimodal = MultiModalConfig(limit_per_prompt={"video": 0, "image": 8, "audio": 8})
    if not A.dry:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        multimodal.mm_encoder_attn_backend = AttentionBackendEnum[A.backend]
    config.model_config = types.SimpleNamespace(
        multimodal_config=multimodal, dtype=DTYPE, max_model_len=A.top, is_multimodal_model=True,
        enforce_eager=False, model="local", hf_config=None, is_diffusion=False,
        is_encoder_decoder=False, is_moe=False,
    )  # fmt: skip
    config.scheduler_config.max_num_batched_tokens = A.top
    config.compilation_config.cudagraph_mm_encoder = True
    from vllm.config.compilation import CUDAGraphMode

    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    with set_current_vllm_config(config), set_forward_context(None, config):
        yield config


def filled(make: Callable[[], Any]) -> Any:
    old = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    try:
        with torch.device(DEVICE):
            module = make()
    finally:
        torch.set_default_dtype(old)
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.02, generator=generator)
        for part in module.modules():
            if isinstance(part, torch.nn.LayerNorm):
                part.weight.fill_(1)
                part.bias.zero_()
    for part in module.modules():
        if hasattr(part, "quant_method"):
            part.quant_method.process_weights_after_loading(part)
    return module.eval().to(DEVICE)


def light(model_class: type, config: Any, **parts: Any) -> Any:
    """A model with its towers alone; every method is vLLM's own."""
    model: Any = model_class.__new__(model_class)
    torch.nn.Module.__init__(model)
    for name, part in parts.items():
        setattr(model, name, part)
    model.is_multimodal_pruning_enabled = False
    model.model_config = config.model_config
    model.multimodal_config = config.model_config.multimodal_config
    model.vllm_config = config
    model.get_max_frames_per_video = lambda: 1
    return model


def qwen3_vl(config: Any) -> Any:
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from vllm.model_executor.models.qwen3_vl import (
        Qwen3_VisionTransformer,
        Qwen3VLForConditionalGeneration,
    )

    visual = filled(lambda: Qwen3_VisionTransformer(Qwen3VLVisionConfig(**TOWER)))
    return light(Qwen3VLForConditionalGeneration, config, visual=visual)


def thinker(config: Any) -> Any:
    from transformers.models.qwen3_omni_moe import configuration_qwen3_omni_moe as configs
    from vllm.model_executor.models import qwen3_omni_moe_thinker as module

    vision = configs.Qwen3OmniMoeVisionEncoderConfig(**TOWER)
    vision.image_size, vision.apply_vit_abs_pos_embed = 768, True
    small = {"encoder_layers": 2, "d_model": 64, "encoder_attention_heads": 4,
             "encoder_ffn_dim": 128, "downsample_hidden_size": 16} if A.dry else {}  # fmt: skip
    audio = configs.Qwen3OmniMoeAudioEncoderConfig(output_dim=2048, **small)
    return light(
        module.Qwen3OmniMoeThinkerForConditionalGeneration, config,
        visual=filled(lambda: module.Qwen3Omni_VisionTransformer(vision)),
        audio_tower=filled(lambda: module.Qwen3OmniMoeAudioEncoder(audio)),
    )  # fmt: skip


def pictures(sides: list[int]) -> dict[str, Any]:
    return patches([(side, side) for side in sides])


def patches(sizes: list[tuple[int, int]]) -> dict[str, Any]:
    """Pictures of so many tokens high and wide."""
    grids = [[1, 2 * high, 2 * wide] for high, wide in sizes]
    width = 3 * TOWER.get("temporal_patch_size", 2) * TOWER["patch_size"] ** 2
    rows = sum(h * w for _, h, w in grids)
    pixels = torch.randn(rows, width, device=DEVICE, dtype=DTYPE)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)}


def clips(lengths: list[int]) -> dict[str, Any]:
    """Clips of so many frames, a hundred of them a second."""
    features = torch.randn(128, sum(lengths), device=DEVICE, dtype=DTYPE)
    return {
        "input_audio_features": features,
        "audio_feature_lengths": torch.tensor(lengths),
        "feature_attention_mask": torch.ones(len(lengths), max(lengths), dtype=torch.long),
    }


def poison_allocator() -> None:
    """Leave NaN in the memory that the allocator hands out next."""
    if A.dry:
        return
    blocks = [torch.full((n,), float("nan"), device=DEVICE) for n in (2**28, 2**24, 2**20, 2**16)]
    synchronize()
    del blocks


class Contestant:
    """Something that encodes a group; captured once, its memory noted."""

    def __init__(self, name: str, make: Callable[[], Any]) -> None:
        poison_allocator()
        before, reserved, started = free_bytes(), reserved_bytes(), time.perf_counter()
        self.name, self.manager = name, make()
        self.seconds = time.perf_counter() - started
        self.mib = (before - free_bytes()) / 2**20
        self.allocator_mib = (reserved_bytes() - reserved) / 2**20
        self.non_finite = 0
        print(f"# {elapsed():.0f} s: {name} after {self.seconds:.1f} s", file=sys.stderr)

    def __call__(self, group: dict[str, Any]) -> list[torch.Tensor]:
        outputs: list[torch.Tensor] | None = self.manager.execute(dict(group))
        if outputs is None:
            raise SystemExit(f"{self.name} did not replay: {self.manager.get_cumulative_stats()}")
        return outputs

    def poison(self) -> None:
        """NaN in whatever the next replay must write before it reads it."""
        poison_allocator()
        for graphs in getattr(self.manager, "budget_graphs", {}).values():  # vLLM's manager
            for metadata in graphs.values():
                buffers = (metadata.output_buffer, *metadata.input_buffers.values())
                for buffer in buffers:
                    if isinstance(buffer, torch.Tensor) and buffer.is_floating_point():
                        buffer.fill_(float("nan"))
        for encoder in self.manager._graphs() if hasattr(self.manager, "_served") else ():
            for entry in encoder._graphs.entries.values():
                encoder._graphs.poison(entry)
                break  # arenas and pool are shared
            encoder._execution.forget()
        synchronize()


def captured(manager: Any) -> Any:
    scope = contextlib.nullcontext() if A.dry else parallel_state.graph_capture(device=DEVICE)
    pool = None if A.dry else torch.cuda.graph_pool_handle()
    with scope:
        manager.capture(pool)
    for graphs in getattr(manager, "budget_graphs", {}).values():
        for metadata in graphs.values() if A.dry else ():
            metadata.graph.bind(manager.model, metadata)
    synchronize()
    return manager


def peer(config: Any, model: Any, budgets: list[int], items: int) -> Any:
    compilation = config.compilation_config
    compilation.encoder_cudagraph_token_budgets = budgets
    compilation.encoder_cudagraph_max_vision_items_per_batch = items
    manager: Any = object.__new__(EncoderCudaGraphManager)
    manager.__init__(config, DEVICE, DTYPE, model)
    return captured(manager)


def ours(config: Any, model: Any, **options: Any) -> Any:
    compilation = config.compilation_config
    compilation.encoder_cudagraph_token_budgets = []
    compilation.encoder_cudagraph_max_vision_items_per_batch = 0
    own = {"max_tokens": A.top, "self_check": A.self_check, "warmups": 1}
    limit = {} if A.dry else {"memory_limit": "90%"}
    config.additional_config = {"graphhal": {**own, **limit, **options}}
    plugin.install(config)
    manager = executor.build(config, DEVICE, DTYPE, model)
    if manager is None:
        raise SystemExit("graphhal declined")
    return captured(manager)


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Milliseconds: on the device, and on the host until the call returned."""
    if A.dry:
        started = time.perf_counter()
        call()
        took = (time.perf_counter() - started) * 1e3
        return took, took
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    synchronize()
    started = time.perf_counter()
    first.record()
    call()
    host = (time.perf_counter() - started) * 1e3
    last.record()
    synchronize()
    return first.elapsed_time(last), host


def compare(
    contestants: list[Contestant], group: dict[str, Any], want: list[torch.Tensor] | None
) -> dict[str, Any]:
    """Medians of a group, in rotating order; and how far each output is from eager's."""
    row: dict[str, Any] = {}
    for contestant in contestants:
        contestant.poison()
        got = contestant(group)
        contestant(group)
        non_finite = sum(int((~torch.isfinite(part)).sum()) for part in got)
        contestant.non_finite += non_finite
        error = 0.0
        if want is not None:
            ours_, theirs = torch.cat(got).double(), torch.cat(list(want)).double()
            error = float((ours_ - theirs).norm() / theirs.norm())
            del ours_, theirs
        row[contestant.name] = {
            "non_finite": non_finite, "l2": error, "device": [], "host": [],
        }  # fmt: skip
    for turn in range(A.rounds):
        order = contestants[turn % len(contestants) :] + contestants[: turn % len(contestants)]
        for contestant in order:
            device, host = timed(lambda: contestant(group))  # noqa: B023  (called at once)
            row[contestant.name]["device"].append(device)
            row[contestant.name]["host"].append(host)
    for result in row.values():
        result["device"] = statistics.median(result["device"])
        result["host"] = statistics.median(result["host"])
    return row


def summed(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """A row for several groups: times added up, the worst difference, all non-finite values."""
    return {
        name: {
            what: (max if what == "l2" else sum)(part[name][what] for part in parts)
            for what in parts[0][name]
        }
        for name in (parts[0] if parts else ())
    }


def table(title: str, rows: dict[str, dict[str, Any]], names: list[str]) -> list[str]:
    width = max(map(len, rows), default=0) + 2
    lines = [f"## {title}", " " * width + "".join(f"{name:>22}" for name in names)]
    for label, row in rows.items():
        cells = ""
        for name in names:
            cell = row.get(name)
            if cell is None:
                cells += " " * 22
                continue
            mark = " NaN" if cell["non_finite"] else ""
            cells += f"{cell['device']:9.3f}/{cell['host']:.3f} {cell['l2']:.0e}{mark}".rjust(22)
        lines.append(f"{label:<{width}}{cells}")
    return lines


def ratio_table(rows: dict[str, dict[str, Any]], mine: list[str], theirs: list[str]) -> list[str]:
    """Device and host time of ours over each peer's, group by group, and over all groups."""
    pairs = [(a, b) for a in mine for b in theirs]
    width = max(map(len, [*rows, "all groups"])) + 2
    lines = ["## ours / theirs: device, host"]
    lines.append(" " * width + "".join(f"{f'{a} / {b}':>24}" for a, b in pairs))
    for label, row in rows.items():
        cells = ""
        for a, b in pairs:
            both = a in row and b in row
            device, host = (
                (row[a][what] / max(row[b][what], 1e-9) if both else 0.0)
                for what in ("device", "host")
            )
            cells += (f"{device:.3f}, {host:.3f}" if both else "").rjust(24)
        lines.append(f"{label:<{width}}{cells}")
    cells = ""
    for a, b in pairs:
        cells += f"{totals(rows, a, b, 'device'):.3f}, {totals(rows, a, b, 'host'):.3f}".rjust(24)
    lines.append(f"{'all groups':<{width}}{cells}")
    return lines


def totals(rows: dict[str, dict[str, Any]], name: str, other: str, what: str) -> float:
    """Over the groups of equal pictures, each once."""
    both = [
        row
        for label, row in rows.items()
        if name in row and other in row and not label.startswith("mix")
    ]
    return sum(row[name][what] for row in both) / max(sum(row[other][what] for row in both), 1e-9)


def save(result: dict[str, Any]) -> None:
    if A.out:
        Path(A.out).parent.mkdir(parents=True, exist_ok=True)
        Path(A.out).write_text(json.dumps(result, indent=1))


def described(contestants: list[Contestant], result: dict[str, Any]) -> list[str]:
    """Memory, graphs, start-up and non-finite values of each contestant."""
    lines = []
    for each in contestants:
        stats = each.manager.get_cumulative_stats()
        dropped = stats.get("dropped", [])
        lines.append(
            f"{each.name}: {each.mib:.0f} MiB of free memory ({each.allocator_mib:.0f} by the "
            f"allocator), {stats.get('num_budgets', 0)} graphs, "
            f"start-up {each.seconds:.1f} s, non-finite values with poisoned pools: "
            f"{each.non_finite}"
        )
        result[each.name] = {
            "mib": each.mib, "allocator_mib": each.allocator_mib, "seconds": each.seconds,
            "graphs": stats.get("num_budgets", 0), "dropped": dropped,
            "non_finite": each.non_finite, "reported_bytes": stats.get("graph_bytes"),
        }  # fmt: skip
        if dropped:
            lines.append(f"  dropped: {dropped[:3]}")
    return lines


def eager(model: Any, group: dict[str, Any], tokens: list[int]) -> list[torch.Tensor]:
    return list(model.encoder_eager_forward(dict(group)).split(tokens))


def attempted(call: Callable[[], None]) -> str | None:
    """What ended the measurements early; the tables are printed all the same."""
    try:
        call()
    except Exception as error:  # noqa: BLE001  (a benchmark: everything is reported)
        traceback.print_exc()
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


def ending(left_out: list[str], failure: str | None) -> list[str]:
    lines = [f"left out for lack of time: {', '.join(left_out) or 'nothing'}"]
    return lines if failure is None else [*lines, f"ENDED EARLY: {failure}"]


def vision(config: Any) -> list[str]:
    """Qwen3-VL: both of graphhal's adapters against vLLM's manager."""
    model = qwen3_vl(config)
    result: dict[str, Any] = {"backend": A.backend, "top": A.top, "rows": {}}
    rows, left_out = result["rows"], []
    largest = pictures([max(SIDES)] * max(COUNTS))
    eager(model, largest, [max(SIDES) ** 2] * max(COUNTS))
    for adapter in ("own", "protocol"):  # kernels that the driver loads once are nobody's memory
        budgets = sorted({min(SIDES) ** 2, max(SIDES) ** 2, A.top})
        ours(config, model, vllm_adapter=adapter, token_budgets=budgets).clear()
    del largest
    ladder = [b for b in (2**k for k in range(3 if A.dry else 6, 20)) if b < A.top] + [A.top]
    own = Contestant("own", lambda: ours(config, model, vllm_adapter="own"))
    protocol = Contestant("protocol", lambda: ours(config, model, vllm_adapter="protocol"))
    doubling = Contestant("peer 2^k", lambda: peer(config, model, ladder, min(64, ladder[0])))

    def measure(label: str, sides: list[int], contestants: list[Contestant]) -> None:
        if elapsed() > A.seconds:
            left_out.append(label)
            return
        group = pictures(sides)
        want = eager(model, group, [side * side for side in sides])
        rows[label] = compare(contestants, group, want)
        save(result)
        print(f"# {elapsed():.0f} s: {label}", file=sys.stderr, flush=True)

    def measure_mix() -> None:
        """Pictures of any height and width between the smallest side and the largest."""
        rng, parts = random.Random(0), []
        while len(parts) < A.mix and elapsed() < A.seconds:
            sizes = [
                (rng.randint(min(SIDES), max(SIDES)), rng.randint(min(SIDES), max(SIDES)))
                for _ in range(rng.choice(COUNTS))
            ]
            group = patches(sizes)
            want = eager(model, group, [high * wide for high, wide in sizes])
            parts.append(compare([doubling, protocol, own], group, want))
        if parts:
            rows[f"mix of {len(parts)} groups"] = summed(parts)
        else:
            left_out.append("the mix")
        save(result)

    def measure_all() -> None:
        measure_mix()
        for count in COUNTS:
            if elapsed() > A.seconds:
                left_out.append(f"all of {count}")
                continue
            budgets = sorted({count * side * side for side in SIDES})
            exact = Contestant("peer exact", lambda: peer(config, model, budgets, count))  # noqa: B023
            for side in SIDES:
                measure(
                    f"{count} x {side * side}", [side] * count, [exact, doubling, protocol, own]
                )
            result["non_finite_exact"] = result.get("non_finite_exact", 0) + exact.non_finite
            del exact

    failure = attempted(measure_all)
    lines = table(f"{A.backend}: device ms / host ms, relative L2 to eager", rows, NAMES)
    lines += ratio_table(rows, ["protocol", "own"], ["peer exact", "peer 2^k"])
    lines += described([doubling, protocol, own], result)
    non_finite = result.get("non_finite_exact", 0)
    lines.append(f"peer exact: non-finite values with poisoned pools: {non_finite}")
    ratios = {
        "worst protocol / better peer, device": max(
            (
                row["protocol"]["device"] / min(row[n]["device"] for n in NAMES[:2] if n in row)
                for row in rows.values()
            ),
            default=0.0,
        ),
        "memory protocol / peer 2^k": protocol.mib / max(doubling.mib, 1e-9),
        "memory own / peer 2^k": own.mib / max(doubling.mib, 1e-9),
    }
    result["ratios"] = ratios
    lines += [f"{name}: {value:.3f}" for name, value in ratios.items()]
    result["left_out"], result["failure"] = left_out, failure
    save(result)
    return lines + ending(left_out, failure)


def omni(config: Any) -> list[str]:
    """The thinker's towers, which vLLM serves eagerly, with graphhal's adapters."""
    model = thinker(config)
    result: dict[str, Any] = {"backend": A.backend, "rows": {}}
    rows, left_out = result["rows"], []
    groups = {
        f"image {side * side}": pictures([side]) for side in ([2, 4] if A.dry else [7, 14, 28])
    }
    groups |= {
        f"audio {s} s": clips([int(100 * s)]) for s in ([2.0] if A.dry else [1.4, 5.0, 15.0, 60.0])
    }
    groups["audio 4 clips"] = clips([140, 300, 500, 220])
    for group in groups.values():
        model.embed_multimodal(**group)
    graphs = Contestant("own", lambda: ours(config, model, vllm_models="qwen3_omni"))
    as_it_is = types.SimpleNamespace(
        execute=lambda group: list(model.embed_multimodal(**group)), get_cumulative_stats=dict
    )
    plain = Contestant("eager", lambda: as_it_is)

    def measure_all() -> None:
        for label, group in groups.items():
            if elapsed() > A.seconds:
                left_out.append(label)
                continue
            want = list(model.embed_multimodal(**group))
            rows[label] = compare([plain, graphs], group, want)
            save(result)

    failure = attempted(measure_all)
    title = f"{A.backend}: Qwen3-Omni thinker, device ms / host ms"
    lines = table(title, rows, ["eager", "own"]) + ratio_table(rows, ["own"], ["eager"])
    lines += described([graphs], result)
    result["left_out"], result["failure"] = left_out, failure
    save(result)
    return lines + ending(left_out, failure)


EXPECTED = ("more rows", "more items", "the adapter does not replay")
"""How the reasons begin for which random groups may run eagerly."""


def sizes_of_groups(draw: Callable[[random.Random], Any], most: int) -> Iterator[list[Any]]:
    """Random groups; every third repeats sizes, or their total in another order."""
    rng, before = random.Random(0), [draw(random.Random(0))]
    for number in range(A.groups):
        if number % 3 == 1:
            sizes = list(before)
        elif number % 3 == 2:
            sizes = rng.sample(before, len(before))
        else:
            sizes = [draw(rng) for _ in range(rng.randint(1, most))]
        before = sizes
        yield sizes


def parity(
    name: str,
    manager: Any,
    groups: Iterator[dict[str, Any]],
    eager: Callable[[dict[str, Any]], torch.Tensor],
) -> tuple[str, bool]:
    """A line of the table, and whether it is right."""
    worst, equal, bad, before = 0.0, 0, 0, manager.stats()["graph_hits"]
    for group in groups:
        outputs = manager.execute(dict(group))
        if outputs is None:
            continue
        want, got = eager(group).double(), torch.cat(outputs).double()
        bad += int((~torch.isfinite(got)).sum())
        worst = max(worst, float((got - want).norm() / want.norm()))
        equal += bool(torch.equal(got, want))
    stats = manager.stats()
    reasons = {reason: n for by in stats["misses"].values() for reason, n in by.items()}
    hits = stats["graph_hits"] - before
    right = worst <= 2e-2 and not bad and hits > 0
    right &= all(reason.startswith(EXPECTED) for reason in reasons)
    missed = "; ".join(f"{n}: {reason}" for reason, n in reasons.items()) or "none"
    return f"| {name} | {A.groups} | {worst:.1e} | {equal} | {hits} | {missed} |", right


def random_groups(config: Any) -> list[str]:
    """Every adapter against the model's own eager code, over random groups."""

    def picture(rng: random.Random) -> tuple[int, int]:
        return rng.randint(1, 14), rng.randint(1, 14)

    def frames(rng: random.Random) -> int:
        return rng.choice((rng.randint(1, 99), 100, 800, rng.randint(100, 3000)))

    def photos() -> Iterator[dict[str, Any]]:
        return map(patches, sizes_of_groups(picture, 10))

    lines, right = [f"{A.backend}, {A.groups} random groups of each, eager against graph"], True
    lines += [
        "| tower | groups | worst relative L2 | bit-equal | hits | misses |",
        "|---" * 6 + "|",
    ]
    model = qwen3_vl(config)
    for adapter in ("own", "protocol"):
        manager = ours(config, model, vllm_adapter=adapter)
        line, fine = parity(
            f"Qwen3-VL, {adapter}", manager, photos(),
            lambda group: model.encoder_eager_forward(dict(group)),
        )  # fmt: skip
        lines.append(line)
        right &= fine
        manager.clear()
    model = thinker(config)

    def embedded(group: dict[str, Any]) -> torch.Tensor:
        return torch.cat(list(model.embed_multimodal(**group)))

    for name, groups in (
        ("pictures", photos()), ("clips", map(clips, sizes_of_groups(frames, 6)))
    ):  # fmt: skip
        manager = ours(config, model, vllm_models="qwen3_omni", audio_chunks="1-64")
        line, fine = parity(f"Qwen3-Omni thinker, {name}", manager, groups, embedded)
        lines.append(line)
        right &= fine
        manager.clear()
    return [*lines, "all right" if right else "ENDED EARLY: a line is wrong"]


def main() -> int:
    with engine() as config, torch.inference_mode():
        if A.groups:
            lines = random_groups(config)
        else:
            lines = vision(config) if A.model == "vl" else omni(config)
    print("\n".join(lines), flush=True)
    return 1 if lines[-1].startswith("ENDED EARLY") else 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        with set_current_vllm_config(VllmConfig()):
            parallel_state.init_distributed_environment(
                world_size=1, rank=0, local_rank=0, backend="gloo",
                distributed_init_method=f"file://{folder}/rendezvous",
            )  # fmt: skip
            parallel_state.initialize_model_parallel(1, 1)
        status = main()
        parallel_state.cleanup_dist_env_and_memory()
    sys.stdout.flush()
    sys.exit(status)
