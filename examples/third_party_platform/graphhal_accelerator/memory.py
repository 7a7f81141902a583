"""What graphs take, as PyTorch's allocator counts it."""

from dataclasses import replace

import torch

from graphhal.platform import MemoryProfile


def free_bytes():
    """Device memory that is free now, in bytes."""
    return torch.accelerator.get_memory_info()[0]


def reserved_bytes(device):
    """Bytes that the allocator holds once nothing is cached."""
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    return torch.accelerator.memory_reserved(device)


def profile_memory(requests):
    """Capture the requests in their order, in one pool, note what each adds, release all."""
    from graphhal_accelerator import graph

    captured, per_graph, pool = [], {}, None
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_reserved()
    try:
        for request in requests:
            captured.append(graph.capture(replace(request, pool=pool)))
            pool = captured[-1].pool
            per_graph[request.key] = captured[-1].num_bytes
        settled = sum(per_graph.values())
        peak = torch.accelerator.max_memory_reserved() - before
        return MemoryProfile(settled, max(0, peak - settled), per_graph)
    finally:
        graph.release(captured)
