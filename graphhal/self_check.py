"""Compares every captured graph with the same adapter's eager forward on its worst cases.

Before each comparison the shared inputs, the static output and, where the platform can, the free
memory of the graph pool are filled with NaN: a graph that reads a row nobody wrote shows it.
"""

import logging
from collections.abc import Hashable, Iterator, Sequence
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
    cosine = torch.nn.functional.cosine_similarity(ours, reference, dim=1)
    return (ours - reference).norm(dim=1), reference.norm(dim=1), cosine


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

    Of every graph the exactly full case always runs and, unless the check is quick, the one with
    most padding: the full case of the next smaller graph, whose eager reference is there already.
    The other worst cases take turns, graph by graph, while the check has taken less than
    `budget_seconds`. The caller drops a graph when it is yielded.
    """
    if mode is SelfCheck.OFF:
        return
    started = perf_counter()

    def problem(key: GraphKey, items: tuple[ItemSpec, ...], eager: _References) -> str | None:
        entry = graphs.entries[key]
        reason = _compare(adapter, execution, graphs, entry, items, eager, tolerance)
        return peers.first_problem(f"self-check of {key}", reason)

    full: dict[str, tuple[ItemSpec, ...]] = {}
    references: dict[str, _References] = {}
    others: dict[GraphKey, list[tuple[ItemSpec, ...]]] = {}
    for entry in sorted(graphs.entries.values(), key=lambda e: e.capacity.rows):
        capacity, path = entry.capacity, entry.capacity.key.path
        try:
            cases = list(execution.worst_cases(capacity))
        except Exception as error:
            log.debug("%s: no worst cases", capacity.key, exc_info=True)
            yield capacity.key, f"self-check: no worst cases: {type(error).__name__}: {error}"
            continue
        most_padding = full.get(path)
        if most_padding is not None and execution.fits(capacity, most_padding):
            cases.insert(1, most_padding)
        eager = references.setdefault(path, {})
        reason = None
        for items in cases[: 1 if mode is SelfCheck.QUICK else 2]:
            reason = reason or problem(capacity.key, items, eager)
        if reason is not None:
            yield capacity.key, reason
        elif mode is SelfCheck.FULL:
            others[capacity.key] = cases[2:]
        full[path] = cases[0]
        references[path] = {k: v for k, v in eager.items() if k == _case_key(cases[0])}
    for turn in range(max(map(len, others.values()), default=0)):
        for key, cases in others.items():
            if turn >= len(cases) or key not in graphs.entries:
                continue
            # Ranks must run the same cases, so only a rank alone may stop for lack of time.
            if peers.size == 1 and perf_counter() - started > budget_seconds:
                return
            reason = problem(key, cases[turn], {})
            if reason is not None:
                yield key, reason


def _case_key(items: Sequence[ItemSpec]) -> Hashable:
    return tuple((i.modality, i.signature, i.frames, i.rows, i.tokens) for i in items)


def _compare(
    adapter: EncoderAdapter,
    execution: Execution,
    graphs: GraphSet,
    entry: Entry,
    items: tuple[ItemSpec, ...],
    eager: _References,
    tolerance: float | None,
) -> str | None:
    """Why the graph disagrees with eager on these items, or None."""
    starts = token_starts(items)
    key = _case_key(items)
    group = GroupOutput(starts[-1])
    try:
        request = adapter.example(items, seed=1)
        if key not in eager:
            reference = GroupOutput(starts[-1])
            execution.eager(request, items, starts, reference, "reference")
            eager[key] = reference.filled()
        graphs.poison(entry)
        execution.replay(request, execution.prepare(entry, items, starts), group)
        with graphs.reference_step(entry.graph.request.inputs):
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
