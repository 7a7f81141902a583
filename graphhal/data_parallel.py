"""Data-parallel encoders: every rank holds the whole tower and encodes its share of the items."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from graphhal.errors import PeersError
from graphhal.items import ItemSpec
from graphhal.outputs import split_items
from graphhal.peers import spread
from graphhal.runner import EncoderGraphs


class DataParallelEncoder:
    """Shards the items of each request over ranks, and gives every rank all outputs.

    Every rank calls `run` with the same request. A rank without an item takes part in the gather.
    Hits and misses are counted by the rank that encoded the item: once over all ranks.

    Args:
        graphs: this rank's encoder.
        group: process group of the device's backend, of the ranks that share requests; its
            timeout bounds the wait for a rank that does not come.
    """

    def __init__(self, graphs: EncoderGraphs, group: Any) -> None:
        import torch.distributed as dist

        self._graphs = graphs
        self._group = group
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)

    def run(self, mm_kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """As `EncoderGraphs.run`: one (tokens, width) tensor per item, in request order.

        Raises:
            InputError: an item is wrong; raised on every rank, before anything is exchanged.
            PeersError: a rank did not come to the gather within the group's timeout (gloo; NCCL
                ends the process, and names the collective).
        """
        items = self._graphs.adapter.item_specs(mm_kwargs)
        if not items:
            return []
        shares = spread([item.rows for item in items], self._size)
        tokens = [sum(items[index].tokens for index in share) for share in shares]
        own = self._own_output(mm_kwargs, items, shares[self._rank])
        try:
            gathered = self._gather(own, max(tokens))
        except RuntimeError as error:
            held = ", ".join(f"rank {r} of {len(share)} items" for r, share in enumerate(shares))
            raise PeersError(
                f"rank {self._rank} waited at the gather of {len(items)} items, {held}; a rank "
                f"that does not come failed in its own items, see its log: {error}"
            ) from error
        outputs: list[torch.Tensor | None] = [None] * len(items)
        for rank, share in enumerate(shares):
            starts = [0]
            for index in share:
                starts.append(starts[-1] + items[index].tokens)
            if share:
                parts = split_items(gathered[rank, : tokens[rank]], starts)
                for index, part in zip(share, parts, strict=True):
                    outputs[index] = part
        return [output for output in outputs if output is not None]

    def _own_output(
        self, mm_kwargs: Mapping[str, Any], items: tuple[ItemSpec, ...], share: tuple[int, ...]
    ) -> torch.Tensor:
        """(tokens of this rank's items, width); no rows where it has none."""
        if not share:
            width, dtype = self._graphs.output_kind()
            return torch.empty((0, width), dtype=dtype, device=self._graphs.adapter.device)
        mine = tuple(replace(items[index], index=number) for number, index in enumerate(share))
        return torch.cat(self._graphs.run_items(mm_kwargs, mine))

    def _gather(self, own: torch.Tensor, rows: int) -> torch.Tensor:
        """(ranks, rows, width): every rank's output, padded to the longest."""
        import torch.distributed as dist

        padded = own.new_zeros((rows, own.shape[1]))
        padded[: len(own)] = own
        gathered = own.new_empty((self._size, rows, own.shape[1]))
        dist.all_gather(list(gathered), padded, group=self._group)
        return gathered
