"""The simulator itself: kernels against PyTorch, rules of streams, captures and task groups."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torch_npu

from graphhal.npu.capture_state import direct_launches
from graphhal.npu.fused_attention import VERSIONS, FusedAttention
from tests.ascend_simulated import simulator
from tests.ascend_simulated.processes import Processes

X = torch.linspace(-2, 2, 24).reshape(4, 6)
Y = torch.linspace(0.5, 3, 24).reshape(4, 6)
INDEX = torch.tensor([3, 0, 0, 2])

OPERATORS: dict[str, Callable[..., torch.Tensor]] = {
    "add": lambda x, y, i: x + y * 2,
    "add scalar": lambda x, y, i: 3 + x,
    "subtract": lambda x, y, i: 1 - x - y - (x - 2) * 3,
    "multiply, divide": lambda x, y, i: x * y / (y + 1),
    "floor divide, remainder": lambda x, y, i: (i * 7) // 2 + (i * 7) % 3,
    "in place": lambda x, y, i: x.clone().add_(y).mul_(y).sub_(y).div_(y).add_(1).mul_(3).div_(2),
    "product added": lambda x, y, i: x.addcmul(x, y, value=2) + x.clone().addcmul_(y, y, value=-1),
    "product added, of lower precision": lambda x, y, i: x.clone().addcmul_(y.bfloat16(), x),
    "in place, unary": lambda x, y, i: y.clone().sub_(0.1).sqrt_().exp_().clamp_(min=1, max=3),
    "in place, bounds": lambda x, y, i: x.clone().clamp_min_(y * 0.1),
    "filling": lambda x, y, i: torch.ones_like(x) + torch.zeros_like(x) + x.clone().fill_(y[0, 0]),
    "ones": lambda x, y, i: torch.ones(3, device=x.device) + torch.zeros(3, device=x.device),
    "signs": lambda x, y, i: -x + x.floor() + x.ceil() * 2 + x.round() + x.flip(0) / 3,
    "minima": lambda x, y, i: torch.minimum(x, y) + x.min(),
    "more comparison": lambda x, y, i: (
        (x != y).float() + (x < y).float() + (x > y).float() + (x <= y).float() + (x <= 0).float()
        + (x != 0).float() + (i == 3).sum() + (x >= 0).float() + (x > 0).logical_not().float()
        + torch.logical_and(x > 0, y > 1).float() + torch.logical_or(x > 0, y > 2).float()
        + (~(x > 1)).float() + x.isfinite().float()
    ),
    "remainders": lambda x, y, i: (i * 7) % (i + 1) + (i * 7) // (i + 1),
    "matrix product": lambda x, y, i: torch.bmm(x[None], y.T[None])[0] + torch.mm(x, y.T),
    "power": lambda x, y, i: y**2 + x**3 + 2.0**x,
    "turns": lambda x, y, i: torch.view_as_real(
        torch.view_as_complex(x.reshape(4, 3, 2)) * torch.polar(y[:, :3], x[:, :3])
    ),
    "resampling": lambda x, y, i: F.interpolate(x[None, None], (5, 3), mode="bicubic")
    + F.interpolate(y[None, None], (5, 3), mode="bilinear", antialias=True),
    "sampling": lambda x, y, i: F.grid_sample(
        x[None, None], y.reshape(1, 3, 4, 2) - 1.5, "bicubic", "border", align_corners=False
    ),
    "unary": lambda x, y, i: x.exp() + x.sin() + x.cos() + x.tanh() - x.abs() + y.sqrt(),
    "reciprocals": lambda x, y, i: y.rsqrt() + y.reciprocal() + x.erf() + x.sigmoid(),
    "activations": lambda x, y, i: F.gelu(x) + F.silu(x) + F.relu(x),
    "attention": lambda x, y, i: F.scaled_dot_product_attention(
        x.reshape(1, 2, 2, 6), y.reshape(1, 2, 2, 6), (x * y).reshape(1, 2, 2, 6)
    ),
    "softmax": lambda x, y, i: x.softmax(-1),
    "clamp": lambda x, y, i: x.clamp(-1, 1) + x.clamp(min=0) + x.clamp(max=0),
    "comparison": lambda x, y, i: ((x > 0) & (y < 2) | (x == y)).float() + (x >= y).float(),
    "where": lambda x, y, i: torch.where(x > 0, x, y),
    "masked fill": lambda x, y, i: x.masked_fill(x > 0, -5.0),
    "matmul": lambda x, y, i: x @ y.T,
    "batched matmul": lambda x, y, i: x.reshape(2, 2, 6) @ y.reshape(2, 6, 2),
    "linear": lambda x, y, i: F.linear(x, y, y[:, 0]),
    "layer norm": lambda x, y, i: F.layer_norm(x, (6,), y[0], y[1]),
    "index": lambda x, y, i: x[i] + x.index_select(0, i),
    "two indices": lambda x, y, i: x[i, i],
    "index put": lambda x, y, i: x.clone().index_put_((i[1:],), y[0]),
    "embedding": lambda x, y, i: F.embedding(i, x),
    "embedding bags": lambda x, y, i: F.embedding_bag(
        i.reshape(2, 2), x, mode="sum", per_sample_weights=y[:2, :2]
    ) + F.embedding_bag(i.reshape(2, 2), x, mode="mean"),
    "gather": lambda x, y, i: x.gather(0, i.reshape(1, 4).repeat(1, 1)),
    "cat, stack": lambda x, y, i: torch.cat([torch.stack([x, y]), torch.stack([y, x])], 1),
    "pad": lambda x, y, i: F.pad(x, (1, 2, 0, 1)),
    "repeat each": lambda x, y, i: torch.repeat_interleave(x[:, 0].contiguous(), i),
    "repeat, expand": lambda x, y, i: x.repeat(2, 1) + x[:1].expand(8, 6),
    "transposed views": lambda x, y, i: (x.T + y.reshape(6, 4)).contiguous(),
    "strided copy": lambda x, y, i: x[:, ::2].clone(),
    "sum, mean": lambda x, y, i: x.sum(0) + x.mean(0) + x.sum(),
    "extrema": lambda x, y, i: x.amax(1) + y.amin(1) + x.max() + torch.maximum(x, y)[:, 0],
    "cumulative sum": lambda x, y, i: x.cumsum(1),
    "norm": lambda x, y, i: x.norm(dim=1),
    "all, any": lambda x, y, i: (x > 0).any().float() + (y > 0).all().float(),
    "arange": lambda x, y, i: torch.arange(2, 9, device=x.device).float(),
    "linspace": lambda x, y, i: torch.linspace(0.5, 3, 7, device=x.device),
    "casts": lambda x, y, i: x.bfloat16().float() + x.half().float() + y.long().float(),
    "convolution 1d": lambda x, y, i: F.conv1d(x[None], y.reshape(2, 4, 3), stride=2, padding=1),
    "convolution 2d": lambda x, y, i: F.conv2d(x[None, None], y[:3, :3][None, None], y[0, :1]),
    "convolution 3d": lambda x, y, i: F.conv3d(
        x.reshape(1, 1, 2, 3, 4), y.reshape(3, 1, 2, 2, 2), stride=(2, 1, 2)
    ),
    "places in order": lambda x, y, i: torch.searchsorted(
        x[0].contiguous(), y.contiguous(), right=True
    ),
    "lists": lambda x, y, i: filled_at_once(x, y, x[:1] * 2),
    "average pooling": lambda x, y, i: F.avg_pool2d(x[None], (2, 3), (1, 2), 1, divisor_override=5)
    + F.avg_pool2d(y[None], (2, 3), (1, 2), 1, count_include_pad=False),
    "grouped convolution": lambda x, y, i: F.conv1d(x[None], y.reshape(4, 1, 6)[..., :3], groups=4),
}  # fmt: skip


def filled_at_once(*sources: torch.Tensor) -> torch.Tensor:
    targets = [torch.empty_like(source) for source in sources]
    zeros = [torch.ones_like(source) for source in sources]
    torch._foreach_copy_(targets, list(sources))
    torch._foreach_zero_(zeros)
    return torch.cat(targets + zeros)


@pytest.fixture
def launched_directly() -> Iterator[None]:
    """Failing launches raise where they happen, and do not end all computing in this process."""
    with direct_launches():
        yield


@pytest.mark.usefixtures("launched_directly")
@pytest.mark.parametrize("name", OPERATORS)
def test_a_kernel_computes_what_pytorch_computes(name: str) -> None:
    expected = OPERATORS[name](X, Y, INDEX)
    found = OPERATORS[name](X.npu(), Y.npu(), INDEX.npu())
    assert found.device.type == "npu"
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("launched_directly", "schedule")
@pytest.mark.parametrize(
    ("name", "action"),
    [
        ("places", lambda x: x.nonzero()),
        ("places by dimension", lambda x: torch.stack((x > 1).nonzero(as_tuple=True))),
        ("no place", lambda x: (x > 9).nonzero()),
        ("masked", lambda x: x[x > 0]),
        ("masked rows", lambda x: x[(x > 1).any(1)]),
    ],
)
def test_sizes_that_depend_on_data_are_read_from_the_device(
    name: str, action: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    assert torch.equal(action(X.npu()).cpu(), action(X)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("ends", [[8], [3, 8], [1, 2, 3, 8]])
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("version", VERSIONS, ids=["1", "2"])
def test_fused_attention_attends_within_sequences(
    dtype: torch.dtype, ends: list[int], kv_heads: int, version: FusedAttention
) -> None:
    query, key, value = (torch.randn(8, heads, 16).to(dtype) for heads in (2, kv_heads, kv_heads))
    arguments = version.arguments(query.npu(), key.npu(), value.npu(), 0.25)
    out, _ = version.operator(**arguments, **version.ends(ends))
    parts = []
    for start, end in zip([0, *ends], ends, strict=False):
        q, k, v = (x[start:end].float().transpose(0, 1) for x in (query, key, value))
        parts.append(
            F.scaled_dot_product_attention(q, k, v, scale=0.25, enable_gqa=True).transpose(0, 1)
        )
    tolerance = 1e-6 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(out.cpu().float(), torch.cat(parts), rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("launched_directly")
@pytest.mark.parametrize("ends", [[], [3, 7], [5, 3, 8]])
def test_fused_attention_refuses_ends_that_do_not_cover_the_rows(ends: list[int]) -> None:
    rows = torch.randn(8, 2, 16).npu()
    with pytest.raises(RuntimeError, match="actual_seq_length"):
        torch_npu.npu_fused_infer_attention_score(
            rows, rows, rows, input_layout="TND", num_heads=2, num_key_value_heads=2, scale=1.0,
            actual_seq_lengths=ends, actual_seq_lengths_kv=ends,
        )  # fmt: skip


@pytest.mark.parametrize(("soc", "version"), [("Ascend910B1", "V3"), ("Ascend950PR_9579", "V5")])
def test_each_chip_gets_the_version_that_it_runs(
    processes: Processes, soc: str, version: str
) -> None:
    """Ascend 950 refuses version 1 of PyTorch's operator, and runs 2 through another kernel."""
    program = f"""
        import warnings; warnings.simplefilter("ignore")
        import torch
        from graphhal.npu import plugin
        from tests.ascend_simulated import simulator
        info = plugin.graphhal_probe()
        rows = torch.randn(8, 2, 16)
        ends = torch.tensor([0, 3, 8], dtype=torch.int32)
        out = info.attention(*[rows.npu()] * 3, ends.npu(), 5, 0.25).cpu()
        for part in (slice(0, 3), slice(3, 8)):
            heads = rows[part].transpose(0, 1)
            attended = torch.softmax(heads @ heads.transpose(1, 2) / 4, -1) @ heads
            torch.testing.assert_close(out[part], attended.transpose(0, 1))
        assert "aclnnFusedInferAttentionScore{version}" in simulator.calls()
        print(info.versions["device"])
    """
    done = processes.run(program, CANN_SIM_SOC=soc)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == soc


@pytest.mark.usefixtures("launched_directly")
def test_operators_of_torch_npu_compute_what_they_are_defined_as() -> None:
    x, y, weight = torch.randn(3, 4, 2, 8), torch.randn(3, 4, 2, 8), torch.randn(8)
    cos, sin = torch.randn(1, 4, 1, 8), torch.randn(1, 4, 1, 8)
    first, second = x.chunk(2, -1)
    added, _, total = torch_npu.npu_add_rms_norm(x.npu(), y.npu(), weight.npu(), 1e-6)
    pairs = [
        (
            torch_npu.npu_rotary_mul(x.npu(), cos.npu(), sin.npu()),
            x * cos + torch.cat((-second, first), -1) * sin,
        ),
        (torch_npu.npu_swiglu(x.npu(), dim=-1), F.silu(first) * second),
        (torch_npu.npu_fast_gelu(x.npu()), x * torch.sigmoid(1.702 * x)),
        (torch_npu.npu_rms_norm(x.npu(), weight.npu(), 1e-6)[0], F.rms_norm(x, (8,), weight, 1e-6)),
        (added, F.rms_norm(x + y, (8,), weight, 1e-6)),
        (total, x + y),
    ]
    for found, expected in pairs:
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)


def test_random_numbers_are_normal_and_repeatable() -> None:
    drawn = []
    for _ in range(2):
        generator = torch.Generator(device="npu").manual_seed(3)
        drawn.append(torch.randn(10_000, generator=generator, device="npu").cpu())
    assert torch.equal(*drawn)
    assert abs(drawn[0].mean()) < 0.05
    assert abs(drawn[0].std() - 1) < 0.05


def test_equality_is_computed_on_the_device() -> None:
    assert torch.equal(X.npu(), X.npu())
    assert not torch.equal(X.npu(), Y.npu())


def test_uninitialised_memory_is_not_a_number() -> None:
    torch.npu.empty_cache()
    assert torch.empty(3 * 2**20, device="npu").cpu().isnan().all()


def test_an_unknown_operator_fails_and_names_itself(processes: Processes) -> None:
    program = """
        import torch, os
        x = torch.ones(4, device="npu")
        try:
            torch.npu.synchronize(); x.erfinv_(); torch.npu.synchronize()
        except RuntimeError as error:
            print(str(error).strip().splitlines()[-1])
        os._exit(0)
    """
    done = processes.run(program)
    assert "no simulated kernel for aclnnInplaceErfinv" in done.stdout + done.stderr


@pytest.mark.usefixtures("launched_directly")
def test_an_operator_of_the_older_interface_fails_and_names_itself() -> None:
    """torch_npu takes it for tensors of internal formats."""
    torch.npu.config.allow_internal_format = True
    try:
        with pytest.raises(RuntimeError, match="no simulated kernel for the graph engine's Conv2D"):
            F.conv2d(X[None, None].npu(), Y[None, None, :3, :3].npu())
    finally:
        torch.npu.config.allow_internal_format = False


def test_a_cuda_build_of_torch_is_refused_by_name(tmp_path: Path) -> None:
    """torch_npu 2.13 aborts in its static initialisers there."""
    library = tmp_path / "torch" / "lib" / "libtorch_cuda.so"
    library.parent.mkdir(parents=True)
    library.touch()
    script = Path(__file__).parents[2] / "ci" / "ascend_simulator" / "make_stubs.py"
    done = subprocess.run(
        [sys.executable, script, tmp_path, tmp_path / "out"],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "is a CUDA build" in done.stderr


def captured(body: Callable[[], None]) -> torch.npu.NPUGraph:
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        body()
    return graph


def test_a_replay_sees_new_contents_and_runs_when_its_stream_gets_there(
    trace: "simulator.Trace", schedule: str
) -> None:
    x, out = torch.ones(4).npu(), torch.zeros(4).npu()
    graph = captured(lambda: out.copy_(x * 2 + 1))
    simulator.mark("begin")
    for value in (2.0, 5.0):
        x.fill_(value)
        graph.replay()
    simulator.mark("end")
    ran = [line for line in trace.between("begin", "end") if line.startswith("exec")]
    assert bool(ran) == (schedule == "eager")
    assert out.cpu().tolist() == [11.0] * 4


def test_a_flag_that_is_set_twice_counts_once(trace: "simulator.Trace") -> None:
    event, stream = torch.npu.ExternalEvent(), torch.npu.current_stream()
    event.record(stream)
    event.record(stream)
    torch.npu.synchronize()
    assert trace.matching("HAZARD lost wake-up")
    event.reset(stream)
    torch.npu.synchronize()


def test_a_flag_that_nobody_sets_is_a_hang(trace: "simulator.Trace") -> None:
    event, stream, other = torch.npu.ExternalEvent(), torch.npu.Stream(), torch.npu.Stream()
    event.wait(stream)
    with pytest.raises(RuntimeError, match="507046"):
        stream.synchronize()
    assert trace.matching("^HANG")
    event.record(other)
    torch.npu.synchronize()


def test_an_event_is_waited_for_as_it_was_last_recorded(schedule: str) -> None:
    """Recording an event again must not delay those who wait for its former record."""
    first, second, event = torch.npu.Stream(), torch.npu.Stream(), torch.npu.Event()
    blocker = torch.npu.ExternalEvent()
    out = torch.zeros(1).npu()
    torch.npu.synchronize()
    event.record(first)
    second.wait_event(event)
    with torch.npu.stream(second):
        out.fill_(1)
    blocker.wait(first)
    event.record(first)
    second.synchronize()
    blocker.record(second)
    torch.npu.synchronize()
    assert out.item() == 1


def test_host_reads_and_synchronisation_invalidate_a_capture() -> None:
    x = torch.ones(4).npu()
    for body in (lambda: x.cpu(), lambda: x[0].item(), torch.npu.synchronize):
        stream = torch.npu.current_stream()
        with pytest.raises(RuntimeError, match="507903"):
            captured(body)
        torch.npu.set_stream(stream)
    assert captured(lambda: x.add_(1)) is not None


@pytest.mark.usefixtures("launched_directly")
def test_faults_hit_the_call_that_was_named() -> None:
    x = torch.ones(4).npu()
    simulator.arm("aclnnMuls:2;aclnnMul:1:507011")
    assert (x * 2).sum().item() == 8
    with pytest.raises(RuntimeError, match="507015"):
        x * 3
    with pytest.raises(RuntimeError, match="507011"):
        x * x
    assert (x * 4).sum().item() == 16
    assert simulator.calls()["aclnnMuls"] == 3


def test_streams_are_limited(processes: Processes) -> None:
    program = """
        import torch, os
        x = torch.ones(4, device="npu")
        torch.npu.Stream()
        graphs = []
        try:
            for _ in range(9):
                graphs.append(torch.npu.NPUGraph())
                with torch.npu.graph(graphs[-1]):
                    x.add_(1)
        except RuntimeError as error:
            print(len(graphs), "207008" in str(error.__context__) + str(error))
        os._exit(0)
    """
    done = processes.run(program, CANN_SIM_STREAMS="39")
    count, named = done.stdout.splitlines()[-1].split()
    assert 1 < int(count) < 9, done.stdout + done.stderr
    assert named == "True"


def test_memory_is_limited() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**40, device="npu")


def test_an_update_behind_the_replay_is_a_hazard(trace: "simulator.Trace") -> None:
    rows = torch.randn(8, 2, 64).npu()
    out, lse = torch.empty_like(rows), torch.empty(1).npu()
    fixed = {
        "query": rows, "key": rows, "value": rows, "input_layout": "TND", "num_heads": 2,
        "num_key_value_heads": 2, "scale": 0.1, "out": [out, lse],
    }  # fmt: skip
    whole = {"actual_seq_lengths": [8], "actual_seq_lengths_kv": [8]}
    shape = {key: value for key, value in fixed.items() if key != "out"}
    work = torch_npu._npu_fused_infer_attention_score_get_max_workspace(**shape, **whole)
    operator = torch.ops.npu.npu_fused_infer_attention_score.out
    handles, blocker = [], torch.npu.ExternalEvent()

    def body() -> None:
        stream = torch.npu.current_stream()
        torch.npu.graph_task_group_begin(stream)
        operator(workspace=work, **fixed, **whole)
        handles.append(torch.npu.graph_task_group_end(stream))
        blocker.wait(stream)
        blocker.reset(stream)

    graph, update = captured(body), torch.npu.Stream()
    graph.replay()
    torch.npu.graph_task_update_begin(update, handles[0])
    with torch.npu.stream(update):
        operator(workspace=work, **fixed, **whole)
    torch.npu.graph_task_update_end(update)
    blocker.record(update)
    torch.npu.synchronize()
    assert trace.matching("HAZARD update of group")


@pytest.mark.parametrize(
    ("program", "seconds", "status"),
    [("pass", 100, 0), ("raise SystemExit(3)", 100, 3), ("1 / 0", 100, 1),
     ("import os; os.abort()", 100, -6), ("import time; time.sleep(99)", 1, -14)],
)  # fmt: skip
def test_a_process_of_its_own_ends_as_any_does(
    processes: Processes, program: str, seconds: int, status: int
) -> None:
    begin = "import sys; print(1); print(2, file=sys.stderr)"
    done = processes.run(f"{begin}; {program}", seconds)
    assert done.returncode == status
    if status in (0, 3):
        assert (done.stdout, done.stderr) == ("1\n", "2\n")
