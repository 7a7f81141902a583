"""Builds wheel and sdist, installs them in clean environments, and looks at what a user gets.

python -m ci.packaging SCRATCH [--python PYTHON] [--extras core,cpu]

`core` and `cpu` are installed for real; every other extra is resolved (`pip --dry-run`), which
says that its ranges have an answer, and no more. Prints one line per check, and a closing line.
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Sequence
from email import message_from_bytes
from pathlib import Path
from typing import Any

from ci.run import ROOT

PLATFORMS = ("cpu", "cuda", "npu", "rocm")
DEVICE_LIBRARIES = ("torch", "torch_npu", "vllm", "transformers")
RESOLVED = {
    # torch-npu is released for one torch each; vLLM's own ranges take minutes to resolve, so
    # of its extra only the release range is looked up.
    "npu": ("{wheel}[npu]",),
    "vllm": ("--no-deps", "vllm>=0.26,<0.34"),
    "cuda": ("{wheel}[cuda]",),
    "rocm": ("{wheel}[rocm]",),
    "test": ("{wheel}[test]",),
    "dev": ("{wheel}[dev]",),
}


class PackagingError(Exception):
    """A built distribution is not what it should be."""


def command(arguments: Sequence[object], **options: Any) -> str:
    """Output of a command that must succeed."""
    done = subprocess.run(
        [str(argument) for argument in arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=options.pop("cwd", ROOT),
        **options,
    )
    if done.returncode != 0:
        raise PackagingError(f"{arguments}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def sources() -> set[str]:
    """Files of the package that git tracks."""
    listed = command(["git", "ls-files", "graphhal"]).split()
    return {name for name in listed if not name.endswith(".pyc")}


def build(scratch: Path, python: str) -> tuple[Path, Path]:
    """(wheel, sdist), built in an isolated environment each."""
    command([python, "-m", "venv", scratch / "build"])
    pip = scratch / "build" / "bin" / "pip"
    command([pip, "install", "-q", "-c", ROOT / "constraints.txt", "build"])
    dist = scratch / "dist"
    command([scratch / "build" / "bin" / "python", "-m", "build", "-o", dist, ROOT])
    (wheel,) = dist.glob("*.whl")
    (sdist,) = dist.glob("*.tar.gz")
    return wheel, sdist


def check_wheel(wheel: Path) -> None:
    """Every tracked file of the package and nothing else; typed; metadata complete."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = next(name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(info))
        points = archive.read(info.replace("METADATA", "entry_points.txt")).decode()
    packaged = {name for name in names if ".dist-info/" not in name}
    if packaged != sources():
        raise PackagingError(f"wheel and checkout differ in {sorted(packaged ^ sources())}")
    if "graphhal/py.typed" not in packaged:
        raise PackagingError("py.typed is missing: type checkers would ignore the annotations")
    if not any(name.endswith("licenses/LICENSE") for name in names):
        raise PackagingError("the licence is missing")
    if metadata["License-Expression"] != "Apache-2.0":
        raise PackagingError(f"licence is {metadata['License-Expression']}")
    extras = set(metadata.get_all("Provides-Extra", ()))
    wanted = {"cpu", "cuda", "npu", "rocm", "vllm", "bench", "test", "dev"}
    if not wanted <= extras:
        raise PackagingError(f"extras lack {sorted(wanted - extras)}")
    core = [r for r in metadata.get_all("Requires-Dist", ()) if "extra ==" not in r]
    if any(r.startswith(("torch", "vllm", "transformers")) for r in core):
        raise PackagingError(f"the core requires a device library: {core}")
    for group in ("graphhal.platforms", "graphhal.adapters", "vllm.general_plugins", "pytest11"):
        if f"[{group}]" not in points:
            raise PackagingError(f"no entry points in {group}")


def check_sdist(sdist: Path, wheel: Path, scratch: Path, python: str) -> None:
    """A wheel built from the sdist holds the same files as the wheel built from the checkout."""
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
    for name in ("LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "tests/test_plan.py"):
        if not any(path.endswith(f"/{name}") for path in names):
            raise PackagingError(f"the sdist lacks {name}")
    rebuilt = scratch / "rebuilt"
    command([python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", rebuilt, sdist])
    with zipfile.ZipFile(next(rebuilt.glob("*.whl"))) as again, zipfile.ZipFile(wheel) as first:
        if set(again.namelist()) != set(first.namelist()):
            raise PackagingError("a wheel from the sdist holds other files than one from git")


def install(wheel: Path, extra: str, scratch: Path, python: str) -> Path:
    """A clean environment with the wheel and one extra."""
    environment = scratch / f"venv-{extra or 'core'}"
    command([python, "-m", "venv", environment])
    what = f"{wheel}[{extra}]" if extra else str(wheel)
    pip = environment / "bin" / "pip"
    command([pip, "install", "-q", "-c", ROOT / "constraints.txt", what])
    return environment


def platforms(environment: Path, scratch: Path) -> dict[str, Any]:
    """What `graphhal platforms --json` says there, away from the checkout."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("GRAPHHAL_", "PYTHONPATH"))}
    program = environment / "bin" / "graphhal"
    found: dict[str, Any] = json.loads(
        command([program, "platforms", "--json"], cwd=scratch, env=clean)
    )
    names = [platform["name"] for platform in found["platforms"]]
    if names != sorted(PLATFORMS):
        raise PackagingError(f"platforms are {names}, not {sorted(PLATFORMS)}")
    for platform in found["platforms"]:
        if platform["status"].startswith("not loaded"):
            raise PackagingError(f"{platform['name']} is {platform['status']}")
    return found


def check_core(wheel: Path, scratch: Path, python: str) -> None:
    """No device library comes along; every platform says what it lacks; bench says it too."""
    environment = install(wheel, "", scratch, python)
    for library in DEVICE_LIBRARIES:
        code = f"import importlib.util as u; print(u.find_spec({library!r}) is None)"
        if command([environment / "bin" / "python", "-c", code], cwd=scratch).strip() != "True":
            raise PackagingError(f"the core installed {library}")
    found = platforms(environment, scratch)
    if found["active"] is not None or any(p["usable"] for p in found["platforms"]):
        raise PackagingError(f"without PyTorch no platform is usable, yet: {found}")
    if not all("not installed" in platform["status"] for platform in found["platforms"]):
        raise PackagingError(f"a platform does not say what is not installed: {found}")
    bench = subprocess.run(
        [environment / "bin" / "graphhal", "bench"], cwd=scratch, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if bench.returncode != 2 or "Traceback" in bench.stderr or "error: " not in bench.stderr:
        raise PackagingError(f"bench without PyTorch: exit {bench.returncode}, {bench.stderr}")


def check_cpu(wheel: Path, scratch: Path, python: str) -> None:
    """The cpu platform is active, and a graph can be captured and replayed."""
    environment = install(wheel, "cpu", scratch, python)
    found = platforms(environment, scratch)
    if found["active"] != "cpu":
        raise PackagingError(f"active is {found['active']}, not cpu: {found}")
    code = "import graphhal; print(graphhal.open_platform().info.name)"
    if command([environment / "bin" / "python", "-c", code], cwd=scratch).strip() != "cpu":
        raise PackagingError("open_platform does not open cpu")


def check_resolves(extra: str, wheel: Path, scratch: Path) -> None:
    """pip finds releases that satisfy the extra's ranges; nothing is installed."""
    what = [part.format(wheel=wheel) for part in RESOLVED[extra]]
    pip = scratch / "build" / "bin" / "pip"
    constraints = () if extra == "vllm" else ("-c", ROOT / "constraints.txt")
    command([pip, "install", "-q", "--dry-run", "--ignore-installed", *constraints, *what])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every check; exit 1 where one failed."""
    parser = argparse.ArgumentParser(prog="python -m ci.packaging")
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--python", default=sys.executable)
    options = parser.parse_args(arguments)
    scratch, python = options.scratch.resolve(), options.python
    scratch.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    try:
        wheel, sdist = build(scratch, python)
    except PackagingError as error:
        print(f"build: FAILED: {error}")
        return 1
    checks: dict[str, Callable[[], None]] = {
        "wheel": lambda: check_wheel(wheel),
        "sdist": lambda: check_sdist(sdist, wheel, scratch, python),
        "core": lambda: check_core(wheel, scratch, python),
        "cpu": lambda: check_cpu(wheel, scratch, python),
    }
    for extra in RESOLVED:
        checks[f"{extra} resolves"] = lambda extra=extra: check_resolves(extra, wheel, scratch)
    failed = 0
    for name, check in checks.items():
        try:
            check()
        except PackagingError as error:
            failed += 1
            print(f"{name}: FAILED: {error}", flush=True)
        else:
            print(f"{name}: ok", flush=True)
    spent = time.monotonic() - started
    print(f"{len(checks) - failed} passed, {failed} failed in {spent:.1f}s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
