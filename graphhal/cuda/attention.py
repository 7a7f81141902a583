"""Packed attention on CUDA: FlashAttention as PyTorch ships it, a masked fallback for the rest.

`cu_seqlens` is read by the kernel, so the boundaries of a replay are whatever the static buffer
holds then; `max_seqlen` sizes the launch and is baked at capture.

Rows past the last end are left unwritten by FlashAttention. No row is past it here: boundaries
cover every row of a graph, padding rows as dummy sequences of their own (`Boundaries.padded_to`).
Spare slots repeat the last end; the kernel returns at once for a sequence without rows.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from graphhal.platform import VarlenAttention

HEAD_MULTIPLE, LARGEST_HEAD = 8, 256
FLASH_DTYPES = (torch.float16, torch.bfloat16)
Kernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, float], torch.Tensor
]
_OPERATOR = (
    "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal",
    "return_debug_mask",
)  # fmt: skip


def bind_attention(capability: tuple[int, int]) -> VarlenAttention:
    """The attention for a device of this compute capability."""
    return PackedAttention(flash_kernel() if capability >= (8, 0) else None)


class PackedAttention:
    """Attention within sequences; see `graphhal.platform.VarlenAttention`.

    Args:
        kernel: FlashAttention for 16-bit tensors; without it everything takes the masked path.
    """

    def __init__(self, kernel: Kernel | None) -> None:
        self._kernel = kernel

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        scale: float,
    ) -> torch.Tensor:
        """(rows, heads, head_dim) of the same dtype; head dims are padded to the kernel's step."""
        width = query.shape[-1]
        if self._kernel is None or query.dtype not in FLASH_DTYPES or width > LARGEST_HEAD:
            return masked_attention(query, key, value, cu_seqlens, scale)
        missing = -width % HEAD_MULTIPLE
        if missing:
            query, key, value = (
                functional.pad(tensor, (0, missing)) for tensor in (query, key, value)
            )
        output = self._kernel(query, key, value, cu_seqlens, max_seqlen, scale)
        return output[..., :width] if missing else output


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """The same by a mask, for dtypes and widths that FlashAttention does not take.

    Reads nothing on the host. Its mask takes rows × rows bytes: for parity tests and small towers.
    """
    rows = torch.arange(query.shape[0], dtype=cu_seqlens.dtype, device=query.device)
    owner = torch.searchsorted(cu_seqlens[1:], rows, right=True)
    output = functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=owner[:, None] == owner[None, :],
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output[0].transpose(0, 1)


def flash_kernel() -> Kernel:
    """FlashAttention, bound once by what this version of PyTorch takes.

    `torch.nn.attention.varlen.varlen_attn` wraps one operator and adds a fill kernel per call, 27
    of them in a replay of a full-size tower. The operator is called directly where its arguments
    are the known ones, else the wrapper is.
    """
    operator = torch.ops.aten._flash_attention_forward.default
    names = tuple(argument.name for argument in operator._schema.arguments)
    if names[: len(_OPERATOR)] == _OPERATOR and "scale" in names:

        def direct(
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            cu_seqlens: torch.Tensor,
            max_seqlen: int,
            scale: float,
        ) -> torch.Tensor:
            output: torch.Tensor = operator(
                query, key, value, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, 0.0, False,
                False, scale=scale,
            )[0]  # fmt: skip
            return output

        return direct
    return wrapped_kernel()


def wrapped_kernel() -> Kernel:
    """PyTorch's public wrapper; where it takes no scale, the query is scaled instead."""
    from torch.nn.attention.varlen import varlen_attn

    takes_scale = "scale" in inspect.signature(varlen_attn).parameters

    def wrapped(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        scale: float,
    ) -> torch.Tensor:
        options: dict[str, Any] = {"scale": scale} if takes_scale else {}
        if not takes_scale:
            query = query * (scale * query.shape[-1] ** 0.5)
        output = varlen_attn(
            query, key, value, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **options
        )
        if isinstance(output, tuple):
            output = output[0]
        return output

    return wrapped
