"""Tensors of a request: refused by name where an encoder could not read them."""

import torch

from graphhal.errors import InputError


def refuse_unreadable(
    tensor: torch.Tensor, name: str, device: torch.device, item: int | None = None
) -> None:
    """Refuse what cannot be copied into a static input on `device`.

    Raises:
        InputError: sparse, or neither on the host nor on the encoder's device.
    """
    if tensor.layout is not torch.strided:
        raise InputError(f"{name} is {tensor.layout}; pass a dense tensor", item)
    if tensor.device != device and tensor.device.type != "cpu":
        raise InputError(
            f"{name} is on {tensor.device}, the encoder on {device}; move it there", item
        )
