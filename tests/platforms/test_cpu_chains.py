"""Random chains of operators: captured once, replayed on other contents, equal to eager."""

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.platforms.cpu_case import Case, eager, same

Operator = Callable[[list[torch.Tensor], int, int], None]


def _append(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Operator:
    def operator(tensors: list[torch.Tensor], i: int, j: int) -> None:
        tensors.append(function(tensors[i % len(tensors)], tensors[j % len(tensors)]))

    return operator


def _in_place(function: Callable[[torch.Tensor, torch.Tensor], object]) -> Operator:
    def operator(tensors: list[torch.Tensor], i: int, j: int) -> None:
        function(tensors[i % len(tensors)], tensors[j % len(tensors)].clone())

    return operator


def _unwritten(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    result = torch.empty_like(x)
    result[:2] = x[:2]
    result[2:] = y[2:]
    return result


# All on 4 x 4 tensors, so that any operator follows any other; values stay bounded.
OPERATORS: dict[str, Operator] = {
    "add": _append(lambda x, y: (x + y) / 2),
    "matmul": _append(lambda x, y: (x @ y).tanh()),
    "transpose": _append(lambda x, y: x.t()),
    "view": _append(lambda x, y: x.reshape(2, 8).reshape(4, 4)),
    "cat": _append(lambda x, y: torch.cat([x[:2], y[2:]])),
    "split": _append(lambda x, y: torch.stack(x.split(1)[::-1]).squeeze(1)),
    "softmax": _append(lambda x, y: x.softmax(-1)),
    "sort": _append(lambda x, y: x.sort(dim=1)[0]),
    "index": _append(lambda x, y: x[y.argsort(dim=0)[0]]),
    "where": _append(lambda x, y: torch.where(x > y, x, y)),
    "unwritten": _append(_unwritten),
    "out": _append(lambda x, y: torch.mul(x, y, out=torch.empty(4, 4, device=x.device))),
    "add_": _in_place(lambda x, y: x.mul_(0.5).add_(y, alpha=0.5)),
    "copy_row_": _in_place(lambda x, y: x[1].copy_(y[0])),
    "fill_": _in_place(lambda x, y: x[:, 2:].fill_(0.25)),
    "mask_": _in_place(lambda x, y: x.masked_fill_(y > 0.5, -0.5)),
    "index_add_": _in_place(
        lambda x, y: x.index_add_(0, torch.zeros(4, dtype=torch.int64, device=x.device), y / 8)
    ),
}

steps = st.lists(
    st.tuples(st.sampled_from(sorted(OPERATORS)), st.integers(0, 9), st.integers(0, 9)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60)
@given(steps, st.integers(0, 99))
def test_chain_equals_eager_on_other_contents(chain: list[tuple[str, int, int]], seed: int) -> None:
    def forward(x: torch.Tensor, state: torch.Tensor) -> list[torch.Tensor]:
        tensors = [x * 1.0, x, state]
        for name, i, j in chain:
            OPERATORS[name](tensors, i, j)
        return tensors

    generator = torch.Generator().manual_seed(seed)
    first, second = torch.rand(2, 2, 4, 4, generator=generator)
    case = Case(forward, *first)
    result = case.replay(*second)
    assert same(result, eager(forward, *second.clone()))
    assert same(case.inputs, [result[1], result[2]])
