"""What a protocol model's graphs are captured and checked with: pictures of its kind, where such
can be written; else its own dummy inputs."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from graphhal.items import ItemSpec
from graphhal.plan import Capacity
from graphhal.self_check import TOLERANCE, Difference
from graphhal.vllm_worker import grid_requests
from graphhal.vllm_worker.protocol_buffers import ProtocolBuffers, safe_bound
from graphhal.vllm_worker.protocol_items import signature_of

log = logging.getLogger(__name__)

CAPTURE_INPUTS = "graphhal_capture_inputs"
"""The key of an example's items where its values are the model's own dummy inputs."""
CAPTURE_VALUES = "graphhal_capture_values"
"""The key of those values; models fill them at random, the example's seed decides how."""


class ProtocolExamples:
    """Requests for one path of a model.

    Args:
        buffers: of the path: its model, and the model's own dummy inputs.
        budgets: of the path's graphs, asked when they are needed.
        writes: whether pictures may be written: the path is the only one, and without axes.
    """

    def __init__(
        self, buffers: ProtocolBuffers, budgets: Callable[[], tuple[int, ...]], writes: bool
    ) -> None:
        self._model, self._dialect, self._path = buffers.model, buffers.dialect, buffers.path
        self._limits, self._device = buffers.limits, buffers.device
        self._buffers = buffers
        self._budgets = budgets
        self._scatters_only = self._dialect.scatters_only()
        self._sought = not writes
        self._grids: grid_requests.PictureRequests | None = None
        self._host_values: Mapping[str, torch.Tensor] = {}

    def grids(self) -> grid_requests.PictureRequests | None:
        """How to write pictures for the model; None where it takes none of a known kind."""
        if self._sought or not self._budgets():
            return self._grids
        self._sought = True
        budget = min(self._budgets())
        inputs = self._buffers.dummies(budget, ())
        self._host_values = {
            name: value
            for name, value in inputs.items()
            if value is not None and value.device.type == "cpu" and value.dim() == 0
        }
        found = grid_requests.find(self._model, budget, inputs)
        if found is not None and not self._scatters_only:
            found = self._merging(found, budget)
        self._grids = found
        return found

    def rows_per_token(self) -> int:
        """Rows of a graph's output for each token: several where the model merges them later."""
        grids = None if self._scatters_only else self.grids()
        return 1 if grids is None else grids.rows

    def sizes(self, tokens: Sequence[int]) -> Mapping[str, torch.Tensor]:
        """What the host knows of pictures of so many tokens each."""
        grids = self.grids()
        return {} if grids is None else grids.sizes(tokens)

    def request(self, items: Sequence[ItemSpec], seed: int) -> dict[str, Any]:
        """Pictures of these items; else the model's dummy inputs for as many rows."""
        grids = self.grids()
        if grids is not None:
            return grids.request([item.rows for item in items], seed, self._device)
        devices = [] if self._device.type == "cpu" else [self._device]
        with torch.random.fork_rng(devices, device_type=self._device.type):
            torch.manual_seed(seed)
            values = self._buffers.dummies_of(items[0].rows, signature_of(items[0]).axes)
        return {CAPTURE_INPUTS: tuple(items), CAPTURE_VALUES: values}

    def groups(self, capacity: Capacity) -> Iterator[tuple[int, ...]]:
        """Tokens of the items: full, one short of full, many small ones; else one full alone."""
        budget, most = capacity.rows, capacity.items
        if self.grids() is None:
            yield (self._buffers.rows_of(capacity.key),)
            return
        yield grid_requests.pictures_of(budget, most)
        if budget > 1:
            yield grid_requests.pictures_of(budget - 1, most)
        if most > 1:
            small = grid_requests.pictures_of(max(1, budget // most), 1)
            rest = budget - small[0] * (most - 1)
            yield (*small * (most - 1), *grid_requests.pictures_of(rest, 1))
            yield (1,) * most

    def unpadded(self, mm_kwargs: Mapping[str, Any]) -> torch.Tensor:
        """What the graph computes, without its padding: rows that the model merges afterwards."""
        count = len(self._model.get_encoder_cudagraph_item_specs(mm_kwargs))
        prepared = self._model.prepare_encoder_cudagraph_replay_buffers(
            dict(mm_kwargs), count, max(count, self._limits.frames), self._path
        )
        values = {name: value for name, value in prepared.values.items() if value is not None}
        for name, value in self._host_values.items():  # what a model bakes it may not prepare again
            values.setdefault(name, safe_bound(name, value, values))
        return self._dialect.forward(values, self._path)

    def _merging(
        self, grids: grid_requests.PictureRequests, tokens: int
    ) -> grid_requests.PictureRequests | None:
        """With the rows that the model's postprocessing makes one token of; None where what it
        makes is not what it makes eagerly."""
        request = grids.request([tokens], 0, self._device)
        try:
            with torch.no_grad():
                rows = self.unpadded(request)
                made = self._dialect.postprocess({"default": rows}, [tokens], request)
                eager = self._dialect.eager(request, self._path)
            wrong = Difference.between(made[0], eager).exceeds(TOLERANCE.get(rows.dtype, 2e-2))
        except Exception:  # the model's own code: without an answer, nothing is known of it
            log.debug("%s: no rows of a token", type(self._model).__name__, exc_info=True)
            return None
        return None if wrong or len(rows) % tokens else replace(grids, rows=len(rows) // tokens)
