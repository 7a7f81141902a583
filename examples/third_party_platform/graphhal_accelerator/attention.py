"""Packed attention from PyTorch operators alone: the boundaries become a mask on the device."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def masked_attention(query, key, value, cu_seqlens, max_seqlen, scale):
    """Attention within each sequence; reads `cu_seqlens` on the device, never on the host.

    A mask of rows × rows needs no bound, so `max_seqlen` is not used. Rows past the last end are
    cleared first: they attend among themselves and come out finite.
    """
    ends = cu_seqlens[1:]
    row = torch.arange(len(query), dtype=torch.int32, device=query.device)
    sequence = torch.searchsorted(ends, row, right=True)
    real = (sequence < len(ends)).view(-1, 1, 1)
    heads_first = (
        torch.where(real, rows, 0.0).transpose(0, 1).unsqueeze(0) for rows in (query, key, value)
    )
    same = sequence.unsqueeze(0) == sequence.unsqueeze(1)
    mixed = scaled_dot_product_attention(*heads_first, attn_mask=same, scale=scale)
    return mixed.squeeze(0).transpose(0, 1)
