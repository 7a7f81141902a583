"""The fused inference attention operator, in the versions that torch_npu wheels have."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch_npu
from torch_npu import npu


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """One version of the operator; both do the same under other argument names."""

    name: str
    query_ends: str
    key_ends: str
    heads: str
    scale: str

    @property
    def operator(self) -> Any:
        """The PyTorch operator packet."""
        return getattr(torch.ops.npu, self.name)

    def arguments(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> dict[str, Any]:
        """All arguments but the ends; query, key, value are (rows, heads, head_dim)."""
        return {
            "query": query,
            "key": key,
            "value": value,
            self.heads: query.shape[1],
            "num_key_value_heads": key.shape[1],
            self.scale: scale,
            "input_layout": "TND",
            "sparse_mode": 0,
        }

    def ends(self, ends: list[int]) -> dict[str, list[int]]:
        """The boundary arguments; queries and keys of an encoder end alike."""
        return {self.query_ends: ends, self.key_ends: ends}

    def workspace(self, arguments: Mapping[str, Any], ends: list[int]) -> torch.Tensor:
        """Scratch memory that suffices for any ends at these shapes."""
        helper = getattr(torch_npu, f"_{self.name}_get_max_workspace")
        memory: torch.Tensor = helper(**arguments, **self.ends(ends))
        return memory


VERSIONS = (
    FusedAttention(
        "npu_fused_infer_attention_score",
        "actual_seq_lengths",
        "actual_seq_lengths_kv",
        "num_heads",
        "scale",
    ),
    FusedAttention(
        "npu_fused_infer_attention_score_v2",
        "actual_seq_qlen",
        "actual_seq_kvlen",
        "num_query_heads",
        "softmax_scale",
    ),
)


@cache
def fused_attention() -> FusedAttention | None:
    """The version of the operator that this wheel can capture and update on this chip.

    The older one first; Ascend 950 runs only the newer.
    """
    only_newer = "Ascend950" in str(npu.get_device_name(npu.current_device()))
    for version in VERSIONS[1:] if only_newer else VERSIONS:
        has_operator = hasattr(torch.ops.npu, version.name)
        if has_operator and hasattr(torch_npu, f"_{version.name}_get_max_workspace"):
            return version
    return None
