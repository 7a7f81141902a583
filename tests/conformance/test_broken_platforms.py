"""The suite itself is tested: each broken platform is caught, and by the checks it should be."""

import pytest

from graphhal.testing import CHECKS
from tests.broken_platforms.catalogue import FAULTS
from tests.broken_platforms.fault import Fault
from tests.broken_platforms.tape_platform import TapePlatform

faults = pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())


def test_the_platform_that_they_break_is_right():
    assert Fault(TapePlatform, frozenset()).failed() == {}


@faults
def test_a_broken_platform_is_caught_by_name(fault: Fault):
    for name in fault.caught_by:
        result = CHECKS[name].run(fault.subject())
        assert result.outcome == "failed", f"{name} let {fault.name} through"
        assert result.detail.startswith(f"{name}: ")
        assert ". Expected: " in result.detail
        assert ". To look at: " in result.detail


@pytest.mark.slow
@faults
def test_a_broken_platform_passes_everything_else(fault: Fault):
    """With the test above: what `caught_by` declares is exact, which the next test rests on."""
    assert set(fault.failed()) == fault.caught_by


@pytest.mark.parametrize("name", CHECKS)
def test_without_any_one_check_a_broken_platform_gets_through(name: str):
    alone = [fault.name for fault in FAULTS.values() if fault.caught_by == {name}]
    assert alone, f"no broken platform needs {name}: drop the check, or break a platform for it"


def test_there_are_broken_platforms_enough():
    assert len(FAULTS) >= 20
