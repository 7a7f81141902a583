"""Charts of the report, each a self-contained SVG document."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    import numpy.typing as npt

    from graphhal.bench.measure import InputResult, TowerResult

EAGER, GRAPH, WASTE, INK, GRID = "#b8bfcc", "#4456d6", "#e2894a", "#20242e", "#e6e8ee"
STYLE = {
    "svg.fonttype": "path",
    "svg.hashsalt": "graphhal",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": "#5b6273",
    "axes.edgecolor": GRID,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": "#5b6273",
    "ytick.color": "#5b6273",
    "xtick.bottom": False,
    "ytick.left": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "legend.frameon": False,
}
MIB = 2**20


def latency(result: TowerResult) -> str:
    """Milliseconds over tokens, both axes logarithmic; bars are first to third quartiles."""
    with mpl.rc_context(STYLE):
        figure, axes = _figure(6.4, 3.6)
        for name, colour in (("eager", EAGER), ("graph", GRAPH)):
            lines = sorted(result.inputs, key=lambda line: line.tokens)
            timings = [getattr(line, name) for line in lines]
            tokens = [line.tokens for line in lines]
            middle = [timing.median_ms for timing in timings]
            spread = [
                [timing.median_ms - timing.low_ms for timing in timings],
                [timing.high_ms - timing.median_ms for timing in timings],
            ]
            axes.errorbar(
                tokens,
                middle,
                yerr=spread,
                color=colour,
                marker="o",
                markersize=5,
                linewidth=1.6,
                elinewidth=1.2,
                capsize=0,
                label=name,
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("tokens of the request")
        axes.set_ylabel("milliseconds")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(ScalarFormatter())
            axis.set_minor_formatter(NullFormatter())
        _label_decades(axes)
        axes.legend(loc="upper left")
        return _svg(figure)


def speed_up(result: TowerResult) -> str:
    """Eager over graph, one bar per input; the line is where they are equal."""
    with mpl.rc_context(STYLE):
        figure, axes = _bars(result.inputs)
        values = [line.speed_up for line in result.inputs]
        colours = [GRAPH if line.served == "hit" else EAGER for line in result.inputs]
        axes.barh(range(len(values)), values, color=colours, height=0.62)
        axes.axvline(1, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        for place, (value, line) in enumerate(zip(values, result.inputs, strict=True)):
            note = "" if line.served == "hit" else "  eager"
            _beside(axes, value, place, f"{value:.2f}×{note}")
        axes.set_xlim(0, max(1.2, *values) * 1.18)
        axes.set_xlabel("times faster than eager")
        return _svg(figure)


def padding(result: TowerResult) -> str:
    """Share of replayed rows that were padding, one bar per input."""
    with mpl.rc_context(STYLE):
        figure, axes = _bars(result.inputs)
        values = [100 * line.padding_waste for line in result.inputs]
        axes.barh(range(len(values)), [100] * len(values), color="#f3f4f8", height=0.62)
        axes.barh(range(len(values)), values, color=WASTE, height=0.62)
        for place, (value, line) in enumerate(zip(values, result.inputs, strict=True)):
            _beside(axes, value, place, f"{value:.1f} %" if line.replays else "not replayed")
        axes.set_xlim(0, 100)
        axes.set_xlabel("padding, percent of replayed rows")
        return _svg(figure)


def memory(result: TowerResult) -> str:
    """Bytes that each graph added, largest graph first, and their sum with the shared arenas."""
    with mpl.rc_context(STYLE):
        figure, axes = _figure(6.4, 3.2)
        graphs = result.capture["graphs"]
        added = [graph["bytes"] / MIB for graph in graphs]
        arenas = result.capture["bytes"] / MIB - sum(added)
        places = range(len(added))
        totals = list(_running(arenas, added))
        axes.fill_between(places, totals, step="mid", color=GRAPH, alpha=0.14, linewidth=0)
        axes.step(
            places, totals, where="mid", color=GRAPH, linewidth=1.6, label="in all, arenas included"
        )
        axes.bar(places, added, color=WASTE, width=0.8, label="added by this graph")
        axes.set_ylim(0, max(totals, default=0) * 1.25 or 1)
        axes.set_xlim(-0.6, max(len(added) - 0.4, 1))
        shown = range(0, len(graphs), max(1, len(graphs) // 5))
        axes.set_xticks(list(shown), [_size(graphs[place]["key"]) for place in shown])
        axes.set_xlabel("graph, in the order of capture")
        axes.set_ylabel("MiB")
        axes.legend(loc="upper right", ncols=2)
        return _svg(figure)


def waveform(samples: npt.NDArray[np.float32], rate: int) -> str:
    """A clip's amplitude over seconds, as one band from the lowest to the highest sample."""
    with mpl.rc_context(STYLE | {"axes.grid": False}):
        figure, axes = _figure(9.6, 2.5)
        width = max(1, len(samples) // 600)
        cut = samples[: len(samples) // width * width].reshape(-1, width)
        seconds = [place * width / rate for place in range(len(cut))]
        axes.fill_between(seconds, cut.min(axis=1), cut.max(axis=1), color=GRAPH, linewidth=0)
        axes.set_xlim(0, len(samples) / rate)
        axes.set_yticks([])
        axes.set_xlabel("seconds")
        return _svg(figure)


def _figure(width: float, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure, figure.subplots()


def _bars(lines: Sequence[InputResult]) -> tuple[Figure, Any]:
    figure, axes = _figure(6.4, 0.9 + 0.36 * len(lines))
    axes.set_yticks(range(len(lines)), [_plain(line.label) for line in lines])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    return figure, axes


def _beside(axes: Any, value: float, place: int, text: str) -> None:
    """Text right of a bar's end, readable over the lines behind it."""
    axes.annotate(
        text,
        (value, place),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85},
    )


def _label_decades(axes: Any) -> None:
    """Ticks at 1, 2 and 5 of each decade where a logarithmic axis spans little."""
    low, high = axes.get_ylim()
    ticks = [step * 10.0**power for power in range(-3, 6) for step in (1, 2, 5)]
    axes.set_yticks([tick for tick in ticks if low <= tick <= high])


def _running(start: float, steps: Sequence[float]) -> Iterator[float]:
    total = start
    for step in steps:
        total += step
        yield total


def _size(key: str) -> str:
    """`tower/image[256]` as `image 256`."""
    return key.rpartition("/")[2].replace("[", " ").rstrip("]")


def _plain(label: str) -> str:
    """Text for matplotlib: a dollar sign would start mathematics."""
    return (label if len(label) <= 34 else label[:33] + "…").replace("$", r"\$")


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    text = out.getvalue()
    return text[text.index("<svg") :]
