"""`graphhal plan`: ladder and memory for a workload trace and a limit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphhal.cli import screen, towers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphhal.adapter import AdapterFactory, EncoderAdapter
    from graphhal.bench.workload import Coverage, Trace
    from graphhal.items import ItemSpec
    from graphhal.plan import GraphKey
    from graphhal.platform import Platform
    from graphhal.settings import Settings


def plan(
    trace: Annotated[
        Path | None, typer.Option(help="A workload trace (JSON); without one, the ladder alone.")
    ] = None,
    limit: Annotated[
        str | None, typer.Option(help="Memory that the graphs of a tower may take: 650MiB.")
    ] = None,
    tower: towers.TowerOption = None,
    preset: towers.PresetOption = towers.Preset.TINY,
    platform: towers.PlatformOption = None,
    dtype: towers.DtypeOption = None,
    policy: towers.PolicyOption = None,
    option: towers.SetOption = None,
    json: towers.JsonOption = False,
) -> None:
    """Say which graphs a workload needs, what they take, and what they serve.

    The graphs are captured to measure their memory, and released.
    """
    from graphhal.bench.workload import items_beside, read_trace

    options = towers.parse_options(policy, option)
    if limit is not None:
        options["memory_limit"] = limit
    read = read_trace(trace) if trace is not None else None
    opened, settings = towers.open_with(platform, options)
    plans = []
    encoded: set[str] = set()
    for factory in towers.choose_towers(tower, settings):
        adapter = towers.build_tower(factory, preset, opened, dtype, seed=0)
        encoded.update(adapter.modalities)
        plans.append(_plan_tower(factory, adapter, opened, settings, read))
    left_out = {} if read is None else items_beside(read, encoded)
    if json:
        screen.print_json(
            {
                "schema": 1,
                "platform": opened.info.name,
                "towers": plans,
                "left_out": dict(left_out),
            }
        )
        return
    for found in plans:
        _show(found)
    for modality, count in left_out.items():
        screen.say(
            f"{count} items of modality {modality!r} are left out; the towers encode "
            f"{', '.join(sorted(encoded))}",
            style="yellow",
        )


def _plan_tower(
    factory: AdapterFactory,
    adapter: EncoderAdapter,
    platform: Platform,
    settings: Settings,
    trace: Trace | None,
) -> dict[str, Any]:
    from graphhal.bench.workload import cover, modality_shapes
    from graphhal.plan import Planner
    from graphhal.runner import EncoderGraphs
    from graphhal.settings import SelfCheck

    unchecked = settings.model_copy(update={"self_check": SelfCheck.OFF})
    graphs = EncoderGraphs(adapter, platform, unchecked)
    ladder = graphs.ladder()
    shapes = modality_shapes(adapter.modalities, ladder, adapter.path)

    def refusal(items: Sequence[ItemSpec]) -> str | None:
        own = adapter.sized(items[0].modality, [item.tokens for item in items])
        return None if own is None else adapter.refusal(own)

    def coverage(keys: Any) -> Coverage | None:
        if trace is None:
            return None
        kept = [capacity for capacity in ladder if capacity.key in keys]
        planner = Planner(
            kept,
            settings.policy,
            adapter.path,
            refusal,
            exact_only=settings.exact_only,
            allow_empty=platform.info.allow_empty,
        )
        return cover(trace, shapes, planner, adapter.modalities)

    wanted = {capacity.key for capacity in ladder}
    whole = coverage(wanted)
    if whole is not None:
        wanted = set(whole.replays)
    try:
        with screen.progress_bar(f"capture {factory.name}") as on_capture:
            report = graphs.capture(on_capture, sorted(wanted))
        captured = graphs.keys()
        # Planned with what was captured alone, all else would miss for want of any graph.
        served = whole if set(captured) == wanted else coverage(captured)
        replays = {} if served is None else served.replays
        return {
            "tower": factory.name,
            "ladder": len(ladder),
            "bytes": report.num_bytes,
            "capture_seconds": report.seconds,
            "graphs": [
                {
                    "key": str(graph.key),
                    "bytes": graph.num_bytes,
                    "replays": replays.get(graph.key, 0),
                }
                for graph in report.captured
            ],
            "dropped": report.as_dict()["dropped"],
            **_options(adapter, settings, captured if served is not None else ()),
            "coverage": None if served is None else _as_dict(served),
        }
    finally:
        graphs.clear()


def _options(
    adapter: EncoderAdapter, settings: Settings, keys: Sequence[GraphKey]
) -> dict[str, Any]:
    """The options under which the tower's ladder has these graphs and fewest others, and how many
    graphs they ask for: what an option means is the adapter's to say."""
    sizes = sorted({key.size for key in keys})
    trials: list[dict[str, Any]] = [{}]
    if sizes:
        trials += [{"token_budgets": sizes}, {"audio_chunks": sizes}, {"max_items": sizes[-1]}]
    found = []
    for options in trials:
        tried = settings.model_copy(update=options)
        ladder = {capacity.key for capacity in adapter.capacities(tried)}
        if ladder.issuperset(keys):
            found.append((len(ladder), options))
    asked_for, options = min(found, key=lambda each: (each[0], len(each[1])))
    return {"options": options, "options_ask_for": asked_for}


def _as_dict(coverage: Coverage) -> dict[str, Any]:
    return {
        "items": coverage.items,
        "hits": coverage.hits,
        "hit_rate": coverage.hit_rate,
        "misses": dict(coverage.misses),
        "padding_waste": coverage.padding_waste,
    }


def _show(found: dict[str, Any]) -> None:
    served = found["coverage"]
    planned = served is not None
    if planned and not served["items"]:
        screen.say(f"{found['tower']}: the trace has no item that it encodes", style="bold")
        return
    columns = ("graph", "added", "replays")[: 3 if planned else 2]
    rows = [
        (graph["key"], screen.human_bytes(graph["bytes"]), str(graph["replays"]))[: len(columns)]
        for graph in found["graphs"]
    ]
    if rows:
        title = f"{found['tower']}: graphs to capture"
        screen.print_table(title, columns, rows, right=columns[1:])
    else:
        screen.say(f"{found['tower']}: no graph to capture", style="bold")
    screen.say(
        f"  {len(rows)} of {found['ladder']} graphs, {screen.human_bytes(found['bytes'])} with the "
        f"shared arenas, captured in {found['capture_seconds']:.2f} s"
    )
    for dropped in found["dropped"]:
        screen.say(f"  dropped {dropped['key']}: {dropped['reason']}")
    if not planned:
        return
    screen.say(
        f"  {served['hits']} of {served['items']} items replayed ({served['hit_rate']:.1%}), "
        f"padding {served['padding_waste']:.1%}"
    )
    for reason, count in served["misses"].items():
        screen.say(f"  {count} eager: {reason}")
    asked_for = found["options_ask_for"]
    beside = "" if asked_for == len(rows) else f" asks for {asked_for} graphs, these among them"
    for name, value in found["options"].items():
        listed = ",".join(map(str, value)) if isinstance(value, list) else value
        screen.say(f"  GRAPHHAL_{name.upper()}={listed}{beside}")
