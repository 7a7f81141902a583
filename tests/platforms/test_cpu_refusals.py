"""What a device graph cannot hold is refused by the reference platform, and nothing else is."""

import copy
import ctypes
import io
import operator
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from graphhal.cpu import plugin
from graphhal.errors import (
    CaptureError,
    HostReadError,
    ReplayError,
    ResourceExhaustedError,
    UnsupportedOperationError,
)
from tests.platforms.cpu_case import Case, request_for

torch.library.define("graphhal_test::longest", "(Tensor cu_seqlens) -> int")
torch.library.impl("graphhal_test::longest", "cpu", lambda ends: int(ends.diff().max()))

Forward = Callable[[torch.Tensor], Any]
static = torch.arange(1.0, 5.0)
count = torch.tensor(2)
static_output = torch.zeros(0)
generator = torch.Generator()
host_array = np.ones(4, dtype=np.float32)
bound_tolist = static.tolist


def refused(forward: Forward, **options: Any) -> CaptureError:
    """The error of capturing `forward` over a static tensor [1, 2, 3, 4]."""
    x, output = static.clone(), torch.zeros(4)
    with pytest.raises(CaptureError) as caught:
        plugin.graphhal_capture(request_for(lambda: forward(x), output, **options))
    return caught.value


def accepted(forward: Forward) -> None:
    x, output = static.clone(), torch.zeros(4)

    def run() -> None:
        output.copy_(forward(x))

    graph = plugin.graphhal_capture(request_for(run, output))
    x.add_(1.0)
    plugin.graphhal_replay(graph)
    with torch.no_grad():
        assert torch.equal(output, forward(x))


def assigned(x: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    result = x * 1
    result[index] = value
    return result


HOST_READS: dict[str, Forward] = {
    "item": lambda x: x[0].item(),
    "float": lambda x: float(x[0]),
    "int": lambda x: int(x[0]),
    "bool": lambda x: bool(x[0] > 0),
    "complex": lambda x: complex(x[0]),
    "index": lambda x: operator.index(x[0].long()),
    "if": lambda x: 1 if x.sum() > 0 else 2,
    "and": lambda x: x[0] and x[1],
    "while": lambda x: [None for _ in range(x[0].long())],
    "max_builtin": lambda x: max(x),
    "in": lambda x: 1.0 in x,
    "assert_all": lambda x: torch._assert((x > 0).all(), "positive"),
    "tolist": lambda x: x.tolist(),
    "tolist_of_intermediate": lambda x: (x * 2).tolist(),
    "tolist_bound_before": lambda x: bound_tolist(),
    "tolist_of_base_class": lambda x: torch._C.TensorBase.tolist(x),
    "numpy": lambda x: x.numpy(),
    "numpy_force": lambda x: x.numpy(force=True),
    "asarray": lambda x: np.asarray(x),
    "array_of_list": lambda x: np.array([x[0], x[1]]),
    "numpy_function": lambda x: np.linalg.norm(x),
    "numpy_operand": lambda x: np.add(x, 1.0),
    "from_dlpack": lambda x: np.from_dlpack(x),
    "print": lambda x: print(x),
    "repr": lambda x: repr(x),
    "str_of_scalar": lambda x: str(x[0]),
    "f_string": lambda x: f"{x}",
    "f_string_scalar": lambda x: f"{x[0]:.2f}",
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "is_nonzero": lambda x: torch.is_nonzero(x[0]),
    "cpu": lambda x: x.cpu(),
    "to_cpu": lambda x: x.to("cpu"),
    "to_cpu_keyword": lambda x: x.to(device="cpu"),
    "size_argument": lambda x: torch.zeros(x[0].long(), device=x.device),
    "slice_bound": lambda x: x[: count + 1],
    "full_value": lambda x: torch.full((2,), x[0], device=x.device),
    "arange_end": lambda x: torch.arange(x[1], device=x.device),
    "tensor_split": lambda x: torch.tensor_split(x, count.expand(1)),
    "tensor_split_method": lambda x: x.tensor_split(tensor_indices_or_sections=count.expand(1)),
    "dynamic_quantisation": lambda x: torch.quantize_per_tensor_dynamic(x, torch.qint8, False),
    "quantisation_range": lambda x: torch._choose_qparams_per_tensor(x),
    "tensordot": lambda x: torch.tensordot(x[None], x[None], dims=count.expand(2, 1) - 2),
    "tensordot_by_position": lambda x: torch.tensordot(x[None], x[None], count.expand(2, 1) - 2),
    "tensor_of_tensors": lambda x: torch.tensor([x[0], x[1]]),
    "one_hot_without_classes": lambda x: F.one_hot(x.long()),
    "inverse": lambda x: torch.linalg.inv(x.view(2, 2)),
    "packed_lengths": lambda x: torch._pack_padded_sequence(x.view(2, 2, 1), x[:2].long(), True),
    "custom_operator": lambda x: torch.ops.graphhal_test.longest(x),
}


@pytest.mark.parametrize("name", HOST_READS)
def test_host_read_is_refused(name: str) -> None:
    error = refused(HOST_READS[name])
    assert isinstance(error, HostReadError)
    assert "reads device data on the host" in str(error)


@pytest.mark.parametrize("target", ["weight", "intermediate", "static_view"])
def test_host_read_of_anything_that_lies_on_the_device_is_refused(target: str) -> None:
    weight = nn.Parameter(torch.ones(3))
    tensor = {"weight": lambda x: weight, "intermediate": torch.neg, "static_view": lambda x: x[1:]}
    assert isinstance(refused(lambda x: tensor[target](x).tolist()), HostReadError)


def test_host_read_inside_a_library_function_is_refused() -> None:
    assert isinstance(refused(lambda x: F.gaussian_nll_loss(x, x, x)), HostReadError)


DYNAMIC: dict[str, Forward] = {
    "nonzero": lambda x: x.nonzero(),
    "argwhere": lambda x: torch.argwhere(x),
    "where_of_one": lambda x: torch.where(x > 2),
    "masked_select": lambda x: x.masked_select(x > 2),
    "mask_index": lambda x: x[x > 2],
    "byte_mask_index": lambda x: x[(x > 2).byte()],
    "mask_beside_index": lambda x: x.view(2, 2)[:, torch.ones_like(x[:2]).bool()],
    "mask_assign_rows": lambda x: assigned(x, x > 2, x[2:]),
    "mask_assign_device_scalar": lambda x: assigned(x, x > 2, x[0]),
    "unique": lambda x: torch.unique(x),
    "unique_consecutive": lambda x: torch.unique_consecutive(x),
    "bincount": lambda x: torch.bincount(x.long()),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "to_sparse": lambda x: x.to_sparse(),
    "to_sparse_rows": lambda x: x.view(2, 2).to_sparse_csr(),
    "mask_put": lambda x: torch.index_put(x, (x > 2,), x[2:]),
    "mask_put_impl": lambda x: torch.ops.aten._index_put_impl_(x * 1, [x > 2], x[2:]),
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_data_dependent_shape_is_refused(name: str) -> None:
    error = refused(DYNAMIC[name])
    assert isinstance(error, UnsupportedOperationError)
    assert "shape depends on device data" in str(error)


HOST_DATA: dict[str, Forward] = {
    "tensor": lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "tensor_onto_device": lambda x: torch.tensor([1.0], device=x.device),
    "scalar_onto_device": lambda x: torch.tensor(1.0, device=x.device),
    "as_tensor_onto_device": lambda x: torch.as_tensor(host_array, device=x.device),
    "as_tensor": lambda x: x + torch.as_tensor(host_array),
    "asarray": lambda x: x + torch.asarray(host_array),
    "asarray_onto_device": lambda x: torch.asarray(host_array, device=x.device),
    "factory_put": lambda x: torch.index_put(x, (torch.arange(2),), x[:2]),
    "factory_put_": lambda x: assigned(x, torch.arange(2), x[:2]),
    "factory_put_impl": lambda x: torch.ops.aten._index_put_impl_(x * 1, [torch.arange(2)], x[:2]),
    "from_numpy": lambda x: x + torch.from_numpy(host_array),
    "from_numpy_moved": lambda x: torch.from_numpy(host_array).to(x.device),
    "moved_by_other": lambda x: torch.tensor([1.0]).to(x),
    "factory_moved": lambda x: torch.arange(4).to(x.device),
    "new_tensor": lambda x: x.new_tensor([1.0]),
    "legacy_constructor": lambda x: x + torch.FloatTensor([1.0, 2.0, 3.0, 4.0]),
    "list_index": lambda x: x[[0, 1]],
    "array_index": lambda x: x[np.array([0, 1])],
    "list_assign": lambda x: assigned(x, [0, 1], 2.0),
    "factory_index": lambda x: x[torch.arange(2)],
    "factory_copy": lambda x: (x * 1).copy_(torch.arange(4)),
    "computed_on_host": lambda x: x + torch.tensor([1.0, 2.0]).repeat(2),
    "copied_in": lambda x: (x * 1).copy_(torch.tensor([1.0, 2.0, 3.0, 4.0])),
}


@pytest.mark.parametrize("name", HOST_DATA)
def test_host_data_on_its_way_to_the_device_is_refused(name: str) -> None:
    error = refused(HOST_DATA[name])
    assert isinstance(error, UnsupportedOperationError)
    assert "brings host data into captured code" in str(error)


def reseed(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(torch.initial_seed() + 1)
    return torch.rand_like(x)


def reseed_for_a_while(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch.initial_seed() + 1)
        return torch.rand_like(x)


def resize_output(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x], out=static_output)


OTHERS: dict[str, tuple[Forward, str]] = {
    "own_generator": (
        lambda x: torch.rand(2, generator=generator, device=x.device),
        "draws from a generator of its own",
    ),
    "reseeding": (reseed, "seeds the random generator"),
    "reseeding_for_a_while": (reseed_for_a_while, "seeds the random generator"),
    "generator_seed": (
        lambda x: torch.default_generator.manual_seed(torch.initial_seed() + 1),
        "seeds the random generator",
    ),
    "set_data": (lambda x: setattr(x, "data", x * 2), "gives a tensor other memory"),
    "set_": (lambda x: x.set_(x * 2), "gives a tensor other memory"),
    "resize_as_": (lambda x: x.clone().resize_as_(x[:2]), "gives a tensor other memory"),
    "resize_": (lambda x: x.clone().resize_(8), "gives a tensor other memory"),
    "out_of_another_shape": (resize_output, "gives a tensor other memory"),
    "data_ptr": (
        lambda x: ctypes.string_at(x.data_ptr(), 4),
        "out of PyTorch's sight",
    ),
    "storage": (lambda x: x.untyped_storage()[0], "out of PyTorch's sight"),
    "typed_storage": (lambda x: x.storage().tolist(), "out of PyTorch's sight"),
    "pickle": (lambda x: pickle.dumps(x), "out of PyTorch's sight"),
    "save": (lambda x: torch.save(x, io.BytesIO()), "out of PyTorch's sight"),
    "frombuffer": (
        lambda x: x + torch.frombuffer(bytearray(16), dtype=torch.float32),
        "made inside the forward, but by no operator",
    ),
    "dlpack_in": (
        lambda x: x + torch.from_dlpack(np.ones(4, dtype=np.float32)),
        "made inside the forward, but by no operator",
    ),
    "parameter_of_a_result": (
        lambda x: nn.Parameter(x * 2) + 1,
        "made inside the forward, but by no operator",
    ),
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning")
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
@pytest.mark.parametrize("name", OTHERS)
def test_what_the_tape_could_not_follow_is_refused(name: str) -> None:
    forward, words = OTHERS[name]
    error = refused(forward)
    assert isinstance(error, UnsupportedOperationError)
    assert words in str(error)


def test_deep_copy_is_refused() -> None:
    assert isinstance(refused(lambda x: copy.deepcopy(x)), CaptureError)


HARMLESS: dict[str, Forward] = {
    "host_tensor_read": lambda x: x * torch.tensor([2.0, 3.0]).tolist()[1],
    "host_numpy": lambda x: x * float(torch.tensor([2.0, 3.0]).numpy().sum()),
    "host_dynamic_shape": lambda x: x * torch.tensor([0, 1]).nonzero().shape[0],
    "host_to_cpu": lambda x: x * torch.arange(3).cpu().sum().item(),
    "factory_read": lambda x: x * torch.ones(3).sum().item(),
    "scalar_constant": lambda x: x * torch.tensor(3.0),
    "scalar_assign": lambda x: assigned(x, 0, 5.0),
    "slice_assign": lambda x: assigned(x, slice(1, 3), 5.0),
    "mask_fill": lambda x: assigned(x, x > 2, 5.0),
    "index_by_factory_on_device": lambda x: x[torch.arange(3, -1, -1, device=x.device)],
    "to_own_device": lambda x: x.to(x.device),
    "as_tensor_of_device": lambda x: torch.as_tensor(x, device=x.device) + torch.asarray(x),
    "to_dtype": lambda x: x.to(torch.float64).to(torch.float32),
    "to_like": lambda x: x.double().to(x),
    "iteration": lambda x: torch.stack([row * len(x) for row in x]),
    "shape_arithmetic": lambda x: x * x.shape[0] * x.numel() * x.stride(0) * x.dim(),
    "same_seed": lambda x: x + (torch.manual_seed(torch.initial_seed()) is None),
    "where_of_three": lambda x: torch.where(x > 2, x, 0.0),
    "repeat_with_output_size": lambda x: x.repeat_interleave(x.long() * 0 + 1, output_size=4),
    "clamp_by_tensor": lambda x: x.clamp(min=x[1]),
    "in_place_view": lambda x: x.clone().view(2, 2).t_().reshape(4),
    "one_hot": lambda x: (
        F.one_hot(x.long(), 6).sum(1) + F.one_hot(x.long(), num_classes=6).sum(1) + x
    ),
    "factory_inside_a_function": lambda x: nn.utils.rnn.pad_sequence([x, x[:2]])[:, 0],
    "split_by_numbers": lambda x: torch.cat(x.tensor_split((1, 3))[::-1]),
    "dot_over_numbers": lambda x: x * torch.tensordot(x, x, 1) * torch.tensordot(x, b=x, dims=1),
    "host_new_tensor": lambda x: x * torch.tensor([2.0]).new_tensor([3.0]).item(),
    "host_to_dtype": lambda x: x * torch.tensor([2.0]).to(torch.float64).item(),
    "host_address": lambda x: x * (torch.tensor([2.0]).data_ptr() != 0),
    "new_memory_like": lambda x: x.new_zeros(4) + torch.zeros_like(x) + x,
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_a_device_allows_is_not_refused(name: str) -> None:
    accepted(HARMLESS[name])


def test_refusal_swallowed_by_the_forward_still_fails_the_capture() -> None:
    def forward(x: torch.Tensor) -> None:
        try:
            x.tolist()
        except Exception:  # noqa: BLE001  (the hazard)
            x.add_(1.0)

    assert isinstance(refused(forward), HostReadError)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")
def test_refusal_that_the_forward_wraps_is_still_that_refusal() -> None:
    @torch.jit.script
    def scripted(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if bool(x.sum() > 0) else x

    error = refused(scripted)
    assert isinstance(error, HostReadError)
    assert isinstance(error.__cause__, RuntimeError)


def test_refusal_names_operation_device_and_way_out() -> None:
    message = str(refused(lambda x: x.tolist()))
    assert message.startswith(".tolist() reads device data on the host.")
    assert "a graph would freeze the value" in message
    assert "pass it in as a host integer or a static input" in message


def test_error_of_the_forward_is_a_capture_error_that_keeps_its_cause() -> None:
    error = refused(lambda x: {}["missing"])
    assert str(error).startswith("the forward of toy/image[1] raised KeyError: 'missing'")
    assert isinstance(error.__cause__, KeyError)


@pytest.mark.parametrize(
    "failure",
    [MemoryError("host"), RuntimeError("DefaultCPUAllocator: can't allocate memory: tried 1 byte")],
)
def test_out_of_memory_is_named_as_such(failure: Exception) -> None:
    def forward(x: torch.Tensor) -> None:
        raise failure

    error = refused(forward)
    assert isinstance(error, ResourceExhaustedError)
    assert error.__cause__ is failure


def faults(kind: str) -> Forward:
    def forward(x: torch.Tensor) -> None:
        x.add_(1.0)
        if kind != "seed":
            torch.rand_like(x)
        if kind == "interrupt":
            raise KeyboardInterrupt
        if kind == "exit":
            raise SystemExit(3)
        if kind == "seed":
            torch.manual_seed(12345)
        if kind == "refusal":
            x.tolist()
        raise ValueError(kind)

    return forward


@pytest.mark.parametrize("kind", ["refusal", "error", "interrupt", "exit", "seed"])
@pytest.mark.parametrize("warmups", [0, 1])
def test_process_is_as_it_was_after_a_failed_capture(kind: str, warmups: int) -> None:
    x, output = static.clone(), torch.zeros(4)
    before = torch.get_rng_state(), torch.initial_seed(), torch.is_grad_enabled()
    expected = {"interrupt": KeyboardInterrupt, "exit": SystemExit}.get(kind, CaptureError)
    with pytest.raises(expected):
        plugin.graphhal_capture(request_for(lambda: faults(kind)(x), output, warmups=warmups))
    assert _get_current_dispatch_mode_stack() == []
    assert torch.overrides._get_current_function_mode_stack() == []
    assert torch.equal(x, static)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (torch.initial_seed(), torch.is_grad_enabled())
    assert plugin.graphhal_step("eager", None, {}, {}) is not None
    assert x.tolist() == [1.0, 2.0, 3.0, 4.0]
    accepted(lambda x: x * 2)


def test_host_reads_outside_the_thread_of_the_capture_are_free() -> None:
    values: list[Any] = []

    def forward(x: torch.Tensor) -> None:
        worker = threading.Thread(target=lambda: values.append(x.tolist()))
        worker.start()
        worker.join()

    plugin.graphhal_capture(request_for(lambda: forward(static), torch.zeros(4)))
    assert values == [[1.0, 2.0, 3.0, 4.0]] * 2


def test_capture_inside_a_capture_is_refused_and_no_step_may_be_entered() -> None:
    steps: list[Any] = []

    def forward(x: torch.Tensor) -> None:
        steps.append(plugin.graphhal_step("replay", None, {}, {}))
        plugin.graphhal_capture(request_for(lambda: None, torch.zeros(1)))

    error = refused(forward)
    assert isinstance(error, UnsupportedOperationError)
    assert "inside another capture" in str(error)
    assert steps == [None]
    scope = plugin.graphhal_step("replay", None, {}, {})
    assert scope is not None
    with scope as entered:
        memory = entered.empty((2, 3), torch.bfloat16)
    assert memory.shape == (2, 3)
    assert memory.dtype == torch.bfloat16


def test_replay_inside_a_capture_is_refused() -> None:
    inner = Case(lambda x: x * 2, static)

    error = refused(lambda x: plugin.graphhal_replay(inner.graph))
    assert isinstance(error.__cause__, ReplayError)


def attend(x: torch.Tensor) -> torch.Tensor:
    return flex_attention(*[x.view(1, 1, 2, 2)] * 3).flatten()


def branch(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, torch.neg, torch.abs, (x,))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("forward", [attend, branch])
def test_what_compiles_itself_is_refused_and_still_runs_eagerly(forward: Forward) -> None:
    x = static.clone()
    before = forward(x)
    error = refused(forward)
    assert isinstance(error, UnsupportedOperationError)
    assert "calls functions of its own" in str(error)
    assert torch.equal(forward(x), before)


def test_a_function_that_is_first_met_in_a_capture_is_compiled_later() -> None:
    calls = []

    def backend(graph: Any, _: Any) -> Any:
        calls.append(graph)
        return graph

    x, twice = static.clone(), torch.compile(lambda x: x * 2, backend=backend)
    plugin.graphhal_capture(request_for(lambda: twice(x), torch.zeros(4)))
    assert not calls
    twice(x)
    assert calls
