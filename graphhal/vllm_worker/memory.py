"""Graph memory inside a vLLM worker: how much may be taken, and what vLLM's profile is told.

vLLM measures graph memory before it sizes the KV cache: it captures, takes the difference of free
memory, and clears. graphhal captures a sample there, the largest graphs, which hold nearly all of
the memory, and holds a block as large as the rest would be until vLLM has looked.
"""

import logging
import sys
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch

from graphhal.errors import SettingsError
from graphhal.plan import GraphKey
from graphhal.platform import Platform
from graphhal.runner import EncoderGraphs
from graphhal.settings import Settings

log = logging.getLogger(__name__)

SHARE_OF_KV = 0.10
"""Share of the memory that would be left for the KV cache that graphs may take by default."""
SHARE_OF_REST = 0.5
"""Share of the card's rest that graphs may take where the KV cache has an explicit size."""
SAMPLED = 3
"""Largest graphs captured for the profile of one encoder; the second and third tell what one more
graph adds."""
PROFILERS = ("profile_cudagraph_memory", "_profile_cudagraph_memory")
"""Functions of vLLM's runners that capture in order to measure."""

_profiled: "weakref.WeakKeyDictionary[Any, _Profile]" = weakref.WeakKeyDictionary()


class _Profile:
    """What was found for a model before its KV cache was sized."""

    def __init__(self) -> None:
        self.estimate = 0
        self.limit: int | None = None


def is_profiling() -> bool:
    """Whether a runner of vLLM is measuring graph memory now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in PROFILERS:
            return True
        frame = frame.f_back
    return False


def limit_bytes(vllm_config: Any, model: Any, settings: Settings, platform: Platform) -> int | None:
    """The memory limit of all graphs of a model: the operator's, else a share of the KV cache's.

    By default at most `SHARE_OF_KV` of what would be left for the KV cache, and never so much that
    one request of `max_model_len` no longer fits. Found once for a model, before its KV cache takes
    the memory. None where free memory cannot be known.

    Raises:
        SettingsError: the limit is a fraction, and the platform cannot say of what.
    """
    limit = settings.memory_limit
    if isinstance(limit, int):
        return limit
    if platform.info.free_bytes is None:
        if limit is not None:
            raise SettingsError(
                f"memory_limit is a fraction, but platform {platform.info.name} cannot say how "
                "much memory is free; set bytes"
            )
        return None
    profile = _profiled.setdefault(model, _Profile())
    if profile.limit is None:
        free = platform.info.free_bytes()
        profile.limit = _share(vllm_config, free) if limit is None else int(limit * free)
    return profile.limit


def _share(vllm_config: Any, free: int) -> int:
    room = _kv_room(vllm_config, free)
    explicit = getattr(vllm_config.cache_config, "kv_cache_memory_bytes", None)
    if explicit:
        # The KV cache is as large as the operator says; graphs live in what is left of the card.
        return max(0, int(SHARE_OF_REST * (_usable(free) - explicit)))
    one_request = request_bytes(vllm_config)
    limit = max(0, min(int(SHARE_OF_KV * room), room - one_request))
    log.info(
        "graphhal: graphs may take %.0f MiB: %.0f MiB would be left for the KV cache, one request "
        "of %s tokens takes %.0f MiB",
        limit / 2**20,
        room / 2**20,
        vllm_config.model_config.max_model_len,
        one_request / 2**20,
    )
    return limit


def _kv_room(vllm_config: Any, free: int) -> int:
    """Bytes that vLLM would give the KV cache, were there no graphs; an estimate from above."""
    total = torch.accelerator.get_memory_info()[1]
    unused = total - int(total * vllm_config.cache_config.gpu_memory_utilization)
    return max(0, _usable(free) - unused)


def _usable(free: int) -> int:
    """Free bytes, those that the allocator holds unused with them, less the peak of a forward."""
    allocated = torch.accelerator.memory_allocated()
    transient = max(0, torch.accelerator.max_memory_allocated() - allocated)
    return free + torch.accelerator.memory_reserved() - allocated - transient


def request_bytes(vllm_config: Any) -> int:
    """KV-cache bytes of one request of `max_model_len`; 0 where the layers do not say."""
    total = 0
    for layer in vllm_config.compilation_config.static_forward_context.values():
        try:
            spec = layer.get_kv_cache_spec(vllm_config)
            total += 0 if spec is None else int(spec.max_memory_usage_bytes(vllm_config))
        except (AttributeError, AssertionError, TypeError, ValueError, NotImplementedError):
            log.debug("a layer does not say how much KV cache it takes", exc_info=True)
    return total


def sample(model: Any, encoders: Sequence[EncoderGraphs]) -> torch.Tensor | None:
    """Capture the largest graphs of each encoder, and hold a block for what the rest would take.

    Returns:
        The block; to be dropped by `clear`. None where nothing has to be held.
    """
    estimate = held = 0
    for graphs in encoders:
        taken, rest = _sample_one(graphs)
        estimate += taken + rest
        held += rest
    _profiled.setdefault(model, _Profile()).estimate = estimate
    log.info("graphhal: encoder graphs are expected to take %.0f MiB", estimate / 2**20)
    if not held or not encoders:
        return None
    return torch.empty(held, dtype=torch.uint8, device=encoders[0].adapter.device)


def _sample_one(graphs: EncoderGraphs) -> tuple[int, int]:
    """(bytes taken by the sample, bytes that the rest of the ladder would take)."""
    ladder = sorted(graphs.ladder(), key=lambda c: (c.rows, c.tokens, c.key), reverse=True)
    free = graphs.platform.info.free_bytes
    if free is None or len(ladder) <= SAMPLED:
        report = graphs.capture()
        _settle()
        return report.num_bytes, 0
    _settle()
    marks = [free()]

    def mark(done: int, total: int, key: GraphKey) -> None:
        _settle()
        marks.append(free())

    graphs.capture(mark, [capacity.key for capacity in ladder[:SAMPLED]])
    if len(graphs.keys()) < SAMPLED:
        # The limit, or a failure, drops graphs: what stays is only known after all were tried.
        report = graphs.capture()
        return report.num_bytes, 0
    _settle()
    each = max(0, marks[1] - marks[SAMPLED]) // (SAMPLED - 1)
    return marks[0] - free(), each * (len(ladder) - SAMPLED)


def _settle() -> None:
    """Wait, and give back what the allocator only keeps: vLLM counts free memory."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()


def capture_all(model: Any, encoders: Sequence[EncoderGraphs]) -> None:
    """Capture every graph, and log how far the estimate was off."""
    free = encoders[0].platform.info.free_bytes if encoders else None
    before = None if free is None else free()
    for graphs in encoders:
        graphs.capture()
    _settle()
    profile = _profiled.get(model)
    if free is None or before is None or profile is None or not profile.estimate:
        return
    taken = before - free()
    log.info(
        "graphhal: encoder graphs took %.0f MiB; %.0f MiB were expected (%+.1f %%)",
        taken / 2**20,
        profile.estimate / 2**20,
        100 * (taken - profile.estimate) / max(taken, 1),
    )
