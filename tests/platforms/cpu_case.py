"""One function of static tensors, captured on the reference platform and replayed."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from graphhal.cpu import plugin
from graphhal.plan import GraphKey
from graphhal.platform import CapturedGraph, CaptureRequest


def flat(values: Any) -> Iterator[torch.Tensor]:
    """Tensors of nested results, in order."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, Mapping):
        yield from flat(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from flat(value)


def request_for(
    forward: Callable[[], Any], output: torch.Tensor, warmups: int = 1, pool: Any = None
) -> CaptureRequest:
    return CaptureRequest(
        key=GraphKey("toy", "image", 1),
        forward=forward,
        inputs={},
        packed=torch.zeros(64, dtype=torch.uint8),
        output=output,
        boundaries={},
        warmups=warmups,
        pool=pool,
        device=torch.device("cpu"),
    )


class Case:
    """`function(*inputs)`, its results copied to static outputs, as the engine does it."""

    def __init__(
        self,
        function: Callable[..., Any],
        *inputs: torch.Tensor,
        warmups: int = 1,
        pool: Any = None,
    ) -> None:
        self.function = function
        self.inputs = [tensor.clone() for tensor in inputs]
        with torch.no_grad():
            self.outputs = [torch.zeros_like(tensor) for tensor in flat(function(*inputs))]
        self.request = request_for(self.forward, self.outputs[0], warmups, pool)
        self.graph: CapturedGraph = plugin.graphhal_capture(self.request)

    def forward(self) -> None:
        for output, result in zip(self.outputs, flat(self.function(*self.inputs)), strict=True):
            output.copy_(result)

    def replay(self, *values: torch.Tensor) -> list[torch.Tensor]:
        """Copies of the outputs after a replay on new contents."""
        for tensor, value in zip(self.inputs, values, strict=True):
            tensor.copy_(value)
        plugin.graphhal_replay(self.graph)
        return [output.clone() for output in self.outputs]


def eager(function: Callable[..., Any], *values: torch.Tensor) -> list[torch.Tensor]:
    """Copies of the function's results."""
    with torch.no_grad():
        return [tensor.clone() for tensor in flat(function(*values))]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """Bit for bit, NaN equal to NaN."""
    return len(left) == len(right) and all(
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        for a, b in zip(left, right, strict=True)
    )
