"""How groups of items are served, computed once for equal sizes and kept while that stays true."""

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Integral

from graphhal.adapter import EncoderAdapter, wrong_answer
from graphhal.errors import AdapterError
from graphhal.execution import Execution, PreparedReplay
from graphhal.graph_set import Entry
from graphhal.items import ItemSpec
from graphhal.outputs import token_starts
from graphhal.plan import Eager, GraphKey, MissReason, Planner, by_path

PREPARED_BYTES = 64 * 2**20
"""Host bytes that are kept for groups whose sizes come again."""
ITEM_BYTES = 1024
"""What an item of a kept plan is counted as, its key included; it takes some 600."""
PREPARED_GROUPS = 4096
"""Groups whose plan is kept, eager ones included."""

_Refusals = tuple[tuple[tuple[ItemSpec, ...], str | None], ...]


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """How a group of these sizes is served.

    Attributes:
        items: that it was made for.
        key: their sizes.
        starts: first row of each item in the group's output; one more entry: the end.
        steps: replays and eager calls, in order.
        num_bytes: host bytes of the packed blocks and the items.
        refusals: items of each path and what the adapter said of them; the plan holds while it
            says the same.
    """

    items: tuple[ItemSpec, ...]
    key: Hashable
    starts: tuple[int, ...]
    steps: tuple[PreparedReplay | Eager, ...]
    num_bytes: int
    refusals: _Refusals

    def miss_reason(self) -> MissReason | None:
        """Why any of the items runs eagerly; None where all are replayed."""
        return next((step.reason for step in self.steps if isinstance(step, Eager)), None)


class GroupPlans:
    """Plans of groups by their sizes, the ones used last kept.

    Args:
        adapter: whose items they are.
        execution: prepares replays.
        planner: decides.
        entries: graphs that the planner knows.
    """

    def __init__(
        self,
        adapter: EncoderAdapter,
        execution: Execution,
        planner: Planner,
        entries: Mapping[GraphKey, Entry],
    ) -> None:
        self._adapter = adapter
        self._execution = execution
        self._planner = planner
        self._entries = entries
        self._refuses = type(adapter).refusal is not EncoderAdapter.refusal
        self._kept: OrderedDict[Hashable, GroupPlan] = OrderedDict()
        self._of_same_items: dict[int, GroupPlan] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, items: tuple[ItemSpec, ...]) -> GroupPlan:
        """How to serve these items.

        Adapters keep the specs of sizes that come again, so most plans are found without a look at
        the sizes.

        Raises:
            AdapterError: the specs describe no group that could be served.
        """
        plan = self._of_same_items.get(id(items))  # it holds them, so no others have their id
        if plan is not None:
            key = plan.key
        else:
            key, plan = self._of_equal_sizes(items)
        if plan is not None:
            if self._holds(plan):
                self._kept.move_to_end(key)
                return plan
            self._forget(plan)
        return self._keep(self._made(tuple(items), key))  # a list may hold others tomorrow

    def _of_equal_sizes(self, items: tuple[ItemSpec, ...]) -> tuple[Hashable, GroupPlan | None]:
        """The sizes of the items, and the plan that is kept for them."""
        try:
            key = tuple(
                [(i.modality, i.signature, i.frames, i.row_offset, i.rows, i.tokens) for i in items]
            )
        except (AttributeError, TypeError) as error:
            raise no_specs(self._adapter, items) from error
        try:
            plan = self._kept.get(key)
        except TypeError as error:
            raise AdapterError(
                f"{self._adapter.name}: signatures of items must be hashable: {error}"
            ) from error
        # Equal signatures promise equal sequences, and a wrong one would show in no other way.
        if plan is not None and not all(
            kept.sequences == item.sequences for kept, item in zip(plan.items, items, strict=True)
        ):
            self._forget(plan)
            plan = None
        return key, plan

    def _holds(self, plan: GroupPlan) -> bool:
        return all(self._adapter.refusal(part) == said for part, said in plan.refusals)

    def _keep(self, plan: GroupPlan) -> GroupPlan:
        self._kept[plan.key] = self._of_same_items[id(plan.items)] = plan
        self._num_bytes += plan.num_bytes
        while len(self._kept) > 1 and (
            self._num_bytes > PREPARED_BYTES or len(self._kept) > PREPARED_GROUPS
        ):
            self._forget(next(iter(self._kept.values())))
        return plan

    def _forget(self, plan: GroupPlan) -> None:
        self._num_bytes -= plan.num_bytes
        del self._kept[plan.key], self._of_same_items[id(plan.items)]

    def _made(self, items: tuple[ItemSpec, ...], key: Hashable) -> GroupPlan:
        check_items(self._adapter, items)
        # Before the plan: if the answer changes meanwhile, the next request plans anew.
        refusals = self._refusals(items)
        starts = token_starts(items)
        steps: list[PreparedReplay | Eager] = []
        for step in self._planner.plan(items).steps:
            if isinstance(step, Eager):
                steps.append(step)
            else:
                entry = self._entries[step.capacity.key]
                steps.append(self._execution.prepare(entry, step.items, starts))
        blocks = sum(s.update.block.nbytes for s in steps if isinstance(s, PreparedReplay))
        num_bytes = blocks + ITEM_BYTES * len(items)
        return GroupPlan(items, key, starts, tuple(steps), num_bytes, refusals)

    def _refusals(self, items: tuple[ItemSpec, ...]) -> _Refusals:
        if not self._refuses:
            return ()
        parts = by_path(items, self._adapter.path)
        return tuple((part, self._adapter.refusal(part)) for _, part in parts)


def no_specs(adapter: EncoderAdapter, items: object) -> AdapterError:
    """The error for items that are none."""
    return wrong_answer(adapter, "item_specs", "a tuple of ItemSpec", items)


def check_items(adapter: EncoderAdapter, items: Sequence[ItemSpec]) -> None:
    """Refuse specs that no plan could hold.

    Raises:
        AdapterError: out of order, a later part of an item, without rows, tokens or attention
            sequences, or with sizes that are no host integers.
    """
    if not isinstance(items, Sequence) or not all(isinstance(item, ItemSpec) for item in items):
        raise no_specs(adapter, items)
    if any(item.index != position for position, item in enumerate(items)):
        raise AdapterError(f"{adapter.name}: item_specs must come in request order")
    sets: dict[str, set[str]] = {}
    for item in items:
        if item.token_offset:
            raise AdapterError(
                f"{adapter.name}: item {item.index} is a later part of an item; pass whole ones"
            )
        sequences = item.sequences.values()
        sizes = (item.rows, item.tokens, item.frames, item.row_offset, *chain(*sequences))
        # A tensor adds up in place. Asking for the type first saves a microsecond a sequence.
        if not all(type(size) is int or isinstance(size, Integral) for size in sizes):
            raise AdapterError(
                f"{adapter.name}: sizes of item {item.index} must be host integers, got {item}"
            )
        counts = (item.rows, item.frames, item.tokens + 1, *map(len, sequences), *chain(*sequences))
        if min(counts) < 1:
            raise AdapterError(
                f"{adapter.name}: item {item.index} needs a row and a frame, no tokens below 0, "
                f"and sequences of a row or more, got {item}"
            )
        known = sets.setdefault(adapter.path(item), set(item.sequences))
        if known != set(item.sequences):
            raise AdapterError(
                f"{adapter.name}: items of one path have the same boundary sets, but item "
                f"{item.index} has {sorted(item.sequences)} beside {sorted(known)}"
            )
