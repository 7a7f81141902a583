"""What every command shows alike: tables, progress, errors, JSON."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from math import isfinite
from typing import TYPE_CHECKING, Any, TextIO

import typer
from rich.box import HEAVY_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from rich.console import JustifyMethod

    Advance = Callable[[int, int, object], None]

PLAIN_WIDTH = 160
"""Columns where the output is not a terminal: tables are read whole in logs."""


def console(stderr: bool = False) -> Console:
    """Where tables go; as wide as the terminal, or `PLAIN_WIDTH`; nowhere, where that is closed."""
    stream: TextIO | None = sys.stderr if stderr else _output()
    width = None if stream is not None and stream.isatty() else PLAIN_WIDTH
    return Console(file=stream, stderr=stderr, width=width, highlight=False, soft_wrap=False)


@contextmanager
def only_ours_on_standard_output() -> Iterator[None]:
    """What plugins and towers print meanwhile goes to standard error: a reader of `--json` gets
    one document."""
    _ours.append(sys.stdout or StringIO())  # None where it is closed
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _ours.pop()


_ours: list[TextIO] = []


def _output() -> TextIO | None:
    return _ours[-1] if _ours else sys.stdout


def fail(message: str, status: int = 1) -> typer.Exit:
    """Print an error; raise what is returned."""
    screen = console(stderr=True)
    screen.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)
    return typer.Exit(status)


@contextmanager
def warnings_of(name: str) -> Iterator[None]:
    """Show what a module warns of, each once and without its traceback; `--verbose` shows more."""
    log = logging.getLogger(name)
    level, handler = log.level, _Warnings(logging.WARNING)
    log.propagate = log.isEnabledFor(logging.WARNING)
    log.addHandler(handler)
    log.setLevel(min(log.getEffectiveLevel(), logging.WARNING))
    try:
        yield
    finally:
        log.propagate = True
        log.setLevel(level)
        log.removeHandler(handler)


class _Warnings(logging.Handler):
    def __init__(self, level: int) -> None:
        super().__init__(level)
        self._shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message not in self._shown:
            self._shown.add(message)
            console(stderr=True).print(
                Text.assemble(("warning: ", "bold yellow"), message), soft_wrap=True
            )


def print_json(data: Any) -> None:
    """The one document that `--json` writes to standard output; not a number becomes null."""
    text = json.dumps(_without_nan(data), indent=2, sort_keys=True, allow_nan=False)
    typer.echo(text, file=_output())


def _without_nan(data: Any) -> Any:
    if isinstance(data, float):
        return data if isfinite(data) else None
    if isinstance(data, dict):
        return {key: _without_nan(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_without_nan(value) for value in data]
    return data


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    right: Sequence[str] = (),
) -> None:
    """A titled table; columns in `right` hold numbers. Text is shown as it is, never as markup.

    No word is broken: where the terminal is too narrow for that, the table has no lines between
    its columns, or is a list of its rows.
    """
    screen = console()
    screen.print(Text(title, style="bold"), soft_wrap=True)
    cells = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    gaps = len(columns) - 1
    for frame, lines in ((3 * gaps + 4, HEAVY_HEAD), (gaps, None)):
        widths = _widths(columns, cells, screen.width - frame)
        if widths is None:
            continue
        padding = (0, 1) if lines else (0, 1, 0, 0)
        made = Table(box=lines, padding=padding, pad_edge=bool(lines), header_style="bold")
        for column, width in zip(columns, widths, strict=True):
            justify: JustifyMethod = "right" if column in right else "left"
            made.add_column(column, width=width, justify=justify)
        for row in cells:
            made.add_row(*row)
        screen.print(made)
        return
    for row in cells:
        screen.print(row[0], style="bold", soft_wrap=True)
        for column, cell in zip(columns[1:], row[1:], strict=True):
            screen.print(Text.assemble(f"  {column}: ", cell), soft_wrap=True)


def _widths(
    columns: Sequence[str], rows: Sequence[Sequence[Text]], room: int
) -> Sequence[int] | None:
    """What each column gets of the room: its longest word at least; None where that is too much."""
    texts = [[column, *(row[at].plain for row in rows)] for at, column in enumerate(columns)]
    least = [
        max(cell_len(word) for text in each for word in (text.split() or [""])) for each in texts
    ]
    more = [max(map(cell_len, each)) - width for each, width in zip(texts, least, strict=True)]
    spare = room - sum(least)
    if spare < 0:
        return None
    share = min(1.0, spare / max(1, sum(more)))
    return [width + int(wanted * share) for width, wanted in zip(least, more, strict=True)]


def say(line: str, style: str = "") -> None:
    """One line of text below a table."""
    console().print(Text(line, style=style), soft_wrap=True)


@contextmanager
def progress_bar(title: str) -> Iterator[Advance]:
    """A bar on standard error; call it with (done, total, what)."""
    columns = (
        TextColumn("{task.description:<34}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[what]}", style="dim"),
    )
    screen = console(stderr=True)
    with Progress(
        *columns, console=screen, transient=True, disable=not screen.is_terminal
    ) as progress:
        task = progress.add_task(title, total=None, what="")

        def advance(done: int, total: int, what: object) -> None:
            progress.update(task, completed=done, total=total, what=str(what))

        yield advance


def human_bytes(count: float) -> str:
    """1,234,567 as `1.18 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
