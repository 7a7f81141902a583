"""Moves news fragments into the changelog.

python -m ci.news 0.2.0
"""

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from ci.run import ROOT

KINDS = ("added", "changed", "fixed", "removed")
MARK = "<!-- releases -->"


def section(fragments: Sequence[Path], version: str, date: str) -> str:
    """Changelog section of these fragments.

    Raises:
        ValueError: a fragment's name has no known kind.
    """
    lines = [f"## {version} ({date})"]
    for path in fragments:
        if path.suffixes[-2:-1] not in [[f".{kind}"] for kind in KINDS]:
            raise ValueError(f"{path.name} must be named TOPIC.KIND.md, KIND one of {KINDS}")
    for kind in KINDS:
        texts = [p.read_text().strip() for p in fragments if p.suffixes[-2] == f".{kind}"]
        if texts:
            lines += [
                "",
                f"### {kind.capitalize()}",
                "",
                *(f"- {' '.join(t.split())}" for t in texts),
            ]
    return "\n".join(lines) + "\n"


def release(root: Path, version: str, date: str) -> None:
    """Write the section of all fragments into the changelog and delete them."""
    changelog = root / "CHANGELOG.md"
    fragments = sorted(p for p in (root / "newsfragments").glob("*.md") if p.name != "README.md")
    text = changelog.read_text()
    changelog.write_text(text.replace(MARK, f"{MARK}\n\n{section(fragments, version, date)}", 1))
    for path in fragments:
        path.unlink()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    release(ROOT, sys.argv[1], datetime.now(UTC).date().isoformat())
