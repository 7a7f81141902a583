"""`graphhal bench`: the main job, eager against graph on a picture and a sound clip."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from graphhal.cli import screen, towers

if TYPE_CHECKING:
    from graphhal.adapter import AdapterFactory
    from graphhal.bench.measure import InputResult, TowerResult
    from graphhal.bench.samples import BenchInput
    from graphhal.platform import Platform
    from graphhal.settings import Settings


def bench(
    image: Annotated[
        list[Path] | None, typer.Option(help="A picture (repeatable); a sample by default.")
    ] = None,
    audio: Annotated[
        list[Path] | None, typer.Option(help="A sound clip (repeatable); a sample by default.")
    ] = None,
    tower: towers.TowerOption = None,
    preset: towers.PresetOption = towers.Preset.TINY,
    platform: towers.PlatformOption = None,
    dtype: towers.DtypeOption = None,
    policy: towers.PolicyOption = None,
    option: towers.SetOption = None,
    repeat: Annotated[int, typer.Option(min=3, max=1000, help="Timed calls of each kind.")] = 15,
    seed: towers.SeedOption = 0,
    json: towers.JsonOption = False,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a self-contained HTML report.")
    ] = None,
) -> None:
    """Capture encoder towers, replay them on real files, and compare with eager."""
    if report is not None:
        _check_report(report)
    options = towers.parse_options(policy, option)
    opened, settings = towers.open_with(platform, options)
    chosen = towers.choose_towers(tower, settings)
    factories = [each for each in chosen if tower or each.modality in ("image", "audio")]
    from graphhal.adapters.sample_files import sample_photograph, sample_speech
    from graphhal.bench.machine import describe_machine

    modalities = {factory.modality for factory in factories}
    for modality, given in (("image", image), ("audio", audio)):
        if given and modality not in modalities:
            names = ", ".join(factory.name for factory in factories)
            raise screen.fail(f"no tower of {names} encodes --{modality} {given[0]}", status=2)
    pictures = image or ([sample_photograph()] if "image" in modalities else [])
    clips = audio or ([sample_speech()] if "audio" in modalities else [])
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for factory in factories:
            inputs = _inputs(factory, pictures, clips, Path(scratch))
            adapter = towers.build_tower(factory, preset, opened, dtype, seed)
            results.append(_measure(factory, adapter, opened, settings, inputs, repeat))
    machine = describe_machine(opened, settings, preset.value)
    if report is not None:
        from graphhal.bench.report import write_report

        write_report(report, machine, results, pictures, clips)
    agrees = all(result.agrees for result in results)
    if json:
        from graphhal.bench.machine import as_document

        screen.print_json(as_document(machine, results))
    else:
        _show(machine, results)
        if report is not None:
            screen.say(f"report: {report}")
    if not agrees:
        raise screen.fail("graph and eager disagree; see parity above")


def _check_report(path: Path) -> None:
    """A place where nothing can be written is told before minutes of work, not after."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise screen.fail(
            f"--report {path} cannot be written; name a file in a folder that exists", status=2
        )
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise screen.fail(f"--report {path} may not be written; name another file", status=2)


def _inputs(
    factory: AdapterFactory, pictures: list[Path], clips: list[Path], scratch: Path
) -> list[BenchInput]:
    from graphhal.bench.samples import clip_inputs, image_inputs

    if factory.modality == "image":
        return image_inputs(pictures, scratch)
    if factory.modality == "audio":
        return clip_inputs(clips, scratch)
    raise screen.fail(f"tower {factory.name} encodes {factory.modality}, which has no bench input")


def _measure(
    factory: AdapterFactory,
    adapter: Any,
    platform: Platform,
    settings: Settings,
    inputs: list[BenchInput],
    repeat: int,
) -> TowerResult:
    from graphhal.bench.measure import measure_tower
    from graphhal.runner import EncoderGraphs

    requests = [(i.label, factory.load(adapter, i.files)) for i in inputs]
    graphs = EncoderGraphs(adapter, platform, settings)
    try:
        with (
            screen.progress_bar(f"capture {factory.name}") as on_capture,
            screen.progress_bar(f"measure {factory.name}") as on_input,
        ):
            return measure_tower(
                graphs, factory.name, factory.modality, requests, repeat, on_capture, on_input
            )
    finally:
        graphs.clear()


def _show(machine: dict[str, Any], results: list[TowerResult]) -> None:
    screen.say(machine["summary"], style="bold")
    columns = (
        "input", "tokens", "eager ms", "graph ms", "speed-up", "parity", "served", "padding",
    )  # fmt: skip
    right = ("tokens", "eager ms", "graph ms", "speed-up", "padding")
    for result in results:
        title = f"{result.tower} ({result.dtype})"
        screen.print_table(title, columns, [_row(line) for line in result.inputs], right)
        screen.say(capture_line(result))
        for dropped in result.capture["dropped"]:
            screen.say(f"  dropped {dropped['key']}: {dropped['reason']}")
    screen.say(
        "times: median (first to third quartile) of wall time, eager and graph in turn", style="dim"
    )


def _row(line: InputResult) -> tuple[str | Text, ...]:
    def timing(values: Any) -> str:
        return f"{short(values.median_ms)} ({short(values.low_ms)}–{short(values.high_ms)})"

    return (
        line.label,
        str(line.tokens),
        timing(line.eager),
        timing(line.graph),
        f"{line.speed_up:.2f}×",
        Text(parity(line), style="green" if line.agrees else "bold red"),
        Text(line.served, style="" if line.served == "hit" else "yellow"),
        f"{line.padding_waste:.1%}" if line.replays else "–",
    )


def short(milliseconds: float) -> str:
    """To three digits, or hundredths: repeats differ by more."""
    return f"{milliseconds:.{2 if milliseconds < 10 else 1 if milliseconds < 100 else 0}f}"


def parity(line: InputResult) -> str:
    """`bit-equal`, or how far apart."""
    found = line.difference
    if found.bit_equal:
        return "bit-equal"
    return f"rel. L2 {found.relative_l2:.1e}, cos ≥ {found.min_cosine:.6f}"


def capture_line(result: TowerResult) -> str:
    """Graphs, seconds and bytes of the capture in one line."""
    capture = result.capture
    return (
        f"  {len(capture['graphs'])} graphs captured in {capture['seconds']:.2f} s, self-check "
        f"{capture['self_check_seconds']:.2f} s, {screen.human_bytes(capture['bytes'])} in all, "
        f"{len(capture['dropped'])} dropped"
    )
