"""Whether the installed vLLM is one that was read: compared by signature, name for name."""

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module, resources
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from graphhal.vllm_worker.touched import ENCODER_CUDAGRAPH, spelled

SUPPORTED = ((0, 26), (0, 33))
"""First and last release line whose signatures were read."""


@dataclass(frozen=True, slots=True)
class Drift:
    """A name of vLLM that is not what it was in any supported release.

    Attributes:
        name: `module:qualname`.
        expected: spellings that are known, newest last.
        found: spelling in this process, or why there is none.
    """

    name: str
    expected: tuple[str, ...]
    found: str

    def __str__(self) -> str:
        return f"{self.name} was expected as {' or '.join(self.expected)}, found {self.found}"


@cache
def known_signatures() -> dict[str, dict[str, str]]:
    """Per release, the spelling of every touched name."""
    text = resources.files(__package__).joinpath("signatures.json").read_text()
    table: dict[str, dict[str, str]] = json.loads(text)
    return table


def installed_version() -> str:
    """vLLM's version, or `unknown`."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return "unknown"


def version_problem(found: str) -> str | None:
    """Why this version is not served, or None."""
    first, last = (f"{major}.{minor}" for major, minor in SUPPORTED)
    try:
        line = tuple(int(part) for part in found.split(".")[:2])
    except ValueError:
        line = ()
    if len(line) == 2 and SUPPORTED[0] <= line <= SUPPORTED[1]:
        return None
    return f"vLLM {first} to {last} was expected, found {found}"


def drifts(names: Iterable[str], redefined_in: str | None = None) -> list[Drift]:
    """The names that are not what they were in any supported release.

    Args:
        names: of vLLM.
        redefined_in: a module that has classes of the same names in place of vLLM's; those that it
            has are compared, in place of vLLM's.
    """
    found = []
    for name in names:
        expected = tuple(
            dict.fromkeys(table[name] for table in known_signatures().values() if name in table)
        )
        looked_at = name
        if redefined_in is not None:
            qualname = name.partition(":")[2]
            if not hasattr(sys.modules.get(redefined_in), qualname.partition(".")[0]):
                continue
            looked_at = f"{redefined_in}:{qualname}"
        actual = _spelling(looked_at)
        if actual not in expected:
            found.append(Drift(looked_at, expected, actual))
    return found


def problem(names: Iterable[str]) -> str | None:
    """One line for the operator about a vLLM that cannot be served, or None."""
    wrong = version_problem(installed_version())
    if wrong is not None:
        return wrong
    changed = drifts(names)
    if not changed:
        return None
    more = f"; and {len(changed) - 2} more" if len(changed) > 2 else ""
    return "; ".join(map(str, changed[:2])) + more


def _spelling(name: str) -> str:
    module, qualname = name.split(":")
    try:
        target: Any = import_module(module)
        for part in qualname.split("."):
            target = getattr(target, part)
            if module == ENCODER_CUDAGRAPH:
                target = _vllms_own(target)
        return spelled(target)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        return f"nothing ({type(error).__name__}: {error})"


def _vllms_own(target: Any) -> Any:
    """vLLM's manager, where one derived from it stands in its place: vllm-ascend's runner puts its
    own there while it makes one, and graphhal replaces either."""
    bases = target.__mro__ if isinstance(target, type) else ()
    return next((base for base in bases if base.__module__ == ENCODER_CUDAGRAPH), target)
