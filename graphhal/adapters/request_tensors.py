"""Tensors of a request: refused by name where an encoder could not read them."""

import torch

from graphhal.errors import InputError

_PLAIN = torch._C._disabled_torch_dispatch_impl


def refuse_unreadable(
    tensor: torch.Tensor, name: str, device: torch.device, item: int | None = None
) -> None:
    """Refuse what cannot be copied into a static input on `device`.

    Raises:
        InputError: sparse, nested, of a class that stands for other tensors (fake, masked,
            distributed), or neither on the host nor on the encoder's device.
    """
    if tensor.is_nested or type(tensor).__torch_dispatch__ is not _PLAIN:
        raise InputError(f"{name} is a {_kind(tensor)}; pass a plain tensor", item)
    if tensor.layout is not torch.strided:
        raise InputError(f"{name} is {tensor.layout}; pass a dense tensor", item)
    if tensor.device != device and tensor.device.type != "cpu":
        raise InputError(
            f"{name} is on {tensor.device}, the encoder on {device}; move it there", item
        )


def _kind(tensor: torch.Tensor) -> str:
    return "nested tensor" if tensor.is_nested else type(tensor).__name__
