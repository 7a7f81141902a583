"""The plugin of the reference platform: what it says of itself, and what importing it loads."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from graphhal.cpu import plugin
from graphhal.platform import PlatformInfo, Unavailable

ROOT = Path(__file__).parents[2]


def test_it_is_a_usable_reference() -> None:
    info = plugin.graphhal_probe()
    assert isinstance(info, PlatformInfo)
    assert (info.name, info.device_type, info.reference) == ("cpu", "cpu", True)
    assert info.boundary_order == "before"
    assert info.boundaries_persist
    assert info.allow_empty
    assert info.versions == {"torch": str(torch.__version__)}


def probe_with(code: str) -> str:
    program = f"{code}\nfrom graphhal.cpu import plugin\nprint(plugin.graphhal_probe())"
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def test_it_is_absent_where_torch_is_not_installed() -> None:
    reason = "the package torch is not installed"
    assert probe_with("import sys; sys.modules['torch'] = None").strip() == str(
        Unavailable(reason, absent=True)
    )


@pytest.mark.parametrize("error", ["ImportError", "OSError"])
def test_it_is_unusable_where_torch_is_broken(tmp_path: Path, error: str) -> None:
    (tmp_path / "torch.py").write_text(f"raise {error}('libc10.so: missing')")
    said = probe_with(f"import sys; sys.path.insert(0, {str(tmp_path)!r})")
    reason = "torch is installed and cannot be imported: libc10.so: missing"
    assert said.strip() == str(Unavailable(reason))


def test_importing_the_plugin_loads_no_torch() -> None:
    code = "import sys, graphhal.cpu.plugin; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_the_first_capture_loads_no_compiler() -> None:
    """`torch._dynamo` takes seconds to import, which counted as time of the first capture."""
    code = (
        "import sys, torch\n"
        "from graphhal import EncoderGraphs, Settings, open_platform\n"
        "from graphhal.testing.toy_encoder import ToyEncoder\n"
        "settings = Settings(platform='cpu')\n"
        "toy = ToyEncoder(torch.device('cpu'), torch.float32, [16])\n"
        "report = EncoderGraphs(toy, open_platform('cpu', settings), settings).capture()\n"
        "print(len(report.captured), 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "1 False"
