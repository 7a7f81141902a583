"""One conformance check: what it demands of which hook, and what became of it on a platform."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from time import perf_counter
from typing import TYPE_CHECKING, Any

from graphhal.testing.caller_state import modes_put_back
from graphhal.testing.check_failure import CheckFailure, NotApplicable

if TYPE_CHECKING:
    from graphhal.testing.subject import Subject


class Outcome(StrEnum):
    """What became of a check. Only `failed` is a failure; the others but `passed` have a reason."""

    PASSED = "passed"
    FAILED = "failed"
    UNCLAIMED = "unclaimed"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True, slots=True)
class Result:
    """One line of a conformance report.

    Attributes:
        check: name of the check.
        outcome: what became of it.
        detail: the failure, or the reason; empty where it passed.
        seconds: that it took.
    """

    check: str
    outcome: Outcome
    detail: str
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "check": self.check,
            "outcome": str(self.outcome),
            "detail": self.detail,
            "seconds": round(self.seconds, 4),
        }


@dataclass(frozen=True, slots=True)
class Check:
    """A plain function over a `Subject`, with the hook that it holds to the contract.

    Attributes:
        name: of the function; unique in the suite.
        area: the file it stands in (`"replay"`, `"boundaries"`, …).
        hook: blamed where the check itself does not know better.
        waivable: whether `PlatformInfo.unclaimed` may name it; what keeps outputs right may not.
        body: raises `CheckFailure` or `NotApplicable`.
    """

    name: str
    area: str
    hook: str
    waivable: bool
    body: Callable[[Subject], None]

    @property
    def demand(self) -> str:
        """What it demands, one sentence."""
        return " ".join((self.body.__doc__ or "").split("\n\n")[0].split())

    def __call__(self, subject: Subject) -> None:
        """Run on a platform.

        Raises:
            CheckFailure: names the check, what happened, what was expected and the hook.
            NotApplicable: the platform's description rules the question out.
        """
        try:
            self.body(subject)
        except CheckFailure as failure:
            raise self._worded(failure.did, failure.expected, failure.hook) from failure.__cause__
        except NotApplicable:
            raise
        except Exception as error:
            did = f"it raised {type(error).__name__}: {error}"
            raise self._worded(did, self.demand, None) from error

    def run(self, subject: Subject) -> Result:
        """Run on a platform and say what became of it; never raises."""
        reason = subject.info.unclaimed.get(self.name) if self.waivable else None
        if reason is not None:
            return Result(self.name, Outcome.UNCLAIMED, reason, 0.0)
        started = perf_counter()
        outcome, detail = Outcome.PASSED, ""
        try:
            with modes_put_back():
                self(subject)
        except CheckFailure as failure:
            outcome, detail = Outcome.FAILED, str(failure)
        except NotApplicable as reason_why:
            outcome, detail = Outcome.NOT_APPLICABLE, str(reason_why)
        finally:
            subject.close()
        return Result(self.name, outcome, detail, perf_counter() - started)

    def _worded(self, did: str, expected: str, hook: str | None) -> CheckFailure:
        failure = CheckFailure(did, expected, hook or self.hook)
        failure.args = (f"{self.name}: {did}. Expected: {expected}. To look at: {failure.hook}",)
        return failure


CHECKS: dict[str, Check] = {}
"""Every check of the suite by name, in order."""


def check(
    hook: str, *, waivable: bool = False
) -> Callable[[Callable[[Subject], None]], Callable[[Subject], None]]:
    """Add a function to the suite; its name is the check's name, its docstring the demand."""

    def add(body: Callable[[Subject], None]) -> Callable[[Subject], None]:
        name = body.__name__
        if name in CHECKS:
            raise ValueError(f"two checks are called {name}")
        area = body.__module__.rpartition(".")[2]
        CHECKS[name] = Check(name, area, hook, waivable, body)
        return body

    return add
