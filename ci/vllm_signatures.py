#!/usr/bin/env python3
"""Write `graphhal/vllm_worker/signatures.json` from vLLM wheels, without importing them.

    python ci/vllm_signatures.py vllm-0.26.0-*.whl vllm-0.31.0-*.whl ...

A folder with an unpacked vLLM works as well: `0.31.0=PATH/site-packages`. Releases that are not
named keep what was read before.
"""

import ast
import json
import re
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from graphhal.vllm_worker.touched import ALL  # noqa: E402

TARGET = ROOT / "graphhal" / "vllm_worker" / "signatures.json"


def source_of(place: Path, name: str) -> str | None:
    """Text of a file in a wheel or a folder; None where it is not there."""
    if place.is_dir():
        path = place / name
        return path.read_text() if path.exists() else None
    with zipfile.ZipFile(place) as wheel:
        return wheel.read(name).decode() if name in wheel.namelist() else None


def spelled_function(node: ast.FunctionDef) -> str:
    """As `graphhal.vllm_worker.touched.spelled` writes it."""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    parts = [a.arg + ("=" if n >= first_default else "") for n, a in enumerate(positional)]
    if arguments.vararg:
        parts.append("*" + arguments.vararg.arg)
    elif arguments.kwonlyargs:
        parts.append("*")
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parts.append(argument.arg + ("=" if default is not None else ""))
    if arguments.kwarg:
        parts.append("**" + arguments.kwarg.arg)
    return f"({', '.join(parts)})"


def spelled_class(node: ast.ClassDef) -> str:
    """Field names of a dataclass."""
    names = [s.target.id for s in node.body if isinstance(s, ast.AnnAssign)]  # type: ignore[union-attr]
    return "fields: " + ", ".join(names)


def lookup(tree: ast.Module, qualname: str) -> str | None:
    """Spelling of a function or class; None where there is none of that name."""
    scope: list[ast.stmt] = tree.body
    found: ast.stmt | None = None
    for part in qualname.split("."):
        found = next(
            (
                node
                for node in scope
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == part
            ),
            None,
        )
        if found is None:
            return None
        scope = getattr(found, "body", [])
    if isinstance(found, ast.ClassDef):
        return spelled_class(found)
    return spelled_function(found) if isinstance(found, ast.FunctionDef) else None


def read(place: Path) -> dict[str, str]:
    """Spelling of every touched name that one release has."""
    trees: dict[str, ast.Module | None] = {}
    table = {}
    for name in ALL:
        module, qualname = name.split(":")
        if module not in trees:
            text = source_of(place, module.replace(".", "/") + ".py")
            trees[module] = None if text is None else ast.parse(text)
        tree = trees[module]
        if tree is not None and (spelling := lookup(tree, qualname)) is not None:
            table[name] = spelling
    return table


def main(arguments: list[str]) -> int:
    """Write the table; returns the exit status."""
    if not arguments:
        print(__doc__)
        return 2
    known = json.loads(TARGET.read_text()) if TARGET.exists() else {}
    tables = {
        version: {name: text for name, text in table.items() if name in ALL}
        for version, table in known.items()
    }
    for argument in arguments:
        version, _, folder = argument.partition("=")
        if not folder:
            match = re.search(r"vllm-([0-9.]+)-", Path(argument).name)
            if match is None:
                print(f"not a vLLM wheel: {argument}", file=sys.stderr)
                return 2
            version, folder = match[1], argument
        tables[version] = read(Path(folder))
    ordered = dict(sorted(tables.items(), key=lambda e: tuple(map(int, e[0].split(".")))))
    TARGET.write_text(json.dumps(ordered, indent=1) + "\n")
    print(f"{TARGET.name}: {', '.join(f'{v} ({len(t)} names)' for v, t in ordered.items())}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
