"""Attention of a graph, under boundaries of every kind, against PyTorch's on the CPU."""

import random
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from graphhal.boundaries import Boundaries
from graphhal.npu.attention import attention
from graphhal.npu.fused_attention import FusedAttention
from graphhal.plan import GraphKey
from graphhal.platform import CapturedGraph, CaptureRequest, HostUpdate, Platform
from tests.ascend_simulated import simulator
from tests.ascend_simulated.encoders import assert_equal

ROWS = 24
SETS = ("full", "windows")
HEADS = ["2 2 16 16", "2 2 17 17", "1 1 3 3", "3 3 72 72", "2 2 80 80", "4 2 64 64", "6 1 40 40",
         "2 2 40 24", "2 2 24 40", "2 2 64 8", "1 1 72 64", "1 1 64 72", "1 1 130 130",
         "1 1 256 256"]  # fmt: skip
"""Heads, heads of keys, dim of queries and keys, dim of values."""


def by_sequence(q: Any, k: Any, v: Any, ends: tuple[int, ...], scale: float) -> torch.Tensor:
    """Attention within each sequence, in float64."""
    parts, start = [], 0
    for end in ends:
        heads = [x[start:end].double().transpose(0, 1) for x in (q, k, v)]
        mixed = scaled_dot_product_attention(*heads, scale=scale, enable_gqa=True)
        parts.append(mixed.transpose(0, 1))
        start = end
    return torch.cat(parts).float()


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert_equal([found.flatten(0, -2)], [expected.flatten(0, -2)], torch.float32)


class Tower:
    """A layer over whole sequences, then one over windows, of random queries, keys and values."""

    def __init__(self, platform: Platform, device: torch.device, heads: str) -> None:
        number, key_heads, dim, value_dim = map(int, heads.split())
        generator = torch.Generator().manual_seed(number * dim + value_dim)
        shapes = [(number, dim), (key_heads, dim), (key_heads, value_dim)]
        self.tensors = [
            torch.randn((2, ROWS, *shape), generator=generator).float() for shape in shapes
        ]
        self.scale = dim**-0.5
        ours = [x.to(device) for x in self.tensors]
        self.out = torch.zeros((2, ROWS, number, value_dim), device=device)
        slots = 4 * (ROWS + 1)
        packed = torch.zeros(2 * slots, dtype=torch.uint8, device=device)
        inputs = {
            name: packed[n * slots : (n + 1) * slots].view(torch.int32)
            for n, name in enumerate(SETS)
        }

        def forward() -> None:
            for n, name in enumerate(SETS):
                mixed = attention(*(x[n] for x in ours), inputs[name], ROWS, self.scale)
                self.out[n].copy_(mixed)

        whole = dict.fromkeys(SETS, Boundaries((ROWS,)))
        self.platform = platform
        self.graph: CapturedGraph = platform.capture(
            CaptureRequest(
                key=GraphKey("heads", "image", ROWS), forward=forward, inputs=inputs, packed=packed,
                output=self.out, boundaries=whole, warmups=1, pool=None, device=device,
            )
        )  # fmt: skip

    def replay(self, full: Boundaries, windows: Boundaries) -> torch.Tensor:
        """What a replay with these boundaries makes, on the device."""
        boundaries = dict(zip(SETS, (full, windows), strict=True))
        request = self.graph.request
        update = HostUpdate(boundaries, torch.zeros_like(request.packed, device="cpu"))
        with self.platform.step("replay", self.graph, request.inputs, boundaries):
            self.platform.update_boundaries(self.graph, update)
            self.platform.replay(self.graph)
            return self.out.clone()

    def expected(self, full: Boundaries, windows: Boundaries) -> torch.Tensor:
        layers = zip(*self.tensors, (full.ends, windows.ends), strict=True)
        return torch.stack([by_sequence(*layer, self.scale) for layer in layers])


def boundaries_of_every_kind() -> list[tuple[Boundaries, Boundaries]]:
    """One long sequence, as many as there are rows, spare slots, and random cuts."""
    chooser = random.Random(3)
    cuts = [
        Boundaries((*sorted(chooser.sample(range(1, ROWS), chooser.randint(1, 9))), ROWS))
        for _ in range(8)
    ]
    one, each = Boundaries((ROWS,)), Boundaries(tuple(range(1, ROWS + 1)))
    short = Boundaries((3, 8)).padded_to(ROWS, slots=7)
    dummies = Boundaries((3, 8)).padded_to(ROWS, slots=9, longest=5)
    kinds = [one, each, short, dummies, *cuts]
    return list(zip(kinds, [each, one, *kinds[2:][::-1]], strict=True))


@pytest.mark.parametrize("heads", HEADS)
def test_replays_follow_their_boundaries_whatever_the_heads(
    platform: Platform, device: torch.device, trace: "simulator.Trace", schedule: str, heads: str
) -> None:
    tower = Tower(platform, device, heads)
    asked = boundaries_of_every_kind()
    outputs = [tower.replay(*each) for each in asked]
    for output, each in zip(outputs, asked, strict=True):
        assert_close(output, tower.expected(*each))
    platform.release([tower.graph])
    assert trace.hazards() == []


@pytest.mark.parametrize(("heads", "copies"), [("2 2 64 64", 0), ("2 2 64 8", 2), ("2 2 40 40", 6)])
def test_only_what_is_too_narrow_for_the_kernel_is_copied(
    platform: Platform, device: torch.device, trace: "simulator.Trace", heads: str, copies: int
) -> None:
    platform.release([Tower(platform, device, heads).graph])
    kernels = trace.matching("^capture model=.* aclnn(ConstantPad|.*Copy)")
    assert len(kernels) == copies + len(SETS)  # and one of each layer's result


def test_the_kernel_gets_rows_that_lie_one_behind_another(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulator's takes any strides; a chip's may not."""
    usual, given = FusedAttention.arguments, []

    def arguments(operator: Any, *tensors: Any) -> dict[str, Any]:
        given.extend(tensor.is_contiguous() for tensor in tensors[:3])
        return usual(operator, *tensors)

    monkeypatch.setattr(FusedAttention, "arguments", arguments)
    for dim in (64, 40):
        parts = torch.zeros(8, 3, 2, dim, device=device).unbind(1)
        attention(*parts, torch.tensor([0, 8]), 8, 0.25)
    assert given == [True] * 6


@pytest.mark.parametrize(
    ("cu_seqlens", "ends"),
    [
        ([0, 3, 8], (3, 8)),
        ([0, 3, 3, 8], (3, 8)),
        ([0, 0, 3, 8], (3, 8)),
        ([0, 3, 3, 3, 8, 8], (3, 8)),
        ([0, 3, 8, 0, 0], (3, 8)),
        ([0, 3], (3, 8)),
    ],
)
def test_an_eager_call_takes_empty_sequences_wherever_they_are(
    device: torch.device, cu_seqlens: list[int], ends: tuple[int, ...]
) -> None:
    rows = torch.randn(8, 2, 16)
    told = torch.tensor(cu_seqlens, dtype=torch.int32, device=device)
    ours = rows.to(device)
    found = attention(ours, ours, ours, told, 8, 0.25)
    assert_close(found, by_sequence(rows, rows, rows, ends, 0.25))
