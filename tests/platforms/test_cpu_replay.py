"""The reference platform replays what eager computes, on any contents of the static memory."""

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from graphhal.cpu import plugin
from graphhal.errors import ReplayError
from graphhal.settings import Settings
from tests.platforms.cpu_case import Case, eager, request_for, same

torch.library.define(
    "graphhal_test::scaled", "(Tensor x, float by, *, Tensor? bias=None) -> Tensor"
)
torch.library.define("graphhal_test::halves", "(Tensor x) -> Tensor[]")
torch.library.define("graphhal_test::count_", "(Tensor(a!) total, Tensor x) -> ()")
torch.library.define("graphhal_test::first_rows", "(Tensor x, int rows) -> Tensor")


@torch.library.impl("graphhal_test::scaled", "cpu")
def _scaled(x: torch.Tensor, by: float, *, bias: torch.Tensor | None = None) -> torch.Tensor:
    return x * by if bias is None else x * by + bias


@torch.library.impl("graphhal_test::halves", "cpu")
def _halves(x: torch.Tensor) -> list[torch.Tensor]:
    return [x[: len(x) // 2].clone(), x[len(x) // 2 :].clone()]


@torch.library.impl("graphhal_test::count_", "cpu")
def _count(total: torch.Tensor, x: torch.Tensor) -> None:
    total.add_(sum(x.flatten().tolist()))  # a kernel may read its own data


@torch.library.impl("graphhal_test::first_rows", "cpu")
def _first_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    result = torch.empty_like(x)
    result[:rows] = x[:rows]
    return result


ops = torch.ops.graphhal_test


class Running(nn.Module):
    """In-place state: a running mean and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        self.calls += 1
        return x - self.mean * self.calls


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.view(1, 6, 2, 4).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(6, 8))


def out_variant(x: torch.Tensor) -> torch.Tensor:
    result = torch.empty(6, 8, device=x.device)
    torch.add(x, 1.0, out=result)
    return torch.mul(result, x, out=result)


def views_in_place(x: torch.Tensor) -> torch.Tensor:
    result = x.clone()
    result[1:3].mul_(2.0)
    result[:, 0] = 7.0
    result.view(-1)[3:5].fill_(-1.0)
    result.t().add_(x.t())
    result.transpose_(0, 1).squeeze_()
    return result.contiguous()


def masks(x: torch.Tensor) -> torch.Tensor:
    result = torch.where(x > 0, x, torch.zeros_like(x)).masked_fill(x > 1, -2.0)
    result[x < -1] = 5.0
    return result


def gather(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    index = torch.arange(5, -1, -1, device=x.device)
    return x[index], x.index_select(0, index), x.gather(0, index[:, None].expand(6, 8)), x[2:, ::2]


def cat_and_split(x: torch.Tensor) -> list[torch.Tensor]:
    a, b, c = x.split([1, 2, 3])
    d, e = torch.cat([c, b, a, x]).chunk(2)
    return [torch.stack([d, e]), *x.unbind(1)[:2], torch.var_mean(x, dim=1)[0]]


def autocast_on(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (x @ x.t()).float() + F.linear(x, x)


def iterate(x: torch.Tensor) -> torch.Tensor:
    total = x.new_zeros(8)
    for index, row in enumerate(x):
        total = total + row * (index + len(x))
    return total


def scalar_tensors(x: torch.Tensor) -> torch.Tensor:
    offset = torch.tensor(0.5)
    offset += 1.0
    return x * offset + torch.tensor(2)


def host_arithmetic(x: torch.Tensor) -> torch.Tensor:
    sizes = torch.tensor([2, 3, 4])
    total = int(sizes.prod()) + sizes.tolist()[0] + torch.arange(3).sum().item()
    return x * total


torch.manual_seed(0)
table, multihead, lstm = nn.Embedding(16, 8), nn.MultiheadAttention(8, 2), nn.LSTM(8, 4)
patches = nn.Conv3d(1, 4, 2, stride=2)
MODULES: dict[str, Any] = {
    "linear": nn.Linear(8, 4),
    "gelu_layernorm": nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16)),
    "conv1d": nn.Conv1d(6, 5, 3, padding=1),
    "conv3d_patches": lambda x: patches(x.view(6, 1, 2, 2, 2)).flatten(1),
    "batchnorm_training": nn.BatchNorm1d(8).train(),
    "multihead": lambda x: multihead(x, x, x),
    "encoder_layer": nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0).eval(),
    "lstm": lambda x: lstm(x)[0],
    "sdpa": Attention(),
    "embedding": lambda x: table(x.abs().mul(3).long().clamp(max=15)),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "interpolate": lambda x: F.interpolate(x[None, None], size=(3, 4), mode="bilinear"),
    "fft": lambda x: torch.fft.rfft(x).abs(),
    "out_variant": out_variant,
    "parameter_data": lambda x: x @ MODULES["linear"].weight.data.t(),
    "views_in_place": views_in_place,
    "masks": masks,
    "gather": gather,
    "cat_and_split": cat_and_split,
    "autocast": autocast_on,
    "iterate": iterate,
    "scalar_tensors": scalar_tensors,
    "host_arithmetic": host_arithmetic,
    "dictionary": lambda x: {"sum": x.sum(0), "parts": (x.max(), {"low": x.min(dim=1)[1]})},
    "repeat_interleave": lambda x: x.repeat_interleave(
        torch.arange(6, device=x.device), dim=0, output_size=15
    ),
    "searchsorted": lambda x: torch.searchsorted(x.flatten().cumsum(0), x.contiguous()),
    "custom_operator": lambda x: ops.scaled(x, 2.5, bias=x[0]),
    "custom_list": lambda x: ops.halves(x),
    "empty_filled": lambda x: torch.empty_like(x).copy_(x) + x.new_empty(8).fill_(1.0),
}


def contents(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 8, generator=generator).to(dtype)


@pytest.mark.parametrize("name", MODULES)
def test_new_contents_are_seen_and_equal_eager_bit_for_bit(name: str) -> None:
    function = MODULES[name]
    case = Case(function, contents(0))
    for seed in (1, 2):
        assert same(case.replay(contents(seed)), eager(function, contents(seed)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["gelu_layernorm", "sdpa"])
def test_other_dtypes_equal_eager_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    module = copy.deepcopy(MODULES[name]).to(dtype)
    case = Case(module, contents(0, dtype))
    result = case.replay(contents(1, dtype))
    assert same(result, eager(module, contents(1, dtype)))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("name", ["sdpa", "gelu_layernorm", "views_in_place", "autocast"])
def test_the_callers_grad_mode_changes_nothing(name: str, mode: Any) -> None:
    function = MODULES[name]
    with mode():
        case = Case(function, contents(0))
        result = case.replay(contents(1))
    assert same(result, eager(function, contents(1)))


def test_a_replay_inside_autocast_casts_nothing_that_was_not_cast_at_capture() -> None:
    case = Case(MODULES["linear"], contents(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = case.replay(contents(1))
    assert same(result, eager(MODULES["linear"], contents(1)))


def test_second_replay_overwrites_the_first_output() -> None:
    case = Case(lambda x: x * 2, contents(0))
    case.replay(contents(1))
    view = case.graph.request.output
    first = view.clone()
    case.replay(contents(2))
    assert view.data_ptr() == case.outputs[0].data_ptr()
    assert not torch.equal(view, first)


def test_host_value_frozen() -> None:
    host = {"factor": 2.0, "calls": 0}

    def forward(x: torch.Tensor) -> torch.Tensor:
        host["calls"] += 1
        return x * host["factor"]

    case = Case(forward, contents(0))
    calls = host["calls"]
    host["factor"] = 100.0
    assert torch.equal(case.replay(contents(1))[0], contents(1) * 2.0)
    assert host["calls"] == calls


def test_python_branch_frozen() -> None:
    module = nn.Dropout(1.0).eval()
    case = Case(module, contents(0))
    module.train()
    assert torch.equal(case.replay(contents(1))[0], contents(1))


def test_default_dtype_frozen() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * (torch.full((8,), 2.0 / 3.0, device=x.device) / 7.0)

    case, values = Case(forward, contents(0)), contents(1)
    expected = eager(forward, values)
    torch.set_default_dtype(torch.float64)
    try:
        result = case.replay(values)
    finally:
        torch.set_default_dtype(torch.float32)
    assert same(result, expected)


@pytest.mark.parametrize("build", [lambda: nn.Linear(8, 4), lambda: nn.LayerNorm(8)])
def test_rebound_weight_is_not_seen_and_in_place_update_is(build: Any) -> None:
    module = build()
    before = eager(module, contents(1))
    case = Case(module, contents(0))
    old = module.weight.data
    module.weight.data = torch.zeros_like(old)
    assert same(case.replay(contents(1)), before)
    old.mul_(2.0)
    module.weight.data = old
    assert same(case.replay(contents(1)), eager(module, contents(1)))
    assert not same(case.replay(contents(1)), before)


def test_views_of_weights_follow_in_place_updates() -> None:
    weight = torch.randn(4, 8)
    case = Case(lambda x: x @ weight.view(8, 4).t().contiguous().t() + weight[1:2, :4], contents(0))
    weight.copy_(torch.arange(32.0).view(4, 8))
    assert torch.equal(
        case.replay(contents(1))[0],
        contents(1) @ weight.view(8, 4).t().contiguous().t() + weight[1:2, :4],
    )


def test_transposing_a_static_tensor_in_place_counts_once() -> None:
    static = torch.randn(8, 6)

    def forward(x: torch.Tensor) -> torch.Tensor:
        alias = static.view(8, 6)
        return x + alias.t_()

    case = Case(forward, contents(0))
    for _ in range(3):
        assert torch.equal(case.replay(contents(1))[0], contents(1) + static.t())


def test_capture_itself_leaves_in_place_state_as_the_warm_up_left_it() -> None:
    for warmups, expected in ((1, 1), (3, 3), (0, 0)):
        module = Running()
        x, output = contents(0), torch.zeros(6, 8)
        request = request_for(lambda m=module, x=x, o=output: o.copy_(m(x)), output, warmups)
        graph = plugin.graphhal_capture(request)
        assert module.calls.item() == expected
        plugin.graphhal_replay(graph)
        plugin.graphhal_replay(graph)
        assert module.calls.item() == expected + 2


def test_a_warm_up_before_the_rehearsal_may_read_on_the_host() -> None:
    """What a module computes on its first call of a size, and keeps, is no part of the graph."""
    kept: dict[torch.Size, float] = {}

    def forward() -> None:
        if x.shape not in kept:
            kept[x.shape] = x.abs().max().item()
        output.copy_(x * kept[x.shape])

    x, output = contents(0), torch.zeros(6, 8)
    scale = x.abs().max().item()
    graph = plugin.graphhal_capture(request_for(forward, output, Settings().warmups))
    x.copy_(contents(1))
    plugin.graphhal_replay(graph)
    assert torch.equal(output, contents(1) * scale)


def test_capture_puts_overlapping_writes_back() -> None:
    state, output = torch.arange(6.0), torch.zeros(6)

    def forward() -> None:
        state[0:3].add_(10.0)
        state[::2].sub_(1.0)  # as many elements from the same address on
        state[2:5].mul_(2.0)
        state.add_(1.0)
        output.copy_(state)

    graph = plugin.graphhal_capture(request_for(forward, output, warmups=0))
    assert torch.equal(state, torch.arange(6.0))
    plugin.graphhal_replay(graph)
    assert state.tolist() == [10.0, 12.0, 23.0, 7.0, 7.0, 6.0]


def test_in_place_state_equals_eager_over_replays() -> None:
    graphed, plain = Running(), Running()
    x, output = contents(0), torch.zeros(6, 8)
    graph = plugin.graphhal_capture(request_for(lambda: output.copy_(graphed(x)), output))
    eager(plain, contents(0))  # the warm-up
    for seed in range(4):
        x.copy_(contents(seed))
        plugin.graphhal_replay(graph)
        assert same([output], eager(plain, contents(seed)))


def test_mutating_custom_operator_without_results() -> None:
    total, x = torch.zeros(()), contents(0)

    def forward() -> None:
        ops.count_(total, x)

    graph = plugin.graphhal_capture(request_for(forward, total))
    before = total.item()
    plugin.graphhal_replay(graph)
    assert total.item() == pytest.approx(before + contents(0).sum().item())


def test_output_of_the_warm_up_survives_the_capture() -> None:
    output = torch.zeros(())
    state = torch.zeros(())

    def forward() -> None:
        state.add_(1.0)
        output.copy_(state)

    plugin.graphhal_capture(request_for(forward, output))
    assert output.item() == 1.0


def test_stale_padding_tail_unwritten_memory_is_poisoned_on_every_replay() -> None:
    def forward(x: torch.Tensor) -> list[torch.Tensor]:
        rows = torch.empty(6, 8, device=x.device)
        rows[:4] = x[:4]
        numbers = torch.empty_like(x, dtype=torch.int64)
        flags = x.new_empty((6, 8), dtype=torch.bool)
        strided = torch.empty_strided((6, 8), (1, 6), device=x.device)
        return [rows, numbers, flags, strided]

    case = Case(forward, contents(0))
    for seed in (1, 2):
        rows, numbers, flags, strided = case.replay(contents(seed))
        assert torch.equal(rows[:4], contents(seed)[:4])
        assert rows[4:].isnan().all()
        assert strided.isnan().all()
        assert (numbers == torch.iinfo(torch.int64).max).all()
        assert flags.all()


def test_rows_that_a_custom_kernel_leaves_unwritten_are_poisoned() -> None:
    case = Case(lambda x: ops.first_rows(x, 2), contents(0))
    result = case.replay(contents(1))[0]
    assert torch.equal(result[:2], contents(1)[:2])
    assert result[2:].isnan().all()


def test_intermediate_kept_by_the_forward_holds_nan_after_capture() -> None:
    kept: list[torch.Tensor] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        kept.append(x * 2)
        return kept[-1] + 1

    case = Case(forward, contents(0))
    assert not kept[0].isnan().any()  # eager
    assert kept[-1].isnan().all()
    kept[-1].zero_()
    assert case.graph.poison is not None
    case.graph.poison()
    assert kept[-1].isnan().all()


def test_cache_filled_by_the_warm_up_is_static_memory() -> None:
    cache: dict[int, torch.Tensor] = {}

    def forward(x: torch.Tensor) -> torch.Tensor:
        if len(x) not in cache:
            cache[len(x)] = torch.arange(8.0, device=x.device)
        return x + cache[len(x)]

    x, output = contents(0), torch.zeros(6, 8)
    graph = plugin.graphhal_capture(request_for(lambda: output.copy_(forward(x)), output))
    plugin.graphhal_replay(graph)
    assert torch.equal(output, x + torch.arange(8.0))
    assert not cache[6].isnan().any()


def test_cache_filled_inside_the_capture_of_one_graph_is_garbage_to_the_next() -> None:
    cache: dict[str, torch.Tensor] = {}
    calls = iter(range(100))

    def forward(x: torch.Tensor) -> torch.Tensor:
        if next(calls) >= 2 and "table" not in cache:  # first met while capturing
            cache["table"] = x.new_ones(8)
        return x + cache.get("table", 0.0)

    x, output = contents(0), torch.zeros(6, 8)
    plugin.graphhal_capture(request_for(lambda: output.copy_(forward(x)), output, warmups=2))
    graph = plugin.graphhal_capture(request_for(lambda: output.copy_(forward(x)), output))
    plugin.graphhal_replay(graph)
    assert output.isnan().all()


def test_random_operators_draw_anew_and_capture_draws_nothing() -> None:
    x, output = torch.zeros(6, 8), torch.zeros(6, 8)
    torch.manual_seed(7)
    graph = plugin.graphhal_capture(
        request_for(lambda: output.copy_(torch.rand_like(x) + F.dropout(x)), output, warmups=0)
    )
    after_capture = torch.get_rng_state()
    torch.manual_seed(7)
    assert torch.equal(after_capture, torch.get_rng_state())
    plugin.graphhal_replay(graph)
    first = output.clone()
    plugin.graphhal_replay(graph)
    assert not torch.equal(first, output)
    torch.manual_seed(7)
    assert torch.equal(first, torch.rand_like(x))


def test_compiled_module_is_recorded_operator_by_operator() -> None:
    compiled = torch.compile(lambda x: (x + 1) * 2, backend="eager")
    case = Case(compiled, contents(0))
    assert torch.equal(case.replay(contents(1))[0], (contents(1) + 1) * 2)


def test_tensor_subclass_unwraps_itself() -> None:
    class Twice(torch.Tensor):
        """Adds its inner tensor twice."""

        @staticmethod
        def __new__(cls: Any, inner: torch.Tensor) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        def __init__(self, inner: torch.Tensor) -> None:
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            plain = [a.inner + a.inner if isinstance(a, Twice) else a for a in args]
            return op(*plain, **(kwargs or {}))

    weight = torch.randn(8)
    wrapped = Twice(weight)
    case = Case(lambda x: x * wrapped, contents(0))
    weight.fill_(3.0)
    assert torch.equal(case.replay(contents(1))[0], contents(1) * 6.0)


def test_collectives_are_replayed_and_waited_for(tmp_path: Any) -> None:
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:

        def forward(x: torch.Tensor) -> torch.Tensor:
            total = x * 3
            dist.all_reduce(total)
            parts = [torch.empty_like(x)]
            dist.all_gather(parts, total)
            return parts[0] + 1

        case = Case(forward, contents(0))
        assert torch.equal(case.replay(contents(1))[0], contents(1) * 3 + 1)
    finally:
        dist.destroy_process_group()


def test_graph_keeps_static_memory_alive() -> None:
    def build() -> Any:
        weight = torch.full((8,), 4.0)
        x, output = contents(0), torch.zeros(6, 8)
        request = request_for(lambda: output.copy_(x * weight), output)
        return plugin.graphhal_capture(request), weakref.ref(weight), output

    graph, _, output = build()
    gc.collect()
    plugin.graphhal_replay(graph)
    assert torch.equal(output, contents(0) * 4.0)


def test_intermediates_are_freed_after_their_last_use() -> None:
    # Ten steps of 4 MiB each, two alive at once.
    def forward(x: torch.Tensor) -> torch.Tensor:
        big = x.expand(1024, 1024).clone()
        for _ in range(9):
            big = big + 1.0
        return big.sum()

    case = Case(forward, torch.ones(1024))
    assert 8 * 2**20 <= case.graph.num_bytes <= 9 * 2**20
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def watched(function: Any) -> Any:
        def call(*operands: Any) -> Any:
            result = function(*operands)
            made.append(weakref.ref(result))
            alive.append(sum(ref() is not None and ref().numel() == 2**20 for ref in made))
            return result

        return call

    case.graph.handle.steps = [(watched(step[0]), *step[1:]) for step in case.graph.handle.steps]
    case.replay(torch.ones(1024))
    assert len(alive) == len(case.graph.handle.steps)
    assert max(alive) <= 3  # the expanded view, one operand, one result


def test_replay_of_a_graph_from_another_thread() -> None:
    case = Case(MODULES["sdpa"], contents(0))
    results: list[Any] = []
    worker = threading.Thread(target=lambda: results.append(case.replay(contents(1))))
    worker.start()
    worker.join()
    assert same(results[0], eager(MODULES["sdpa"], contents(1)))


def test_other_threads_run_torch_while_one_captures() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def plugin_step() -> Any:
        return plugin.graphhal_step("eager", None, {}, {})

    def forward(x: torch.Tensor) -> torch.Tensor:
        if plugin_step() is None:  # only while capturing
            inside.set()
            assert go_on.wait(30)
        return x * 2

    results: list[Any] = []

    def other() -> None:
        assert inside.wait(30)
        values = torch.tensor([1.0, 2.0])
        results.append((values.tolist(), values[values > 1].numpy().sum(), plugin_step() is None))
        go_on.set()

    worker = threading.Thread(target=other)
    worker.start()
    case = Case(forward, contents(0))
    worker.join()
    assert results == [([1.0, 2.0], 2.0, False)]
    assert torch.equal(case.replay(contents(1))[0], contents(1) * 2)
    assert len([s for s in case.graph.handle.steps if "mul" in s[-1]]) == 1


def test_failing_operator_in_a_replay_is_a_replay_error_that_names_it() -> None:
    case = Case(lambda x: table(x[:, 0].long()), torch.zeros(6, 8))
    with pytest.raises(ReplayError, match=r"^aten\.embedding\.default failed: IndexError"):
        case.replay(torch.full((6, 8), 99.0))
    recording = case.graph.handle
    assert all(recording.registers[step[2]] is None for step in recording.steps)
    assert torch.equal(case.replay(torch.ones(6, 8))[0], table.weight.detach()[1].expand(6, 8))


def test_views_of_weights_cost_nothing_in_a_replay() -> None:
    names = [step[-1] for step in Case(nn.Linear(8, 4), contents(0)).graph.handle.steps]
    assert names == ["aten.addmm.default", "aten.copy_.default"]


def test_results_that_nobody_reads_cost_nothing_in_a_replay() -> None:
    names = [step[-1] for step in Case(nn.LayerNorm(8), contents(0)).graph.handle.steps]
    assert names == ["aten.native_layer_norm.default", "part of a result", "aten.copy_.default"]
