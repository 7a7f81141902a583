"""The same scenarios through vllm-ascend's encoder-graph manager and through graphhal, simulated.

    python -m tests.ascend_peer.side_by_side [--json FILE]

Needs, in one environment, torch_npu over the simulated runtime (ci/ascend_simulator), vLLM's and
vllm-ascend's Python files. ci/cells/ascend_peer.sh makes it. Each scenario runs in a process of its
own; the tower, the requests and the CPU reference are the same for both. Exits with 1 where
graphhal's column is not right.
"""

import argparse
import json
import logging
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

warnings.simplefilter("ignore")

import torch  # noqa: E402
import torchvision_schemas  # noqa: E402, F401  (ci/vllm_shim)
from torch import nn  # noqa: E402
from vllm.v1.worker import encoder_cudagraph_defs as defs  # noqa: E402
from vllm_ascend.ops.mm_encoder_attention import AscendMMEncoderAttention  # noqa: E402
from vllm_ascend.worker import encoder_acl_graph  # noqa: E402

from graphhal.discovery import bind  # noqa: E402
from graphhal.npu import acl_errors, plugin  # noqa: E402
from graphhal.settings import Settings  # noqa: E402
from tests.ascend_peer.engines import crops, engine_on_device, gemma3  # noqa: E402
from tests.ascend_simulated import simulator  # noqa: E402
from tests.ascend_simulated.encoders import Twins, assert_equal, toy_twins  # noqa: E402
from tests.toy_encoder import FULL, MERGE, WINDOW, WINDOWED, ToyEncoder, images  # noqa: E402

BUDGETS = (4, 8, 16)
ITEMS = 4
PATHS = ("image", "video")


class PeerAttention(AscendMMEncoderAttention):
    """vllm-ascend's attention layer, made without an engine."""

    def __init__(self, heads: int, head_dim: int) -> None:
        nn.Module.__init__(self)
        self.num_heads = self.num_kv_heads = heads
        self.head_size, self.scale, self.enable_pad = head_dim, head_dim**-0.5, False


class PeerModel:
    """The toy encoder behind vLLM's encoder-graph protocol; boundaries live on the device."""

    def __init__(self, toy: ToyEncoder, two_paths: bool) -> None:
        self.toy, self.two_paths = toy, two_paths
        self.layers: dict[int, PeerAttention] = {}

    def get_encoder_cudagraph_config(self) -> Any:
        keys = ["pixels", "position_ids", *self.toy.sets]
        paths = {"enable_dual_path_graph": True, "global_token_per_image": BUDGETS[0],
                 "local_token_per_patch": BUDGETS[0]} if self.two_paths else {}  # fmt: skip
        return defs.EncoderCudaGraphConfig(["image"], keys, 10, **paths)

    def get_encoder_cudagraph_budget_range(self, _: Any) -> tuple[int, int]:
        return BUDGETS[0], BUDGETS[-1]

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: Any) -> list[Any]:
        items = self.toy.item_specs(mm_kwargs)
        return [
            defs.EncoderItemSpec(i.rows, i.tokens, i.tokens, i.tokens) if self.two_paths
            else defs.EncoderItemSpec(i.rows, i.tokens)
            for i in items
        ]  # fmt: skip

    def select_encoder_cudagraph_items(self, mm_kwargs: Any, indices: list[int]) -> Any:
        items = self.toy.item_specs(mm_kwargs)
        picked = [items[i] for i in indices]
        pixels = [mm_kwargs["pixels"][i.row_offset : i.row_offset + i.rows] for i in picked]
        return {"pixels": torch.cat(pixels), "grids": [mm_kwargs["grids"][i] for i in indices]}

    def _values(self, mm_kwargs: Any) -> dict[str, torch.Tensor]:
        items = self.toy.item_specs(mm_kwargs)
        values = {
            "pixels": mm_kwargs["pixels"],
            "position_ids": torch.from_numpy(self.toy.metadata(items)["position_ids"]),
        }
        for name in self.toy.sets:
            ends = [0]
            for item in items:
                for length in item.sequences[name]:
                    ends.append(ends[-1] + length)
            values[name] = torch.tensor(ends, dtype=torch.int32)
        return {name: value.to("npu:0") for name, value in values.items()}

    def prepare_encoder_cudagraph_capture_inputs(
        self, budget: int, items: int, frames: int, device: Any, dtype: Any, path: str = "default"
    ) -> Any:
        rows = budget * MERGE
        slots = {FULL: items + 1, WINDOWED: rows // WINDOW + items + 1}
        values: dict[str, torch.Tensor] = {
            "pixels": torch.zeros(rows, 6, device=device),
            "position_ids": torch.zeros(rows, dtype=torch.int64, device=device),
        }
        for name in self.toy.sets:
            ends = torch.full((slots[name] + 1,), rows, dtype=torch.int32)
            ends[0] = 0
            values[name] = ends.to(device)
        return defs.EncoderCudaGraphCaptureInputs(values)

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: Any, items: int, frames: int, path: str = "default"
    ) -> Any:
        return defs.EncoderCudaGraphReplayBuffers(self._values(mm_kwargs))

    def _attend(self, query: Any, key: Any, value: Any, ends: Any, _: int, scale: float) -> Any:
        layer = self.layers.setdefault(0, PeerAttention(query.shape[1], query.shape[2]))
        batched = (x.contiguous().unsqueeze(0) for x in (query, key, value))
        return layer.forward_oot(*batched, cu_seqlens=ends)[0]

    def encoder_cudagraph_forward(self, values: Any, path: str = "default") -> torch.Tensor:
        self.toy.attention = self._attend
        levels = self.toy.forward(values, dict.fromkeys(self.toy.sets, 0))
        return levels if isinstance(levels, torch.Tensor) else torch.cat(list(levels), dim=-1)

    def encoder_eager_forward(self, mm_kwargs: Any, path: str = "default") -> torch.Tensor:
        return self.encoder_cudagraph_forward(self._values(mm_kwargs))

    def postprocess_encoder_output(
        self, out: Any, indices: Any, tokens: Any, into: Any, clone: bool = False, **_: Any
    ) -> None:
        out = next(iter(out.values())) if isinstance(out, dict) else out
        at = 0
        for index in indices:
            piece = out[at : at + tokens[index]]
            into[index] = piece.clone() if clone else piece
            at += tokens[index]


class Peer:
    """vllm-ascend's manager."""

    def __init__(self, sets: tuple[str, ...], two_paths: bool = False) -> None:
        toy = ToyEncoder(budgets=BUDGETS, sets=sets)
        self.reference = twins_of(sets).reference
        toy.tower.to("npu:0")
        config = MagicMock()
        options = config.compilation_config
        options.encoder_cudagraph_token_budgets = list(BUDGETS)
        options.encoder_cudagraph_max_vision_items_per_batch = ITEMS
        options.encoder_cudagraph_max_frames_per_batch = None
        multimodal = config.model_config.multimodal_config
        multimodal.get_limit_per_prompt.return_value = 0
        multimodal.mm_encoder_tp_mode = "weights"
        config.parallel_config.tensor_parallel_size = 1
        self.model = PeerModel(toy, two_paths)
        device = torch.device("npu:0")
        self.manager = encoder_acl_graph.EncoderAclGraphManager(
            config, device, torch.float32, self.model
        )

    def capture(self) -> None:
        self.manager.capture(torch.npu.graph_pool_handle())

    def run(self, request: Any) -> list[torch.Tensor]:
        with torch.inference_mode():
            outputs: list[torch.Tensor] = self.manager.execute(request)
            return outputs

    def expected(self, request: Any) -> list[torch.Tensor]:
        return self.reference.run_eager(request)

    def graphs(self) -> int:
        return sum(len(graphs) for graphs in self.manager.budget_graphs.values())

    def clear(self) -> None:
        self.manager.clear()


def twins_of(sets: tuple[str, ...], paths: tuple[str, ...] = ("image",)) -> Twins:
    """graphhal's engine over the same tower, and the CPU's."""
    settings = Settings(max_items=ITEMS, self_check="quick")
    platform = bind(plugin, plugin.graphhal_probe(), "npu")
    return toy_twins(platform, settings, budgets=BUDGETS, sets=sets, paths=paths)


class Ours:
    """graphhal's engine."""

    def __init__(self, sets: tuple[str, ...], two_paths: bool = False) -> None:
        self.twins = twins_of(sets, PATHS if two_paths else PATHS[:1])

    def capture(self) -> None:
        self.twins.graphs.capture()

    def run(self, request: Any) -> list[torch.Tensor]:
        return self.twins.graphs.run(request)

    def expected(self, request: Any) -> list[torch.Tensor]:
        return self.twins.expected(request)

    def graphs(self) -> int:
        return len(self.twins.graphs.keys())

    def clear(self) -> None:
        self.twins.graphs.clear()


Side = Peer | Ours
Kind = type[Peer] | type[Ours]


def requests(count: int, seed: int = 3) -> list[Any]:
    chooser = random.Random(seed)
    return [
        images(*chooser.choices(range(1, 5), k=chooser.randint(1, ITEMS))) for _ in range(count)
    ]


def captured(kind: Kind, sets: tuple[str, ...] = (FULL, FULL), **options: Any) -> Side:
    side = kind(sets, **options)
    side.capture()
    return side


def same(outputs: Any, expected: Any) -> bool:
    try:
        assert_equal(outputs, expected, torch.float32)
    except AssertionError:
        return False
    return True


def right(side: Side, asked: list[Any]) -> str:
    wrong = 0
    for request in asked:
        outputs = side.run(request)
        torch.npu.synchronize()
        wrong += not same(outputs, side.expected(request))
    return f"{wrong} of {len(asked)} wrong" if wrong else "right"


def new_boundaries(kind: Kind) -> str:
    """new boundaries in one shape, full attention"""
    return right(captured(kind), requests(20))


def windows(kind: Kind) -> str:
    """a windowed and a full layer in one tower"""
    return right(captured(kind, (WINDOWED, FULL)), requests(20))


def neighbours(kind: Kind) -> str:
    """memory that others hold while graphs replay"""
    side = captured(kind)
    torch.npu.empty_cache()
    others = [torch.full((n,), 3.0, device="npu:0") for n in (80, 160, 320, 40, 10) * 40]
    found = right(side, requests(10))
    spoilt = sum(bool((other.cpu() != 3).any()) for other in others)
    return f"{spoilt} foreign tensors overwritten, results {found}" if spoilt else found


def kept(kind: Kind) -> str:
    """outputs that a caller keeps over later requests"""
    side, asked = captured(kind), requests(20)
    outputs = [side.run(request) for request in asked]
    torch.npu.synchronize()
    wrong = sum(
        not same(output, side.expected(request))
        for request, output in zip(asked, outputs, strict=True)
    )
    return f"{wrong} of {len(asked)} wrong" if wrong else "right"


def waits(kind: Kind) -> str:
    """20 requests in a row on a busy device, pixels there"""
    side = captured(kind)
    asked = [{**request, "pixels": request["pixels"].npu()} for request in requests(20)]
    side.run(asked[0])
    torch.npu.synchronize()
    simulator.schedule("lazy")
    with tempfile.TemporaryDirectory() as folder, simulator.traced(Path(folder) / "t") as trace:
        outputs = [side.run(request) for request in asked]
        torch.npu.current_stream().npu_stream  # noqa: B018
        count = len(trace.matching("^sync"))
    torch.npu.synchronize()
    wrong = 0
    for request, output in zip(asked, outputs, strict=True):
        on_host = {**request, "pixels": request["pixels"].cpu()}
        wrong += not same(output, side.expected(on_host))
    return f"{count} waits, {wrong} of {len(asked)} wrong" if wrong else f"{count} waits, right"


def paths(kind: Kind) -> str:
    """two paths whose graphs have the same budgets"""
    side = captured(kind, two_paths=True)
    if isinstance(side, Ours):
        asked = [{**r, "grids": [(*g, p) for g in r["grids"]]} for r in requests(10) for p in PATHS]
        return right(side, asked)
    return right(side, requests(20))


def no_boundaries(kind: Kind) -> str:
    """vLLM's Gemma 3: pictures of one size, no boundaries"""
    with engine_on_device() as config:
        config.additional_config = {"graphhal": {"platform": "npu"}} if kind is Ours else {}
        model = gemma3(config).to("npu:0")
        device = torch.device("npu:0")
        manager = encoder_acl_graph.EncoderAclGraphManager(config, device, torch.float32, model)
        manager.capture(torch.npu.graph_pool_handle())
        wrong = 0
        for group in crops():
            request = {**group, "pixel_values": group["pixel_values"].to(device)}
            try:
                outputs = manager.execute(request)
            except Exception as error:  # noqa: BLE001
                first = f"raises {type(error).__name__}"
                try:
                    torch.npu.synchronize()
                except Exception as late:  # noqa: BLE001
                    return f"{first}, then the device hangs ({acl_errors.codes_of(late)})"
                return first
            wrong += not same(outputs, [one.cpu() for one in model.embed_multimodal(**request)])
        return f"{wrong} of {len(crops())} wrong" if wrong else "right"


def recapture(kind: Kind) -> str:
    """cleared and captured again"""
    side = captured(kind)
    side.clear()
    side.capture()
    return right(side, requests(10))


def exhausted(kind: Kind) -> str:
    """streams run out (207008) at the third graph"""
    side = kind((FULL, FULL))
    simulator.arm("aclmdlRICaptureBegin:3:207008;aclmdlRICaptureBegin:4:207008")
    try:
        side.capture()
    finally:
        simulator.arm()
    return f"{side.graphs()} graphs kept, {right(side, requests(10))}"


def stream_after_failure(kind: Kind) -> str:
    """the current stream after a capture that failed"""
    side, before = kind((FULL, FULL)), torch.npu.current_stream()
    simulator.arm("aclmdlRICaptureEnd:1")
    with suppress(Exception):  # the question is what is left behind
        side.capture()
    simulator.arm()
    return "as before" if torch.npu.current_stream() == before else "the capture stream"


def failed_update(kind: Kind) -> str:
    """one boundary update fails (107033), then requests go on"""
    side, asked = captured(kind), requests(10)
    side.run(asked[0])
    torch.npu.synchronize()
    simulator.arm("aclmdlRICaptureTaskUpdateBegin:1")
    try:
        side.run(asked[0])
    except Exception as error:  # noqa: BLE001
        first = f"raises {type(error).__name__}"
    else:
        first = "served"
    simulator.arm()
    try:
        torch.npu.synchronize()
        return f"{first}, then {right(side, asked)}"
    except Exception as error:  # noqa: BLE001
        return f"{first}, then the device hangs ({acl_errors.codes_of(error)})"


SCENARIOS = (
    new_boundaries, windows, paths, no_boundaries, neighbours, kept, waits, recapture, exhausted,
    stream_after_failure, failed_update,
)  # fmt: skip


def forked(action: Callable[[], str]) -> str:
    """What the action finds, in a process of its own."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            found = action()
        except BaseException as error:  # noqa: BLE001  (a finding)
            first = (str(error).strip().splitlines() or [""])[0]
            found = f"{type(error).__name__}: {first[:120]}"
        os.write(writing, found.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        found = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return found if status == 0 else f"the process dies ({status})"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.disable(logging.ERROR)  # what is found stands in the table
    names = ("vllm", "vllm_ascend", "torch", "torch_npu")
    found: dict[str, Any] = {"versions": {name: version(name) for name in names}, "scenarios": {}}
    print(found["versions"])
    wrong = 0
    print("| scenario | vllm-ascend | graphhal |\n|---|---|---|")
    for scenario in SCENARIOS:
        peer, ours = (forked(lambda k=k, s=scenario: s(k)) for k in (Peer, Ours))
        found["scenarios"][scenario.__name__] = [scenario.__doc__, peer, ours]
        print(f"| {scenario.__doc__} | {peer} | {ours} |", flush=True)
        wrong += not ours.endswith(("right", "as before"))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
