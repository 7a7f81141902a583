"""One encoder of a model in a vLLM worker: its graphs, by path, and the items' outputs."""

import logging
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from graphhal.data_parallel import DataParallelEncoder
from graphhal.peers import Peers
from graphhal.plan import MissReason
from graphhal.platform import Platform
from graphhal.runner import EncoderGraphs
from graphhal.settings import Settings
from graphhal.vllm_worker.towers import Combine, Encoder

log = logging.getLogger(__name__)


class ServedEncoder:
    """One encoder of the model and its graphs, by path.

    Attributes:
        encoder: as given.
        graphs: by path.
    """

    def __init__(
        self, encoder: Encoder, platform: Platform, settings: Settings, peers: Peers, group: Any
    ) -> None:
        self.encoder = encoder
        self.graphs = {
            path: EncoderGraphs(adapter, platform, settings, peers)
            for path, adapter in encoder.adapters.items()
        }
        self._shared = (
            None
            if group is None
            else {path: DataParallelEncoder(g, group) for path, g in self.graphs.items()}
        )

    @property
    def is_alone(self) -> bool:
        """Whether no other rank decides, or encodes, with this one."""
        return self._shared is None and all(g.peers.size == 1 for g in self.graphs.values())

    def encode(self, mm_kwargs: Mapping[str, Any]) -> list[torch.Tensor] | None:
        """By replay; None where any item must run eagerly. Over several ranks always encodes."""
        combine = self.encoder.combine
        if self._shared is not None:
            made = {path: shared.run(mm_kwargs) for path, shared in self._shared.items()}
            if combine is None:
                return next(iter(made.values()))
            return self._combined(combine, made, mm_kwargs)
        if combine is None:
            return next(iter(self.graphs.values())).try_replay(mm_kwargs)
        return self._replay_paths(combine, mm_kwargs)

    def _replay_paths(
        self, combine: Combine, mm_kwargs: Mapping[str, Any]
    ) -> list[torch.Tensor] | None:
        """All paths or none; an item counts once, however many of them it takes."""
        items = {path: g.adapter.item_specs(mm_kwargs) for path, g in self.graphs.items()}
        most = max(items, key=lambda path: len(items[path]))
        statistics = self.graphs[most].statistics
        made: dict[str, list[torch.Tensor]] = {}
        reasons = (graphs.miss_reason(items[path]) for path, graphs in self.graphs.items())
        reason = next((each for each in reasons if each is not None), None)
        for path, graphs in self.graphs.items():
            outputs = reason or graphs.replay_items(mm_kwargs, items[path])
            if isinstance(outputs, MissReason):
                statistics.count_misses(items[most], outputs)
                return None
            made[path] = outputs
        try:
            joined = self._combined(combine, made, mm_kwargs)
        except Exception as error:  # the model's own code: eager is another part of it
            if not self.is_alone and isinstance(error, torch.OutOfMemoryError):
                raise  # of this rank alone: the others have replayed
            log.debug("%s: its paths cannot be put together", self.encoder.name, exc_info=True)
            statistics.count_misses(items[most], MissReason.REFUSED)
            return None
        statistics.count_hits(items[most])
        return joined

    def _combined(
        self,
        combine: Combine,
        made: Mapping[str, list[torch.Tensor]],
        mm_kwargs: Mapping[str, Any],
    ) -> list[torch.Tensor]:
        """The items' outputs, by the model's own code, from what its paths made."""
        joined = {path: _joined(parts) for path, parts in made.items() if parts}
        specs = self._any_adapter().model.get_encoder_cudagraph_item_specs(mm_kwargs)
        return combine(joined, [spec.output_tokens for spec in specs], mm_kwargs)

    def _any_adapter(self) -> Any:
        return next(iter(self.encoder.adapters.values()))


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts one after another: the tensor they are consecutive views of, where they are."""
    base = parts[0]._base
    rows = sum(len(part) for part in parts)
    if base is not None and base.dim() == 2 and len(base) == rows:
        starts = accumulate((len(part) for part in parts), initial=0)
        if all(
            part._base is base and part.storage_offset() == start * base.stride(0)
            for part, start in zip(parts, starts, strict=False)
        ):
            return base
    return torch.cat(list(parts))
