"""Which captured graph holds which items: pure decisions on host integers, no tensors."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

from graphhal.boundaries import Boundaries
from graphhal.cost_table import CostTable
from graphhal.errors import AdapterError, BoundariesError
from graphhal.items import ItemSpec
from graphhal.settings import Policy

WORTHWHILE = 0.03
"""Share of the time that another plan must save to replace the smallest graph: repeated timings of
one replay differ by 1-2 % on an H200, and fewer, fuller graphs round as eager does more often."""


LONE_ROOM = 1 / 8
"""Share by which a lone graph may be larger than the smallest one that holds a group and still be
preferred: attention of one image of 1600 tokens took 0.67 of the time on an H200."""


class MissReason(StrEnum):
    """Why items ran eagerly; every miss is counted under one of these."""

    NO_GRAPHS = "no graph is captured"
    TOO_MANY_ROWS = "more rows than the largest graph"
    TOO_MANY_ITEMS = "more items than a graph's slots"
    TOO_MANY_SEQUENCES = "more attention sequences than a graph's slots"
    SEQUENCE_TOO_LONG = "an attention sequence is longer than the captured bound"
    EMPTY_SLOT = "an empty slot that the platform's kernel cannot take"
    NOT_EXACT = "no graph of exactly this size, and only exact ones are allowed"
    REFUSED = "the adapter does not replay such a group"
    CHEAPER_EAGER = "measured: eager is cheaper"
    OUTER_CAPTURE = "another capture is running on this stream, or the pool is not clean"
    NESTED = "asked for while another request of this thread is being replayed"
    REPLAY_FAILED = "the replay failed"
    WEIGHTS_MOVED = "weights were rebound after capture"


@dataclass(frozen=True, slots=True, order=True)
class GraphKey:
    """Names one captured graph.

    Attributes:
        adapter: name of the adapter.
        path: modality or path within it (`"image"`, `"audio"`, `"global"`, …).
        size: token budget, or chunk count for audio.
        axes: further capture axes, sorted pairs.
    """

    adapter: str
    path: str
    size: int
    axes: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        axes = "".join(f",{name}={value}" for name, value in self.axes)
        return f"{self.adapter}/{self.path}[{self.size}{axes}]"


@dataclass(frozen=True, slots=True)
class SequenceBound:
    """What one boundary set of a graph can hold; `max_seqlen` is baked at capture.

    The guard (`Capacity.misfit`) and the captured forward read the same number.
    """

    rows: int
    slots: int
    max_seqlen: int


@dataclass(frozen=True)
class Capacity:
    """What one graph holds at most, known before it is captured.

    Attributes:
        key: the graph.
        rows: input rows of its static input.
        tokens: output rows (the token budget).
        items: items at most.
        sequences: per boundary set, its bound.
        lone_from: rows from which a sequence that is alone is attended to by another kernel, in
            graphs of two slots (it and its padding) and eagerly; `PlatformInfo.lone_sequence_from`.
        gathers_last: the forward ends with picking the items' tokens, so that their number decides
            nothing about how they are computed.
    """

    key: GraphKey
    rows: int
    tokens: int
    items: int
    sequences: Mapping[str, SequenceBound]
    lone_from: int | None = None
    gathers_last: bool = False

    @property
    def lone(self) -> bool:
        """It is captured with the kernel for one sequence and its padding."""
        return any(map(self._is_lone, self.sequences))

    def _is_lone(self, name: str) -> bool:
        bound = self.sequences[name]
        return (
            self.lone_from is not None
            and bound.slots <= 2
            and bound.max_seqlen >= bound.rows >= self.lone_from
        )

    @classmethod
    def of(cls, items: Sequence[ItemSpec], key: GraphKey) -> "Capacity":
        """The capacity that these items fill exactly: what an eager call uses."""
        lengths = _lengths(items)
        return cls(
            key=key,
            rows=sum(item.rows for item in items),
            tokens=sum(item.tokens for item in items),
            items=len(items),
            sequences={
                name: SequenceBound(sum(values), len(values), max(values))
                for name, values in lengths.items()
            },
        )

    def misfit(self, items: Sequence[ItemSpec], allow_empty: bool = True) -> MissReason | None:
        """Why this graph cannot hold the items, or None where it can.

        Raises:
            AdapterError: they have a boundary set that the graph lacks.
        """
        if sum(item.rows for item in items) > self.rows:
            return MissReason.TOO_MANY_ROWS
        if sum(item.tokens for item in items) > self.tokens:
            return MissReason.TOO_MANY_ROWS
        if len(items) > self.items:
            return MissReason.TOO_MANY_ITEMS
        for name, values in _lengths(items).items():
            bound = self.sequences.get(name)
            if bound is None:
                raise AdapterError(
                    f"{self.key}: item_specs names the boundary set {name!r}, capacities only "
                    f"{sorted(self.sequences)}"
                )
            slack = bound.rows - sum(values)
            if slack < 0:
                return MissReason.TOO_MANY_ROWS
            if max(values) > bound.max_seqlen:
                return MissReason.SEQUENCE_TOO_LONG
            dummies = -(-slack // bound.max_seqlen)
            if len(values) + dummies > bound.slots:
                return MissReason.TOO_MANY_SEQUENCES
            if not allow_empty and len(values) + slack < bound.slots:
                return MissReason.EMPTY_SLOT
        return None

    def is_exact_for(self, items: Sequence[ItemSpec]) -> bool:
        """Whether the items leave no padding row, so that a replay does the eager arithmetic."""
        return (
            sum(item.rows for item in items) == self.rows
            and (self.gathers_last or sum(item.tokens for item in items) == self.tokens)
            and all(
                sum(lengths) == self.sequences[name].rows
                and self._eager_is_lone(lengths) == self._is_lone(name)
                for name, lengths in _lengths(items).items()
            )
        )

    def _eager_is_lone(self, lengths: Sequence[int]) -> bool:
        return self.lone_from is not None and len(lengths) == 1 and lengths[0] >= self.lone_from

    @property
    def attention_room(self) -> int:
        """Rows that attention is launched for: every slot as long as the bound."""
        return sum(bound.slots * bound.max_seqlen for bound in self.sequences.values())

    def attention_work(self, items: Sequence[ItemSpec]) -> int:
        """Sum of the squared sequence lengths that attention computes, padding included."""
        work = 0
        for name, values in _lengths(items).items():
            bound = self.sequences[name]
            whole, rest = divmod(max(0, bound.rows - sum(values)), bound.max_seqlen)
            work += sum(v * v for v in values) + whole * bound.max_seqlen**2 + rest * rest
        return work

    def boundaries(
        self, items: Sequence[ItemSpec], allow_empty: bool = True
    ) -> Mapping[str, Boundaries]:
        """Boundaries of the items, per set, padded to this capacity's rows and slots.

        Raises:
            BoundariesError: the items do not fit (see `misfit`).
        """
        result = {}
        for name, values in _lengths(items).items():
            bound = self.sequences[name]
            if max(values) > bound.max_seqlen:
                raise BoundariesError(
                    f"{self.key}: a sequence of {max(values)} rows is longer than the bound "
                    f"{bound.max_seqlen} of {name}, which is baked at capture"
                )
            result[name] = Boundaries.from_lengths(values).padded_to(
                bound.rows, bound.slots, bound.max_seqlen, allow_empty
            )
        return result


@dataclass(frozen=True, slots=True)
class Replay:
    """Replay one graph for these items."""

    capacity: Capacity
    items: tuple[ItemSpec, ...]


@dataclass(frozen=True, slots=True)
class Eager:
    """One eager call for these items, and why."""

    items: tuple[ItemSpec, ...]
    reason: MissReason


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps that cover every token of a group exactly once."""

    steps: tuple[Replay | Eager, ...]


class Planner:
    """Turns the items of a group into a plan, under one policy.

    Args:
        capacities: graphs that can be replayed now.
        policy: `single`, `packed` or `measured`.
        path_of: the path (ladder) that items belong to.
        refusal: the adapter's word that a group must run eagerly, or None.
        exact_only: replay only where a graph leaves no padding row.
        allow_empty: whether the platform's kernel takes empty sequences.
        costs: needed by `measured`.
        without: why items miss where their path has no graph.
    """

    def __init__(
        self,
        capacities: Sequence[Capacity],
        policy: Policy,
        path_of: Callable[[ItemSpec], str],
        refusal: Callable[[Sequence[ItemSpec]], str | None],
        exact_only: bool = False,
        allow_empty: bool = True,
        costs: CostTable | None = None,
        without: MissReason = MissReason.NO_GRAPHS,
    ) -> None:
        self._ladders: dict[str, list[Capacity]] = {}
        for capacity in sorted(
            capacities, key=lambda c: (c.rows, c.tokens, not c.lone, c.attention_room, c.key)
        ):
            self._ladders.setdefault(capacity.key.path, []).append(capacity)
        self._policy = policy
        self._path_of = path_of
        self._refusal = refusal
        self._exact_only = exact_only
        self._allow_empty = allow_empty
        self._costs = costs or CostTable()
        self._without = without

    def plan(self, items: Sequence[ItemSpec]) -> Plan:
        """Cover the items exactly once, cheapest first where costs are known."""
        plans = [self._plan_path(*part) for part in by_path(items, self._path_of)]
        return Plan(tuple(chain.from_iterable(plan.steps for plan in plans)))

    def _plan_path(self, path: str, group: tuple[ItemSpec, ...]) -> Plan:
        if self._refusal(group) is not None:
            return Plan((Eager(group, MissReason.REFUSED),))
        ladder = self._ladders.get(path, [])
        whole = self._smallest(ladder, group)
        if isinstance(whole, Capacity):
            one = Plan((Replay(whole, group),))
            return (
                one if self._policy is not Policy.MEASURED else self._cheapest(ladder, group, one)
            )
        eager = Plan((Eager(group, whole),))
        if self._exact_only:
            return eager
        if all(item.splittable for item in group):
            frames = self._by_frames(ladder, group)
            if frames is None or self._policy is not Policy.MEASURED:
                return frames or eager
            return self._cheaper(group, frames)
        if self._policy is Policy.SINGLE:
            return eager
        packed = self._pack(ladder, group, whole)
        return packed if self._policy is Policy.PACKED else self._cheaper(group, packed)

    def _smallest(
        self, ladder: Sequence[Capacity], items: Sequence[ItemSpec]
    ) -> Capacity | MissReason:
        """The smallest graph that holds the items, or a lone one that is hardly larger; else why
        the largest one does not."""
        reason = self._without
        smallest: Capacity | None = None
        for capacity in ladder:
            if smallest is not None:
                if smallest.lone or capacity.rows > smallest.rows * (1 + LONE_ROOM):
                    return smallest
                if not capacity.lone:
                    continue
            misfit = capacity.misfit(items, self._allow_empty)
            if misfit is None and self._exact_only and not capacity.is_exact_for(items):
                misfit = MissReason.NOT_EXACT
            if misfit is None:
                smallest = capacity
            else:
                reason = misfit
        return reason if smallest is None else smallest

    def _by_frames(self, ladder: Sequence[Capacity], items: Sequence[ItemSpec]) -> Plan | None:
        """Successive frames, as many a replay as a graph holds; None where one is too much."""
        batches: list[list[ItemSpec]] = [[]]
        for item in items:
            first = 0
            while first < item.frames:
                take = self._most_frames(ladder, batches[-1], item, first)
                if take == 0 and not batches[-1]:
                    return None
                if take == 0:
                    batches.append([])
                    continue
                batches[-1].append(item.chunk(first, take))
                first += take
        return Plan(tuple(self._replays(ladder, batches)))

    def _most_frames(
        self, ladder: Sequence[Capacity], batch: Sequence[ItemSpec], item: ItemSpec, first: int
    ) -> int:
        # A frame makes a token or more, so no more of them fit than a graph has tokens.
        low = 0
        high = min(item.frames - first, max((c.tokens for c in ladder), default=0))
        while low < high:
            middle = (low + high + 1) // 2
            fits = self._smallest(ladder, (*batch, item.chunk(first, middle)))
            low, high = (middle, high) if isinstance(fits, Capacity) else (low, middle - 1)
        return low

    def _pack(
        self, ladder: Sequence[Capacity], items: Sequence[ItemSpec], reason: MissReason
    ) -> Plan:
        """Greedy packing, smallest items first; what no graph holds goes into ONE eager call."""
        batches: list[list[ItemSpec]] = [[]]
        left: list[ItemSpec] = []
        for item in sorted(items, key=lambda i: (i.tokens, i.index)):
            if isinstance(self._smallest(ladder, (*batches[-1], item)), Capacity):
                batches[-1].append(item)
                continue
            alone = self._smallest(ladder, (item,))
            if isinstance(alone, Capacity):
                batches.append([item])
            else:
                left.append(item)
                reason = alone
        steps: list[Replay | Eager] = list(self._replays(ladder, [b for b in batches if b]))
        if left:
            steps.append(Eager(tuple(sorted(left, key=lambda i: i.index)), reason))
        return Plan(tuple(steps))

    def _replays(
        self, ladder: Sequence[Capacity], batches: Sequence[Sequence[ItemSpec]]
    ) -> Iterator[Replay]:
        for batch in batches:
            capacity = self._smallest(ladder, batch)
            if isinstance(capacity, Capacity):
                yield Replay(capacity, tuple(batch))

    def _cheapest(self, ladder: Sequence[Capacity], items: Sequence[ItemSpec], one: Plan) -> Plan:
        """Among all graphs that hold the group, the group packed, and eager: the cheapest."""
        candidates = [
            Plan((Replay(capacity, tuple(items)),))
            for capacity in ladder
            if capacity.misfit(items, self._allow_empty) is None
            and (not self._exact_only or capacity.is_exact_for(items))
        ]
        if len(items) > 1 and not self._exact_only:
            candidates.append(self._split_plan(ladder, items))
        priced = [(cost, plan) for plan in candidates if (cost := self._cost(plan)) is not None]
        best, best_cost = one, self._cost(one)
        for cost, plan in priced:
            if best_cost is None or cost < best_cost * (1 - WORTHWHILE):
                best, best_cost = plan, cost
        return self._cheaper(items, best)

    def _split_plan(self, ladder: Sequence[Capacity], items: Sequence[ItemSpec]) -> Plan:
        halves = [[item] for item in items]
        return Plan(tuple(self._replays(ladder, halves)))

    def _cheaper(self, items: Sequence[ItemSpec], plan: Plan) -> Plan:
        eager = Plan((Eager(tuple(items), MissReason.CHEAPER_EAGER),))
        planned, eager_cost = self._cost(plan), self._cost(eager)
        if planned is None or eager_cost is None:
            return plan
        return eager if eager_cost < planned else plan

    def _cost(self, plan: Plan) -> float | None:
        """Expected milliseconds of a plan; None where something was not measured."""
        total = 0.0
        for step in plan.steps:
            if isinstance(step, Replay):
                work = step.capacity.attention_work(step.items)
                cost = self._costs.replay_ms(step.capacity.key, work)
            else:
                rows = sum(item.rows for item in step.items)
                exact = Capacity.of(step.items, GraphKey("", "", 0))
                work = exact.attention_work(step.items)
                cost = self._costs.eager_ms(self._path_of(step.items[0]), rows, work)
            if cost is None:
                return None
            total += cost
        return total


def by_path(
    items: Sequence[ItemSpec], path_of: Callable[[ItemSpec], str]
) -> list[tuple[str, tuple[ItemSpec, ...]]]:
    """The items of each path, in order: what graphs and eager calls take together."""
    parts: dict[str, list[ItemSpec]] = {}
    for item in items:  # asked once: an item must be in one part whatever is answered
        parts.setdefault(path_of(item), []).append(item)
    return [(path, tuple(parts[path])) for path in sorted(parts)]


def _lengths(items: Sequence[ItemSpec]) -> dict[str, tuple[int, ...]]:
    """Per boundary set, the lengths of all sequences of the items, in order."""
    names = items[0].sequences if items else ()
    return {name: tuple(chain.from_iterable(i.sequences[name] for i in items)) for name in names}
