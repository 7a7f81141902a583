"""Platform rocm: the facts in which it differs from CUDA, without a device."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from benchmarks import rocm_stand_in
from benchmarks.rocm_stand_in import StrictAiter
from graphhal.errors import CaptureError, UnsupportedOperationError
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

    def destroy_process_group(group=None):
        log.append(f"end {group}")

    for module in (torch.distributed, torch.distributed.distributed_c10d):
        monkeypatch.setattr(module, "destroy_process_group", destroy_process_group)
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


@pytest.fixture
def operators():
    """Operators by the names of AITER's and vLLM's, on the host."""
    made = torch.library.Library("graphhal_facts", "DEF")
    made.define("dynamic_per_tensor_quant(Tensor rows) -> (Tensor, Tensor)")
    made.define("dynamic_scaled_fp8_quant(Tensor rows) -> (Tensor, Tensor)")
    made.define("dynamic_per_token_scaled_fp8_quant(Tensor rows) -> (Tensor, Tensor)")
    made.define("gemm_a8w8(Tensor left, Tensor right, Tensor scale) -> Tensor")

    def quantise(rows):
        scale = torch.ones(())
        return rows.to(torch.float8_e4m3fn), scale

    def quantise_rows(rows):
        return rows.to(torch.float8_e4m3fn), torch.ones(len(rows), 1)

    made.impl("dynamic_per_tensor_quant", quantise, "CPU")
    made.impl("dynamic_scaled_fp8_quant", quantise, "CPU")
    made.impl("dynamic_per_token_scaled_fp8_quant", quantise_rows, "CPU")
    made.impl("gemm_a8w8", lambda a, b, scale: a.float() @ b.float() * scale, "CPU")
    yield torch.ops.graphhal_facts
    made._destroy()


@pytest.mark.parametrize("name", ["dynamic_per_tensor_quant", "dynamic_scaled_fp8_quant"])
def test_operators_that_scale_over_all_rows_are_refused(fake, operators, name):
    request = request_for(fake, forward=lambda: getattr(operators, name)(torch.randn(16, 32)))
    with pytest.raises(UnsupportedOperationError, match=f"{name}.*one fp8 scale over all rows"):
        plugin.graphhal_capture(request)


def test_a_product_with_a_scale_over_all_rows_is_refused_whatever_its_name(fake, operators):
    rows = torch.randn(16, 32)

    def forward() -> None:
        scale = rows.abs().amax() / 448.0
        operators.gemm_a8w8((rows / scale).to(torch.float8_e4m3fn), rows.t(), scale)

    with pytest.raises(UnsupportedOperationError, match=r"gemm_a8w8.*one fp8 scale"):
        plugin.graphhal_capture(request_for(fake, forward=forward))


def test_a_scale_per_row_is_fine(fake, operators):
    rows = torch.randn(16, 32)

    def forward() -> None:
        eight, scales = operators.dynamic_per_token_scaled_fp8_quant(rows)
        operators.gemm_a8w8(eight, rows.t(), scales)
        largest = rows.abs().amax()  # of something else: no fp8 data meets it
        request.output.copy_((rows / largest)[:4, :2] * 0.0)

    request = request_for(fake, forward=forward)
    fake.replay_body = lambda: request.output.zero_()
    plugin.graphhal_capture(request)


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


@pytest.fixture
def strict(fake, monkeypatch):
    """The stand-in of the device checks, over the fake streams."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: fake.current())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing(fake))

    def kernel(query, key, value, cu_seqlens, longest, scale):
        lengths = cu_seqlens.diff().tolist()
        rows = sum(lengths)
        result = torch.full_like(query, float("nan"))
        result[:rows] = looped(query, key, value, lengths, scale).to(query.dtype)
        return result

    return StrictAiter(kernel)


def attending(packed, cu_seqlens, output):
    query, key, value = tensors(8, 16, torch.bfloat16)

    def forward() -> None:
        output.copy_(packed(query, key, value, cu_seqlens, 8, 0.3)[:4, 0, :2])

    return forward


def test_a_kernel_with_workspaces_by_stream_captures_after_warm_up_on_that_stream(fake, strict):
    request = request_for(fake)
    forward = attending(attention.PackedAttention(strict), ends((2, 6)), request.output)
    object.__setattr__(request, "forward", forward)
    fake.replay_body = forward
    graph = plugin.graphhal_capture(request)
    assert list(strict.workspaces) == [graph.pool.stream.stream_id]


def test_without_warm_up_such_a_kernel_cannot_be_captured(fake, strict):
    request = request_for(fake, warmups=0)
    forward = attending(attention.PackedAttention(strict), ends((2, 6)), request.output)
    object.__setattr__(request, "forward", forward)
    with pytest.raises(CaptureError, match="this stream never ran the kernel"):
        plugin.graphhal_capture(request)


def test_the_stand_in_is_strict_and_attention_makes_it_harmless(strict):
    query, key, value = tensors(8, 16, torch.bfloat16)
    alone = strict(query, key, value, ends((2, 4)), ends((2, 4)), 4, 4, softmax_scale=0.3)
    assert alone[6:].isnan().all()
    got = attention.PackedAttention(strict)(query, key, value, ends((2, 4)), 4, 0.3)
    assert got[6:].eq(0).all() and torch.equal(got[:6], alone[:6])
    with pytest.raises(ValueError, match="an empty sequence"):
        strict(query, key, value, ends((2, 4), 3), ends((2, 4), 3), 4, 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="an NVIDIA device is here")
def test_the_stand_in_is_no_platform_without_an_nvidia_device():
    assert rocm_stand_in.graphhal_probe() == Unavailable(
        "the stand-in for AITER needs an NVIDIA device", absent=True
    )


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
    torch.distributed.distributed_c10d.destroy_process_group("world")
    assert distributed == ["end world"]
    assert "pool died with 0 users" in fake.log
    assert torch.distributed.destroy_process_group.releases_graphs


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
