"""Runs one tower over real inputs: eager and graph in turn, compared and timed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from statistics import median, quantiles
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from graphhal.cost import synchronize
from graphhal.runner import EncoderGraphs
from graphhal.self_check import TOLERANCE, Difference

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from graphhal.graph_set import Progress
    from graphhal.settings import Settings

SECONDS_PER_INPUT = 1.0
"""An input is repeated less often where its repeats would take longer."""
FEWEST_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Timing:
    """Wall time of one call, device included, in milliseconds.

    Attributes:
        median_ms: of all repeats.
        low_ms: first quartile.
        high_ms: third quartile.
        repeats: timed calls.
    """

    median_ms: float
    low_ms: float
    high_ms: float
    repeats: int

    @classmethod
    def of(cls, milliseconds: Sequence[float]) -> Timing:
        """Summary of two repeats or more."""
        low, _, high = quantiles(milliseconds, n=4, method="inclusive")
        return cls(median(milliseconds), low, high, len(milliseconds))


@dataclass(frozen=True, slots=True)
class InputResult:
    """One line of the table.

    Attributes:
        label: of the input.
        item_tokens: output tokens of each item.
        eager: the eager forward.
        graph: the whole `EncoderGraphs.run`: staging, replay or fallback, copy-out.
        difference: graph against eager, over all items.
        agrees: within the tolerance of the dtype.
        misses: items by reason; empty where every item was replayed.
        replays: launches by graph.
        rows_used: input rows of the items that were replayed.
        rows_replayed: input rows that those graphs computed.
    """

    label: str
    item_tokens: tuple[int, ...]
    eager: Timing
    graph: Timing
    difference: Difference
    agrees: bool
    misses: Mapping[str, int]
    replays: Mapping[str, int]
    rows_used: int
    rows_replayed: int

    @property
    def tokens(self) -> int:
        """Output tokens of all items."""
        return sum(self.item_tokens)

    @property
    def speed_up(self) -> float:
        """Eager over graph, medians."""
        return self.eager.median_ms / self.graph.median_ms

    @property
    def padding_waste(self) -> float:
        """Share of replayed rows that were padding."""
        return 1 - self.rows_used / self.rows_replayed if self.rows_replayed else 0.0

    @property
    def served(self) -> str:
        """`hit`, or the reasons of the misses."""
        if not self.misses:
            return "hit"
        return "; ".join(f"miss: {reason}" for reason in self.misses)


@dataclass(slots=True)
class TowerResult:
    """What the bench found for one tower.

    Attributes:
        tower: name of the adapter factory.
        modality: of its files.
        dtype: of the outputs.
        tolerance: relative L2 that counts as agreement.
        capture: `CaptureReport.as_dict()`.
        inputs: one result per input.
        stats: `EncoderGraphs.stats()` at the end.
    """

    tower: str
    modality: str
    dtype: str
    tolerance: float
    capture: dict[str, Any]
    inputs: list[InputResult] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def agrees(self) -> bool:
        """Whether every input agrees with eager."""
        return all(result.agrees for result in self.inputs)


def allowed_difference(dtype: torch.dtype, settings: Settings) -> float:
    """Relative L2 that graph and eager may differ by."""
    return settings.tolerance or TOLERANCE.get(dtype, 2e-2)


def measure_input(
    graphs: EncoderGraphs, label: str, request: Mapping[str, Any], repeat: int
) -> InputResult:
    """Encode one request both ways, compare, and time both in turn.

    Args:
        graphs: captured.
        label: of the input.
        request: keyword arguments of the model, as `AdapterFactory.load` makes them.
        repeat: timed calls of each kind, at most.
    """
    device = graphs.adapter.device
    eager = graphs.run_eager(request)
    before = _counters(graphs)
    ours = graphs.run(request)
    after = _counters(graphs)
    difference = Difference.between(torch.cat(ours), torch.cat(eager))
    tolerance = allowed_difference(eager[0].dtype, graphs.settings)

    def timed(call: Callable[[Mapping[str, Any]], object]) -> float:
        synchronize(device)
        started = perf_counter()
        call(request)
        synchronize(device)
        return (perf_counter() - started) * 1e3

    pilot = timed(graphs.run_eager) + timed(graphs.run)
    repeats = max(FEWEST_REPEATS, min(repeat, int(SECONDS_PER_INPUT * 1e3 / pilot)))
    pairs = [(timed(graphs.run_eager), timed(graphs.run)) for _ in range(repeats)]
    misses, replays, used, replayed = (now - then for now, then in zip(after, before, strict=True))
    return InputResult(
        label=label,
        item_tokens=tuple(len(output) for output in ours),
        eager=Timing.of([pair[0] for pair in pairs]),
        graph=Timing.of([pair[1] for pair in pairs]),
        difference=difference,
        agrees=not difference.exceeds(tolerance),
        misses=dict(misses),
        replays=dict(replays),
        rows_used=used.total(),
        rows_replayed=replayed.total(),
    )


def _counters(graphs: EncoderGraphs) -> tuple[Counter[str], ...]:
    """Misses by reason, replays by graph, rows used, rows replayed: as they stand now."""
    statistics = graphs.statistics
    misses: Counter[str] = Counter()
    for (_, reason), count in statistics.misses.items():
        misses[str(reason)] += count
    return (
        misses,
        Counter(statistics.replays),
        Counter(statistics.rows_used),
        Counter(statistics.rows_replayed),
    )


def measure_tower(
    graphs: EncoderGraphs,
    tower: str,
    modality: str,
    requests: Sequence[tuple[str, Mapping[str, Any]]],
    repeat: int,
    on_capture: Progress | None = None,
    on_input: Callable[[int, int, str], None] | None = None,
) -> TowerResult:
    """Capture the graphs of the paths that the requests take, and measure every request.

    Args:
        graphs: not captured yet.
        tower: name of the adapter factory.
        modality: of the requests.
        requests: (label, request).
        repeat: timed calls of each kind and input, at most.
        on_capture: called with (done, total, key) after each graph.
        on_input: called with (done, total, label) after each input.
    """
    adapter = graphs.adapter
    paths = {adapter.path(item) for _, request in requests for item in adapter.item_specs(request)}
    keys = [capacity.key for capacity in graphs.ladder() if capacity.key.path in paths]
    graphs.capture(on_capture, keys)
    dtype = adapter.dtype
    result = TowerResult(
        tower=tower,
        modality=modality,
        dtype=str(dtype).removeprefix("torch."),
        tolerance=allowed_difference(dtype, graphs.settings),
        capture=graphs.report.as_dict(),
    )
    for done, (label, request) in enumerate(requests, start=1):
        result.inputs.append(measure_input(graphs, label, request, repeat))
        if on_input is not None:
            on_input(done, len(requests), label)
    result.stats = graphs.stats()
    return result
