"""`graphhal check`: every graph of the towers against eager, on its worst cases."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from graphhal.cli import screen, towers
from graphhal.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphhal.plan import Capacity
    from graphhal.runner import EncoderGraphs


ALL_CASES = {"self_check": "full", "policy": "single", "exact_only": False}
"""What decides here: every worst case is replayed, also where a server would run it eagerly."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What became of one graph.

    Attributes:
        tower: name of the adapter factory.
        key: of the graph.
        cases: worst cases that this graph replayed.
        relative_l2: largest over the cases; None where the graph is not there.
        min_cosine: smallest of a token over the cases.
        reason: why the graph is not used, or disagrees; None where it is right.
    """

    tower: str
    key: str
    cases: int = 0
    relative_l2: float | None = None
    min_cosine: float | None = None
    reason: str | None = None


def check(
    tower: towers.TowerOption = None,
    preset: towers.PresetOption = towers.Preset.TINY,
    platform: towers.PlatformOption = None,
    dtype: towers.DtypeOption = None,
    option: towers.SetOption = None,
    seed: towers.SeedOption = 0,
    json: towers.JsonOption = False,
) -> None:
    """Capture every graph with the full self-check, and compare each with eager once more.

    Every worst case is replayed: policy, exact_only and self_check are set here.
    """
    given = towers.parse_options(None, option)
    Settings.from_mapping(given)  # what is set here all the same has to be an option, and right
    opened, settings = towers.open_with(platform, given | ALL_CASES)
    from graphhal.runner import EncoderGraphs

    lines: list[Checked] = []
    broken: Exception | None = None
    for factory in towers.choose_towers(tower, settings, every=True):
        try:
            adapter = towers.build_tower(factory, preset, opened, dtype, seed)
            graphs = EncoderGraphs(adapter, opened, settings)
            try:
                with screen.progress_bar(f"capture {factory.name}") as on_capture:
                    graphs.capture(on_capture)
                lines.extend(_check_tower(factory.name, graphs))
            finally:
                graphs.clear()
        except Exception as error:  # noqa: BLE001  (raised below, when the others are shown)
            reason = f"{type(error).__name__}: {error}"
            lines.append(Checked(factory.name, f"{factory.name}/…", reason=reason))
            broken = broken or error
    if not lines:
        raise screen.fail("there is no graph to check; the settings ask for none of these towers")
    if json:
        screen.print_json(
            {"schema": 1, "platform": opened.info.name, "graphs": [asdict(line) for line in lines]}
        )
    else:
        _show(lines)
    if broken is not None:
        raise broken
    wrong = [line.key for line in lines if line.reason is not None]
    if wrong:
        raise screen.fail(f"{len(wrong)} of {len(lines)} graphs are not right: {', '.join(wrong)}")


def _check_tower(tower: str, graphs: EncoderGraphs) -> Iterator[Checked]:
    """Every key of the ladder: dropped by its own check, or compared here through `run`.

    Smallest first, and given up afterwards: the next larger graph replays its small cases itself.
    """
    reasons = {dropped.key: dropped.reason for dropped in graphs.report.dropped}
    with screen.progress_bar(f"check {tower}") as advance:
        ladder = sorted(graphs.ladder(), key=lambda c: (c.rows, c.tokens, c.key))
        for done, capacity in enumerate(ladder, start=1):
            if capacity.key in reasons:
                yield Checked(tower, str(capacity.key), reason=reasons[capacity.key])
            else:
                yield _compare(tower, graphs, capacity)
                graphs.drop(capacity.key, "checked")
            advance(done, len(ladder), capacity.key)


def _compare(tower: str, graphs: EncoderGraphs, capacity: Capacity) -> Checked:
    import torch

    from graphhal.bench.measure import allowed_difference
    from graphhal.self_check import Difference

    found = []
    before = graphs.statistics.replays[str(capacity.key)]
    for items in graphs.adapter.worst_cases(capacity):
        request = graphs.adapter.example(items, seed=3)
        eager = torch.cat(graphs.run_eager(request))
        found.append(Difference.between(torch.cat(graphs.run(request)), eager))
    allowed = allowed_difference(eager.dtype, graphs.settings)
    wrong = [difference for difference in found if difference.exceeds(allowed)]
    cases = graphs.statistics.replays[str(capacity.key)] - before
    reason = None if cases else "no worst case was replayed"
    return Checked(
        tower,
        str(capacity.key),
        cases=cases,
        relative_l2=max(difference.relative_l2 for difference in found),
        min_cosine=min(difference.min_cosine for difference in found),
        reason=f"differs from eager by more than {allowed:.0e}" if wrong else reason,
    )


def _show(lines: list[Checked]) -> None:
    columns = ("graph", "cases", "largest rel. L2", "smallest cosine", "result")
    rows = [
        (
            line.key,
            str(line.cases),
            _figure(line.relative_l2, ".1e"),
            _figure(line.min_cosine, ".6f"),
            Text("ok", style="green")
            if line.reason is None
            else Text(line.reason, style="bold red"),
        )
        for line in lines
    ]
    screen.print_table("every graph against eager", columns, rows, right=columns[1:4])


def _figure(value: float | None, spec: str) -> str:
    return "–" if value is None else format(value, spec)
