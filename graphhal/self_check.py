"""Compares every captured graph with the same adapter's eager forward on its worst cases.

Before each comparison the shared inputs, the static output and, where the platform can, the free
memory of the graph pool are filled with NaN: a graph that reads a row nobody wrote shows it.
"""

import logging
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from graphhal.adapter import EncoderAdapter
from graphhal.execution import Execution, GroupOutput, OuterCaptureError
from graphhal.graph_set import Entry, GraphSet
from graphhal.items import ItemSpec
from graphhal.outputs import token_starts
from graphhal.peers import Peers
from graphhal.plan import GraphKey
from graphhal.settings import SelfCheck

log = logging.getLogger(__name__)

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""Relative L2 by dtype of a whole output: padded rows let GEMMs pick other kernels, which round
differently; a stale boundary or a foreign row is off by 0.1 and more."""
TOKEN_FACTOR = 8.0
"""One token may differ by this many times the tolerance: a single wrong row must not drown."""

COMPARED = 2**21
"""Elements that are compared at a time: in float64 they take some 64 MiB, not a card's rest."""

_Case = tuple[ItemSpec, ...]
_References = dict[Hashable, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Difference:
    """How far two outputs of the same items are apart.

    Attributes:
        relative_l2: of the whole, ‖graph − eager‖ / ‖eager‖.
        worst_token: largest relative L2 of one token.
        min_cosine: smallest cosine of one token.
        bit_equal: every element is the same.
    """

    relative_l2: float
    worst_token: float
    min_cosine: float
    bit_equal: bool

    @classmethod
    def between(cls, graph: torch.Tensor, eager: torch.Tensor) -> "Difference":
        """Compare (tokens, width) outputs; NaN anywhere in either makes every figure NaN."""
        if graph.numel() == eager.numel() == 0:
            return cls(0.0, 0.0, 1.0, graph.shape == eager.shape)
        rows = max(1, COMPARED // max(1, eager.shape[1]))
        parts = zip(torch.split(graph, rows), torch.split(eager, rows), strict=True)
        delta, norms, cosine = (
            torch.cat(figures)
            for figures in zip(*(_by_token(*part) for part in parts), strict=True)
        )
        floor = norms.mean().clamp(min=torch.finfo(torch.float64).tiny)
        figures = torch.stack(
            [
                delta.norm() / norms.norm().clamp(min=torch.finfo(torch.float64).tiny),
                (delta / norms.maximum(1e-3 * floor)).max(),
                cosine.min(),
            ]
        ).tolist()
        relative_l2, worst_token, min_cosine = figures
        return cls(relative_l2, worst_token, min_cosine, torch.equal(graph, eager))

    def exceeds(self, tolerance: float) -> bool:
        """Whether the outputs disagree; not a number counts as disagreement."""
        within = self.relative_l2 <= tolerance and self.worst_token <= TOKEN_FACTOR * tolerance
        return not within


def _by_token(graph: torch.Tensor, eager: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """‖graph − eager‖, ‖eager‖ and the cosine of each token, in float64."""
    ours, reference = graph.double(), eager.double()
    norm, dot = reference.norm(dim=1), torch.linalg.vecdot(ours, reference)
    smallest = torch.finfo(torch.float64).tiny
    cosine = dot / (ours.norm(dim=1) * norm).clamp(min=smallest)
    return (ours - reference).norm(dim=1), norm, cosine


def check(
    adapter: EncoderAdapter,
    execution: Execution,
    graphs: GraphSet,
    mode: SelfCheck,
    tolerance: float | None,
    budget_seconds: float,
    peers: Peers,
) -> Iterator[tuple[GraphKey, str]]:
    """Yield (key, reason) of every graph that must not be used.

    A quick check runs the exactly full case of every graph. A full one always runs two that take
    little time: the exactly full case with the shortest sequences, and the one with most padding,
    which is that case of the next smaller graph, whose eager reference is there already (of the
    smallest graph the first two of its worst cases instead). The others, longest sequences first,
    take turns graph by graph while the next will have ended within `budget_seconds`. Where any of
    them fails, a graph of the same path that had no time for all of its own is not used either.

    A case that a graph fails becomes one of the other graphs of its path: they would serve it now.

    The caller drops a graph when it is yielded.
    """
    if mode is SelfCheck.OFF:
        return
    started = perf_counter()
    slowest = 0.0

    def problem(key: GraphKey, items: _Case, eager: _References) -> str | None:
        nonlocal slowest
        began = perf_counter()
        entry = graphs.entries[key]
        reason = _compare(adapter, execution, graphs, entry, items, eager, tolerance)
        slowest = max(slowest, perf_counter() - began)
        return peers.first_problem(f"self-check of {key}", reason)

    full: dict[str, _Case] = {}
    references: dict[str, _References] = {}
    others: dict[GraphKey, list[_Case]] = {}
    suspects: dict[str, list[_Case]] = {}
    for entry in sorted(graphs.entries.values(), key=lambda e: e.capacity.rows):
        capacity, path = entry.capacity, entry.capacity.key.path
        try:
            cases = list(execution.worst_cases(capacity))
        except Exception as error:
            log.debug("%s: no worst cases", capacity.key, exc_info=True)
            yield capacity.key, f"self-check: no worst cases: {type(error).__name__}: {error}"
            continue
        if not cases:
            yield capacity.key, "self-check: none of its worst cases fits"
            continue
        always = cases[:1]
        if mode is SelfCheck.FULL:
            always = [_shortest_of_the_fullest(cases)]
            for items in [full[path]] if path in full else cases[:2]:
                if items not in always and execution.fits(capacity, items):
                    always.append(items)
        failed_before = suspects.setdefault(path, [])
        always += [i for i in failed_before if execution.fits(capacity, i)]
        eager = references.setdefault(path, {})
        reason = None
        for items in always:
            reason = problem(capacity.key, items, eager)
            if reason is not None:
                break
        if reason is not None:
            failed_before.append(items)
            yield capacity.key, reason
        elif mode is SelfCheck.FULL:
            others[capacity.key] = [case for case in cases if case not in always]
        full[path] = always[0]
        references[path] = {k: v for k, v in eager.items() if k == _case_key(always[0])}
    failed: set[str] = set()
    turns = deque(_in_turns(others))
    while turns:
        key, items = turns.popleft()
        if key not in graphs.entries:
            continue
        over = perf_counter() - started + slowest > budget_seconds
        if any(peers.exchange("self-check is out of time", over)):  # ranks run the same cases
            break
        reason = problem(key, items, {})
        others[key].remove(items)
        if reason is not None:
            failed.add(key.path)
            yield key, reason
            for other, left in others.items():
                heir = graphs.entries.get(other)
                if heir is None or other.path != key.path:
                    continue
                if execution.fits(heir.capacity, items):
                    left.append(items)
                    turns.appendleft((other, items))
    for key, left in others.items():
        if left and key.path in failed and key in graphs.entries:
            yield key, "self-check: no time for a case that another graph of this path failed"


def _shortest_of_the_fullest(cases: Sequence[_Case]) -> _Case:
    """Of the cases with most rows, the one that attention takes least time for."""

    def rows(items: _Case) -> int:
        return sum(item.rows for item in items)

    def squares(items: _Case) -> int:
        return sum(n * n for item in items for part in item.sequences.values() for n in part)

    most = max(map(rows, cases))
    return min((items for items in cases if rows(items) == most), key=squares)


def _in_turns(cases: Mapping[GraphKey, Sequence[_Case]]) -> list[tuple[GraphKey, _Case]]:
    """One case of each graph after another, small graphs first; before all others one of the
    largest graph of each path, where a sequence can be longest."""
    turns = [
        (key, each[turn])
        for turn in range(max(map(len, cases.values()), default=0))
        for key, each in cases.items()
        if turn < len(each)
    ]
    largest = {key.path: (key, each[0]) for key, each in cases.items() if each}
    first = list(largest.values())
    return first + [pair for pair in turns if pair not in first]


def _case_key(items: Sequence[ItemSpec]) -> Hashable:
    return tuple((i.modality, i.signature, i.frames, i.rows, i.tokens) for i in items)


def _compare(
    adapter: EncoderAdapter,
    execution: Execution,
    graphs: GraphSet,
    entry: Entry,
    items: _Case,
    eager: _References,
    tolerance: float | None,
) -> str | None:
    """Why the graph disagrees with eager on these items, or None."""
    starts = token_starts(items)
    key = _case_key(items)
    group = GroupOutput(starts[-1])
    try:
        request = adapter.example(items, seed=1)
        step, inputs = execution.prepare(entry, items, starts), entry.graph.request.inputs
        if key not in eager:
            reference = GroupOutput(starts[-1])
            execution.eager(request, items, starts, reference, "reference")
            eager[key] = reference.filled()
            with graphs.reference_step(inputs):  # what staging keeps of a request shows in the next
                step.stage(adapter.example(items, seed=2))
        graphs.poison(entry)
        with graphs.reference_step(inputs):  # whose end waits, not for ever
            execution.replay(request, step, group)
        with graphs.reference_step(inputs):
            found = Difference.between(group.filled(), eager[key])
    except OuterCaptureError:
        return "self-check: another capture is running on this stream"
    except Exception as error:
        # Whatever a plugin or an adapter raises costs this graph, never the start-up.
        log.debug("%s: self-check failed", entry.capacity.key, exc_info=True)
        return f"self-check: {type(error).__name__}: {error}"
    allowed = TOLERANCE.get(eager[key].dtype, 2e-2) if tolerance is None else tolerance
    if not found.exceeds(allowed):
        return None
    sizes = ", ".join(str(item.tokens) for item in items[:8]) + (", …" if len(items) > 8 else "")
    return (
        f"self-check: differs from eager by relative L2 {found.relative_l2:.2e} "
        f"(worst token {found.worst_token:.2e}, allowed {allowed:.0e}) "
        f"for {len(items)} items of {sizes} tokens"
    )
