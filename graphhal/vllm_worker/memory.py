"""Graph memory inside a vLLM worker: how much may be taken, and what vLLM's profile is told.

vLLM measures graph memory before it sizes the KV cache: it captures, takes the difference of free
memory, and clears. graphhal captures a sample there, the largest graph, which holds nearly all of
the memory, and some of the others, and holds a block as large as the rest would be until vLLM has
looked. What the driver loads meanwhile (kernels for new shapes, 200 MiB on an H200) is paid once
and belongs to no graph, so the estimate counts what the graphs themselves took. Of that the driver
keeps some when the sample is released, 16 of 208 MiB on an H200, and later graphs take it again.

vLLM switches the garbage collector off while it captures. Tensors in reference cycles would pile up
beside the KV cache, and be counted as if graphs held them: so it is on while graphhal captures (the
platforms switch it off while a stream records), and free memory is only read after a collection.
"""

import gc
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from types import FrameType
from typing import Any

import torch

from graphhal.errors import SettingsError
from graphhal.graph_set import CaptureReport
from graphhal.plan import GraphKey
from graphhal.platform import Platform
from graphhal.runner import EncoderGraphs
from graphhal.settings import SelfCheck, Settings
from graphhal.workspaces import take_workspaces

log = logging.getLogger(__name__)

SHARE_OF_KV = 0.10
"""Share of the memory that would be left for the KV cache that graphs may take by default."""
SHARE_OF_REST = 0.5
"""Share of the card's rest that graphs may take where the KV cache has an explicit size."""
SAMPLED = 12
"""Graphs captured for the profile of one encoder: the largest, and others spread over the ladder.
Those tell what one more adds; a card hands memory out in pieces, so two or three would tell
little."""
PIECE = 2 * 2**20
"""Bytes; a card hands out memory in pieces of this size, PyTorch's allocator in ten times that."""
PROFILERS = ("profile_cudagraph_memory", "_profile_cudagraph_memory")
"""Functions of vLLM's runners that capture in order to measure."""

_profiled: "weakref.WeakKeyDictionary[Any, _Profile]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Taken:
    """What graphs of a model took of the card.

    Attributes:
        expected: bytes that vLLM's profile was told; 0 where it did not ask.
        counted: bytes of free memory that graphs took, in the profile's sample for good and in
            capture; None where free memory cannot be known.
        allocator: bytes of them that PyTorch's allocator took; the driver took the rest.
    """

    expected: int
    counted: int | None
    allocator: int = 0


class _Profile:
    """What was found for a model before its KV cache was sized."""

    def __init__(self) -> None:
        self.estimate = 0
        self.limit: int | None = None
        self.shares: tuple[int, ...] | None = None
        self.sampled = 0
        self.kept = 0


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
    the memory. None where free memory cannot be known, and on a host, which has no such cache.

    Raises:
        SettingsError: the limit is a fraction, and the platform cannot say of what.
    """
    limit = settings.memory_limit
    if isinstance(limit, int):
        return limit
    free = platform.info.free_bytes
    if free is None and limit is not None:
        raise SettingsError(
            f"memory_limit is a fraction, but platform {platform.info.name} cannot say how "
            "much memory is free; set bytes"
        )
    if free is None or (limit is None and _meter(platform) is None):
        return None
    profile = _profiled.setdefault(model, _Profile())
    if profile.limit is None:
        profile.limit = _share(vllm_config, free()) if limit is None else int(limit * free())
    return profile.limit


def _meter(platform: Platform) -> Callable[[], int] | None:
    """Free bytes of the card that vLLM measures; None on a host, where others take memory too."""
    return None if platform.info.reference else platform.info.free_bytes


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
        except Exception:  # the layer's own code: the others' bytes count all the same
            log.debug("a layer does not say how much KV cache it takes", exc_info=True)
    return total


@contextmanager
def collecting() -> Iterator[None]:
    """With the garbage collector on, whatever vLLM set; as it was afterwards."""
    was_on = gc.isenabled()
    gc.enable()
    try:
        yield
    finally:
        if not was_on:
            gc.disable()


def sample(
    model: Any, encoders: Sequence[EncoderGraphs], limit: int | None = None
) -> torch.Tensor | None:
    """Capture the largest graphs of each encoder, and hold a block for what the rest would take.

    Args:
        model: whose profile this is.
        encoders: its encoders, in the order in which `capture_all` will capture them.
        limit: bytes that all of them may take; None for no limit.

    Returns:
        The block; to be dropped by `clear`. None where nothing has to be held.
    """
    profile = _profiled.setdefault(model, _Profile())
    found = _sample_each(profile, encoders, limit)
    held = sum(rest for _, rest in found)
    profile.sampled = sum(taken for taken, _ in found)
    profile.estimate = estimate = profile.sampled + held
    log.info("graphhal: encoder graphs are expected to take %.0f MiB", estimate / 2**20)
    if not held:
        return None
    try:
        return torch.empty(held, dtype=torch.uint8, device=encoders[0].adapter.device)
    except torch.OutOfMemoryError:
        log.warning("graphhal: %.0f MiB for further graphs are not free", held / 2**20)
        return None


def _sample_each(
    profile: _Profile, encoders: Sequence[EncoderGraphs], limit: int | None
) -> list[tuple[int, int]]:
    """(bytes taken, bytes that the rest would take) of each encoder's sample; of all its graphs
    within its share of the limit, where they exceed it together."""
    for graphs in encoders:
        _allow(graphs, None)
    found = [_sample_one(graphs) for graphs in encoders]
    wanted = [taken + rest for taken, rest in found]
    beyond = limit is not None and sum(wanted) > limit
    profile.shares = ()
    # Ranks that capture together go on together.
    answers = [graphs.peers.exchange("beyond the limit", beyond) for graphs in encoders]
    if any(map(any, answers)):
        profile.shares = tuple((limit or 0) * each // max(1, sum(wanted)) for each in wanted)
        found = [(num_bytes, 0) for num_bytes in _limited(profile, encoders, limit, _unchecked_all)]
    return found


@contextmanager
def giving_back(model: Any, encoders: Sequence[EncoderGraphs]) -> Iterator[None]:
    """While graphs are released: what stays with the driver of a profile's, its block gone before,
    is theirs."""
    profile = _profiled.get(model) if encoders else None
    free = _meter(encoders[0].platform) if encoders else None
    if profile is None or not profile.sampled or free is None:
        yield
        return
    sampled, profile.sampled = profile.sampled, 0
    _settle()
    before = free()
    yield
    _settle()
    kept = sampled - (free() - before)
    profile.kept = min(sampled, max(0, kept // PIECE * PIECE))


def _limited(
    profile: _Profile | None,
    encoders: Sequence[EncoderGraphs],
    limit: int | None,
    capture: Callable[[EncoderGraphs], CaptureReport],
) -> list[int]:
    """Capture each encoder within what those before it have left of the limit of all, less the
    shares of those after it: the graphs of pictures would take everything, and speech would run
    eagerly. The bytes that each takes."""
    shares = (profile.shares if profile is not None else ()) or [0] * len(encoders)
    taken: list[int] = []
    for number, graphs in enumerate(encoders):
        left = None if limit is None else limit - sum(taken) - sum(shares[number + 1 :])
        _allow(graphs, left)
        taken.append(capture(graphs).num_bytes)
    return taken


def _allow(graphs: EncoderGraphs, limit: int | None) -> None:
    graphs.settings = graphs.settings.model_copy(update={"memory_limit": limit})


def _sample_one(graphs: EncoderGraphs) -> tuple[int, int]:
    """(bytes taken by the sample, bytes that the rest of the ladder would take)."""
    ladder = sorted(graphs.ladder(), key=lambda c: (c.rows, c.tokens, c.key), reverse=True)
    if _meter(graphs.platform) is None:
        return graphs.capture().num_bytes, 0
    sampled = _spread([capacity.key for capacity in ladder])
    report, grown = _unchecked(graphs, sampled)
    left_out = len(ladder) - len(sampled)
    if left_out and len(report.captured) < len(sampled):
        # A failure drops graphs: what stays is only known after all were tried.
        report, left_out = _unchecked_all(graphs), 0
    _settle()
    further = [(line.num_bytes, grown.get(line.key, 0)) for line in report.captured[1:]]
    return report.num_bytes, _each(further) * left_out if left_out else 0


def _unchecked_all(graphs: EncoderGraphs) -> CaptureReport:
    report, _ = _unchecked(graphs)
    _settle()
    return report


def _unchecked(
    graphs: EncoderGraphs, keys: Sequence[GraphKey] | None = None
) -> tuple[CaptureReport, dict[GraphKey, int]]:
    """Capture for a profile: nothing is served from it, and what serves later is checked then.

    Returns:
        The report, and bytes by which PyTorch's allocator grew with each graph but the first.
    """
    settings, marks = graphs.settings, list[tuple[GraphKey, int]]()
    graphs.settings = settings.model_copy(update={"self_check": SelfCheck.OFF})
    try:
        report = graphs.capture(lambda _, __, key: marks.append((key, _reserved())), keys)
    finally:
        graphs.settings = settings
    return report, {key: after - before for (_, before), (key, after) in pairwise(marks)}


def _each(further: Sequence[tuple[int, int]]) -> int:
    """Bytes that one more graph adds as a rule, from those of others and the allocator's of them.

    Where a graph made the pool grow, the ones between it and the next find room there, so that
    growth is not theirs too: they take what the driver takes for a graph. Where the allocator does
    not tell the two apart, a graph that took more than most shows it.
    """
    driver = [max(0, num_bytes - grown) for num_bytes, grown in further]
    most = int(median(driver)) + PIECE
    return sum(min(num_bytes, most) for num_bytes in driver) // len(driver)


def _spread(keys: Sequence[GraphKey]) -> list[GraphKey]:
    """The first two keys, and others at even distances, `SAMPLED` in all: the second largest graph
    is the one that may not find room where the largest did."""
    if len(keys) <= SAMPLED:
        return list(keys)
    step = (len(keys) - 2) / (SAMPLED - 2)
    return [keys[0], *(keys[1 + round(number * step)] for number in range(SAMPLED - 1))]


def _settle() -> None:
    """Wait, and give back what nobody uses: vLLM counts free memory."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()


def capture_all(model: Any, encoders: Sequence[EncoderGraphs], limit: int | None = None) -> Taken:
    """Capture every graph, and log how far the estimate was off; arguments as for `sample`.

    Workspaces of the stream that vLLM captures on are its own: its graphs need them as well.
    """
    profile = _profiled.get(model)
    expected = 0 if profile is None else profile.estimate
    if limit is not None and len(encoders) > 1 and (profile is None or profile.shares is None):
        profile = _share_late(model, encoders, limit)
    free = _meter(encoders[0].platform) if encoders else None
    if free is not None:
        take_workspaces(encoders[0].adapter.device)
    _settle()
    before, reserved = 0 if free is None else free(), _reserved()
    _limited(profile, encoders, limit, EncoderGraphs.capture)
    _settle()
    if free is None:
        return Taken(expected, None)
    kept = 0 if profile is None else profile.kept
    counted = before - free() + kept
    if expected:
        log.info(
            "graphhal: encoder graphs took %.0f MiB, %.0f of them since vLLM's profile; %.0f MiB "
            "were expected (%+.1f %%)",
            counted / 2**20,
            kept / 2**20,
            expected / 2**20,
            100 * (counted - expected) / max(counted, 1),
        )
    return Taken(expected, counted, _reserved() - reserved)


def _share_late(model: Any, encoders: Sequence[EncoderGraphs], limit: int) -> _Profile:
    """What shares of the limit encoders need, where vLLM asked for no profile: with an explicit KV
    cache it does not, and the first encoder would take everything."""
    profile = _profiled.setdefault(model, _Profile())
    profile.sampled = sum(taken for taken, _ in _sample_each(profile, encoders, limit))
    with giving_back(model, encoders):
        for graphs in encoders:
            graphs.clear()
    return profile


def _reserved() -> int:
    return torch.accelerator.memory_reserved() if torch.accelerator.is_available() else 0
