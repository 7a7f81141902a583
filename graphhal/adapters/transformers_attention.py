"""Hands a platform's packed attention to a transformers module, through `AttentionInterface`."""

import copy
from itertools import count
from typing import Any

import torch
from transformers import AttentionInterface

from graphhal.platform import VarlenAttention

# transformers passes boundaries and a bound, instead of splitting by `.tolist()`, to every
# attention whose name contains "flash".
_PREFIX = "graphhal_flash_varlen"
_names: dict[VarlenAttention, str] = {}
_numbers = count()


def use_packed_attention(module: torch.nn.Module, attention: VarlenAttention) -> None:
    """Make `module` compute its attention with `attention`, from now on.

    The choice lives in the module's own copy of its configuration, so that several towers, on
    several platforms, can live in one process.

    Args:
        module: a transformers encoder that was built with another attention (`sdpa`).
        attention: the platform's packed attention.
    """
    config = module.config
    own = copy.copy(config)
    own._attn_implementation = _registered(attention)  # type: ignore[union-attr]
    for part in module.modules():
        if getattr(part, "config", None) is config:
            part.config = own


def packed_attention_of(module: torch.nn.Module) -> VarlenAttention | None:
    """The attention that `use_packed_attention` gave this module; None where it has another."""
    chosen = module.config._attn_implementation  # type: ignore[union-attr]
    return next((attention for attention, name in _names.items() if name == chosen), None)


def _registered(attention: VarlenAttention) -> str:
    name = _names.get(attention)
    if name is None:
        name = _names[attention] = f"{_PREFIX}_{next(_numbers)}"
        AttentionInterface.register(name, _interface_for(attention))
    return name


def _interface_for(attention: VarlenAttention) -> Any:
    def packed(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float,
        cu_seq_lens_q: torch.Tensor,
        max_length_q: int,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """(1, heads, rows, head_dim) in, (1, rows, heads, head_dim) out, as transformers has it."""
        out = attention(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            cu_seq_lens_q,
            max_length_q,
            scaling,
        )
        return out.unsqueeze(0), None

    return packed
