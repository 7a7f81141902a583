"""Platform rocm: the facts in which it differs from CUDA, without a device."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from graphhal.errors import UnsupportedOperationError
from graphhal.platform import PlatformInfo, Unavailable
from graphhal.rocm import attention, graph, plugin
from tests.platforms.fake_streams import install
from tests.platforms.test_cuda_attention import assert_near, ends, looped, tensors
from tests.platforms.test_cuda_streams import capturing, request_for


@pytest.fixture
def fake(monkeypatch):
    return install(monkeypatch)


@pytest.fixture(autouse=True)
def distributed(monkeypatch):
    """A process group whose end can be watched."""
    log: list[str] = []
    monkeypatch.setattr(
        torch.distributed, "destroy_process_group", lambda group=None: log.append(f"end {group}")
    )
    return log


# --- the runtime


@pytest.mark.parametrize(
    ("version", "architecture", "bad"),
    [
        ((7, 2, 0), "gfx942", True),
        ((7, 2, 3), "gfx942", True),
        ((7, 2, 4), "gfx942", False),
        ((7, 1, 1), "gfx942", False),
        ((7, 14, 0), "gfx942", False),
        ((7, 2), "gfx942", True),
        ((7, 2, 1), "gfx950", False),
        ((7, 14, 0), "gfx1100", True),
        ((7, 14, 0), "gfx1201", True),
        ((6, 4, 0), "gfx90a", False),
    ],
)
def test_runtimes_known_to_replay_wrongly_are_refused(version, architecture, bad):
    reason = graph.runtime_problem(version, architecture)
    assert (reason is not None) is bad
    if reason:
        assert architecture in reason
        assert "http" not in reason


@pytest.mark.parametrize(
    ("told", "package", "expected"),
    [("7.2.1", None, (7, 2, 1)), (None, "7.2.4", (7, 2, 4)), (None, None, (7, 2))],
)
def test_a_hip_build_number_is_not_taken_for_a_patch_version(monkeypatch, told, package, expected):
    monkeypatch.setattr(torch.version, "rocm", told, raising=False)
    monkeypatch.setattr(plugin, "_installed", lambda name: package if name == "rocm" else None)
    assert plugin.rocm_version("7.2.26015-abcdef") == expected


# --- the first replay


def test_an_operation_that_the_runtime_swallows_is_caught_at_capture(fake):
    request = request_for(fake)

    def forward() -> None:
        if not capturing(fake):
            request.output.fill_(3.0)

    object.__setattr__(request, "forward", forward)
    with pytest.raises(UnsupportedOperationError, match="first replay does not repeat"):
        plugin.graphhal_capture(request)
    assert not any(fake.pool_users.values())


def test_a_graph_that_repeats_its_warm_up_is_kept(fake):
    request = request_for(fake, forward=lambda: request.output.fill_(3.0))
    fake.replay_body = lambda: request.output.fill_(3.0)
    captured = plugin.graphhal_capture(request)
    assert captured.request is request
    assert request.output.eq(3.0).all()


def test_a_replay_that_writes_nothing_is_caught_even_where_eager_writes_zeros(fake):
    request = request_for(fake, forward=lambda: request.output.zero_())
    with pytest.raises(UnsupportedOperationError, match="first replay does not repeat"):
        plugin.graphhal_capture(request)


# --- captures that another thread ends


def test_a_capture_ended_by_another_thread_is_tried_again(fake):
    ends_left = [2]

    def forward() -> None:
        if capturing(fake) and ends_left[0]:
            ends_left[0] -= 1
            fake.capturing[fake.current().stream_id].invalid = True
        request.output.fill_(1.0)

    request = request_for(fake, forward=forward)
    fake.replay_body = lambda: request.output.fill_(1.0)
    assert plugin.graphhal_capture(request).handle is not None
    assert ends_left == [0]


def test_a_capture_that_always_ends_is_given_up(fake):
    tries: list[int] = []

    def forward() -> None:
        if capturing(fake):
            tries.append(1)
            fake.capturing[fake.current().stream_id].invalid = True

    with pytest.raises(UnsupportedOperationError):
        plugin.graphhal_capture(request_for(fake, forward=forward))
    assert len(tries) == graph.ATTEMPTS


def test_a_fault_of_the_code_itself_is_not_tried_again(fake):
    tries: list[int] = []

    def forward() -> None:
        if capturing(fake):
            tries.append(1)
            raise RuntimeError("capturing stream has unjoined work")

    with pytest.raises(UnsupportedOperationError):
        plugin.graphhal_capture(request_for(fake, forward=forward))
    assert len(tries) == 1


# --- fp8


def eight_bit(scale):
    left = torch.ones(16, 32).to(torch.float8_e4m3fn)
    right = torch.ones(32, 16).to(torch.float8_e4m3fn)
    one = torch.tensor(1.0)
    return torch._scaled_mm(
        left, right.t().contiguous().t(), scale_a=scale, scale_b=one, out_dtype=torch.bfloat16
    )


def test_a_dynamic_per_tensor_scale_is_refused(fake):
    rows = torch.randn(16, 32)

    def forward() -> None:
        eight_bit(rows.abs().max() / 448.0)

    with pytest.raises(UnsupportedOperationError, match=r"_scaled_mm.*one fp8 scale over all rows"):
        plugin.graphhal_capture(request_for(fake, forward=forward))


def test_a_static_scale_is_fine(fake):
    scale = torch.tensor([0.5])
    request = request_for(
        fake, forward=lambda: (eight_bit(scale.reshape(())), request.output.zero_())
    )
    fake.replay_body = lambda: request.output.zero_()
    plugin.graphhal_capture(request)


def test_eight_bit_attention_is_refused():
    packed = attention.PackedAttention(Aiter())
    query, key, value = (t.to(torch.float8_e4m3fn) for t in tensors(6, 16))
    with pytest.raises(UnsupportedOperationError, match="scaled over all rows"):
        packed(query, key, value, ends((6,)), 6, 0.3)


# --- attention


class Aiter:
    """As strict as AITER: no empty sequence, rows past the last end are left as they are."""

    def __init__(self):
        self.outs: list[torch.Tensor | None] = []

    def __call__(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
        softmax_scale=None, causal=False, out=None,
    ):  # fmt: skip
        lengths = cu_seqlens_q.diff().tolist()
        assert all(length > 0 for length in lengths), "an empty sequence"
        assert max(lengths) <= max_seqlen_q
        self.outs.append(out)
        result = torch.full_like(q, float("nan")) if out is None else out
        result[: sum(lengths)] = looped(q, k, v, lengths, softmax_scale).to(q.dtype)
        return result


class OlderAiter(Aiter):
    def __call__(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None
    ):
        result = super().__call__(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            softmax_scale=softmax_scale,
        )  # fmt: skip
        return (result, None)


@pytest.mark.parametrize("kind", [Aiter, OlderAiter])
def test_rows_that_the_kernel_leaves_unwritten_are_zero(kind):
    query, key, value = tensors(8, 16, torch.bfloat16)
    got = attention.PackedAttention(kind())(query, key, value, ends((2, 4)), 4, 0.3)
    want = looped(query[:6], key[:6], value[:6], (2, 4), 0.3)
    assert_near(got[:6], want, 2e-2)
    assert got[6:].eq(0).all()


def test_float32_goes_by_the_mask():
    query, key, value = tensors(6, 16)
    kernel = Aiter()
    got = attention.PackedAttention(kernel)(query, key, value, ends((2, 4)), 4, 0.3)
    assert kernel.outs == []
    assert_near(got, looped(query, key, value, (2, 4), 0.3))


def test_an_aiter_with_other_arguments_is_refused_at_start():
    with pytest.raises(TypeError, match="does not take cu_seqlens_k, cu_seqlens_q"):
        attention.PackedAttention(lambda q, k, v, softmax_scale, max_seqlen_q, max_seqlen_k: q)


# --- teardown


def test_graphs_are_released_before_the_process_group_ends(fake, distributed):
    request = request_for(fake, forward=lambda: request.output.zero_())
    fake.replay_body = lambda: request.output.zero_()
    captured = plugin.graphhal_capture(request)
    plugin.graphhal_capture(request_for_same(request, captured))
    torch.distributed.destroy_process_group("world")
    assert distributed == ["end world"]
    assert "pool died with 0 users" in fake.log


def request_for_same(request, captured):
    from dataclasses import replace

    return replace(request, pool=captured.pool)


def test_the_teardown_hook_is_installed_once():
    graph.release_before_teardown()
    once = torch.distributed.destroy_process_group
    graph.release_before_teardown()
    assert torch.distributed.destroy_process_group is once


# --- probe


def host(monkeypatch, *, hip="7.14.1", architecture="gfx942:sramecc+:xnack-", kernel=None):
    module = ModuleType("aiter")
    if kernel is not None:
        module.flash_attn_varlen_func = kernel
    monkeypatch.setitem(sys.modules, "aiter", module)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "an AMD one")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(gcnArchName=architecture)
    )


def test_a_usable_host(monkeypatch):
    host(monkeypatch, kernel=Aiter().__call__)
    info = plugin.graphhal_probe()
    assert isinstance(info, PlatformInfo)
    assert (info.name, info.device_type, info.allow_empty) == ("rocm", "cuda", False)
    assert info.versions["architecture"] == "gfx942"
    assert "no_empty_sequences" in info.capabilities


def test_torch_that_is_not_for_rocm(monkeypatch):
    host(monkeypatch, hip=None)
    assert plugin.graphhal_probe() == Unavailable("this torch is not built for ROCm", absent=True)


def test_no_aiter(monkeypatch):
    host(monkeypatch)
    answer = plugin.graphhal_probe()
    assert isinstance(answer, Unavailable)
    assert "AITER" in answer.reason
    assert not answer.absent


def test_an_unknown_aiter(monkeypatch):
    host(monkeypatch, kernel=lambda q, k, v: q)
    assert "not a version that graphhal knows" in plugin.graphhal_probe().reason


def test_a_bad_runtime(monkeypatch):
    host(monkeypatch, architecture="gfx1100", kernel=Aiter().__call__)
    assert "gfx1100" in plugin.graphhal_probe().reason
