"""Attention kernels that could serve a CUDA graph, at the shapes of a full-size vision tower.

    python benchmarks/attention_kernels.py

FlashAttention as PyTorch ships it, cuDNN's dense attention with the boundary in head dims
(`lone_attention`), and `sdpa`, which takes no boundaries; all inside device graphs, 16 heads of 72,
bfloat16; microseconds of one layer between two events, and the relative L2 to a loop of one float32
call a sequence. Boundaries change after capture, below the baked bound.
"""

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median

import torch
from torch.nn import functional

from graphhal.cuda.attention import lone_attention
from graphhal.cuda.kernels import cudnn_kernel, flash_kernel

HEADS, WIDTH, LAYERS = 16, 72, 8
SCALE = WIDTH**-0.5
CASES: tuple[tuple[str, list[int], int, int], ...] = (
    # name, lengths, slots, bound
    ("49 tokens", [196], 1, 196),
    ("8 × 49 tokens", [196] * 8, 9, 1568),
    ("784 tokens", [3136], 9, 3136),
    ("4 × 196 tokens", [784] * 4, 9, 3136),
    ("1024 tokens", [4096], 9, 4096),
    ("1600 tokens", [6400], 9, 6400),
    ("1500 tokens in 1600", [6000, 400], 9, 6400),
    ("1600 tokens in two", [3000, 3400], 9, 6400),
    ("4096 tokens", [16384], 9, 16384),
    ("8 × 512 tokens", [2048] * 8, 9, 16384),
)


def lone(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
) -> torch.Tensor:
    """One sequence and its padding, or any two, by cuDNN's dense kernel."""
    dense = cudnn_kernel()
    if dense is None:
        raise RuntimeError("no such kernel here")
    return lone_attention(dense, query, key, value, cu_seqlens, scale)


def dense_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
) -> torch.Tensor:
    """One sequence, whatever `sdpa` chooses."""
    parts = [t.transpose(0, 1)[None] for t in (query, key, value)]
    return functional.scaled_dot_product_attention(*parts, scale=scale)[0].transpose(0, 1)


def reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Sequence[int]
) -> torch.Tensor:
    """One float32 call a sequence."""
    ends = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    out = torch.empty_like(query, dtype=torch.float32)
    for a, b in pairwise(ends):
        parts = [t[a:b].float().transpose(0, 1)[None] for t in (query, key, value)]
        out[a:b] = functional.scaled_dot_product_attention(*parts, scale=SCALE)[0].transpose(0, 1)
    return out


def ends_of(lengths: Sequence[int], slots: int) -> torch.Tensor:
    """Boundaries with spare slots that repeat the last end."""
    ends = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    ends += [ends[-1]] * (slots + 1 - len(ends))
    return torch.tensor(ends, dtype=torch.int32, device="cuda")


def measured(
    kernel: Callable[..., torch.Tensor], lengths: list[int], slots: int, bound: int
) -> str:
    """Microseconds a layer and the relative L2, or what went wrong."""
    rows = sum(lengths)
    generator = torch.Generator("cuda").manual_seed(1)
    fused = torch.randn(
        (rows, 3, HEADS, WIDTH), generator=generator, device="cuda", dtype=torch.bfloat16
    )
    query, key, value = fused.unbind(1)
    ends = ends_of([rows], slots)  # captured as one sequence, replayed with others
    try:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                kernel(query, key, value, ends, bound, SCALE)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(LAYERS):
                out = kernel(query, key, value, ends, bound, SCALE)
        ends.copy_(ends_of(lengths, slots))
        out.fill_(float("nan"))
        times = []
        for _ in range(7):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / LAYERS)
        expected = reference(query, key, value, lengths)
        error = ((out.float() - expected).norm() / expected.norm()).item()
    except RuntimeError as error:
        return str(error).strip().splitlines()[0][:80]
    return f"{median(times[1:]):.1f} ({error:.0e})"


@torch.no_grad()
def main() -> int:
    """Print the table."""
    print(torch.cuda.get_device_name(), torch.__version__, "cuDNN", torch.backends.cudnn.version())
    print("| lengths | FlashAttention | lone, cuDNN | sdpa, one sequence |\n|---|---|---|---|")
    flash = flash_kernel()
    for name, lengths, slots, bound in CASES:
        cells = [measured(flash, lengths, slots, bound)]
        cells.append(measured(lone, lengths, slots, bound) if len(lengths) <= 2 else "–")
        cells.append(measured(dense_sdpa, lengths, slots, bound) if len(lengths) == 1 else "–")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
