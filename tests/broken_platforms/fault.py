"""A deliberate fault of a platform, and the checks that must catch it."""

from collections.abc import Callable
from dataclasses import dataclass

from graphhal.testing import CHECKS, Outcome, Subject
from tests.broken_platforms.tape_platform import TapePlatform

FAULTS: dict[str, "Fault"] = {}


@dataclass(frozen=True)
class Fault:
    """A broken platform: the correct one with one method changed.

    `caught_by` is all the checks that it fails, no more and no less. `source` is the module that a
    fresh process imports, for the two checks that need one.
    """

    platform: type[TapePlatform]
    caught_by: frozenset[str]
    source: str | None = None

    @property
    def name(self) -> str:
        return self.platform.__name__

    def subject(self) -> Subject:
        return Subject(self.platform(), "tape", source=self.source)

    def failed(self) -> dict[str, str]:
        """Messages of the checks that it fails, by name; every check gets a fresh platform."""
        results = [check.run(self.subject()) for check in CHECKS.values()]
        return {r.check: r.detail for r in results if r.outcome is Outcome.FAILED}


def caught_by(
    *checks: str, source: str | None = None
) -> Callable[[type[TapePlatform]], type[TapePlatform]]:
    def add(platform: type[TapePlatform]) -> type[TapePlatform]:
        fault = Fault(platform, frozenset(checks), source)
        FAULTS[fault.name] = fault
        return platform

    return add
