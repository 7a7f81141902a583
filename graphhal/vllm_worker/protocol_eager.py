"""The reference of a protocol model's graphs: its own eager code, on inputs of its own."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from graphhal.vllm_worker.protocol import Dialect


def run(model: Any, dialect: Dialect, path: str, subset: Mapping[str, Any]) -> torch.Tensor:
    """(tokens, width) of all items of a request, on one of the model's paths."""
    with _alone(model):
        output = dialect.eager(model, dict(subset), path)
    return output if isinstance(output, torch.Tensor) else torch.cat(list(output))


def copied(value: Any) -> Any:
    """Inputs with tensors of their own: the model may work in place."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {name: copied(each) for name, each in value.items()}
    return [copied(each) for each in value] if isinstance(value, list) else value


@contextmanager
def _alone(model: Any) -> Iterator[None]:
    """Without the model's own spreading of items over ranks (Kimi K2.5's eager code spreads): each
    rank encodes its share by itself, and the others would not come to the gather."""
    spreads = getattr(model, "use_data_parallel", False) is True
    if spreads:
        model.use_data_parallel = False
    try:
        yield
    finally:
        if spreads:
            model.use_data_parallel = True
