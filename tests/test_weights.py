"""Weights that were rebound after capture are noticed; in-place updates are not held against it."""

from collections.abc import Callable
from copy import deepcopy
from functools import cached_property, partial

import pytest
import torch
from torch import nn

from graphhal import held_places, weights
from graphhal.weights import PLACES, WHOLE, WINDOW, WeightWatch
from tests.toy_encoder import FULL, HIDDEN, MERGE, Tower


def noticed(watch: WeightWatch) -> bool:
    """What a request looks at, before its launch and after it."""
    return watch.unsafe_to_launch() or watch.outdated()


def tower() -> Tower:
    return Tower([FULL, FULL], levels=2)


def replace_parameter(made: Tower) -> None:
    made.embed.weight = nn.Parameter(made.embed.weight.detach().clone())


def rebind_data(made: Tower) -> None:
    made.positions.data = made.positions.data.clone()


def rebind_nested(made: Tower) -> None:
    made.blocks[1].qkv.bias.data = made.blocks[1].qkv.bias.data.clone()


def replace_buffer(made: Tower) -> None:
    made.scale = made.scale.clone()


def delete_parameter(made: Tower) -> None:
    del made.mergers[0].weight


def unset_parameter(made: Tower) -> None:
    made.mergers[0].bias = None


def replace_module(made: Tower) -> None:
    made.blocks[0].out = deepcopy(made.blocks[0].out)


def replace_list_entry(made: Tower) -> None:
    made.mergers[1] = deepcopy(made.mergers[1])


def remove_module(made: Tower) -> None:
    del made.blocks[1]


def sleep(made: Tower) -> None:
    made.embed.weight.untyped_storage().resize_(0)


def convert(made: Tower) -> None:
    made.double()


def hook(made: Tower) -> None:
    made.mergers[0].register_forward_hook(lambda module, args, output: output * 2)


def hook_before(made: Tower) -> None:
    made.mergers[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def patch_forward(made: Tower) -> None:
    forward = made.mergers[0].forward
    made.mergers[0].forward = lambda rows: forward(rows) * 2


def patch_call(made: Tower) -> None:
    call = made.mergers[0]._call_impl
    made.mergers[0]._call_impl = lambda rows: call(rows) * 2


def give_another_class(made: Tower) -> None:
    merger = made.mergers[0]

    class Doubled(type(merger)):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return super().forward(rows) * 2

    merger.__class__ = Doubled


def transpose_the_data(made: Tower) -> None:
    weight = made.blocks[0].out.weight
    weight.data = weight.data.t()  # the same address


def transpose_in_place(made: Tower) -> None:
    with torch.no_grad():
        made.blocks[0].out.weight.t_()


def append_a_module(made: Tower) -> None:
    made.blocks.append(deepcopy(made.blocks[0]))


def swap_tensors(made: Tower) -> None:
    weight = made.blocks[0].out.weight
    torch.utils.swap_tensors(weight, nn.Parameter(torch.randn_like(weight)))


def replace_plain_tensor(made: Tower) -> None:
    made.shift = made.shift + 1


def rebind_plain_tensor(made: Tower) -> None:
    made.shift.data = made.shift.data.clone()


def change_a_number(made: Tower) -> None:
    made.gain = 2.0


def change_a_layers_number(made: Tower) -> None:
    made.blocks[0].boundary_set = "other"


def change_an_entry(made: Tower) -> None:
    made.gains[0] = 2.0


def change_a_nested_entry(made: Tower) -> None:
    made.gains[1].append(2.0)


def change_an_entry_by_name(made: Tower) -> None:
    made.scaling["default"] = 2.0


def change_an_entry_of_a_list_by_name(made: Tower) -> None:
    made.scaling["by_level"][0] = 2.0


def append_a_word(made: Tower) -> None:
    made.merged.append("default")


def rebind_a_tensor_in_a_tuple(made: Tower) -> None:
    made.tables[0].data = made.tables[0].data.clone()


def shadow_a_number_of_the_class(made: Tower) -> None:
    made.share = 2.0


def patch_a_method(made: Tower) -> None:
    made.merged_rows = lambda rows: rows.reshape(-1, MERGE * HIDDEN) * 2


REBINDINGS: list[Callable[[Tower], None]] = [
    replace_plain_tensor,
    rebind_plain_tensor,
    change_a_number,
    change_a_layers_number,
    change_an_entry,
    change_a_nested_entry,
    change_an_entry_by_name,
    change_an_entry_of_a_list_by_name,
    append_a_word,
    shadow_a_number_of_the_class,
    patch_a_method,
    rebind_a_tensor_in_a_tuple,
    patch_call,
    give_another_class,
    transpose_the_data,
    transpose_in_place,
    append_a_module,
    swap_tensors,
    replace_parameter,
    rebind_data,
    rebind_nested,
    replace_buffer,
    delete_parameter,
    unset_parameter,
    replace_module,
    replace_list_entry,
    remove_module,
    sleep,
    convert,
    hook,
    hook_before,
    patch_forward,
]


@pytest.mark.parametrize("rebind", REBINDINGS, ids=lambda rebind: rebind.__name__)
def test_rebound_weights_are_noticed(rebind):
    made = tower()
    watch = WeightWatch([made])
    assert not watch.moved()
    assert not noticed(watch)
    rebind(made)
    assert noticed(watch)
    assert watch.moved()


def update_in_place(made: Tower) -> None:
    made.shift.add_(1)
    made.gain = made.gain
    with torch.no_grad():
        made.embed.weight.add_(1)
        made.scale.mul_(2)


def load_a_state(made: Tower) -> None:
    made.load_state_dict({name: x + 1 for name, x in made.state_dict().items()})


def change_the_mode(made: Tower) -> None:
    made.eval().requires_grad_(False)


@pytest.mark.parametrize(
    "change", [update_in_place, load_a_state, change_the_mode], ids=lambda change: change.__name__
)
def test_updates_in_place_keep_the_graphs(change):
    made = tower()
    watch = WeightWatch([made])
    change(made)
    assert not watch.moved()
    assert not noticed(watch)


def test_what_forwards_note_on_their_modules_is_left_out_once_it_settled():
    made = tower()
    made.calls, made.last, made.first = 0, None, torch.zeros(1)
    watch = WeightWatch([made])
    made.calls, made.last = 1, torch.ones(1)
    assert watch.moved()
    watch.settle()
    made.calls, made.last = 2, torch.ones(1)
    assert not watch.moved()
    assert not noticed(watch)
    made.first = torch.zeros(1)
    assert noticed(watch)


@pytest.mark.parametrize(
    "change", [replace_buffer, rebind_data, transpose_in_place, patch_forward, hook]
)
def test_settling_forgives_no_weight(change):
    made = tower()
    watch = WeightWatch([made])
    change(made)
    watch.settle()
    assert noticed(watch)


def test_settling_forgives_no_mode():
    made = nn.Dropout()
    made.calls = 0
    watch = WeightWatch([made])
    made.calls = 1
    watch.settle()
    made.calls = 2
    assert not noticed(watch)
    made.eval()
    watch.settle()
    assert noticed(watch)


def test_lists_and_dicts_that_forwards_change_are_left_out_once_they_settled():
    made = tower()
    made.by_size, made.last, made.calls = {4: torch.ones(4)}, {"rows": 4}, [1]
    watch = WeightWatch([made])
    made.by_size[8] = torch.ones(8)
    made.last["rows"] = 8
    made.calls.append(2)
    assert watch.moved()
    watch.settle()
    made.by_size.pop(4)
    made.last["rows"] = 16
    made.calls.append(3)
    assert not watch.moved()
    assert not noticed(watch)
    change_an_entry_by_name(made)
    assert noticed(watch)


def test_a_key_that_is_new_moves_nothing():
    made = tower()
    watch = WeightWatch([made])
    made.scaling["other"] = 1.0
    assert not noticed(watch)


def test_a_property_that_is_computed_once_moves_nothing():
    class Late(nn.Linear):
        @cached_property
        def width(self) -> int:
            return self.in_features

    made = Late(2, 2)
    watch = WeightWatch([made])
    assert made.width == 2
    assert not noticed(watch)


def test_what_forwards_set_in_place_of_the_classs_own_while_captured_moves_nothing():
    class Counting(nn.Linear):
        calls = 0

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(rows)

    made = Counting(2, 2)
    watch = WeightWatch([made])
    made(torch.ones(1, 2))
    watch.settle()
    assert not noticed(watch)
    made.forward = lambda rows: rows
    assert noticed(watch)


def test_a_list_that_holds_itself_and_a_long_one_are_watched_as_a_whole():
    made = nn.Module()
    made.words = list(range(held_places.CONTENTS + 1))
    made.words[0] = made.loop = [made.words]
    made.loop.append(made.loop)
    watch = WeightWatch([made])
    made.words[1] = 0
    assert not noticed(watch)
    made.words = []
    assert noticed(watch)


def test_an_attribute_that_forwards_give_other_memory_is_left_out_too():
    made = tower()
    watch = WeightWatch([made])
    rebind_plain_tensor(made)
    watch.settle()
    assert not noticed(watch)


def test_attributes_of_a_hosts_whole_model_are_its_own_affair():
    made = tower()
    watch = WeightWatch([made], attributes=False)
    replace_plain_tensor(made)
    change_a_number(made)
    shadow_a_number_of_the_class(made)
    assert not noticed(watch)
    assert not watch.moved()
    replace_parameter(made)
    assert noticed(watch)


@pytest.mark.parametrize("attributes", [True, False])
def test_another_patch_of_a_patched_module_is_noticed(attributes):
    made = tower()
    patch_forward(made)
    watch = WeightWatch([made], attributes=attributes)
    patch_forward(made)
    assert noticed(watch)


def test_a_tensor_without_plain_memory_is_watched_by_name():
    made = tower()
    made.held = held = torch.eye(2).to_sparse()
    watch = WeightWatch([made])
    assert not noticed(watch)
    made.held = held.clone()
    assert noticed(watch)


def test_nothing_to_watch_never_moves():
    watch = WeightWatch([])
    assert not watch.moved()
    assert not noticed(watch)
    assert not noticed(WeightWatch([nn.ReLU()]))


def test_tied_and_shared_modules_are_watched_once():
    made = tower()
    made.mergers[1] = made.mergers[0]
    watch = WeightWatch([made, made, made.mergers])
    assert not watch.moved()
    replace_parameter(made)
    assert watch.moved()


class Many(nn.Module):
    """More tensors than a request looks at, or just as many."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(torch.zeros(1) for _ in range(tensors))


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(weights, "monotonic", lambda: now[0])
    return now


def test_a_busy_server_notices_within_as_many_requests_as_windows(clock):
    made = Many(WHOLE + WINDOW)
    watch = WeightWatch([made])
    assert not noticed(watch)
    for position in (0, WINDOW, 2 * WINDOW, WHOLE + WINDOW - 1):
        made.tensors[position].data = torch.zeros(1)
        assert any(noticed(watch) for _ in range(WHOLE // WINDOW + 1))
        watch = WeightWatch([made])


def test_the_first_request_after_a_pause_notices(clock):
    made = Many(WHOLE + 1)
    watch = WeightWatch([made])
    for position in (0, WINDOW, WHOLE):
        made.tensors[position].data = torch.zeros(1)
        clock[0] += 1.5 * weights.PAUSE_SECONDS
        assert noticed(watch)
        watch = WeightWatch([made])


def test_a_busy_server_looks_at_all_weights_from_time_to_time(clock):
    step = weights.PAUSE_SECONDS / 2
    requests = int(weights.FULL_CHECK_SECONDS / step)
    made = Many(WINDOW * (requests + 1))
    watch = WeightWatch([made])
    assert not noticed(watch)
    made.tensors[0].data = torch.zeros(1)  # just looked at, and far from its turn
    for request in range(requests - 1):
        clock[0] += step
        assert not noticed(watch), request
    clock[0] += 1.5 * step
    assert noticed(watch)


def test_a_check_of_everything_is_not_due_again_at_the_next_request(clock):
    made = Many(2 * WHOLE)
    watch = WeightWatch([made])
    clock[0] += 1.5 * weights.FULL_CHECK_SECONDS
    assert not noticed(watch)
    made.tensors[-1].data = torch.zeros(1)  # far from its turn
    clock[0] += weights.PAUSE_SECONDS / 2
    assert not noticed(watch)


def test_a_busy_server_notices_an_attribute_within_as_many_requests_as_parts(clock):
    made = many()
    watch = WeightWatch([made])
    for module in (made[0], made[WHOLE // 2], made[-1]):
        module.in_features += 1
        assert any(noticed(watch) for _ in range(len(watch._firm + watch._noted) // PLACES + 1))
        watch = WeightWatch([made])
    assert not any(noticed(watch) for _ in range(len(watch._firm + watch._noted) // PLACES + 1))


def test_a_small_tower_is_looked_at_whole_every_time(clock):
    made = Many(WHOLE)
    for position in (0, WHOLE // 2, WHOLE - 1):
        watch = WeightWatch([made])
        made.tensors[position].data = torch.zeros(1)
        assert noticed(watch)


def many() -> nn.Sequential:
    made = nn.Sequential(*(nn.Linear(2, 2) for _ in range(WHOLE)))
    made[-1].register_buffer("shift", torch.zeros(2))
    return made


def replace_last_parameter(made: nn.Sequential) -> None:
    made[-1].weight = nn.Parameter(made[-1].weight.detach().clone())


def replace_last_module(made: nn.Sequential) -> None:
    made[-1] = nn.Linear(2, 2)


def replace_last_buffer(made: nn.Sequential) -> None:
    made[-1].shift = torch.zeros(2)


@pytest.mark.parametrize(
    "replace", [replace_last_parameter, replace_last_module, replace_last_buffer]
)
@pytest.mark.parametrize("turn", range(9))
def test_one_replacement_among_many_is_noticed_at_once(replace, turn):
    made = many()
    watch = WeightWatch([made])
    for _ in range(turn):
        assert not noticed(watch)
    replace(made)
    assert noticed(watch)


def test_what_other_modules_register_is_looked_at_once_and_moves_nothing(monkeypatch):
    made = many()
    watch = WeightWatch([made])
    nn.Linear(2, 2)
    full = []
    monkeypatch.setattr(watch, "moved", lambda: full.append(True) or WeightWatch.moved(watch))
    for _ in range(5):
        assert not noticed(watch)
    assert len(full) == 1


def test_a_hook_among_many_modules_is_noticed_at_once():
    made = many()
    watch = WeightWatch([made])
    made[-1].register_forward_hook(lambda *_: None)
    assert noticed(watch)


class Derived(nn.Linear):
    """Has no `forward` of its own."""


@pytest.mark.parametrize("patched", [nn.Linear, Derived])
def test_a_class_of_many_modules_that_is_patched_is_noticed_in_turn(patched, monkeypatch):
    made = many().append(Derived(2, 2))
    watch = WeightWatch([made])
    kinds = len(set(map(type, made.modules())))
    assert not any(noticed(watch) for _ in range(kinds))
    monkeypatch.setattr(patched, "forward", lambda self, rows: rows)
    assert any(noticed(watch) for _ in range(kinds))
    assert watch.moved()
    assert not WeightWatch([made]).moved(), "it was there at capture"


def test_a_parameter_that_was_none_at_capture_is_noticed():
    made = many()
    made[-1].bias = None
    watch = WeightWatch([made])
    assert not watch.moved()
    made[-1].bias = nn.Parameter(torch.ones(2))
    assert noticed(watch)


@pytest.mark.parametrize(
    "register",
    [
        nn.modules.module.register_module_forward_pre_hook,
        nn.modules.module.register_module_forward_hook,
    ],
)
def test_a_hook_on_every_module_of_the_process_is_noticed(register):
    made = tower()
    watch = WeightWatch([made])
    handle = register(lambda *_: None)
    try:
        assert noticed(watch)
        watch = WeightWatch([made])
        assert not watch.moved()
    finally:
        handle.remove()
    assert noticed(watch)


def test_what_goes_is_noticed_too():
    made = tower()
    handle = made.embed.register_forward_hook(lambda module, args, output: output * 2)
    patch_forward(made)
    assert not WeightWatch([made]).moved(), "it was there at capture"
    watch = WeightWatch([made])
    del made.mergers[0].forward
    assert noticed(watch)
    watch = WeightWatch([made])
    handle.remove()
    assert noticed(watch)


def test_hooks_of_other_modules_and_tensors_move_nothing():
    made = many()
    watch = WeightWatch([made])
    nn.Linear(2, 2).register_forward_hook(lambda *_: None)
    torch.zeros(1, requires_grad=True).register_hook(lambda grad: grad)
    assert not noticed(watch)
    assert not watch.moved()


def test_other_storage_of_one_among_many_is_noticed_in_turn():
    made = many()
    watch = WeightWatch([made])
    made[-1].weight.data = made[-1].weight.data.clone()
    assert any(noticed(watch) for _ in range(2 * WHOLE // WINDOW))


def test_a_module_that_is_replaced_where_its_owner_keeps_it() -> None:
    owner = nn.Module()
    owner.tower = nn.Linear(2, 2)
    watch = WeightWatch([owner.tower], [(owner, "tower", owner.tower)])
    assert not watch.moved()
    owner.other = nn.Linear(2, 2)
    assert not noticed(watch)
    owner.tower = nn.Linear(2, 2)
    assert noticed(watch)
    gone = nn.Linear(2, 2)
    assert WeightWatch([gone], [(owner, "tower", gone)]).moved(), "it was not there from the start"


@pytest.mark.parametrize("name", ["forward", "__call__", "_call_impl"])
def test_a_class_that_is_patched_after_capture_is_noticed(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    made = tower()
    watch = WeightWatch([made])
    kind = type(made.blocks[0])
    called = getattr(kind, name)
    monkeypatch.setattr(kind, name, lambda self, *args: called(self, *args) * 2, raising=False)
    assert noticed(watch)


class ReadsMode(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(rows, 0.5, training=self.training)


class ReadsModeWithin(nn.Module):
    @torch.no_grad()
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.stack([row * 2 if self.training else row for row in rows])


class ReadsModeInAMethod(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.doubled(rows)

    def doubled(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * 2 if self.training else rows


class ReadsModeAbove(ReadsMode):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows)


@pytest.mark.parametrize(
    "module",
    [
        nn.Dropout(0.5),
        nn.BatchNorm1d(4),
        nn.RReLU(),
        ReadsMode(),
        ReadsModeWithin(),
        ReadsModeInAMethod(),
        ReadsModeAbove(),
    ],
    ids=lambda module: type(module).__name__,
)
def test_the_mode_of_a_module_that_computes_by_it_is_noticed(module: nn.Module) -> None:
    watch = WeightWatch([nn.Sequential(module.train())])
    assert not watch.moved()
    module.eval()
    assert noticed(watch)


def test_a_forward_that_is_no_function_is_watched_too() -> None:
    class Doubled(nn.Module):
        forward = partial(torch.mul, other=2)

    made = Doubled()
    watch = WeightWatch([made])
    made.eval()
    assert not noticed(watch)
    made.forward = partial(torch.mul, other=3)
    assert noticed(watch)


def test_the_mode_of_a_module_that_only_sets_it_moves_nothing() -> None:
    class Sets(nn.Linear):
        def train(self, mode: bool = True) -> "Sets":
            super().train(mode)
            self.weight.requires_grad_(self.training)
            return self

    made = Sets(2, 2)
    watch = WeightWatch([made])
    made.eval()
    assert not noticed(watch)
