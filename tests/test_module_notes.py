"""What modules note during a capture is put back; what they held before is known."""

import pytest
import torch
from torch import nn

from graphhal.module_notes import ModuleNotes


def test_tensors_are_put_back_and_all_else_stays():
    made = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    made.noted, made.unset, made.calls = torch.zeros(1), None, 1
    before = made.noted, made[0].weight, made[1].running_mean
    notes = ModuleNotes([made, made[0]])
    notes.take()
    made.noted, made.unset, made.new, made.calls = torch.ones(1), torch.ones(1), torch.ones(1), 2
    made[0].weight = nn.Parameter(torch.ones(2, 2))
    made[1].running_mean = torch.ones(2)
    notes.put_back()
    now = made.noted, made[0].weight, made[1].running_mean
    assert all(ours is noted for ours, noted in zip(now, before, strict=True))
    assert made.unset is None
    assert not hasattr(made, "new")
    assert made.calls == 2


def test_nothing_noted_changes_nothing():
    made = nn.Linear(2, 2)
    notes = ModuleNotes([made])
    made.noted = torch.ones(1)
    notes.put_back()
    assert made.noted is not None
    assert notes.attributes() == ()


def test_attributes_are_neither_parameters_nor_buffers_and_are_told_once():
    made = nn.BatchNorm1d(2)
    made.noted = torch.ones(1)
    notes = ModuleNotes([made])
    notes.take()
    (attribute,) = notes.attributes()
    assert attribute is made.noted
    assert notes.attributes() == (), "the notes would keep what is replaced later"


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_keeps_its_own_counsel():
    notes = ModuleNotes([torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2))])
    notes.take()
    notes.put_back()
    assert notes.attributes() == ()


def test_what_lists_and_dicts_hold_is_noted_and_put_back():
    made = nn.Linear(2, 2)
    made.by_name, made.pair, made.words = {"noted": torch.zeros(1)}, (4, torch.zeros(1)), ["a"]
    made.nested = [{"last": torch.zeros(1)}]
    made.nested.append(made.nested)
    noted, pair, last = made.by_name["noted"], made.pair, made.nested[0]["last"]
    notes = ModuleNotes([made])
    notes.take()
    made.by_name["noted"], made.by_name["new"], made.pair = torch.ones(1), torch.ones(1), [pair[1]]
    made.nested[0]["last"], made.words = torch.ones(1), ["b"]
    notes.put_back()
    assert made.by_name == {"noted": noted}
    assert made.pair is pair
    assert made.nested[0]["last"] is last
    assert made.words == ["b"]
    assert set(map(id, notes.attributes())) == set(map(id, (noted, pair[1], last)))


def test_entries_of_lists_are_put_back_where_a_tensor_is_among_them():
    made = nn.Linear(2, 2)
    made.by_layer, made.grown = [torch.zeros(1), 4, None], [[torch.zeros(1)]]
    made.calls = [1, torch.zeros(1)]
    first, nested = made.by_layer[0], made.grown[0][0]
    notes = ModuleNotes([made])
    notes.take()
    made.by_layer[2], made.calls[0] = torch.ones(1), 2
    made.grown[0].append(torch.ones(1))
    notes.put_back()
    assert made.by_layer == [first, 4, None]
    assert made.grown == [[nested]]
    assert made.calls[0] == 2, "its tensor is the same"
    notes.attributes()
    made.by_layer[0] = later = torch.ones(1)
    notes.put_back()
    assert made.by_layer[0] is later
