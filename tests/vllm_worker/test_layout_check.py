"""The first group of a layout against eager: agreed, wrong for good, or not comparable now."""

import pytest
import torch

from graphhal.errors import RefusedError
from graphhal.items import ItemSpec
from graphhal.vllm_worker.layout_check import LayoutCheck

ITEMS = tuple(ItemSpec(n, "image", 2, 2, {}, ("layout", n)) for n in range(2))
EAGER = torch.arange(12.0).reshape(4, 3)


def padded(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows, torch.full((2, 3), float("nan"))])


def test_padding_rows_are_not_compared() -> None:
    check = LayoutCheck("model", None)
    check.compare(ITEMS, lambda: padded(EAGER), lambda: EAGER)
    assert not check.is_wrong(ITEMS)


@pytest.mark.parametrize("eager", [EAGER * 1.01, EAGER[:3], EAGER * float("nan")])
def test_a_layout_that_differs_is_wrong_for_good(eager: torch.Tensor) -> None:
    check = LayoutCheck("model", None)
    with pytest.raises(RefusedError, match="2 items of 2, 2 tokens"):
        check.compare(ITEMS, lambda: padded(EAGER), lambda: eager)
    assert check.is_wrong(ITEMS)
    assert not check.is_wrong(ITEMS[:1])


def test_the_tolerance_of_the_settings_holds() -> None:
    LayoutCheck("model", 0.02).compare(ITEMS, lambda: EAGER, lambda: EAGER * 1.01)


def test_what_cannot_be_compared_now_may_be_later() -> None:
    def full() -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    check = LayoutCheck("model", None)
    with pytest.raises(RefusedError, match="no room"):
        check.compare(ITEMS, lambda: EAGER, full)
    assert not check.is_wrong(ITEMS)
