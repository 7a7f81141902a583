"""A platform on an imagined card, whose memory use is scripted."""

import weakref
from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any

from graphhal.errors import CaptureError
from graphhal.platform import CapturedGraph, CaptureRequest, Platform

MIB = 2**20
PIECE = 2 * MIB
"""Device memory is handed out in pieces of this size."""


class Card:
    """Counts what is taken; `free_bytes` is what the driver would say."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0.0
        self.reserved = 0.0
        """Of what is used, what PyTorch's allocator holds for graphs."""
        self.spare = 0.0
        """Of what is used, what the driver keeps for graphs to come."""
        self.of_stream = 0.0
        """Bytes that libraries take for good with a stream's first use."""
        self.stream_is_new = True

    def free_bytes(self) -> int:
        return self.total - -int(-self.used // PIECE) * PIECE

    def use_stream(self, _: Any = None) -> None:
        if self.stream_is_new:
            self.used += self.of_stream
            self.reserved += self.of_stream
        self.stream_is_new = False

    def take(self, num_bytes: float, owner: Any) -> None:
        """Taken until the owner is gone."""
        self.used += num_bytes
        weakref.finalize(owner, self.give, num_bytes)

    def give(self, num_bytes: float) -> None:
        self.used -= num_bytes

    def take_from_driver(self, num_bytes: float, owner: Any) -> float:
        """Bytes that were not spare; all are, once the owner is gone."""
        fresh = max(0.0, num_bytes - self.spare)
        self.spare -= num_bytes - fresh
        self.used += fresh
        weakref.finalize(owner, self.spare_more, num_bytes)
        return fresh

    def spare_more(self, num_bytes: float) -> None:
        self.spare += num_bytes

    def reserve(self, num_bytes: float, owner: Any) -> None:
        """Taken by the allocator."""
        self.reserved += num_bytes
        self.take(num_bytes, owner)
        weakref.finalize(owner, self.unreserve, num_bytes)

    def unreserve(self, num_bytes: float) -> None:
        self.reserved -= num_bytes


class Cycle:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.own = self


class Owner:
    """Of a graph's memory."""


def scripted(
    platform: Platform,
    card: Card,
    first: float,
    each: float,
    garbage: float = 0.0,
    loads: float = 0.0,
    growth: float = 0.0,
    grows: int = 1,
    kept: float = 0.0,
    workspace: float = 0.0,
    largest: int = 0,
    fails: Container[int] = (),
) -> Platform:
    """The platform, with graphs that take memory of the card, and run again where they replay.

    Args:
        platform: its attention and its steps are used.
        card: what graphs take memory of.
        first: bytes of the first graph, arenas included.
        each: bytes of every further graph.
        garbage: bytes that every eager reference leaves in a reference cycle.
        loads: bytes that the driver loads for good where a graph of a new size is captured.
        growth: bytes by which the second graph makes the pool grow, and others that follow.
        grows: every which graph makes it grow, up to a dozen.
        kept: bytes of every graph that the driver keeps for later ones.
        workspace: bytes that the allocator takes for good with the first two captures.
        largest: size of the graph that takes `first`; where another is the first, it takes less.
        fails: sizes of graphs that cannot be captured.
    """
    seen: set[int] = set()
    spaces = [workspace / 2, workspace / 2]
    alive: dict[int, Owner] = {}

    def capture(request: CaptureRequest) -> CapturedGraph:
        request.forward()
        if request.key.size in fails:
            raise CaptureError("planted")
        if loads and request.key.size not in seen:
            seen.add(request.key.size)
            card.used += loads
        owner, count = Owner(), len(alive)
        if spaces:
            card.used += spaces[-1]
            card.reserved += spaces.pop()
        grown = growth if 1 <= count <= 12 and (count - 1) % grows == 0 else 0.0
        share = request.key.size / largest if largest else 1.0
        of_pool = int((first * share if not alive else 0.0) + grown)
        of_driver = int(each) if alive else 0
        card.reserve(of_pool, owner)
        card.take(of_driver, owner)
        fresh = card.take_from_driver(int(kept), owner)
        graph = CapturedGraph(request, object(), None, int(of_pool + of_driver + fresh))
        alive[id(graph)] = owner
        return graph

    def release(graphs: Sequence[CapturedGraph]) -> None:
        for graph in graphs:
            alive.pop(id(graph), None)

    def step(kind: Any, *rest: Any) -> Any:
        card.use_stream()
        if kind == "reference" and garbage:
            card.take(garbage, Cycle())
        return platform.step(kind, *rest)

    return replace(
        platform,
        info=replace(platform.info, reference=False, free_bytes=card.free_bytes),
        capture=capture,
        replay=lambda graph: graph.request.forward(),
        update_boundaries=lambda graph, update: graph.request.packed.copy_(update.block),
        release=release,
        step=step,
    )
