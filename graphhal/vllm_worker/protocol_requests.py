"""A protocol model's requests: which items they have on a path, and the kwargs of some of them."""

import logging
from collections.abc import Hashable, Mapping, Sequence
from itertools import product
from typing import Any

import torch

from graphhal.errors import InputError, RefusedError
from graphhal.items import ItemSpec
from graphhal.vllm_worker import host_ends
from graphhal.vllm_worker.protocol_buffers import ProtocolBuffers
from graphhal.vllm_worker.protocol_examples import CAPTURE_INPUTS, ProtocolExamples
from graphhal.vllm_worker.protocol_items import Signature, are_all, signature_of
from graphhal.vllm_worker.refusals import mixes_pictures_and_films, outgrows

log = logging.getLogger(__name__)

NEVER = 2**30
"""Tokens of an item that its model never wants in a graph (Kimi K2.5: chunks of films)."""
OUTGROWN = "larger than any that was captured"
"""The capture axis of groups that the axes' largest key does not cover."""


class ProtocolRequests:
    """What the model says of requests, on one path.

    Attributes:
        has_axes: whether there are capture axes beside the token budget.
        axes: of the graphs, by the path of their key; each combination has one of its own.

    Args:
        name: of the path's adapter, for errors.
        config: the model's, for graphs.
        buffers: of the path: its model, and how this vLLM spells the protocol.
        examples: tell how many rows a graph makes for a token.
    """

    def __init__(
        self, name: str, config: Any, buffers: ProtocolBuffers, examples: ProtocolExamples
    ) -> None:
        self._name = name
        self._model, self._dialect, self._path = buffers.model, buffers.dialect, buffers.path
        self._modalities = tuple(config.modalities)
        self._buffers = buffers
        self._examples = examples
        axes = self._dialect.axes(config)
        self.has_axes = bool(axes)
        self.axes: Mapping[str, tuple[Hashable, ...]] = {
            f"{self._path}/{number}" if axes else self._path: keys
            for number, keys in enumerate(product(*map(tuple, axes)))
        }
        if not self.axes:
            raise ValueError("a capture axis has no keys")
        self._come_selected: dict[frozenset[str], bool] = {}
        self._is_only_path = len(self._dialect.paths(config)) == 1

    def items(self, mm_kwargs: Mapping[str, Any]) -> tuple[ItemSpec, ...]:
        """The request's items on this path; rows are output tokens.

        Raises:
            InputError: the model's code for graphs does not take these inputs.
        """
        if CAPTURE_INPUTS in mm_kwargs:
            items: tuple[ItemSpec, ...] = mm_kwargs[CAPTURE_INPUTS]
            return items
        try:
            return self._own_items(mm_kwargs)
        except Exception as error:  # the model's own code: eager is another part of it
            raise InputError(f"{self._name} sizes no such items: {error!r}") from error

    def _own_items(self, mm_kwargs: Mapping[str, Any]) -> tuple[ItemSpec, ...]:
        if mixes_pictures_and_films(mm_kwargs):
            raise ValueError("pictures and films in one group")
        only = self._modalities[0] if len(self._modalities) == 1 else None
        modality = only or self._model.get_input_modality(mm_kwargs)
        axes = self._axes_of(mm_kwargs)
        specs: list[ItemSpec] = []
        every = self._model.get_encoder_cudagraph_item_specs(mm_kwargs)
        if not every:
            raise ValueError("no items")
        lengths = self.lengths(mm_kwargs, len(every))
        for position, spec in enumerate(every):
            tokens = self._dialect.path_tokens(spec, self._path)
            if not 0 <= tokens < NEVER:
                raise ValueError(f"item {position} of {tokens} tokens is never to be in a graph")
            if not tokens and self._is_only_path:
                raise ValueError(f"item {position} has no tokens")
            if lengths[position] and sum(lengths[position]) != spec.input_size:
                raise ValueError(f"item {position} has {spec.input_size} rows, {lengths[position]}")
            if tokens:
                place = (position, len(every))
                item = self.item(len(specs), modality, tokens, place, axes, lengths[position])
                specs.append(item)
        return tuple(specs)

    def lengths(self, mm_kwargs: Mapping[str, Any], items: int) -> list[tuple[int, ...]]:
        """Rows of each item's attention sequences; none where the model keeps its boundaries."""
        if not self._buffers.ends_on_host:
            return [()] * items
        lengths = host_ends.lengths_of(mm_kwargs)
        if len(lengths) != items or not all(map(all, lengths)):
            raise ValueError(f"{items} items, of sequences {lengths}")
        return lengths

    def _axes_of(self, mm_kwargs: Mapping[str, Any]) -> tuple[Hashable, ...]:
        if not self.has_axes:
            return ()
        count = len(self._model.get_encoder_cudagraph_item_specs(mm_kwargs))
        axes = self._dialect.select(mm_kwargs, list(range(count)))[1]
        return (OUTGROWN,) if outgrows(mm_kwargs, axes) else axes

    def item(
        self,
        index: int,
        modality: str,
        tokens: int,
        place: tuple[int, int],
        axes: tuple[Hashable, ...],
        lengths: tuple[int, ...],
    ) -> ItemSpec:
        """The spec of an item at `place`: its position among how many items of the request."""
        return ItemSpec(
            index=index,
            modality=modality,
            rows=tokens,
            tokens=tokens * self._examples.rows_per_token(),
            sequences={host_ends.ENDS: lengths} if lengths else {},
            signature=Signature(tokens, place, axes, lengths),
        )

    def path(self, item: ItemSpec) -> str:
        """Of the graphs for the axes that an item's group resolved to."""
        axes = signature_of(item).axes
        own = (path for path, keys in self.axes.items() if keys == axes)
        return next(own, f"{self._path}/none")

    def subset(
        self, mm_kwargs: Mapping[str, Any], items: Sequence[ItemSpec], for_graph: bool = True
    ) -> Mapping[str, Any]:
        """The kwargs of these items; for a graph, of the axes that it was captured for."""
        if not self.has_axes and are_all(items):
            return self.whole(mm_kwargs, len(items))
        positions = [signature_of(item).place[0] for item in items]
        subset, axes = self._dialect.select(mm_kwargs, positions)
        expected = signature_of(items[0]).axes
        if for_graph and axes != expected:
            raise RefusedError(f"capture axes became {axes}, the graph has {expected}")
        return subset

    def whole(self, mm_kwargs: Mapping[str, Any], count: int) -> Mapping[str, Any]:
        """The kwargs of all items: as they came, which copies no pixels, unless the model's own
        selection of them, which vLLM's manager always hands on, says something else."""
        kind = frozenset(mm_kwargs)
        if self._come_selected.get(kind):
            return mm_kwargs
        try:
            selected, _ = self._dialect.select(mm_kwargs, list(range(count)))
        except Exception:  # the model's own code: whatever asks next may do without
            log.debug("%s: no selection of all items", self._name, exc_info=True)
            return mm_kwargs
        if kind not in self._come_selected:
            self._come_selected[kind] = not self.has_axes and _says_no_more(selected, mm_kwargs)
        return mm_kwargs if self._come_selected[kind] else selected


def _says_no_more(selected: Mapping[str, Any], mm_kwargs: Mapping[str, Any]) -> bool:
    """Whether a selection of all items is what came, less what nothing asks for. One of other
    shapes is none of all items."""
    told = [
        name in mm_kwargs and _is_same(each, mm_kwargs[name]) for name, each in selected.items()
    ]
    return None in told or all(told)


def _is_same(one: Any, other: Any) -> bool | None:
    """Whether two inputs hold the same numbers, whatever holds them; None where their shapes
    differ."""
    if isinstance(one, list | tuple) or isinstance(other, list | tuple):
        try:
            told = [_is_same(*pair) for pair in zip(one, other, strict=True)]
        except (TypeError, ValueError):  # one is no list, or they are not of one length
            return None
        return None if None in told else all(told)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape:
            return None
        other = other.to(one.device)
        same = (one == other) | ((one != one) & (other != other))  # NaN is what it was
        return one.dtype == other.dtype and bool(same.all())
    answer = one == other
    many = isinstance(answer, torch.Tensor) and answer.dim() > 0  # a number beside several
    return None if many else bool(answer)
