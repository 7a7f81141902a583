"""The toy encoder with tensor-parallel weights: ranks hold parts of the output projections."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.toy_encoder import HEADS, HIDDEN, MERGE, ToyEncoder


class ShardedToyEncoder(ToyEncoder):
    """Row-parallel `out` projections, summed over the ranks of `group`."""

    collectives = True

    def __init__(self, group: Any, **knobs: Any) -> None:
        super().__init__(**knobs)
        self.group = group
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self.part = slice(rank * HIDDEN // size, (rank + 1) * HIDDEN // size)

    def forward(
        self, inputs: Mapping[str, torch.Tensor], max_seqlen: Mapping[str, int]
    ) -> Sequence[torch.Tensor]:
        assert self.attention is not None
        tower = self.tower
        rows = tower.embed(inputs["pixels"]) * tower.scale
        rows = rows + tower.positions[inputs["position_ids"]]
        levels = []
        for block in tower.blocks:
            name = block.boundary_set
            shape = (len(rows), HEADS, HIDDEN // HEADS)
            query, key, value = (x.reshape(shape) for x in block.qkv(rows).split(HIDDEN, dim=1))
            mixed = self.attention(
                query, key, value, inputs[name], max_seqlen[name], shape[2] ** -0.5
            ).reshape(len(rows), HIDDEN)
            summed = mixed[:, self.part] @ block.out.weight[:, self.part].t()
            dist.all_reduce(summed, group=self.group)
            rows = rows + summed + block.out.bias
            levels.append(rows)
        return [
            merger(level.reshape(-1, MERGE * HIDDEN))
            for merger, level in zip(tower.mergers, reversed(levels), strict=False)
        ]
