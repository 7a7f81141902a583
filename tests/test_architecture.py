"""The layout is tested: import order, one shape for every platform, and what importing may load."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "graphhal"
PLATFORMS = ("cpu", "cuda", "npu", "rocm")
PLATFORM_FILES = {"plugin.py", "graph.py", "attention.py", "memory.py"}
PLATFORM_LINES = 200
HOOKSPEC_LINES = 80
BANNED_NAMES = {"utils", "common", "helpers", "types", "base", "core", "manager"}
DEVICE_LIBRARIES = (
    "torch",
    "torch_npu",
    "vllm",
    "vllm_ascend",
    "vllm_omni",
    "aiter",
    "transformers",
)
ONLY_IMPORTERS = {
    "vllm": {"vllm_worker"},
    "vllm_omni": {"vllm_worker"},
    "vllm_ascend": {"vllm_worker"},
    "torch_npu": {"npu"},
    "aiter": {"rocm"},
}
# A module imports from earlier lines only; a package counts as one, whatever it does inside.
ORDER = (
    {"errors", "held_places", "memory_limits", "workspaces"},
    {"boundaries", "items", "settings", "peers", "module_notes", "masked_attention"},
    {"weights"},
    {"cost_table", "stats"},
    {"plan"},
    {"platform"},
    {"adapter", "hookspecs", "stream_capture", "outputs"},
    {"arena"},
    {"graph_set"},
    {"execution"},
    {"self_check", "cost", "group_plans"},
    {"start_up"},
    {"runner"},
    {"data_parallel", "discovery"},
    {"testing"},
    {*PLATFORMS, "adapters", "pytest_plugin"},
    {"bench", "vllm_worker"},
    {"cli"},
)
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
# A platform or adapter that reached for these would know policy, or be known to it by name.
FORBIDDEN_TO_PLUGINS = {
    "runner", "start_up", "graph_set", "execution", "discovery", "testing", "self_check",
}  # fmt: skip


def modules(package: Path) -> Iterator[tuple[Path, str, ast.Module]]:
    """(path, top-level name under graphhal, syntax tree)."""
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        yield path, parts[0], ast.parse(path.read_text())


def imported(tree: ast.Module) -> Iterator[str]:
    """Dotted names that run-time imports of a module name; TYPE_CHECKING blocks left out."""
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide what a module needs"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def import_problems(package: Path) -> list[str]:
    problems = []
    for path, own, tree in modules(package):
        where = path.relative_to(package)
        if own == "__init__":
            continue
        if own not in RANK:
            problems.append(f"{where}: {own} has no place in ORDER")
            continue
        for name in imported(tree):
            top, *rest = name.split(".")
            if top in ONLY_IMPORTERS and own not in ONLY_IMPORTERS[top]:
                problems.append(f"{where}: only {sorted(ONLY_IMPORTERS[top])} may import {top}")
            other = rest[0] if top == "graphhal" and rest else own
            if other == own or other not in RANK:
                continue
            if RANK[other] >= RANK[own]:
                problems.append(f"{where}: {own} may not import {other}")
            if own in {*PLATFORMS, "adapters"} and other in FORBIDDEN_TO_PLUGINS:
                problems.append(f"{where}: a plugin may not import {other}")
    return problems


def shape_problems(package: Path) -> list[str]:
    problems = []
    for name in PLATFORMS:
        files = {path.name for path in (package / name).glob("*.py")}
        problems += [f"{name} lacks {missing}" for missing in sorted(PLATFORM_FILES - files)]
        for path in sorted((package / name).glob("*.py")):
            lines = len(path.read_text().splitlines())
            if lines > PLATFORM_LINES:
                problems.append(f"{name}/{path.name} has {lines} lines, over {PLATFORM_LINES}")
    lines = len((package / "hookspecs.py").read_text().splitlines())
    if lines > HOOKSPEC_LINES:
        problems.append(f"hookspecs.py has {lines} lines, over one screen of {HOOKSPEC_LINES}")
    for path in package.rglob("*.py"):
        if path.stem in BANNED_NAMES or path.parent.name in BANNED_NAMES:
            problems.append(f"{path.relative_to(package)}: this name says nothing")
    return problems


def circle(package: Path) -> list[str]:
    """Modules that import one another in a circle, imports within functions too; [] for none."""
    found = {
        ".".join(("graphhal", *path.relative_to(package).with_suffix("").parts)): tree
        for path, _, tree in modules(package)
        if path.name != "__init__.py"
    }
    imports = {
        name: {
            other
            for each in imported(tree)
            for other in (each, each.rpartition(".")[0])
            if other in found and other != name
        }
        for name, tree in found.items()
    }
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def assert_problems(package: Path) -> list[str]:
    """`python -O` strips asserts, so none may guard anything."""
    return [
        f"{path.relative_to(package)}:{node.lineno}: assert"
        for path, _, tree in modules(package)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
    ]


def loaded_libraries(names: list[str]) -> set[str]:
    """Device libraries that importing these modules loads, in a fresh interpreter."""
    code = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
print(*(n for n in {DEVICE_LIBRARIES!r} if n in sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(done.stdout.split())


def test_imports_point_one_way() -> None:
    assert import_problems(PACKAGE) == []


def test_no_modules_import_one_another_in_a_circle() -> None:
    assert circle(PACKAGE) == []


def test_every_platform_has_the_same_files_and_is_a_page() -> None:
    assert shape_problems(PACKAGE) == []


def test_no_assert_guards_anything() -> None:
    assert assert_problems(PACKAGE) == []


def test_importing_graphhal_loads_no_device_library() -> None:
    assert loaded_libraries(["graphhal", "graphhal.discovery", "graphhal.cli"]) == set()


@pytest.mark.parametrize("package", [*PLATFORMS, "adapters", "vllm_worker"])
def test_importing_a_plugin_loads_no_device_library(package: str) -> None:
    assert loaded_libraries([f"graphhal.{package}.plugin"]) == set()


def test_public_names_are_fetched_on_use() -> None:
    code = "import sys, graphhal as g\nprint(g.Settings, g.Boundaries, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False"


def plant(tmp_path: Path, where: str, text: str) -> Path:
    """The file at `where` with more text at its end, alone in a package."""
    source, target = PACKAGE / where, tmp_path / "graphhal" / where
    target.parent.mkdir(parents=True)
    target.write_text((source.read_text() if source.exists() else "") + text)
    return tmp_path / "graphhal"


def plant_in_copy(tmp_path: Path, where: str, text: str) -> Path:
    """The same, in a copy of the whole layout."""
    for path in PACKAGE.rglob("*.py"):
        copy = tmp_path / "graphhal" / path.relative_to(PACKAGE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    target = tmp_path / "graphhal" / where
    target.parent.mkdir(exist_ok=True)
    target.write_text((target.read_text() if target.exists() else "") + text)
    return tmp_path / "graphhal"


@pytest.mark.parametrize(
    ("where", "text", "found"),
    [
        ("plan.py", "\nimport graphhal.runner\n", "plan may not import runner"),
        ("plan.py", "\nfrom graphhal import runner\n", "plan may not import runner"),
        ("cuda/graph.py", "\nfrom graphhal.rocm import graph\n", "cuda may not import rocm"),
        ("adapters/extra.py", "from graphhal.cpu import graph\n", "adapters may not import cpu"),
        ("cpu/graph.py", "\ndef f():\n    import graphhal.discovery\n", "a plugin may not import"),
        ("runner.py", "\nimport vllm.config\n", "only ['vllm_worker'] may import vllm"),
        ("cuda/memory.py", "\nimport torch_npu\n", "only ['npu'] may import torch_npu"),
        ("stray.py", "", "stray has no place in ORDER"),
    ],
)
def test_planted_imports_are_found(tmp_path: Path, where: str, text: str, found: str) -> None:
    assert found in "\n".join(import_problems(plant(tmp_path, where, text)))


@pytest.mark.parametrize(
    ("where", "text", "found"),
    [
        ("hookspecs.py", "#\n" * HOOKSPEC_LINES, "over one screen"),
        ("rocm/graph.py", "#\n" * PLATFORM_LINES, "rocm/graph.py has"),
        ("adapters/utils.py", "", "this name says nothing"),
        ("core/engine.py", "", "this name says nothing"),
    ],
)
def test_planted_shapes_are_found(tmp_path: Path, where: str, text: str, found: str) -> None:
    assert found in "\n".join(shape_problems(plant_in_copy(tmp_path, where, text)))


def test_a_missing_platform_file_is_found(tmp_path: Path) -> None:
    package = plant_in_copy(tmp_path, "plan.py", "")
    (package / "npu" / "memory.py").unlink()
    assert "npu lacks memory.py" in shape_problems(package)


@pytest.mark.parametrize("text", ["import graphhal.npu.memory", "from graphhal.npu import memory"])
def test_a_planted_circle_is_found(tmp_path: Path, text: str) -> None:
    package = plant_in_copy(tmp_path, "npu/pool.py", f"\ndef late():\n    {text}\n")
    assert "graphhal.npu.pool" in circle(package)


def test_a_planted_assert_is_found(tmp_path: Path) -> None:
    assert assert_problems(plant(tmp_path, "plan.py", "\nassert True\n")) != []


def test_a_module_that_loads_torch_is_found() -> None:
    assert "torch" in loaded_libraries(["graphhal.runner"])
