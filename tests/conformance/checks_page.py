"""`python -m tests.conformance.checks_page`: writes docs/conformance.md from the suite."""

import re
from itertools import groupby
from pathlib import Path

from graphhal.testing import checks
from tests.broken_platforms.catalogue import FAULTS
from tests.broken_platforms.fault import Fault

PAGE = Path(__file__).resolve().parents[2] / "docs" / "conformance.md"
HEAD = """# What the conformance suite demands

Written from the code by `python -m tests.conformance.checks_page`; how to run the suite:
[vendors](vendors.md). A check marked ○ may be left unclaimed, with a reason.
"""
MATRIX = """
## What catches what

The suite is tested on {faults} broken platforms: a correct one in memory, with one fault each.
Every fault is caught, by these checks and no others: `pytest -m slow` runs all {checks} checks on
each. Each check is the only one that catches some of them (**bold**), so that removing it from the
suite lets a broken platform through. `python -m tests.broken_platforms` runs and prints it all.

| broken platform | caught by |
|---|---|
"""
ALONE = """
| check | broken platforms that it catches | which nothing else catches |
|---|---|---|
"""


def words(fault: Fault) -> str:
    """`SkipsTheBoundaryUpdate` as words."""
    return re.sub(r"(?<=.)([A-Z])", lambda match: " " + match[1].lower(), fault.name)


def matrix() -> str:
    """Every broken platform against every check, as the faults declare it."""
    names = [check.name for check in checks()]
    parts = [MATRIX.format(faults=len(FAULTS), checks=len(names))]
    for fault in sorted(FAULTS.values(), key=lambda f: min(map(names.index, f.caught_by))):
        caught = [f"`{name}`" for name in names if name in fault.caught_by]
        shown = f"**{caught[0]}**" if len(caught) == 1 else ", ".join(caught)
        parts.append(f"| {words(fault)} | {shown} |\n")
    parts.append(ALONE)
    for name in names:
        catches = [fault for fault in FAULTS.values() if name in fault.caught_by]
        alone = [words(fault) for fault in catches if len(fault.caught_by) == 1]
        parts.append(f"| `{name}` | {len(catches)} | {', '.join(alone)} |\n")
    return "".join(parts)


def page() -> str:
    """The page as the code says."""
    parts = [HEAD]
    for area, members in groupby(checks(), key=lambda check: check.area):
        parts.append(
            f"\n## {area.capitalize()}\n\n| check | demand | to look at |\n|---|---|---|\n"
        )
        for check in members:
            mark = " ○" if check.waivable else ""
            parts.append(f"| `{check.name}`{mark} | {check.demand} | {check.hook} |\n")
    return "".join(parts) + matrix()


if __name__ == "__main__":
    PAGE.write_text(page())
