"""The suite's own promises: waivers, wording, the command without pytest."""

import json
from dataclasses import replace

import pytest

from graphhal.errors import NoPlatformError, PluginError
from graphhal.hookspecs import hookimpl
from graphhal.platform import Unavailable
from graphhal.testing import CHECKS, Subject, checks, open_subject, run
from graphhal.testing.__main__ import main
from tests.broken_platforms.memory_faults import IgnoresThePool
from tests.broken_platforms.tape_platform import TapePlatform
from tests.conformance.checks_page import PAGE, page

TAPE = "tests.broken_platforms.tape_platform:TapePlatform"
FAULT = "tests.broken_platforms.memory_faults:IgnoresThePool"


class WaivesThePool(IgnoresThePool):
    reason = "the allocator of this device has no pools"

    @hookimpl
    def graphhal_probe(self):
        waived = {"graphs_share_the_pool": self.reason}
        return replace(super().graphhal_probe(), unclaimed=waived)


def test_a_waived_check_is_reported_with_its_reason():
    (result,) = run(Subject(WaivesThePool(), "tape"), ["graphs_share_the_pool"])
    assert (result.outcome, result.detail) == ("unclaimed", WaivesThePool.reason)


def test_what_keeps_outputs_right_cannot_be_waived():
    waivable = {check.name for check in checks() if check.waivable}
    assert waivable == {
        "no_step_inside_a_capture",
        "graphs_share_the_pool",
        "graph_bytes_are_measured",
        "the_profile_foretells_capture",
        "poison_shows_unwritten_rows",
    }


def test_every_check_says_what_it_demands_and_of_whom():
    for check in checks():
        assert check.demand.endswith("."), check.name
        assert check.hook


def test_every_area_of_the_suite_has_checks():
    assert {check.area for check in checks()} == {
        "contract", "capture", "replay", "boundaries", "attention", "ownership", "pool",
        "lifetime", "statistics",
    }  # fmt: skip


def test_a_misspelt_hook_never_gets_as_far_as_a_check():
    class Misspelt(TapePlatform):
        @hookimpl
        def graphhal_relase(self, graphs):
            pass

    with pytest.raises(PluginError, match="graphhal_relase is no hook of graphhal"):
        Subject(Misspelt(), "tape")


def test_an_unusable_platform_has_no_subject():
    class Absent(TapePlatform):
        @hookimpl
        def graphhal_probe(self):
            return Unavailable("no tape drive is connected")

    with pytest.raises(NoPlatformError, match="no tape drive is connected"):
        Subject(Absent(), "tape")
    with pytest.raises(NoPlatformError, match=r"^no platform 'nosuch' is installed\. Installed: "):
        open_subject("nosuch")


def test_an_exception_in_a_hook_is_a_failure_with_its_cause():
    class Raises(TapePlatform):
        @hookimpl
        def graphhal_release(self, graphs):
            raise RuntimeError("driver error 719")

    (result,) = run(Subject(Raises(), "tape"), ["release_clears_the_handle"])
    assert result.outcome == "failed"
    assert "it raised RuntimeError: driver error 719" in result.detail
    assert "To look at: graphhal_release" in result.detail


def test_the_command_prints_a_table_and_its_status(capsys):
    one = ["--check", "graphs_share_the_pool"]
    assert main(["--plugin", TAPE, *one]) == 0
    assert "1 passed" in capsys.readouterr().out
    assert main(["--plugin", FAULT, *one]) == 1
    assert "FAIL" in capsys.readouterr().out
    assert main(["--platform", "nosuch"]) == 2
    assert capsys.readouterr().out.startswith("nosuch: no platform 'nosuch' is installed")


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        ("no_such_module", "it cannot be loaded: ModuleNotFoundError: No module named 'no_such"),
        (f"{TAPE}s", "it cannot be loaded: AttributeError: module "),
        ("json", "it lacks the hook graphhal_probe, which a platform needs"),
    ],
)
def test_a_plugin_that_is_none_is_told_in_one_line(capsys, plugin, message):
    assert main(["--plugin", plugin]) == 2
    assert f"{plugin}: {message}" in capsys.readouterr().out


def test_a_probe_that_answers_nothing_is_told_in_one_line(capsys, monkeypatch):
    monkeypatch.setattr(TapePlatform, "graphhal_probe", lambda self: None)
    assert main(["--plugin", TAPE]) == 2
    assert "graphhal_probe returned None, not a PlatformInfo" in capsys.readouterr().out


def test_a_dtype_that_is_none_lists_those_there_are(capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["--platform", "cpu", "--dtype", "nn"])
    assert "bfloat16" in capsys.readouterr().err


def test_the_command_speaks_json(capsys):
    assert main(["--plugin", FAULT, "--check", "graphs_share_the_pool", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["platform"] == "tape"
    assert report["counts"] == {"failed": 1}
    assert report["results"][0]["check"] == "graphs_share_the_pool"
    assert main(["--list", "--json"]) == 0
    assert {entry["check"] for entry in json.loads(capsys.readouterr().out)} == set(CHECKS)
    assert main(["--platform", "nosuch", "--json"]) == 2
    assert "nosuch" in json.loads(capsys.readouterr().out)["unavailable"]


def test_the_page_of_checks_is_what_the_code_says():
    assert PAGE.read_text() == page(), "run: python -m tests.conformance.checks_page"
