"""Packed attention on ROCm: AITER's varlen kernels, a masked fallback for the rest.

`cu_seqlens` is read by the kernel; `max_seqlen` sizes the launch and is baked at capture. The
kernel writes into an output of zeros, so that rows past the last end are zero.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from graphhal.errors import UnsupportedOperationError
from graphhal.masked_attention import masked_attention

LARGEST_HEAD = 256
KERNEL_DTYPES = (torch.float16, torch.bfloat16)
_REQUIRED = frozenset(
    {"q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale"}
)


class PackedAttention:
    """Attention within sequences; see `graphhal.platform.VarlenAttention`.

    Args:
        varlen: AITER's `flash_attn_varlen_func`, or what behaves like it.

    Raises:
        TypeError: it does not take the arguments that AITER's takes.
    """

    def __init__(self, varlen: Callable[..., Any]) -> None:
        parameters = inspect.signature(varlen).parameters
        missing = sorted(_REQUIRED - parameters.keys())
        if missing:
            raise TypeError(f"flash_attn_varlen_func does not take {', '.join(missing)}")
        self._varlen = varlen
        self._takes_out = "out" in parameters

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        scale: float,
    ) -> torch.Tensor:
        """(rows, heads, head_dim) of the same dtype.

        Raises:
            UnsupportedOperationError: fp8 tensors, whose scales would be taken over all rows.
        """
        if query.dtype.is_floating_point and query.dtype.itemsize == 1:
            raise UnsupportedOperationError(
                f"attention in {query.dtype} is scaled over all rows, padding included; keep "
                "query, key and value in bfloat16 or float16"
            )
        if query.dtype not in KERNEL_DTYPES or query.shape[-1] > LARGEST_HEAD:
            return masked_attention(query, key, value, cu_seqlens, scale)
        options: dict[str, Any] = {}
        if self._takes_out:
            options["out"] = query.new_zeros((*query.shape[:2], value.shape[-1]))
        output = self._varlen(
            q=query,
            k=key,
            v=value,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=max_seqlen,
            max_seqlen_k=max_seqlen,
            softmax_scale=scale,
            **options,
        )
        if isinstance(output, tuple | list):
            output = output[0]
        if not self._takes_out:
            rows = torch.arange(len(output), dtype=cu_seqlens.dtype, device=output.device)
            output = output.masked_fill((rows >= cu_seqlens[-1])[:, None, None], 0)
        result: torch.Tensor = output
        return result
