"""Hands a platform's packed attention to a transformers module, through `AttentionInterface`."""

import copy
from itertools import count
from typing import Any

import torch
from transformers import AttentionInterface

from graphhal.errors import AdapterError
from graphhal.platform import VarlenAttention

# transformers passes boundaries and a bound, instead of splitting by `.tolist()`, to every
# attention whose name contains "flash".
_PREFIX = "graphhal_flash_varlen"
_OTHERWISE = (
    *("attention_mask", "is_causal", "sliding_window"),
    *("position_bias", "softcap", "s_aux", "dropout"),
)
"""What transformers' own attentions compute with, and a packed one does not."""
_names: dict[VarlenAttention, str] = {}
_numbers = count()


def use_packed_attention(module: torch.nn.Module, attention: VarlenAttention) -> None:
    """Make `module` compute its attention with `attention`, from now on.

    Within a sequence every row attends to every row. A layer that asks for anything else (a mask,
    causal or windowed attention, dropout) raises `AdapterError` when it is called.

    The choice lives in the module's own copies of its configurations, so that several towers, on
    several platforms, can live in one process. A module that has it already stays as it is: graphs
    of another adapter may read it.

    Args:
        module: a transformers encoder that was built with another attention (`sdpa`).
        attention: the platform's packed attention.
    """
    name = _registered(attention)
    copies: dict[int, Any] = {}  # a tower's parts share configurations, and one holds another
    for part in module.modules():
        config: Any = getattr(part, "config", None)
        if getattr(config, "_attn_implementation", name) != name:
            own = part.config = copy.deepcopy(config, copies)
            own._attn_implementation = name


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
        scaling: float | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        max_length_q: int | None = None,
        is_causal: bool | None = None,
        dropout: float = 0.0,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """(1, heads, rows, head_dim) in, (1, rows, heads, head_dim) out, as transformers has it."""
        if cu_seq_lens_q is None or max_length_q is None or len(query) != 1:
            raise AdapterError(
                f"{type(module).__name__} got a batch of {len(query)}, cu_seq_lens_q "
                f"{'missing' if cu_seq_lens_q is None else 'given'} and max_length_q "
                f"{max_length_q}; packed attention takes a batch of 1 and both: hand them to the "
                "tower's layers"
            )
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        others["attention_mask"] = attention_mask
        others["is_causal"], others["dropout"] = causal or None, dropout or None
        asked = [name for name in _OTHERWISE if others.get(name) is not None]
        if asked:
            raise AdapterError(
                f"{type(module).__name__} asks for {', '.join(asked)}, which packed attention does "
                "not compute; leave this tower the attention that it was built with"
            )
        out = attention(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            cu_seq_lens_q,
            max_length_q,
            query.shape[-1] ** -0.5 if scaling is None else scaling,
        )
        return out.unsqueeze(0), None

    return packed
