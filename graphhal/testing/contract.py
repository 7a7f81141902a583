"""Checks of what a plugin says of itself, and of how its hooks are written."""

import subprocess
import sys

import torch

from graphhal.platform import PlatformInfo
from graphhal.testing.check import CHECKS, check
from graphhal.testing.check_failure import CheckFailure, NotApplicable
from graphhal.testing.subject import Subject

_DEVICE_LIBRARIES = ("torch", "torch_npu", "aiter", "intel_extension_for_pytorch", "triton")


@check("graphhal_probe")
def info_describes_the_platform(subject: Subject) -> None:
    """The probe names the platform as it is installed, its device type, versions and words."""
    info = subject.info
    if info.name != subject.name:
        raise CheckFailure(
            f"PlatformInfo.name is {info.name!r}",
            f"{subject.name!r}, the name of the entry point, which GRAPHHAL_PLATFORM takes",
        )
    if not info.versions or not all(
        isinstance(name, str) and isinstance(version, str) and version
        for name, version in info.versions.items()
    ):
        raise CheckFailure(
            f"PlatformInfo.versions is {info.versions!r}",
            "a version, as text, of every library and driver that decides behaviour",
        )
    if info.boundary_order not in ("before", "after"):
        raise CheckFailure(f"boundary_order is {info.boundary_order!r}", "'before' or 'after'")
    if info.free_bytes is not None:
        free = info.free_bytes()
        if not isinstance(free, int) or free < 0:
            raise CheckFailure(f"free_bytes() returned {free!r}", "bytes, an int of 0 or more")


@check("PlatformInfo.unclaimed")
def unclaimed_checks_have_reasons(subject: Subject) -> None:
    """`PlatformInfo.unclaimed` maps names of checks that may be waived to a reason in words."""
    for name, reason in subject.info.unclaimed.items():
        found = CHECKS.get(name)
        if found is None:
            waivable = ", ".join(c.name for c in CHECKS.values() if c.waivable)
            raise CheckFailure(
                f"it names {name!r}, which is no check", f"names among these: {waivable}"
            )
        if not found.waivable:
            raise CheckFailure(
                f"it names {name!r}, without which outputs would be wrong",
                "to pass that check; it cannot be waived",
            )
        if len(reason.split()) < 3:
            raise CheckFailure(
                f"the reason for {name!r} is {reason!r}", "a reason of three words or more"
            )


@check("the imports of the plugin's module")
def importing_the_plugin_is_free(subject: Subject) -> None:
    """Importing the plugin's module loads no device library; `graphhal_probe` does that."""
    if subject.source is None:
        raise NotApplicable("the plugin object was made in this process, not imported by name")
    program = (
        f"import sys, {subject.source}; "
        f"print(*[name for name in {_DEVICE_LIBRARIES!r} if name in sys.modules])"
    )
    done = in_fresh_process(program)
    if done.returncode:
        raise CheckFailure(
            f"a fresh process could not import it: {done.stderr.strip()[-600:]}",
            "an import that works wherever the package is installed",
        )
    if done.stdout.strip():
        raise CheckFailure(
            f"importing {subject.source} loaded {done.stdout.strip()}",
            "imports of graphhal and the standard library only; a worker imports every plugin",
        )


def in_fresh_process(program: str) -> "subprocess.CompletedProcess[str]":
    """Run Python source in a new interpreter with this one's import path."""
    path = [entry for entry in sys.path if entry]
    start = f"import sys; sys.path[:] = {path!r}\n"
    return subprocess.run(  # noqa: S603  (this interpreter, our own source)
        [sys.executable, "-c", start + program], capture_output=True, text=True, check=False
    )


def describe(info: PlatformInfo) -> str:
    """One line for the head of a report."""
    versions = ", ".join(f"{name} {version}" for name, version in info.versions.items())
    return f"{info.name} on {torch.device(info.device_type)} ({versions})"
