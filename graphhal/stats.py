"""What happened: hits, misses by reason, padding waste, histogram of item tokens."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from typing import Any

from graphhal.items import ItemSpec

TOKEN_EDGES = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper edges of the input token histogram, in tokens an item; above the last is `inf`."""
_EDGES = (*map(str, TOKEN_EDGES), "inf")


class Statistics:
    """Counters of one `EncoderGraphs`; kept over `clear()` and recapture.

    A hit is an item that was replayed, counted once however many replays it took; a miss is an
    item that ran eagerly, counted under its reason.
    """

    def __init__(self) -> None:
        self.hits: Counter[str] = Counter()
        self.misses: Counter[tuple[str, str]] = Counter()
        self.replays: Counter[str] = Counter()
        self.eager_calls: Counter[str] = Counter()
        self.rows_used: Counter[str] = Counter()
        self.rows_replayed: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()

    def count_replay(self, key: str, rows_used: int, rows: int) -> None:
        """One launch of a graph: rows of real input, and rows that it computed."""
        self.replays[key] += 1
        self.rows_used[key] += rows_used
        self.rows_replayed[key] += rows

    def count_hits(self, items: Iterable[ItemSpec]) -> None:
        """Items that were served by replay."""
        for item in items:
            self.hits[item.modality] += 1
            self._count_tokens(item)

    def count_misses(self, items: Iterable[ItemSpec], reason: str) -> None:
        """Items that ran in one eager call, and why."""
        self.eager_calls[reason] += 1
        for item in items:
            self.misses[item.modality, reason] += 1
            self._count_tokens(item)

    def _count_tokens(self, item: ItemSpec) -> None:
        self.tokens[_EDGES[bisect_left(TOKEN_EDGES, item.tokens)]] += 1

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON: counts are items unless the name says otherwise."""
        used, replayed = self.rows_used.total(), self.rows_replayed.total()
        reasons: dict[str, dict[str, int]] = {}
        for (modality, reason), count in sorted(self.misses.items()):
            reasons.setdefault(modality, {})[str(reason)] = count
        return {
            "hits": dict(sorted(self.hits.items())),
            "misses": reasons,
            "replays": dict(sorted(self.replays.items())),
            "eager_calls": {str(r): count for r, count in sorted(self.eager_calls.items())},
            "padding_waste": 0.0 if replayed == 0 else 1 - used / replayed,
            "padding_waste_by_graph": {
                key: 1 - self.rows_used[key] / rows
                for key, rows in sorted(self.rows_replayed.items())
            },
            "item_tokens": {edge: self.tokens[edge] for edge in _EDGES if self.tokens[edge]},
        }
