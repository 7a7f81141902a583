"""The HTML report: one file, nothing loaded from elsewhere, everything shown is escaped."""

from __future__ import annotations

import base64
import io
from html import escape
from typing import TYPE_CHECKING, Any

from graphhal.adapters.sample_files import is_film, read_image, read_sound
from graphhal.bench import charts
from graphhal.bench.samples import CLIP_RATE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from graphhal.bench.measure import InputResult, Timing, TowerResult

THUMBNAIL_PIXELS = 480
STYLE = """
:root { color-scheme: light; --ink: #20242e; --soft: #5b6273; --line: #e6e8ee; --accent: #4456d6;
  --good: #1d7f54; --bad: #b3372f; --warm: #a65d1f; }
* { box-sizing: border-box; }
body { margin: 0; background: #f6f7fa; color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 44px 28px 72px; }
h1 { font-size: 30px; letter-spacing: -.02em; margin: 0 0 4px; }
h2 { font-size: 21px; letter-spacing: -.01em; margin: 52px 0 4px; }
h3 { font-size: 14px; margin: 0 0 6px; }
p { margin: 0 0 12px; color: var(--soft); }
.chips { display: flex; flex-wrap: wrap; gap: 8px; margin: 18px 0 26px; }
.chip { background: #fff; border: 1px solid var(--line); border-radius: 99px; padding: 3px 12px;
  font-size: 13px; color: var(--soft); }
.chip b { color: var(--ink); font-weight: 600; }
.grid { display: grid; gap: 18px; grid-template-columns: repeat(auto-fit, minmax(430px, 1fr)); }
.cards { display: grid; gap: 14px; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); }
.card { background: #fff; border: 1px solid var(--line); border-radius: 12px; padding: 18px 20px; }
.card .figure { font-size: 26px; font-weight: 650; letter-spacing: -.02em; line-height: 1.2; }
.card .what { color: var(--soft); font-size: 13px; }
.card img { display: block; width: 100%; height: auto; }
.sources { grid-template-columns: 260px 1fr; margin-bottom: 26px; }
.sources img.photo { border-radius: 8px; max-height: 240px; object-fit: cover; }
.good { color: var(--good); } .bad { color: var(--bad); } .warm { color: var(--warm); }
.scroll { overflow-x: auto; background: #fff; border: 1px solid var(--line); border-radius: 12px;
  margin: 18px 0; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th, td { text-align: left; padding: 8px 13px; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
th { color: var(--soft); font-weight: 600; font-size: 12.5px; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
td small { color: var(--soft); display: block; line-height: 1.25; }
code { font: 12.5px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
details { margin-top: 14px; } summary { cursor: pointer; color: var(--soft); font-size: 13.5px; }
footer { margin-top: 56px; color: var(--soft); font-size: 13px; }
@media (max-width: 720px) { .sources, .grid { grid-template-columns: 1fr; } }
"""
METHOD = (
    "Times are wall time of one call with the device waited for, median and first to third "
    "quartile; eager and graph ran in turn. A graph time is the whole call: staging, replay or "
    "eager fallback, copy-out. Parity compares the outputs of both: relative L2 of the whole, "
    "smallest cosine of a token."
)
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def write_report(
    path: Path,
    machine: dict[str, Any],
    results: Sequence[TowerResult],
    pictures: Sequence[Path],
    clips: Sequence[Path],
) -> None:
    """Write the report.

    Args:
        path: of the HTML file.
        machine: from `describe_machine`.
        results: one per tower.
        pictures: the pictures that were encoded; thumbnails are shown.
        clips: the clips that were encoded; waveforms are shown.
    """
    text = render(machine, results, pictures, clips)
    path.write_text(text, encoding="utf-8", errors="replace")  # a file's name may be no text


def render(
    machine: dict[str, Any],
    results: Sequence[TowerResult],
    pictures: Sequence[Path] = (),
    clips: Sequence[Path] = (),
) -> str:
    """The report as one HTML document."""
    chips = {
        "platform": machine["platform"],
        "device": machine["device"],
        "preset": machine["preset"],
        "policy": machine["settings"]["policy"],
        "graphhal": machine["graphhal"],
        **machine["versions"],
        "date": machine["date"].replace("T", " ").removesuffix("+00:00") + " UTC",
    }
    body = [
        "<h1>graphhal bench</h1>",
        "<p>Encoder towers on real files: the eager forward against captured graphs.</p>",
        '<div class="chips">',
        *(
            f'<span class="chip">{_e(name)} <b>{_e(text)}</b></span>'
            for name, text in chips.items()
        ),
        "</div>",
        '<div class="grid sources">',
        *map(_picture, [picture for picture in pictures if not is_film(picture)][:1]),
        *map(_clip, clips[:1]),
        "</div>",
        *(_tower(result) for result in results),
        _settings(machine),
        f"<footer>{METHOD}</footer>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>graphhal bench, {_e(machine['platform'])}</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _e(text: object) -> str:
    return escape(str(text), quote=True)


def _image(svg: str, alt: str) -> str:
    data = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{_e(alt)}" src="data:image/svg+xml;base64,{data}">'


def _picture(path: Path) -> str:
    image = read_image(path, 0)
    size = f"{image.width} × {image.height}"
    image.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
    out = io.BytesIO()
    image.save(out, "JPEG", quality=85)
    data = base64.b64encode(out.getvalue()).decode()
    return (
        f'<div class="card"><h3>{_e(path.name)}</h3>'
        f'<img class="photo" alt="the photograph" src="data:image/jpeg;base64,{data}">'
        f'<div class="what">{size} pixels</div></div>'
    )


def _clip(path: Path) -> str:
    samples = read_sound(path, 0, CLIP_RATE)
    return (
        f'<div class="card"><h3>{_e(path.name)}</h3>'
        f"{_image(charts.waveform(samples, CLIP_RATE), 'waveform of the clip')}"
        f'<div class="what">{len(samples) / CLIP_RATE:.1f} seconds of sound</div></div>'
    )


def _tower(result: TowerResult) -> str:
    best = max(result.inputs, key=lambda line: line.speed_up, default=None)
    worst = max((line.difference.relative_l2 for line in result.inputs), default=0.0)
    exact = sum(line.difference.bit_equal for line in result.inputs)
    hits = sum(line.served == "hit" for line in result.inputs)
    capture = result.capture
    cards = [
        (f"{best.speed_up:.2f}×" if best else "–", "largest speed-up", ""),
        (
            "equal" if result.agrees else "differs",
            "every input is bit-equal"
            if exact == len(result.inputs)
            else f"{exact} of {len(result.inputs)} bit-equal, relative L2 ≤ {worst:.1e}",
            "good" if result.agrees else "bad",
        ),
        (f"{hits} / {len(result.inputs)}", "inputs replayed", ""),
        (str(len(capture["graphs"])), f"graphs captured in {capture['seconds']:.2f} s", ""),
        (f"{capture['bytes'] / charts.MIB:.1f} MiB", "graphs and arenas", ""),
    ]
    shown = "".join(
        f'<div class="card"><div class="figure {mood}">{_e(figure)}</div>'
        f'<div class="what">{_e(what)}</div></div>'
        for figure, what, mood in cards
    )
    drawn = (
        ("Latency over tokens", charts.latency(result)),
        ("Speed-up by input", charts.speed_up(result)),
        ("Memory by graph", charts.memory(result)),
        ("Padding waste by input", charts.padding(result)),
    )
    pictures = "".join(
        f'<div class="card"><h3>{_e(title)}</h3>{_image(svg, title)}</div>' for title, svg in drawn
    )
    return (
        f"<h2>{_e(result.tower)}</h2><p>{_e(result.modality)} encoder, {_e(result.dtype)}</p>"
        f'<div class="cards">{shown}</div>{_table(result)}<div class="grid">{pictures}</div>'
        f"{_dropped(capture['dropped'])}"
    )


def _table(result: TowerResult) -> str:
    columns = (
        ("input", ""),
        ("items", "number"),
        ("tokens", "number"),
        ("eager ms", "number"),
        ("graph ms", "number"),
        ("speed-up", "number"),
        ("parity", ""),
        ("served", ""),
        ("padding", "number"),
    )
    head = "".join(f'<th class="{kind}">{name}</th>' for name, kind in columns)
    rows = "".join(f"<tr>{_row(line)}</tr>" for line in result.inputs)
    return f'<div class="scroll"><table><tr>{head}</tr>{rows}</table></div>'


def _row(line: InputResult) -> str:
    found = line.difference
    parity = (
        "bit-equal"
        if found.bit_equal
        else f"L2 {found.relative_l2:.1e} <small>cos ≥ {found.min_cosine:.6f}</small>"
    )
    padding = f"{line.padding_waste:.1%}" if line.replays else "–"
    served = "" if line.served == "hit" else "warm"
    return "".join(
        [
            f"<td>{_e(line.label)}</td>",
            f'<td class="number">{len(line.item_tokens)}</td>',
            f'<td class="number">{line.tokens}</td>',
            f'<td class="number">{_timing(line.eager)}</td>',
            f'<td class="number">{_timing(line.graph)}</td>',
            f'<td class="number"><b>{line.speed_up:.2f}×</b></td>',
            f'<td class="{"good" if line.agrees else "bad"}">{parity}</td>',
            f'<td class="{served}">{_e(line.served)}</td>',
            f'<td class="number">{padding}</td>',
        ]
    )


def _timing(timing: Timing) -> str:
    return f"{timing.median_ms:.2f} <small>{timing.low_ms:.2f}–{timing.high_ms:.2f}</small>"


def _dropped(dropped: Iterable[dict[str, str]]) -> str:
    lines = "".join(f"<li><code>{_e(d['key'])}</code> {_e(d['reason'])}</li>" for d in dropped)
    return f"<h3>Dropped graphs: their inputs run eagerly</h3><ul>{lines}</ul>" if lines else ""


def _settings(machine: dict[str, Any]) -> str:
    lines = "".join(
        f"<tr><td><code>{_e(name)}</code></td><td><code>{_e(value)}</code></td></tr>"
        for name, value in machine["settings"].items()
    )
    return (
        "<details><summary>Settings of this run</summary>"
        f'<div class="scroll"><table>{lines}</table></div></details>'
    )
