"""Which graphs of a ladder a memory limit leaves: as many as can be, so the largest go first."""

from collections.abc import Iterator, Sequence

Cost = tuple[int, int]
"""Rows of a graph, in which all paths are measured, and the bytes that its capture added."""


def first_to_keep(costs: Sequence[Cost], arenas: int, limit: int) -> int:
    """The graph that a ladder begins with where most of its graphs fit a limit.

    The largest graph brings the memory that all share, so what does not fit beside it are the
    smallest ones, which gain most from being graphs. Begun with a smaller one, a ladder needs
    less, in proportion to the size.

    Args:
        costs: of the ladder, largest first, as it was captured.
        arenas: bytes of the largest graph's inputs and output.
        limit: bytes of everything.

    Returns:
        Index of a cost, of those that leave most graphs the smallest; 0 where none leaves any.
    """
    best = most = 0
    for start in range(len(costs)):
        count = sum(fitting(costs, arenas, limit, start))
        if count and count >= most:
            best, most = start, count
    return best


def fitting(costs: Sequence[Cost], arenas: int, limit: int, start: int) -> Iterator[bool]:
    """Whether each graph from `start` on fits, captured in this order; none does without the
    first."""
    (largest, pool), (size, own) = costs[0], costs[start]
    share = size / max(1, largest)
    total = arenas * share + max(own, pool * share)
    yield total <= limit
    for _, num_bytes in costs[start + 1 :]:
        fits = total + num_bytes <= limit
        total += num_bytes if fits else 0
        yield fits
