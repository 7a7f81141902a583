"""Random groups of every tower through the engine on platform `cpu`: graph against eager.

`ADAPTER_GROUPS` sets how many groups a tower and dtype; the default keeps the suite short.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from graphhal import EncoderGraphs, Settings, open_platform
from graphhal.adapters.covo_audio import CovoAudioFactory
from graphhal.adapters.qwen3_omni_audio import Qwen3OmniAudioFactory
from graphhal.adapters.qwen3_omni_vision import Qwen3OmniVisionFactory
from graphhal.adapters.siglip import SiglipFactory
from graphhal.plan import MissReason
from graphhal.self_check import TOKEN_FACTOR, TOLERANCE, Difference

CPU = torch.device("cpu")
GROUPS = int(os.environ.get("ADAPTER_GROUPS", "10"))
Group = tuple[dict[str, Any], list[MissReason | None]]


def images(adapter: Any, rng: np.random.Generator, count: int | None = None) -> Group:
    """One to five images; the ladder ends at 100 tokens and four items."""
    sides = 2 * rng.integers(1, 9, size=(count or rng.integers(1, 6), 2))
    grids = [[1, int(h), int(w)] for h, w in sides]
    rows = sum(h * w for _, h, w in grids)
    reason = None
    if rows > 400:
        reason = MissReason.TOO_MANY_ROWS
    elif len(grids) > 4:
        reason = MissReason.TOO_MANY_ITEMS
    pixels = normal(rng, rows, adapter.patch_width)
    return {"pixel_values": pixels, "image_grid_thw": grids}, [reason] * len(grids)


def videos(adapter: Any, rng: np.random.Generator) -> Group:
    """One to three videos of up to nine frames: always replayed, in chunks where need be."""
    count = int(rng.integers(1, 4))
    grids = np.concatenate(
        [rng.integers(1, 10, size=(count, 1)), 2 * rng.integers(1, 7, size=(count, 2))], axis=1
    )
    pixels = normal(rng, int(grids.prod(axis=1).sum()), adapter.patch_width)
    return {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor(grids)}, [None] * count


def pictures(adapter: Any, rng: np.random.Generator) -> Group:
    """Images, videos, or both."""
    kind = rng.integers(3)
    first, reasons = images(adapter, rng) if kind != 1 else ({}, [])
    second, more = videos(adapter, rng) if kind != 0 else ({}, [])
    return first | second, reasons + more


def clips(adapter: Any, rng: np.random.Generator) -> Group:
    """One to five clips; the ladder ends at twelve windows and four items."""
    count = int(rng.integers(1, 6))
    longest = int(rng.choice([90, 300, 900]))
    lengths = rng.integers(1, longest + 1, size=count).tolist()
    reason = None
    if max(lengths) < 97 and max(lengths) % 8 not in (0, 7):
        reason = MissReason.REFUSED
    elif sum(-(-length // 100) for length in lengths) > 12:
        reason = MissReason.TOO_MANY_ROWS
    elif count > 4:
        reason = MissReason.TOO_MANY_ITEMS
    features = normal(rng, adapter.mel, sum(lengths))
    return {"input_features": features, "feature_lens": lengths}, [reason] * count


def padded_clips(adapter: Any, rng: np.random.Generator) -> Group:
    """One to three clips; graphs hold two."""
    count = int(rng.integers(1, 4))
    reason = MissReason.TOO_MANY_ROWS if count > 2 else None
    counts = rng.integers(0, adapter.tokens_per_clip + 1, size=count)
    features = normal(rng, count, adapter.mel, adapter.frames)
    return {"audio_features": features, "audio_num_tokens": counts}, [reason] * count


def normal(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))


TOWERS: dict[str, tuple[Any, Callable[..., Group], int]] = {
    "vision": (Qwen3OmniVisionFactory(), pictures, 1),
    "audio": (Qwen3OmniAudioFactory(), clips, 1),
    "covo": (CovoAudioFactory(), padded_clips, 5),
}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return getattr(torch, request.param)


@pytest.fixture(scope="module", params=list(TOWERS))
def tower(
    request: pytest.FixtureRequest, dtype: torch.dtype
) -> Iterator[tuple[EncoderGraphs, Callable[..., Group], int]]:
    factory, make, cost = TOWERS[request.param]
    settings = Settings(
        token_budgets="16,40,100" if request.param == "vision" else None,
        audio_chunks="1-12",
        max_items=4,
        max_frames=6,
        self_check="off",
    )
    graphs = EncoderGraphs(factory.build("tiny", CPU, dtype), open_platform("cpu"), settings)
    report = graphs.capture()
    assert not report.dropped
    yield graphs, make, cost
    graphs.clear()


def test_graph_equals_eager_and_misses_have_the_expected_reason(tower, dtype):
    graphs, make, cost = tower
    rng = np.random.default_rng(7)
    tolerance = TOLERANCE[dtype]
    expected: Counter[MissReason | None] = Counter()
    for number in range(max(2, GROUPS // cost)):
        request, reasons = make(graphs.adapter, rng)
        ours = graphs.run(request)
        expected.update(reasons)
        theirs = graphs.run_eager(request)
        assert [len(out) for out in ours] == [len(out) for out in theirs]
        if sum(len(out) for out in ours):
            difference = Difference.between(torch.cat(ours), torch.cat(theirs))
            assert difference.relative_l2 <= tolerance, (number, difference)
            assert difference.worst_token <= TOKEN_FACTOR * tolerance, (number, difference)
    stats = graphs.stats()
    misses: Counter[str] = Counter()
    for by_reason in stats["misses"].values():
        misses.update(by_reason)
    assert sum(stats["hits"].values()) == expected.pop(None, 0)
    assert misses == {reason.value: count for reason, count in expected.items()}


@pytest.mark.parametrize("tower", ["vision"], indirect=True)
def test_equal_totals_with_other_lengths_use_their_own_boundaries(tower, dtype):
    """The same graph and the same rows again, cut differently: [8, 4] then [4, 8] then [8, 4]."""
    graphs, _, _ = tower
    pixels = normal(np.random.default_rng(0), 48, graphs.adapter.patch_width)
    seen = {}
    for grids in ([[1, 8, 4], [1, 4, 4]], [[1, 4, 4], [1, 8, 4]], [[1, 8, 4], [1, 4, 4]]):
        request = {"pixel_values": pixels, "image_grid_thw": grids}
        ours = torch.cat(graphs.run(request))
        difference = Difference.between(ours, torch.cat(graphs.run_eager(request)))
        assert difference.relative_l2 <= TOLERANCE[dtype]
        again = seen.setdefault(str(grids), ours)
        assert torch.equal(again, ours)
    assert not torch.equal(*seen.values())


@pytest.mark.parametrize(
    "factory",
    [Qwen3OmniVisionFactory(), Qwen3OmniAudioFactory(), SiglipFactory()],
    ids=lambda f: f.name,
)
def test_a_tower_of_another_dtype_is_followed(factory):
    """Inputs in the dtype of its beginnings would lose their last digits."""
    adapter = factory.build("tiny", CPU, torch.bfloat16)
    options = Settings(token_budgets="16", audio_chunks=1, max_items=1, self_check="off")
    graphs = EncoderGraphs(adapter, open_platform("cpu"), options)
    graphs.capture()
    (module,) = adapter.modules()
    module.float()
    now = EncoderGraphs(factory.wrap(module), open_platform("cpu"), options)
    (items, *_) = now.adapter.worst_cases(now.ladder()[0])
    request = now.adapter.example(items, seed=0)
    (wanted,) = now.run_eager(request)
    assert wanted.dtype == torch.float32
    assert torch.equal(graphs.run(request)[0], wanted)
    graphs.capture()
    (replayed,) = graphs.try_replay(request) or (None,)
    assert torch.equal(replayed, wanted)


@pytest.mark.parametrize("factory", [case[0] for case in TOWERS.values()], ids=lambda f: f.name)
def test_other_graphs_of_the_same_tower_cost_none(factory):
    """As one set of graphs for images and one for videos, or with other settings."""
    adapter = factory.build("tiny", CPU, torch.float32)
    options = Settings(token_budgets="16", audio_chunks=1, max_items=1, self_check="off")
    graphs = EncoderGraphs(adapter, open_platform("cpu"), options)
    graphs.capture()
    EncoderGraphs(adapter, open_platform("cpu"), options).capture()
    assert graphs.check_weights()
