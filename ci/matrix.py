"""Reads `ci/matrix.toml`: every cell checked on the way in, nothing guessed."""

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

MATRIX = Path(__file__).with_name("matrix.toml")
KINDS = ("pure", "cpu", "simulated", "device")
NEEDS = ("python", "device", "tool", "file", "env")


class MatrixError(ValueError):
    """A cell is malformed; says which one, what is wrong and what is allowed."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination that is tested.

    Attributes:
        name: what `--cell` calls it.
        title: one line for the table.
        kind: `pure` (no device code), `cpu`, `simulated` (a device's real library over a
            simulated runtime) or `device`.
        platform: graphhal platform under test, or "-" where it does not matter.
        python: interpreter, "3.11".
        pytorch: version or range, or "-".
        vllm: version or "-".
        command: shell line, run in the repository root; its exit status decides.
        setup: shell lines before it; `$CELL_VENV`, `$CELL_PYTHON` and `$CELL_WORK` name the cell's
            virtual environment, interpreter and scratch folder.
        needs: `python:3.12`, `device:cuda`, `tool:g++`, `file:PATH`, `env:NAME` (a variable that
            is set); without all of them the cell is skipped with the reason.
        minutes: time limit of set-up and command together.
        hosted: runs in the hosted workflow too.
        if_time: comes after the others, and is left out where time runs short.
    """

    name: str
    title: str
    kind: str
    platform: str
    python: str
    pytorch: str
    vllm: str
    command: str
    setup: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    minutes: int = 15
    hosted: bool = True
    if_time: bool = False


def load(path: Path = MATRIX) -> tuple[Cell, ...]:
    """Every cell of the matrix, in file order.

    Raises:
        MatrixError: a field is unknown, missing or not allowed, or a name is used twice.
    """
    tables = tomllib.loads(path.read_text()).get("cell", [])
    cells = tuple(_cell(table, index) for index, table in enumerate(tables))
    names = [cell.name for cell in cells]
    for name in names:
        if names.count(name) > 1:
            raise MatrixError(f"two cells are called {name!r}; names select cells, so they differ")
    if not cells:
        raise MatrixError(f"{path.name} has no [[cell]]")
    return cells


def _cell(table: dict[str, Any], index: int) -> Cell:
    where = f"cell {table.get('name', index)!r}"
    known = {field.name for field in fields(Cell)}
    if unknown := sorted(set(table) - known):
        raise MatrixError(f"{where}: unknown field {unknown[0]!r}. Fields: {sorted(known)}")
    for key in ("setup", "needs"):
        table[key] = tuple(table.get(key, ()))
    try:
        cell = Cell(**table)
    except TypeError as error:
        raise MatrixError(f"{where}: {error}") from error
    if cell.kind not in KINDS:
        raise MatrixError(f"{where}: kind {cell.kind!r} is not one of {KINDS}")
    for need in cell.needs:
        if need.partition(":")[0] not in NEEDS or not need.partition(":")[2]:
            raise MatrixError(
                f"{where}: need {need!r} is not one of {NEEDS} with a value after ':'"
            )
    if cell.kind == "device" and f"device:{cell.platform}" not in cell.needs:
        raise MatrixError(f"{where}: a device cell needs 'device:{cell.platform}'")
    return cell
