"""A platform stand-in and an eager call for adapter tests, without the engine."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from graphhal.adapter import EncoderAdapter
from graphhal.items import ItemSpec
from graphhal.plan import Capacity, GraphKey
from graphhal.platform import Platform, PlatformInfo

Encode = Callable[[EncoderAdapter, Mapping[str, Any]], list[torch.Tensor]]
CPU = torch.device("cpu")


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
) -> torch.Tensor:
    """One `scaled_dot_product_attention` a sequence, rows past the last end left as NaN."""
    out = torch.full_like(query, torch.nan)
    ends = cu_seqlens.tolist()
    for start, end in pairwise(ends):
        assert end - start <= max_seqlen, "a sequence is longer than the bound"
        if end > start:
            parts = [t[start:end].transpose(0, 1).unsqueeze(0) for t in (query, key, value)]
            one = torch.nn.functional.scaled_dot_product_attention(*parts, scale=scale)
            out[start:end] = one[0].transpose(0, 1)
    return out


def _unused(*_: Any) -> Any:
    raise AssertionError("an adapter called the device")


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


@pytest.fixture(scope="session")
def platform_stub() -> Platform:
    """A platform of which only the attention works."""
    return Platform(PlatformInfo("stub", "cpu", {}, _attention), *[_unused] * 6)


def forward(
    adapter: EncoderAdapter, request: Mapping[str, Any], capacity: Capacity | None = None
) -> list[torch.Tensor]:
    """Levels of an eager call, or of one in buffers of `capacity`, the padding poisoned with NaN
    before staging; only real tokens come back."""
    items = adapter.item_specs(request)
    exact = capacity or Capacity.of(items, GraphKey(adapter.name, adapter.path(items[0]), 0))
    inputs = packed_inputs(adapter, items, exact)
    if capacity is None:
        inputs |= adapter.eager_inputs(request, items)
    else:
        for name, spec in adapter.buffers(capacity).items():
            if not spec.packed:
                inputs[name] = torch.full(spec.shape, torch.nan, dtype=spec.dtype)
        adapter.stage(request, items, inputs)
    levels = adapter.forward(inputs, {n: b.max_seqlen for n, b in exact.sequences.items()})
    levels = [levels] if isinstance(levels, torch.Tensor) else list(levels)
    assert len(levels[0]) == exact.tokens
    return [level[: sum(item.tokens for item in items)] for level in levels]


def packed_inputs(
    adapter: EncoderAdapter, items: Sequence[ItemSpec], capacity: Capacity
) -> dict[str, torch.Tensor]:
    """Packed buffers as the engine fills them: real rows, then zeros."""
    arrays = dict(adapter.metadata(items))
    for name, ends in capacity.boundaries(items).items():
        arrays[name] = ends.cu_seqlens
    packed = {}
    for name, spec in adapter.buffers(capacity).items():
        if spec.packed:
            packed[name] = torch.zeros(spec.shape, dtype=spec.dtype)
            source = torch.from_numpy(np.array(arrays.pop(name)))
            assert source.dtype == spec.dtype, name
            packed[name][: len(source)] = source
    assert not arrays, "metadata without a buffer"
    return packed


@pytest.fixture
def encode() -> Encode:
    """Calls an adapter's forward as the engine's eager call does."""
    return forward
