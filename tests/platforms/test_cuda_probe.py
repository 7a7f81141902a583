"""What the probe of platform cuda says of hosts that it cannot serve, and of one that it can."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from graphhal.cuda import plugin
from graphhal.platform import PlatformInfo, Unavailable


def host(
    monkeypatch, *, hip=None, cuda="13.0", devices=1, error=None, forked=False,
    capability=(9, 0), cudnn=True,
):  # fmt: skip
    """A CUDA host as PyTorch would show it."""

    def device_count():
        if isinstance(error, Warning):
            import warnings

            warnings.warn(error, stacklevel=1)
            return 0
        return devices

    def init():
        if isinstance(error, Exception) and not isinstance(error, Warning):
            raise error

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: forked)
    monkeypatch.setattr(torch.cuda, "device_count", device_count)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: cudnn)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a fast one")
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 13010, raising=False)


def refusal(monkeypatch, **options) -> Unavailable:
    host(monkeypatch, **options)
    answer = plugin.graphhal_probe()
    assert isinstance(answer, Unavailable)
    return answer


def test_torch_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    answer = plugin.graphhal_probe()
    assert answer == Unavailable("the package torch is not installed", absent=True)


def test_torch_without_cuda(monkeypatch):
    answer = refusal(monkeypatch, cuda=None)
    assert answer.absent
    assert "built without CUDA" in answer.reason


def test_torch_for_rocm_is_rocms(monkeypatch):
    answer = refusal(monkeypatch, hip="7.0", cuda=None)
    assert answer.absent
    assert "platform rocm" in answer.reason


def test_no_device(monkeypatch):
    assert refusal(monkeypatch, devices=0).absent


@pytest.mark.parametrize(
    ("error", "absent"),
    [
        (RuntimeError("Found no NVIDIA driver on your system. Please check…"), True),
        (UserWarning("CUDA initialization: The NVIDIA driver on your system is too old"), False),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered\nmore"), False),
    ],
)
def test_the_drivers_own_words_are_shown(monkeypatch, error, absent):
    answer = refusal(monkeypatch, error=error)
    assert str(error).splitlines()[0] in answer.reason
    assert "\n" not in answer.reason
    assert answer.absent is absent


def test_a_forked_process(monkeypatch):
    answer = refusal(monkeypatch, forked=True)
    assert not answer.absent
    assert "spawn" in answer.reason


def test_a_usable_host(monkeypatch):
    host(monkeypatch)
    info = plugin.graphhal_probe()
    assert isinstance(info, PlatformInfo)
    assert (info.name, info.device_type, info.boundary_order) == ("cuda", "cuda", "before")
    assert info.boundaries_persist
    assert info.allow_empty
    assert info.versions["device"] == "a fast one"
    assert info.versions["driver"] == "13.1"
    assert info.capabilities == {
        "collectives",
        "mem_pool_eager",
        "ordinary_outputs",
        "poison",
    }


@pytest.mark.parametrize(
    ("capability", "cudnn", "rows"),
    [((9, 0), True, 4096), ((10, 0), True, 4096), ((9, 0), False, None), ((8, 0), True, None)],
)
def test_lone_sequences_pay_where_cudnn_beats_flash_attention(monkeypatch, capability, cudnn, rows):
    host(monkeypatch, capability=capability, cudnn=cudnn)
    assert plugin.graphhal_probe().lone_sequence_from == rows


def test_an_allocator_without_private_pools_claims_none(monkeypatch):
    host(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert plugin.graphhal_probe().capabilities == {"collectives", "ordinary_outputs"}


@pytest.mark.parametrize("name", ["cuda", "rocm"])
def test_importing_the_plugin_loads_no_device_library(name):
    code = f"import sys, graphhal.{name}.plugin; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_hooks_match_the_hookspec():
    import pluggy

    from graphhal import hookspecs

    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(plugin)
    manager.check_pending()
    names = {caller.name for caller in manager.get_hookcallers(plugin)}
    assert names == {
        "graphhal_probe", "graphhal_capture", "graphhal_replay", "graphhal_update_boundaries",
        "graphhal_step", "graphhal_profile_memory", "graphhal_release",
    }  # fmt: skip


@pytest.mark.device("cuda")
def test_this_machine():
    answer = plugin.graphhal_probe()
    if isinstance(answer, Unavailable):
        pytest.skip(answer.reason)
    assert SimpleNamespace(**answer.versions).device
    assert answer.free_bytes is not None
    assert answer.free_bytes() > 0
