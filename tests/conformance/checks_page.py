"""`python -m tests.conformance.checks_page`: writes docs/conformance.md from the suite."""

from itertools import groupby
from pathlib import Path

from graphhal.testing import checks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "conformance.md"
HEAD = """# What the conformance suite demands

Written from the code by `python -m tests.conformance.checks_page`; how to run the suite:
[vendors](vendors.md). A check marked ○ may be left unclaimed, with a reason.
"""


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
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
