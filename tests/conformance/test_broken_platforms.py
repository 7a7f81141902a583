"""The suite itself is tested: each broken platform is caught, and by the checks it should be."""

from dataclasses import replace

import pytest
import torch

from graphhal.errors import UnsupportedOperationError
from graphhal.hookspecs import hookimpl
from graphhal.testing import CHECKS
from tests.broken_platforms.catalogue import FAULTS
from tests.broken_platforms.fault import Fault
from tests.broken_platforms.tape_platform import TapePlatform

faults = pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())


def test_the_platform_that_they_break_is_right():
    assert Fault(TapePlatform, frozenset()).failed() == {}


class AsStrictAsRocm(TapePlatform):
    """No empty sequence, and a first replay that must repeat the warm-up from a NaN output."""

    @hookimpl
    def graphhal_probe(self):
        return replace(super().graphhal_probe(), allow_empty=False)

    @hookimpl
    def graphhal_capture(self, request):
        graph = super().graphhal_capture(request)
        expected = request.output.clone()
        request.output.fill_(float("nan"))
        graph.handle.run()
        if not torch.equal(request.output, expected):
            raise UnsupportedOperationError(f"{request.key}: the first replay differs")
        return graph

    def attend(self, query, key, value, cu_seqlens, max_seqlen, scale):
        if not self.capturing:
            assert min(cu_seqlens.diff().tolist()) > 0, "an empty sequence"
        return super().attend(query, key, value, cu_seqlens, max_seqlen, scale)


def test_no_check_asks_a_strict_platform_for_what_it_cannot_take():
    outcomes = {name: check.run(Fault(AsStrictAsRocm, frozenset()).subject())
                for name, check in CHECKS.items()}  # fmt: skip
    assert {result.detail for result in outcomes.values() if result.outcome == "failed"} == set()
    unasked = {name for name, result in outcomes.items() if result.outcome != "passed"}
    assert unasked <= {
        "importing_the_plugin_is_free", "a_process_exits_cleanly", "poison_shows_unwritten_rows",
    }  # fmt: skip


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
