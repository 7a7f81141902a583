"""What a user installs: ranges, extras, entry points; the packaging cell finds planted faults."""

import tomllib
import zipfile
from importlib import import_module
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import graphhal
from ci import packaging as cell
from ci.packaging import PackagingError

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def requirements(lines: list[str]) -> dict[str, Requirement]:
    return {found.name: found for found in map(Requirement, lines)}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {name.lower().replace("_", "-"): number for name, number in pinned}


def test_the_version_has_one_home() -> None:
    assert PROJECT["dynamic"] == ["version"]
    assert version("graphhal") == graphhal.__version__


def test_the_core_brings_no_device_library() -> None:
    core = requirements(PROJECT["dependencies"])
    assert {"torch", "torch-npu", "vllm", "transformers"}.isdisjoint(core)
    assert {"numpy", "pluggy", "pydantic", "pydantic-settings"} <= set(core)


def test_every_promised_extra_is_there() -> None:
    assert {"cpu", "cuda", "npu", "rocm", "vllm", "test", "dev"} <= set(EXTRAS)


@pytest.mark.parametrize("extra", ["cpu", "cuda", "npu", "rocm", "bench"])
def test_one_range_of_pytorch(extra: str) -> None:
    torch = requirements(EXTRAS[extra])["torch"].specifier
    assert all(number in torch for number in ("2.11.0", "2.12.1", "2.13.0", "2.14.1"))
    assert not any(number in torch for number in ("2.10.0", "2.15.0"))


def test_one_range_of_python() -> None:
    wanted = Requirement(f"x {PROJECT['requires-python']}").specifier
    assert all(number in wanted for number in ("3.11.0", "3.12.5", "3.13.9"))
    assert not any(number in wanted for number in ("3.10.9", "3.14.0"))


def test_the_range_of_vllm() -> None:
    vllm = requirements(EXTRAS["vllm"])["vllm"].specifier
    assert all(number in vllm for number in ("0.26.0", "0.31.0", "0.33.0"))
    assert not any(number in vllm for number in ("0.25.1", "0.34.0"))


def test_every_direct_dependency_of_the_two_commands_is_pinned_within_its_range() -> None:
    pinned = pins()
    lines = [*PROJECT["dependencies"], *EXTRAS["bench"], *EXTRAS["test"], *EXTRAS["cpu"]]
    wanted = requirements(lines)
    del wanted["graphhal"]
    for name, requirement in wanted.items():
        assert pinned[name] in requirement.specifier, name


def test_the_package_is_typed() -> None:
    assert (ROOT / "graphhal" / "py.typed").is_file()


@pytest.mark.parametrize("group", ["graphhal.platforms", "graphhal.adapters"])
def test_entry_points_name_modules_that_exist(group: str) -> None:
    own = [p for p in entry_points(group=group) if p.dist and p.dist.name == "graphhal"]
    assert {point.name for point in own} == set(PROJECT["entry-points"][group])
    for point in own:
        assert import_module(point.value)


def test_the_command_is_installed() -> None:
    (point,) = entry_points(group="console_scripts", name="graphhal")
    assert callable(point.load())


def test_both_readme_commands_are_the_ones_that_ci_runs() -> None:
    readme = (ROOT / "README.md").read_text()
    matrix = (ROOT / "ci" / "matrix.toml").read_text()
    for script in ("scripts/main-job.sh", "scripts/test.sh"):
        assert f"    sh {script}\n" in readme
        assert f"sh {script}" in matrix
        assert (ROOT / script).is_file()


METADATA = """\
Metadata-Version: 2.4
Name: graphhal
Version: 0
License-Expression: Apache-2.0
Requires-Dist: numpy
"""


def wheel(folder: Path, files: dict[str, str | None]) -> Path:
    """A wheel like the real one; `files` replaces members, None leaves one out."""
    groups = ("graphhal.platforms", "graphhal.adapters", "vllm.general_plugins", "pytest11")
    extras = "".join(
        f"Provides-Extra: {extra}\n"
        for extra in ("cpu", "cuda", "npu", "rocm", "vllm", "bench", "test", "dev")
    )
    members: dict[str, str | None] = {
        **dict.fromkeys(cell.sources(), ""),
        "graphhal-0.dist-info/METADATA": METADATA + extras,
        "graphhal-0.dist-info/entry_points.txt": "".join(f"[{group}]\n" for group in groups),
        "graphhal-0.dist-info/licenses/LICENSE": "",
    } | files
    path = folder / "graphhal-0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in members.items():
            if text is not None:
                archive.writestr(name, text)
    return path


def test_a_good_wheel_passes(tmp_path: Path) -> None:
    cell.check_wheel(wheel(tmp_path, {}))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"graphhal/plan.py": None}, "wheel and checkout differ in .*plan"),
        ({"graphhal/py.typed": None}, "wheel and checkout differ in .*py.typed"),
        ({"tests/test_plan.py": ""}, "wheel and checkout differ in .*test_plan"),
        ({"graphhal-0.dist-info/licenses/LICENSE": None}, "the licence is missing"),
        ({"graphhal-0.dist-info/METADATA": METADATA}, "extras lack"),
        (
            {"graphhal-0.dist-info/METADATA": METADATA.replace("Apache-2.0", "MIT")},
            "licence is MIT",
        ),
        ({"graphhal-0.dist-info/entry_points.txt": ""}, "no entry points in graphhal.platforms"),
    ],
)
def test_a_faulty_wheel_is_found(
    tmp_path: Path, files: dict[str, str | None], message: str
) -> None:
    with pytest.raises(PackagingError, match=message):
        cell.check_wheel(wheel(tmp_path, files))


def test_a_core_that_requires_a_device_library_is_found(tmp_path: Path) -> None:
    path = wheel(tmp_path, {})
    with zipfile.ZipFile(path) as archive:
        metadata = archive.read("graphhal-0.dist-info/METADATA").decode()
    heavy = {"graphhal-0.dist-info/METADATA": f"{metadata}Requires-Dist: torch>=2.11\n"}
    with pytest.raises(PackagingError, match="the core requires a device library"):
        cell.check_wheel(wheel(tmp_path, heavy))


def test_a_command_that_fails_is_told_with_its_output() -> None:
    with pytest.raises(PackagingError, match=r"(?s)exit 3.*out of luck"):
        cell.command(["sh", "-c", "echo out of luck; exit 3"])
