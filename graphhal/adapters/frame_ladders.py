"""Which graphs images and films get, and the groups that show whether a graph is right."""

from collections.abc import Iterator
from typing import NamedTuple

from graphhal.adapters.token_ladder import token_budgets
from graphhal.plan import Capacity
from graphhal.settings import Settings

MAX_FRAME_PATCHES = 4096
"""Patches of one video frame, at most: the bound that video graphs bake, and their guard reads."""
SMALL_FRAME_PATCHES = 1024
"""The bound of graphs for many frames. A kernel's work grows with slots x bound, however few of
them a film uses: 65 slots of 4096 patches cost FlashAttention 65 µs a layer on an H200."""
LARGE_FRAMES = 8
"""Frames in a graph for larger ones, at most. Such graphs end where one frame fills them, since
longer films replay them over successive frames."""
VIDEO_LADDER_STEPS, BUSY_VIDEO_LADDER_STEPS = 4, 8
"""Budgets in each doubling of the video ladder, and where a card is busy with rows."""
LONE_LADDER_STEPS = 8
"""Budgets in each doubling of the ladder of lone images: a graph takes 3.5 MiB of the driver's and,
with its self-check, a second at start-up."""

Sizes = list[tuple[int, int]]
"""Items of a group: frames, and tokens of a frame."""


class FrameGraph(NamedTuple):
    """What one graph holds.

    Attributes:
        tokens: its budget.
        items: images or films, at most.
        slots: attention sequences, padding included.
        longest: patches of one frame, at most.
        axes: tell it from others of its budget.
    """

    tokens: int
    items: int
    slots: int
    longest: int
    axes: tuple[tuple[str, int], ...] = ()


def image_graphs(settings: Settings, area: int, lone_from: int | None) -> Iterator[FrameGraph]:
    """A dense ladder, and graphs of their own for large images, where that is faster.

    Args:
        area: patches of a token.
        lone_from: patches from which one image is faster in a graph of its own; None for never.
    """
    for budget in token_budgets(settings):
        items = min(settings.max_items, budget)
        yield FrameGraph(budget, items, min(items + 1, budget), budget * area)
    if lone_from is None or settings.max_items == 1:
        return
    for budget in token_budgets(settings, LONE_LADDER_STEPS, LONE_LADDER_STEPS):
        if budget * area >= lone_from:
            yield FrameGraph(budget, 1, min(2, budget), budget * area, (("items", 1),))


def video_graphs(settings: Settings, area: int) -> Iterator[FrameGraph]:
    """A coarser ladder: graphs for many frames, and for few larger ones; `area` as above."""

    def graph(
        budget: int, frames: int, longest: int, axes: tuple[tuple[str, int], ...] = ()
    ) -> FrameGraph:
        padding = -(-(budget - frames) * area // longest)
        return FrameGraph(budget, min(settings.max_items, frames), frames + padding, longest, axes)

    for budget in token_budgets(settings, VIDEO_LADDER_STEPS, BUSY_VIDEO_LADDER_STEPS):
        rows, frames = budget * area, min(settings.max_frames, budget)
        longest = min(rows, MAX_FRAME_PATCHES)
        if frames <= LARGE_FRAMES or rows <= SMALL_FRAME_PATCHES:
            yield graph(budget, frames, longest)
            continue
        yield graph(budget, frames, SMALL_FRAME_PATCHES)
        if rows <= MAX_FRAME_PATCHES or settings.token_budgets is not None:
            yield graph(budget, LARGE_FRAMES, longest, (("frames", LARGE_FRAMES),))


def nearly_equal(capacity: Capacity) -> Sizes:
    """As many images, or films of one frame, as fit, nearly equally large."""
    share, more = divmod(capacity.tokens, capacity.items)
    return [(1, share + (n < more)) for n in range(capacity.items)]


def worst_images(capacity: Capacity, slots: int, area: int) -> Iterator[Sizes]:
    """Full, one token short, many short sequences at full and at low load; as full as can be where
    every slot needs a row."""
    budget, items = capacity.tokens, capacity.items
    yield [(1, budget)]
    yield [(1, budget - 1)]
    yield [(1, budget // items)] * items
    yield [(1, 1)] * (items - 1) + [(1, budget - items + 1)]
    yield [(1, _filled(capacity, slots, area))]
    yield [(1, 1)] * items


def worst_films(capacity: Capacity, slots: int, longest: int, area: int) -> Iterator[Sizes]:
    """As for images, of films whose frames have at most `longest` tokens."""
    budget, items = capacity.tokens, capacity.items
    frames = next(n for n in range(slots, 0, -1) if n - (-(budget - n) // longest) <= slots)
    for tokens in (budget, budget - 1, _filled(capacity, slots, area)):
        yield _films(tokens, longest, frames, items)
    if items > 1:
        yield [(frames // 2, 1), (1, min(longest, budget - frames // 2))]
    yield [(frames, 1)]


def _filled(capacity: Capacity, slots: int, area: int) -> int:
    return capacity.tokens - -(-(slots - 1) // area)


def _films(tokens: int, longest: int, frames: int, items: int) -> Sizes:
    """Films with `tokens` tokens in all, or as near as fits."""
    for count in range(-(-tokens // longest), frames + 1):
        if count and tokens % count == 0:
            return [(count, tokens // count)]
    count = min(tokens // longest, frames)
    rest = min(longest, tokens - count * longest)
    return [(count, longest)] + [(1, rest)] * (items > 1 and count < frames)
