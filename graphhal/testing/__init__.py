"""The conformance suite for platform plugins, as plain functions; pytest is not needed.

    from graphhal.testing import open_subject, run

    for result in run(open_subject("xpu")):
        print(result.check, result.outcome, result.detail)

`python -m graphhal.testing --platform NAME` prints the same as a table. With pytest, a test file
of three lines and `pytest --graphhal-platform=NAME` (see `graphhal.pytest_plugin`). What a platform
does not claim it lists in `PlatformInfo.unclaimed`, check by check, with a reason.
"""

from collections.abc import Iterable, Iterator

from graphhal.testing import (
    attention,
    boundaries,
    capture,
    contract,
    lifetime,
    ownership,
    pool,
    replay,
    statistics,
)
from graphhal.testing.check import CHECKS, Check, Outcome, Result
from graphhal.testing.check_failure import CheckFailure, NotApplicable
from graphhal.testing.subject import Subject, open_subject
from graphhal.testing.toy_encoder import ToyEncoder, ToyItem

AREAS = (contract, capture, replay, boundaries, attention, ownership, pool, lifetime, statistics)
"""The modules whose checks make the suite."""


def checks() -> tuple[Check, ...]:
    """Every check, by area."""
    order = [area.__name__.rpartition(".")[2] for area in AREAS]
    return tuple(sorted(CHECKS.values(), key=lambda check: order.index(check.area)))


def run(subject: Subject, names: Iterable[str] | None = None) -> Iterator[Result]:
    """Run checks on a platform; one result each, as they finish.

    Args:
        subject: the platform, from `open_subject`.
        names: checks to run; by default all.

    Raises:
        KeyError: a name is no check.
    """
    chosen = checks() if names is None else tuple(CHECKS[name] for name in names)
    for check in chosen:
        yield check.run(subject)


__all__ = [
    "CHECKS",
    "Check",
    "CheckFailure",
    "NotApplicable",
    "Outcome",
    "Result",
    "Subject",
    "ToyEncoder",
    "ToyItem",
    "checks",
    "open_subject",
    "run",
]
