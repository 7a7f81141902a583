"""A workload trace: what requests looked like, and how a ladder would have served them."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from graphhal.errors import InputError
from graphhal.items import ItemSpec
from graphhal.plan import Capacity, Eager, GraphKey, MissReason, Planner
from graphhal.settings import MOST_TOKENS

Positive = Annotated[int, Field(gt=0, le=10**9)]
Tokens = Annotated[int, Field(gt=0, le=MOST_TOKENS)]
Frames = Annotated[int, Field(gt=0, le=10**5)]
LARGEST_TRACE_BYTES = 64 * 2**20


class TraceItem(BaseModel):
    """One item of a request.

    Attributes:
        modality: `"image"`, `"video"`, `"audio"`.
        tokens: output tokens.
        frames: equal frames, for a video.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    modality: str
    tokens: Tokens
    frames: Frames = 1

    @model_validator(mode="after")
    def _whole_frames(self) -> "TraceItem":
        if self.tokens % self.frames:
            raise ValueError(f"{self.tokens} tokens cannot be {self.frames} equal frames")
        return self


class TraceGroup(BaseModel):
    """Items that were encoded together.

    Attributes:
        items: in request order.
        count: how often such a group came.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    items: Annotated[list[TraceItem], Field(min_length=1)]
    count: Positive = 1


class Trace(BaseModel):
    """A workload trace file.

    Attributes:
        schema_version: 1; written as `schema`.
        groups: in any order.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    schema_version: Literal[1] = Field(alias="schema")
    groups: Annotated[list[TraceGroup], Field(min_length=1)]


def read_trace(path: Path) -> Trace:
    """A trace from a JSON file.

    Raises:
        InputError: no such file, not JSON, or not a trace; names the field.
    """
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST_TRACE_BYTES + 1)
    except OSError as error:
        raise InputError(f"trace {path} cannot be read: {error.strerror}") from error
    if len(text) > LARGEST_TRACE_BYTES:
        raise InputError(f"trace {path} is larger than {LARGEST_TRACE_BYTES >> 20} MiB")
    try:
        return Trace.model_validate_json(text)
    except ValidationError as error:
        found = error.errors()[0]
        where = ".".join(map(str, found["loc"])) or "the document"
        example = json.dumps(
            {"schema": 1, "groups": [{"items": [{"modality": "image", "tokens": 196}], "count": 9}]}
        )
        raise InputError(
            f"trace {path}: {where}: {found['msg']}. A trace looks like {example}"
        ) from error


def items_beside(trace: Trace, modalities: Collection[str]) -> Counter[str]:
    """Items of other modalities than these, by modality: misspelt, or of other towers."""
    beside: Counter[str] = Counter()
    for group in trace.groups:
        for item in group.items:
            if item.modality not in modalities:
                beside[item.modality] += group.count
    return beside


def item_spec(index: int, item: TraceItem, shape: Capacity) -> ItemSpec:
    """An item of this size, with rows and attention sequences in a graph's proportions.

    A trace has sizes alone: sequences are taken to be as long as the graph's bound allows.

    Args:
        index: in the request.
        item: of the trace.
        shape: any graph of the item's path.
    """
    frame_tokens = item.tokens // item.frames
    sequences: dict[str, tuple[int, ...]] = {}
    for name, bound in shape.sequences.items():
        rows = ceil(frame_tokens * bound.rows / shape.tokens)
        longest = min(bound.max_seqlen, rows)
        ends = [*range(longest, rows, longest), rows]
        lengths = tuple(end - start for start, end in zip([0, *ends], ends, strict=False))
        sequences[name] = lengths * item.frames
    return ItemSpec(
        index=index,
        modality=item.modality,
        rows=ceil(frame_tokens * shape.rows / shape.tokens) * item.frames,
        tokens=item.tokens,
        sequences=sequences,
        signature=(item.modality, item.tokens, item.frames),
        frames=item.frames,
        splittable=item.frames > 1,
    )


@dataclass(slots=True)
class Coverage:
    """How a ladder serves a trace; every count is weighted by how often its group came.

    Attributes:
        items: of this tower's modalities.
        hits: items served by replay.
        misses: items by reason.
        replays: launches by graph.
        rows_used: input rows of the replayed items.
        rows_replayed: rows that the graphs computed for them.
    """

    items: int = 0
    hits: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    replays: Counter[GraphKey] = field(default_factory=Counter)
    rows_used: int = 0
    rows_replayed: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of items served by replay."""
        return self.hits / self.items if self.items else 0.0

    @property
    def padding_waste(self) -> float:
        """Share of replayed rows that were padding."""
        return 1 - self.rows_used / self.rows_replayed if self.rows_replayed else 0.0


def cover(
    trace: Trace,
    shapes: Mapping[str, Capacity],
    planner: Planner,
    modalities: Collection[str] = (),
) -> Coverage:
    """Plan every group of a trace.

    Args:
        trace: of the workload.
        shapes: any graph of each modality that has one.
        planner: over the ladder in question.
        modalities: that the tower encodes, with a graph or without.
    """
    coverage = Coverage()
    eager = set(modalities) - set(shapes)
    for group in trace.groups:
        without = sum(item.modality in eager for item in group.items) * group.count
        if without:
            coverage.items += without
            coverage.misses[str(MissReason.NO_GRAPHS)] += without
        known = [item for item in group.items if item.modality in shapes]
        specs = _placed([item_spec(n, item, shapes[item.modality]) for n, item in enumerate(known)])
        if not specs:
            continue
        coverage.items += len(specs) * group.count
        missed: set[int] = set()
        for step in planner.plan(specs).steps:
            if isinstance(step, Eager):
                missed.update(item.index for item in step.items)
                coverage.misses[str(step.reason)] += len(step.items) * group.count
            else:
                coverage.replays[step.capacity.key] += group.count
                coverage.rows_used += sum(item.rows for item in step.items) * group.count
                coverage.rows_replayed += step.capacity.rows * group.count
        coverage.hits += (len(specs) - len(missed)) * group.count
    return coverage


def _placed(specs: Sequence[ItemSpec]) -> list[ItemSpec]:
    """The items one after another in their request's input."""
    starts = [0, *accumulate(spec.rows for spec in specs)]
    return [
        ItemSpec(
            index=spec.index,
            modality=spec.modality,
            rows=spec.rows,
            tokens=spec.tokens,
            sequences=spec.sequences,
            signature=spec.signature,
            row_offset=start,
            frames=spec.frames,
            splittable=spec.splittable,
        )
        for spec, start in zip(specs, starts, strict=False)
    ]


def modality_shapes(
    modalities: Sequence[str], ladder: Sequence[Capacity], path_of: Callable[[ItemSpec], str]
) -> dict[str, Capacity]:
    """The largest graph of each modality's path; modalities without a graph are left out."""
    shapes = {}
    for modality in modalities:
        path = path_of(ItemSpec(0, modality, 1, 1, {}, (modality,)))
        own = [capacity for capacity in ladder if capacity.key.path == path]
        if own:
            shapes[modality] = max(own, key=lambda capacity: capacity.rows)
    return shapes
