"""What the static inputs of a protocol model's graphs hold: boundaries, bounds, padding."""

import types
from typing import Any

import pytest
import torch

from graphhal.plan import GraphKey
from graphhal.vllm_worker.limits import Limits
from graphhal.vllm_worker.protocol_buffers import MARKER, ProtocolBuffers, safe_bound
from graphhal.vllm_worker.protocol_staging import Captured

KEY = GraphKey("m", "default", 16)


def ends(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def buffers(
    values: dict[str, Any], backend: str = "FLASH_ATTN", device: str = "cpu"
) -> ProtocolBuffers:
    """Of a model that prepares these for every graph; one item, two frames."""
    model = torch.nn.Module()
    model.attn_backend = types.SimpleNamespace(name=backend)
    dialect: Any = types.SimpleNamespace(
        capture_inputs=lambda budget, *_: values | {"budget": torch.tensor(budget)}
    )
    limits = Limits(None, 16, 16, 1, 2)
    return ProtocolBuffers(model, dialect, "default", limits, torch.device(device), torch.float32)


def captured(values: dict[str, Any], backend: str = "FLASH_ATTN", device: str = "cpu") -> Captured:
    return buffers(values, backend, device).of(KEY, ())


@pytest.mark.parametrize(
    ("name", "scalars", "bound"),
    [
        ("cu_seqlens", {}, 64),
        ("cu_seqlens", {"max_seqlen": torch.tensor(16)}, 64),  # too small for one full picture
        ("cu_seqlens", {"max_seqlen_full": torch.tensor(100)}, 100),
        ("cu_window_seqlens", {"max_seqlen_window": torch.tensor(24)}, 24),
        ("cu_window_seqlens", {"max_seqlen": torch.tensor(24)}, 64),
        ("cu_window_seqlens", {}, 64),
    ],
)
def test_dummy_sequences_have_room_and_are_no_longer_than_the_bound(
    name: str, scalars: dict[str, torch.Tensor], bound: int
) -> None:
    found = captured({name: ends(0, 32, 64)} | scalars)
    padding = found.ends[name]
    dummies = -(-64 // bound)
    assert (padding.rows, padding.bound) == (64, bound)
    assert padding.steps.tolist() == [bound * n for n in range(1, 2 + dummies + 1)]
    assert found.specs[name].shape == (2 + dummies + 1,)


def test_every_item_and_frame_has_a_slot_however_few_the_model_prepares() -> None:
    assert captured({"cu_seqlens": ends(0, 64)}).specs["cu_seqlens"].shape == (2 + 1 + 1,)


def test_boundaries_that_are_no_row_numbers_are_kept_as_they_are() -> None:
    found = captured({"cu_seqlens": ends(0, 128, 256)}, backend="FLASHINFER")
    assert found.ends == {}
    assert found.specs["cu_seqlens"].shape == (3,)


def test_host_scalars_are_baked_and_what_is_none_is_left_out() -> None:
    given = {"max_seqlen": torch.tensor(7), "pixels": torch.zeros(4, 2), "mask": None}
    found = captured(given)
    assert found.constants == {"max_seqlen": torch.tensor(7), "budget": torch.tensor(16)}
    assert found.specs.keys() == {"pixels", MARKER}
    elsewhere = captured(given | {"count": torch.tensor(7, device="meta")}, device="meta")
    assert elsewhere.constants.keys() == {"max_seqlen", "budget", "pixels"}
    assert elsewhere.specs.keys() == {"count", MARKER}


def test_dummy_inputs_are_told_by_the_rows_that_the_model_made_of_them() -> None:
    ours = buffers({})
    assert ours.rows_of(KEY) == 16
    found = ours.of(KEY, ())
    assert ours.rows_of(KEY) == 16
    found.made = 12
    assert ours.rows_of(KEY) == 12
    assert [int(ours.dummies_of(rows, ())["budget"] or 0) for rows in (12, 5)] == [16, 5]


@pytest.mark.parametrize(
    ("name", "values", "baked"),
    [
        ("max_seqlen", {"cu_seqlens": ends(0, 64)}, 64),
        ("max_seqlen_full", {"cu_seqlens": ends(0, 64)}, 64),
        ("max_seqlen", {"cu_seqlens": ends(0, 4)}, 16),
        ("max_seqlen", {}, 16),
        ("max_seqlen_window", {"cu_seqlens": ends(0, 64)}, 16),
        ("scale", {"cu_seqlens": ends(0, 64)}, 16),
    ],
)
def test_the_bound_of_whole_pictures_holds_one_that_fills_the_graph(
    name: str, values: dict[str, Any], baked: int
) -> None:
    """As Kimi's, in tokens, does not."""
    assert safe_bound(name, torch.tensor(16), values) == baked
