"""Compares groups of new sizes with eager, where the self-check had no real groups.

Most models' code is not known well enough to write a request for it. Their graphs are checked on
the dummy inputs that the model itself makes, which cannot show that it prepares the buffers of
some groups wrongly (vLLM 0.31 does so for Gemma 4's films). What a model prepares follows from
sizes, so a group speaks for all of its layout. A server sees more layouts than it could compare:
a group whose sizes, neighbours, and number and extremes of items were right before is not compared,
unless the model prepared other shapes than for as many tokens before: rows that are missing from a
request would become zeros.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise

import torch

from graphhal.errors import RefusedError
from graphhal.items import ItemSpec
from graphhal.self_check import TOLERANCE, Difference
from graphhal.vllm_worker.protocol_items import signature_of

log = logging.getLogger(__name__)


class LayoutCheck:
    """Which groups of one adapter were right, and which must never be replayed.

    Args:
        name: of the adapter.
        tolerance: relative L2 that replay and eager may differ by; None for that of the dtype.
    """

    def __init__(self, name: str, tolerance: float | None) -> None:
        self._name = name
        self._tolerance = tolerance
        self._right: set[Hashable] = set()
        self._wrong: set[Hashable] = set()

    def is_wrong(self, items: Sequence[ItemSpec]) -> bool:
        """Whether groups of this layout, or one of the items alone, were found to differ."""
        if not self._wrong:
            return False
        kinds = _kinds(items)
        return kinds in self._wrong or any((kind,) in self._wrong for kind in kinds)

    def is_settled(self, graph: Hashable, items: Sequence[ItemSpec], shapes: Hashable) -> bool:
        """Whether all that such a group consists of was right in others."""
        return _parts(graph, items, shapes) <= self._right

    def compare(
        self,
        graph: Hashable,
        items: Sequence[ItemSpec],
        shapes: Hashable,
        staged: Callable[[], torch.Tensor],
        eager: Callable[[], torch.Tensor],
    ) -> None:
        """Compare what the graph is about to compute with eager.

        Args:
            graph: that holds the group.
            items: the group.
            shapes: of the buffers that the model prepared for it.
            staged: runs the captured forward on the staged buffers; padding rows come last.
            eager: the model's own output for the same items.

        Raises:
            RefusedError: they differ, and no group of this layout may be replayed; or they cannot
                be compared now.
        """
        try:
            problem = self._difference(sum(item.tokens for item in items), staged, eager)
        except Exception as error:
            raise RefusedError(
                f"no comparison with eager: {type(error).__name__}: {error}"
            ) from error
        if problem is None:
            self._right |= _parts(graph, items, shapes)
            return
        self._wrong.add(_kinds(items))
        sizes = ", ".join(str(item.tokens) for item in items[:8])
        more = ", …" if len(items) > 8 else ""
        reason = (
            f"the buffers that the model prepares for {len(items)} items of {sizes}{more} tokens "
            f"give another result than eager ({problem})"
        )
        log.warning("graphhal: %s: such groups run eagerly: %s", self._name, reason)
        raise RefusedError(reason)

    def _difference(
        self, tokens: int, staged: Callable[[], torch.Tensor], eager: Callable[[], torch.Tensor]
    ) -> str | None:
        expected = eager()
        if len(expected) != tokens:
            return f"eager makes {len(expected)} rows"
        if not expected.isfinite().all():  # the request's doing: equal NaN tell nothing of a layout
            raise ValueError("eager's own output is not finite")
        found = Difference.between(staged()[:tokens], expected)
        allowed = self._tolerance or TOLERANCE.get(expected.dtype, 2e-2)
        if not found.exceeds(allowed):
            return None
        return f"relative L2 {found.relative_l2:.2e}, allowed {allowed:.0e}"


def _kinds(items: Sequence[ItemSpec]) -> tuple[Hashable, ...]:
    """What tells the items of a layout apart, in order."""
    signatures = [(item.modality, signature_of(item)) for item in items]
    return tuple((modality, each.tokens, each.axes) for modality, each in signatures)


def _parts(graph: Hashable, items: Sequence[ItemSpec], shapes: Hashable) -> set[Hashable]:
    """Sizes, neighbouring sizes, the number of items in the graph with the extremes: models lay a
    group out by its largest item; and what as many tokens were prepared in."""
    kinds = _kinds(items)
    sizes = [item.rows for item in items]
    extremes = (graph, len(kinds), min(sizes), max(sizes))
    return {*kinds, *pairwise(kinds), extremes, (sum(sizes), shapes)}
