"""Free memory on Ascend: of the device, and within a graph pool."""

from typing import Any

import torch
import torch_npu
from torch_npu import npu

PADDING = 32
"""Bytes that torch_npu's allocator adds to every request before it rounds up."""
SMALL_BLOCK = 2**20
"""Larger requests are served from other segments than smaller ones."""


def free_bytes() -> int:
    """Bytes that are free on the current device now, as the driver counts them."""
    return int(npu.mem_get_info()[0])


def give_caches_back() -> None:
    """Memory that torch_npu caches, to the driver. It goes over the devices, and stays at the one
    that fails; the current one is current again here."""
    with npu.device(npu.current_device()):
        npu.empty_cache()


def settled_bytes(index: int) -> int:
    """Bytes of the device that are taken once nothing transient is: caches are given back first."""
    give_caches_back()
    free, total = npu.mem_get_info(index)
    return int(total - free)


def poison(index: int, pool: Any, stream: Any) -> None:
    """Fill the free memory of a graph pool with 0xFF bytes: NaN in every floating-point type."""
    with npu.device(index), npu.stream(stream):
        torch_npu._C._npu_beginAllocateCurrentThreadToPool(index, pool)
        try:
            held = [
                torch.full((size,), 0xFF, dtype=torch.uint8, device=f"npu:{index}")
                for size in _free_sizes(index, pool)
            ]
            held.clear()
        finally:
            torch_npu._C._npu_endAllocateToPool(index, pool)
            torch_npu._C._npu_releasePool(index, pool)


def _free_sizes(index: int, pool: Any) -> list[int]:
    """Bytes to ask for, so that the allocator hands out every free block of a pool.

    The snapshot is of all pools: torch_npu 2.13's of one pool takes a reference from each number
    of the pool's id, which Python frees in the end while others use it.
    """
    sizes: list[int] = []
    for segment in npu.memory_snapshot():
        if segment["device"] != index or segment["segment_pool_id"] != pool:
            continue
        for block in segment["blocks"]:
            left = int(block["size"]) if block["state"] == "inactive" else 0
            while left > PADDING:
                piece = min(left, SMALL_BLOCK) if segment["segment_type"] == "small" else left
                sizes.append(piece - PADDING)
                left -= piece
    return sorted(sizes, reverse=True)
