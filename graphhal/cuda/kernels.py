"""Attention kernels that PyTorch ships, bound once by what the installed version takes."""

import inspect
from collections.abc import Callable
from typing import Any

import torch

Varlen = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, float], torch.Tensor
]
Dense = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
_VARLEN_OPERATOR = (
    "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal",
    "return_debug_mask",
)  # fmt: skip
_DENSE_OPERATOR = (
    "query", "key", "value", "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal",
    "return_debug_mask",
)  # fmt: skip
"""Arguments of the operators that are called by name, in order, as far as they are used."""


def flash_kernel() -> Varlen:
    """FlashAttention, bound once by what this version of PyTorch takes.

    `torch.nn.attention.varlen.varlen_attn` wraps one operator and adds a fill kernel per call, 27
    of them in a replay of a full-size tower. The operator is called directly where its arguments
    are the known ones, else the wrapper is.
    """
    operator = torch.ops.aten._flash_attention_forward.default
    names = tuple(argument.name for argument in operator._schema.arguments)
    if names[: len(_VARLEN_OPERATOR)] == _VARLEN_OPERATOR and "scale" in names:

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


def cudnn_kernel() -> Dense | None:
    """cuDNN's attention where this PyTorch has it under the known arguments.

    Called by name: of `scaled_dot_product_attention`'s other backends one takes rows × rows bytes.
    """
    operator = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    names = tuple(argument.name for argument in operator._schema.arguments)
    known = names[: len(_DENSE_OPERATOR)] == _DENSE_OPERATOR and "scale" in names
    if not known or not torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
        return None

    def dense(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        output: torch.Tensor = operator(
            query, key, value, None, False, 0.0, False, False, scale=scale
        )[0]
        return output

    return dense


def wrapped_kernel() -> Varlen:
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
