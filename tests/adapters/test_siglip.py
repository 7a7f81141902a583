"""The guide's example adapter does what the guide says."""

import copy
from typing import Any

import pytest
import torch

from graphhal.adapters.siglip import Siglip, SiglipFactory
from graphhal.errors import InputError, SettingsError
from graphhal.settings import Settings

CPU = torch.device("cpu")
FACTORY = SiglipFactory()


@pytest.fixture(scope="module")
def adapter() -> Siglip:
    return FACTORY.build("tiny", CPU, torch.float32, seed=3)


def test_eager_and_padded_graphs_equal_the_ordinary_forward(adapter, encode):
    ordinary = copy.deepcopy(adapter.tower)
    for images in (1, 2, 3):
        request = adapter.example(adapter._specs(images), seed=images)
        expected = ordinary(request["pixel_values"]).last_hidden_state.flatten(0, 1)
        (exact,) = encode(adapter, request)
        torch.testing.assert_close(exact, expected, rtol=0, atol=1e-6)
        four = adapter.capacities(Settings(max_items=4))[3]
        (padded,) = encode(adapter, request, four)
        torch.testing.assert_close(padded, expected, rtol=0, atol=2e-6)


def test_worst_cases_fit_and_the_first_is_full(adapter):
    for capacity in adapter.capacities(Settings(max_items=3)):
        groups = list(adapter.worst_cases(capacity))
        assert all(capacity.misfit(group) is None for group in groups)
        assert capacity.is_exact_for(groups[0])


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (None, "must be one floating-point tensor"),
        (torch.zeros(1, 3, 224, 224).int(), "must be one floating-point tensor"),
        (torch.zeros(0, 3, 224, 224), r"must be images of \(3, 224, 224\)"),
        (torch.zeros(1, 3, 224, 200), r"must be images of .*got \(1, 3, 224, 200\)"),
        (torch.zeros(3, 224, 224), r"must be images of"),
        (torch.zeros(1, 3, 224, 224, device="meta"), r"is on meta, the encoder on cpu"),
        (torch.zeros(1, 3, 224, 224).to_sparse(), r"is torch.sparse_coo; pass a dense tensor"),
    ],
)
def test_a_wrong_image_is_refused_with_the_fix(adapter, pixels: Any, message: str):
    with pytest.raises(InputError, match=message):
        adapter.item_specs({"pixel_values": pixels})


def test_the_sample_photograph_loads_and_other_modules_are_not_wrapped(adapter):
    request = FACTORY.load(adapter, [])
    assert [spec.tokens for spec in adapter.item_specs(request)] == [196]
    assert FACTORY.wrap(torch.nn.Linear(1, 1)) is None
    assert isinstance(FACTORY.wrap(adapter.tower), Siglip)
    with pytest.raises(SettingsError, match="unknown preset"):
        FACTORY.build("huge", CPU, torch.float32)
