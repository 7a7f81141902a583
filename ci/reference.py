"""Writes the references in docs/ that come from the code: hooks and options.

python -m ci.reference --write     after a change of hookspecs.py or settings.py
python -m ci.reference --check     exit 1 where a page is out of step

Needs graphhal importable; it imports no device library.
"""

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from ci.run import ROOT
from graphhal import hookspecs
from graphhal.settings import ENV_PREFIX, Settings


def hooks() -> str:
    """Every hook with its arguments, its result and its docstring, in file order."""
    source = Path(hookspecs.__file__).read_text()
    parts = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            arguments = ", ".join(ast.unparse(argument) for argument in node.args.args)
            returns = "" if node.returns is None else ast.unparse(node.returns)
            text = " ".join((ast.get_docstring(node) or "").split())
            parts.append(f"### `{node.name}`\n\n    ({arguments}) -> {returns}\n\n{text}\n")
    return "\n".join(parts)


def options() -> str:
    """Every option with its default and its meaning."""
    meanings = _attributes(inspect.getdoc(Settings) or "")
    lines = ["| option | environment | default | meaning |", "|---|---|---|---|"]
    for name, field in Settings.model_fields.items():
        default = _default(field.get_default(call_default_factory=True))
        meaning = meanings[name].replace("|", "\\|")
        lines.append(f"| `{name}` | `{ENV_PREFIX}{name.upper()}` | {default} | {meaning} |")
    return "\n".join(lines) + "\n"


def _default(value: object) -> str:
    """A default as a person would write it."""
    if value is None or value == ():
        return "–"
    if isinstance(value, tuple) and len(value) > 8:
        return f"`{value[0]}-{value[-1]}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _attributes(docstring: str) -> dict[str, str]:
    """Meanings by name, from the `Attributes:` part of a docstring."""
    part = docstring.partition("Attributes:\n")[2]
    found = re.findall(r"^    (\w+): (.*(?:\n {8,}.*)*)", part, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


PAGES = {"hooks": ("vendors.md", hooks), "options": ("operators.md", options)}


def page(name: str) -> tuple[Path, str]:
    """(path, text as the code says) of the page that holds a reference.

    Raises:
        ValueError: the page has no place for it.
    """
    file, write = PAGES[name]
    path = ROOT / "docs" / file
    pattern = re.compile(rf"(<!-- {name}: .*? -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    text, places = pattern.subn(
        lambda match: f"{match[1]}\n{write()}\n{match[2]}", path.read_text()
    )
    if places != 1:
        raise ValueError(f"{file} has {places} places for {name}, not 1")
    return path, text


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m ci.reference")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true")
    mode.add_argument("--check", action="store_true")
    write = parser.parse_args(arguments).write
    stale = []
    for name in PAGES:
        path, text = page(name)
        if path.read_text() != text:
            stale.append(path.name)
            if write:
                path.write_text(text)
    if stale and not write:
        print(f"out of step: {', '.join(stale)}. Run: python -m ci.reference --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
