"""The pytest plugin: skips with a reason, and what makes a skip a failure."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
THREE_LINES = "def test_conformance(graphhal_check):\n    graphhal_check()\n"


@pytest.fixture
def run(tmp_path, capsys):
    """A pytest run of a third party's three lines, in this process; exit status and output."""

    def run(*arguments, ini=""):
        (tmp_path / "pytest.ini").write_text(f"[pytest]\n{ini}\n")
        (tmp_path / "test_conformance.py").write_text(THREE_LINES)
        options = ("-rs", "-v", "--import-mode=importlib", "-p", "no:cacheprovider", "-k", CHEAP)
        status = pytest.main(
            [str(tmp_path), "-c", str(tmp_path / "pytest.ini"), *options, *arguments]
        )
        return status, capsys.readouterr().out

    return run


CHEAP = "unclaimed_checks_have_reasons or unavailable"


def test_three_lines_run_a_check_on_a_named_platform(run):
    status, output = run("--graphhal-platform=cpu")
    assert status == 0, output
    assert "test_conformance[cpu-unclaimed_checks_have_reasons] PASSED" in output


def test_a_platform_of_the_ini_file_that_cannot_serve_skips_with_its_reason(run):
    status, output = run(ini="graphhal_platform = nothing")
    assert status == 0, output
    assert "no platform 'nothing' is installed. Installed: " in output
    assert "1 skipped" in output


def test_a_required_platform_that_cannot_serve_fails(run):
    status, output = run("--require-platform=nosuch", ini="graphhal_platform = nothing")
    assert status == 1, output
    assert "platform nosuch is required here: no platform 'nosuch' is installed" in output


def test_loading_the_plugin_loads_no_device_library():
    code = "import graphhal.pytest_plugin, sys; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("outcome", ["unclaimed", "not applicable", "failed"])
def test_outcomes_reach_pytest(outcome, monkeypatch):
    from graphhal import pytest_plugin
    from graphhal.testing import CHECKS, Check, Outcome, Result

    check = CHECKS["release_works_twice"]
    result = Result(check.name, Outcome(outcome), "the reason in words", 0.0)
    monkeypatch.setattr(Check, "run", lambda self, subject: result)
    expected = pytest.fail.Exception if outcome == "failed" else pytest.skip.Exception
    with pytest.raises(expected, match="the reason in words"):
        pytest_plugin._run(check, subject=None)
