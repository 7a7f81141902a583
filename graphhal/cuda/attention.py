"""Packed attention on CUDA: FlashAttention as PyTorch ships it, cuDNN's for one long sequence, a
masked fallback for the rest.

`cu_seqlens` is read by the kernel, so the boundaries of a replay are whatever the static buffer
holds then; `max_seqlen` sizes the launch and is baked at capture.

Rows past the last end are left unwritten by FlashAttention. No row is past it here: boundaries
cover every row of a graph, padding rows as dummy sequences of their own (`Boundaries.padded_to`).
Spare slots repeat the last end; the kernel returns at once for a sequence without rows.
"""

import logging

import torch
from torch.nn import functional

from graphhal.cuda.kernels import Dense, Varlen, cudnn_kernel, flash_kernel
from graphhal.masked_attention import masked_attention

log = logging.getLogger(__name__)

HEAD_MULTIPLE, LARGEST_HEAD = 8, 256
LONE_SEQUENCE_FROM = 4096
"""Rows of one sequence from which `lone_attention` is faster than FlashAttention on an H200."""
LONE_DIMS = 8
"""Head dims that keep a sequence and its padding apart: two would do, kernels take steps of 8."""
LONE_WIDTHS = range(65, 121)
"""Head dims to which `LONE_DIMS` more cost cuDNN nothing: it computes in 64 or 128."""
APART = -30000.0
"""Score, before scaling, between rows of different sequences: 0 after softmax in float32."""
FLASH_DTYPES = (torch.float16, torch.bfloat16)


def bind_attention(capability: tuple[int, int]) -> "PackedAttention":
    """The attention for a device of this compute capability."""
    return PackedAttention(
        flash_kernel() if capability >= (8, 0) else None,
        # Measured on Hopper; before it, PyTorch prefers FlashAttention to cuDNN itself.
        cudnn_kernel() if capability >= (9, 0) else None,
    )


class PackedAttention:
    """Attention within sequences; see `graphhal.platform.VarlenAttention`.

    Args:
        kernel: FlashAttention for 16-bit tensors; without it everything takes the masked path.
        dense: attention of all rows to all, (1, heads, rows, head_dim), for `lone_attention`.
    """

    def __init__(self, kernel: Varlen | None, dense: Dense | None = None) -> None:
        self._kernel = kernel
        self._dense = dense if kernel is not None else None

    @property
    def lone_sequence_from(self) -> int | None:
        """See `graphhal.platform.PlatformInfo`."""
        return None if self._dense is None else LONE_SEQUENCE_FROM

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
        if self._dense is not None and _is_lone(query, key, cu_seqlens, max_seqlen):
            try:
                return lone_attention(self._dense, query, key, value, cu_seqlens, scale)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                if torch.cuda.is_current_stream_capturing():
                    raise
                log.warning("cuDNN's attention fails, FlashAttention takes over: %s", error)
                self._dense = None
        missing = -width % HEAD_MULTIPLE
        if missing:
            query, key, value = (
                functional.pad(tensor, (0, missing)) for tensor in (query, key, value)
            )
        output = self._kernel(query, key, value, cu_seqlens, max_seqlen, scale)
        return output[..., :width] if missing else output


def _is_lone(
    query: torch.Tensor, key: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int
) -> bool:
    """Whether shapes say that one sequence may take all rows and at most one follows it."""
    rows, heads, width = query.shape
    return (
        max_seqlen >= rows >= LONE_SEQUENCE_FROM
        and len(cu_seqlens) <= 3
        and key.shape[1] == heads
        and width in LONE_WIDTHS
        and width % HEAD_MULTIPLE == 0
    )


def lone_attention(
    dense: Dense,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention within one or two sequences by a dense kernel, which computes rows × rows.

    cuDNN's takes 0.6 of FlashAttention's time for one long sequence, but boundaries only in a form
    that PyTorch 2.11 prepares anew at every call, for 40 ms. So the boundary goes into further head
    dims: a query has ones where another sequence's keys have `APART`, and zeros are all that is
    added to the scores within a sequence. Values must be finite in every row.

    cuDNN prepares every number of rows for 60 ms and keeps that for good. So rows are rounded up,
    to 16 numbers in each doubling; the graphs of the default ladder have such numbers.
    """
    count = query.shape[0]
    missing = -count % (1 << max(0, (count - 1).bit_length() - 5))
    if missing:
        query, key, value = (
            functional.pad(tensor, (0, 0, 0, 0, 0, missing)) for tensor in (query, key, value)
        )
    rows = torch.arange(count + missing, dtype=cu_seqlens.dtype, device=query.device)
    dims = torch.arange(LONE_DIMS, device=query.device)
    sequence = rows >= cu_seqlens[1]
    if missing:
        sequence = sequence.to(cu_seqlens.dtype) + (rows >= count)
    own = (sequence[:, None] == dims).to(query.dtype)[:, None]
    shape = (count + missing, query.shape[1], LONE_DIMS)
    query = torch.cat([query, (1 - own).expand(shape)], dim=-1)
    key = torch.cat([key, (own * APART).expand(shape)], dim=-1)
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    output = dense(query, key, value, scale)
    return output[0].transpose(0, 1)[:count]
