"""The worked example of a third party's plugin: installed apart, found by entry point, honest."""

import importlib
import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

from graphhal.platform import Unavailable
from graphhal.testing import CHECKS, Subject
from tests.conformance import simulated_accelerator

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "third_party_platform"


@pytest.fixture
def plugin(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE)
    yield importlib.import_module("graphhal_accelerator.plugin")
    for name in [n for n in sys.modules if n.startswith("graphhal_accelerator")]:
        del sys.modules[name]


@pytest.fixture
def simulated(plugin, monkeypatch):
    if not hasattr(torch.accelerator, "Graph"):
        pytest.skip(f"torch {torch.__version__} has no torch.accelerator.Graph; 2.13 has")
    simulated_accelerator.install(monkeypatch)
    return plugin


@pytest.mark.simulated
@pytest.mark.parametrize("name", CHECKS)
def test_its_logic_conforms_on_a_simulated_device(simulated, name):
    source = "graphhal_accelerator.plugin" if name == "importing_the_plugin_is_free" else None
    result = CHECKS[name].run(Subject(simulated, "accelerator", source=source))
    expected = {"poison_shows_unwritten_rows": "unclaimed"} | dict.fromkeys(
        ("poison_spares_what_is_in_use", "a_process_exits_cleanly"), "not applicable"
    )
    assert result.outcome == expected.get(name, "passed"), result.detail


def test_it_stands_back_where_graphhal_has_a_platform(simulated):
    assert "cuda" in simulated.HAVE_THEIR_OWN
    assert simulated.graphhal_probe().reference is False


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_without_an_accelerator_it_says_so(plugin):
    answer = plugin.graphhal_probe()
    assert answer == Unavailable("PyTorch sees no accelerator in this machine", absent=True)


def test_an_older_pytorch_is_named(plugin, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.delattr(torch.accelerator, "Graph", raising=False)
    answer = plugin.graphhal_probe()
    assert isinstance(answer, Unavailable)
    assert answer.reason.startswith(f"torch {torch.__version__} has no torch.accelerator.Graph")


def call(*command, cwd):
    """Run in an environment that knows nothing of this checkout."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)


LIST = """
import json
from graphhal.discovery import find_plugins
print(json.dumps({p.name: [p.distribution, p.describe()] for p in find_plugins()}))
"""
REASON = "PyTorch sees no accelerator in this machine"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_an_installed_plugin_is_found_and_its_suite_skips_with_the_reason(tmp_path):
    """In a venv of its own, which sees this one's libraries and graphhal."""
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    site = call(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=tmp_path)
    own = Path(site.stdout.strip())
    others = [path for path in sys.path if path.endswith("site-packages")]
    own.joinpath("libraries.pth").write_text(
        "".join(f"import site; site.addsitedir({path!r})\n" for path in others)
    )
    pip = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation")
    done = call(*pip, "--no-index", "--target", own, EXAMPLE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr

    found = json.loads(call(python, "-c", LIST, cwd=tmp_path).stdout)
    assert found["accelerator"] == ["graphhal-accelerator", f"not usable: {REASON}"]
    assert found["cpu"][0] == "graphhal"

    table = call(python, "-m", "graphhal.testing", "--platform", "accelerator", cwd=tmp_path)
    assert table.returncode == 2
    assert table.stdout.startswith(f"accelerator: platform accelerator is not usable: {REASON}")

    suite = (python, "-m", "pytest", "-rs", "-q", "-p", "no:cacheprovider", EXAMPLE / "tests")
    skipped = call(*suite, "-c", EXAMPLE / "pyproject.toml", cwd=tmp_path)
    assert skipped.returncode == 0, skipped.stdout
    assert "1 skipped" in skipped.stdout
    assert REASON in skipped.stdout
