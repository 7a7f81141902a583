"""Compares the first group of every layout with eager, where the self-check had no real groups.

Most models' code is not known well enough to write a request for it. Their graphs are checked on
the dummy inputs that the model itself makes, which cannot show that it prepares the buffers of
some groups wrongly (vLLM 0.31 does so for Gemma 4's films). What a model prepares follows from
sizes, so one group of a layout speaks for all.
"""

import logging
from collections.abc import Callable, Hashable, Sequence

import torch

from graphhal.errors import RefusedError
from graphhal.items import ItemSpec
from graphhal.self_check import TOLERANCE, Difference

log = logging.getLogger(__name__)


class LayoutCheck:
    """Which layouts of one adapter's groups must never be replayed.

    Args:
        name: of the adapter.
        tolerance: relative L2 that replay and eager may differ by; None for that of the dtype.
    """

    def __init__(self, name: str, tolerance: float | None) -> None:
        self._name = name
        self._tolerance = tolerance
        self._wrong: set[Hashable] = set()

    def is_wrong(self, items: Sequence[ItemSpec]) -> bool:
        """Whether groups of this layout were found to differ from eager."""
        return bool(self._wrong) and _layout(items) in self._wrong

    def compare(
        self,
        items: Sequence[ItemSpec],
        staged: Callable[[], torch.Tensor],
        eager: Callable[[], torch.Tensor],
    ) -> None:
        """Compare what the graph is about to compute with eager.

        Args:
            items: the group.
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
            return
        self._wrong.add(_layout(items))
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
        found = Difference.between(staged()[:tokens], expected)
        allowed = self._tolerance or TOLERANCE.get(expected.dtype, 2e-2)
        if not found.exceeds(allowed):
            return None
        return f"relative L2 {found.relative_l2:.2e}, allowed {allowed:.0e}"


def _layout(items: Sequence[ItemSpec]) -> Hashable:
    return tuple((item.modality, item.signature) for item in items)
