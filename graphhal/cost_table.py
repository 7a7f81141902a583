"""What steps are expected to take, from times measured on this card: pure arithmetic.

A step's time has two parts that grow apart: work on rows (projections), and work inside attention
sequences, which grows with the square of their lengths. One picture of 1568 tokens takes 1.8 times
as long as eight of 196, in the same graph. So every size is measured twice where it can be: as one
long sequence and as many short ones.
"""

from bisect import bisect_right
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, order=True)
class Timing:
    """One measured call.

    Attributes:
        attention: sum of the squared lengths of its attention sequences, padding included.
        milliseconds: median, with staging and copy-out.
    """

    attention: int
    milliseconds: float


@dataclass(frozen=True)
class CostTable:
    """Milliseconds measured on this card at start-up.

    Attributes:
        replays: per graph, timings of its replay.
        eager: per path and number of rows, timings of eager calls.
    """

    replays: Mapping[Hashable, tuple[Timing, ...]] = field(default_factory=dict)
    eager: Mapping[str, Mapping[int, tuple[Timing, ...]]] = field(default_factory=dict)

    def replay_ms(self, key: Hashable, attention: int) -> float | None:
        """Expected time of a replay; None for a graph that was not measured."""
        timings = self.replays.get(key)
        return _at(timings, attention) if timings else None

    def eager_ms(self, path: str, rows: int, attention: int) -> float | None:
        """Expected time of an eager call; None where nothing was measured.

        Linear between two measured sizes, as the smallest below it (launches cost the same),
        proportional to the largest above it.
        """
        sizes = self.eager.get(path)
        if not sizes:
            return None
        known = sorted(sizes)
        at = bisect_right(known, rows)
        if at == 0:
            return _at(sizes[known[0]], attention)
        low = known[at - 1]
        low_ms = _at(sizes[low], attention)
        if at == len(known):
            return low_ms * rows / low
        high = known[at]
        share = (rows - low) / (high - low)
        return low_ms + (_at(sizes[high], attention) - low_ms) * share


def _at(timings: tuple[Timing, ...], attention: int) -> float:
    """Between the lightest and the heaviest timing linear; outside them as the nearer one."""
    light, heavy = min(timings), max(timings)
    if attention <= light.attention or light.attention == heavy.attention:
        return light.milliseconds
    share = (attention - light.attention) / (heavy.attention - light.attention)
    return light.milliseconds + (heavy.milliseconds - light.milliseconds) * min(1.0, share)
