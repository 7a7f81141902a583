"""Hosts that change PyTorch's ways around the engine, and strangers' adapters and platforms."""

import os
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from PIL import Image
from torch import nn

from graphhal import EncoderGraphs, Settings, testing
from graphhal.adapter import BufferSpec, EncoderAdapter
from graphhal.adapters.covo_audio import CovoAudioFactory
from graphhal.adapters.siglip import SiglipFactory
from graphhal.bench.report import write_report
from graphhal.bench.samples import image_inputs
from graphhal.cpu import plugin as cpu
from graphhal.discovery import bind
from graphhal.errors import (
    AdapterError,
    BoundariesError,
    CaptureError,
    InputError,
    ResourceExhaustedError,
    SettingsError,
)
from graphhal.graph_set import GraphSet
from graphhal.items import ItemSpec
from graphhal.plan import Capacity, GraphKey, MissReason, Planner
from graphhal.self_check import Difference
from graphhal.settings import Policy, SelfCheck
from graphhal.testing import toy_encoder
from tests.toy_encoder import WINDOWED, ToyEncoder, images, request


@pytest.fixture
def platform():
    return bind(cpu, cpu.graphhal_probe())


def captured(platform, adapter=None, **options):
    graphs = EncoderGraphs(adapter or ToyEncoder(), platform, Settings(**options))
    assert graphs.capture().dropped == []
    return graphs


def test_a_default_device_of_the_host_takes_no_tensor_of_the_engine(platform):
    asked = [images(3), images(3, 4)]
    graphs = captured(platform)
    expected = [torch.cat(graphs.run_eager(each)) for each in asked]
    with torch.device("meta"):
        outputs = [torch.cat(graphs.run(each)) for each in asked]
    for output, want in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, want)
    assert graphs.stats()["hits"] == {"image": 3}


def test_the_conformance_suite_runs_under_a_default_device_of_the_host():
    toy_encoder._weights.cache_clear()
    with torch.device("meta"):
        asked = ["replay_sees_new_pixels", "attention_takes_strided_rows"]
        results = list(testing.run(testing.open_subject("cpu"), asked))
    assert [(result.outcome, result.detail) for result in results] == [("passed", "")] * 2


class RowByRow(EncoderAdapter):
    """A stranger's adapter: nothing is packed, so it gives every size the same signature."""

    name = "rows"
    modalities = ("image",)
    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 6))

    def item_specs(self, mm_kwargs):
        sizes = mm_kwargs["sizes"]
        return tuple(
            ItemSpec(n, "image", rows, rows, {}, signature=None, row_offset=at)
            for n, (rows, at) in enumerate(zip(sizes, accumulate(sizes, initial=0), strict=False))
        )

    def capacities(self, settings):
        return tuple(Capacity(GraphKey("rows", "image", n), n, n, 4, {}) for n in (4, 8))

    def buffers(self, capacity):
        return {"x": BufferSpec((capacity.rows, 4), torch.float32)}

    def metadata(self, items):
        return {}

    def stage(self, mm_kwargs, items, inputs):
        start, end = items[0].row_offset, items[-1].row_offset + items[-1].rows
        inputs["x"][: end - start].copy_(mm_kwargs["x"][start:end])
        inputs["x"][end - start :].zero_()

    def forward(self, inputs, max_seqlen):
        return self.net(inputs["x"])

    def example(self, items, seed):
        sizes = [item.rows for item in items]
        generator = torch.Generator().manual_seed(seed)
        return {"sizes": sizes, "x": torch.randn(sum(sizes), 4, generator=generator)}

    def worst_cases(self, capacity):
        return [self.item_specs({"sizes": [rows]}) for rows in (capacity.rows, capacity.rows - 1)]


@pytest.mark.parametrize("self_check", [SelfCheck.FULL, SelfCheck.OFF])
def test_items_of_one_signature_and_other_sizes_are_other_groups(platform, self_check):
    adapter = RowByRow()
    graphs = captured(platform, adapter, self_check=self_check)
    for sizes in ([3], [7], [20], [21], [2, 4], [4, 2]):
        asked = {"sizes": sizes, "x": torch.randn(sum(sizes), 4)}
        outputs = graphs.run(asked)
        assert [len(output) for output in outputs] == sizes
        torch.testing.assert_close(torch.cat(outputs), adapter.net(asked["x"]).detach())


def test_items_of_one_signature_and_other_sequences_are_planned_anew(platform):
    class Unsigned(ToyEncoder):
        def item_specs(self, mm_kwargs):
            return tuple(
                replace(item, signature=0, frames=1, splittable=False)
                for item in super().item_specs(mm_kwargs)
            )

    graphs = captured(platform, Unsigned(paths=("video",)), self_check=SelfCheck.OFF)
    for grids in ([(2, 6, "video")], [(6, 2, "video")], [(2, 6, "video")]):
        asked = request(grids, seed=1)
        torch.testing.assert_close(graphs.run(asked), graphs.run_eager(asked))
    assert graphs.stats()["hits"] == {"video": 3}


def test_items_of_one_signature_and_other_frames_or_modality_are_other_groups(platform):
    class Unsigned(ToyEncoder):
        """Two frames of one window have the sequences of one frame of two, other positions."""

        def item_specs(self, mm_kwargs):
            return tuple(replace(i, signature=0) for i in super().item_specs(mm_kwargs))

    adapter = Unsigned(budgets=(4,), paths=("image", "video"), sets=(WINDOWED,))
    graphs = captured(platform, adapter, self_check=SelfCheck.OFF)
    for grids in ([(1, 8, "video")], [(2, 4, "video")], [(1, 8, "image")]):
        asked = request(grids, seed=1)
        torch.testing.assert_close(graphs.run(asked), graphs.run_eager(asked))
    assert graphs.stats()["replays"] == {"toy/video[4]": 2, "toy/image[4]": 1}


@pytest.mark.parametrize(
    "error",
    [
        CaptureError("c"),
        ResourceExhaustedError("no streams left"),
        BoundariesError("b"),
        AdapterError("a"),
        InputError("i"),
    ],
)
@pytest.mark.parametrize("hook", ["step", "update_boundaries", "replay"])
def test_an_error_of_graphhals_own_from_a_platform_costs_the_graph_and_no_request(
    platform, hook, error
):
    def failing(*arguments):
        if graphs.keys() and (hook != "step" or arguments[0] == "replay"):
            raise error
        return getattr(platform, hook)(*arguments)

    broken = replace(platform, **{hook: failing})
    graphs = EncoderGraphs(ToyEncoder(), broken, Settings(self_check=SelfCheck.OFF))
    graphs.capture()
    left = len(graphs.keys())
    torch.testing.assert_close(graphs.run(images(3)), graphs.run_eager(images(3)))
    assert graphs.stats()["misses"] == {"image": {MissReason.REPLAY_FAILED: 1}}
    assert len(graphs.keys()) == left - 1


@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("part", ["nothing", "arenas", "all but a byte", "all"])
def test_a_memory_profile_is_no_less_than_capture_takes_and_within_the_limit(
    platform, part, offset
):
    full = EncoderGraphs(ToyEncoder(), platform, Settings()).profile_memory()
    graphs_alone = sum(full.per_graph.values())
    limits = {
        "nothing": 1,
        "arenas": full.settled_bytes - graphs_alone,
        "all but a byte": full.settled_bytes - 1,
        "all": full.settled_bytes,
    }
    limit = limits[part] + offset
    graphs = EncoderGraphs(ToyEncoder(), platform, Settings(memory_limit=limit))
    profile = graphs.profile_memory()
    assert graphs.capture().num_bytes <= profile.settled_bytes <= limit


def test_a_host_that_cannot_allocate_the_largest_graphs_inputs_keeps_smaller_graphs(
    platform, monkeypatch
):
    allocate = GraphSet._allocate

    def failing(self, planned, output):
        if planned[0][0].tokens > 8:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return allocate(self, planned, output)

    monkeypatch.setattr(GraphSet, "_allocate", failing)
    graphs = EncoderGraphs(ToyEncoder(), platform, Settings())
    report = graphs.capture()
    assert [line.key.size for line in report.captured] == [8, 4]
    assert [line.reason[:13] for line in report.dropped] == ["out of memory"]


def test_a_later_part_of_an_item_is_refused_and_costs_no_graph(platform):
    graphs = captured(platform, ToyEncoder(paths=("image", "video")))
    asked = request([(4, 4, "video")])
    (item,) = graphs.adapter.item_specs(asked)
    with pytest.raises(AdapterError, match="later part of an item"):
        graphs.run_items(asked, (item.chunk(1, 2),))
    assert len(graphs.keys()) == 6


def test_clips_without_tokens_are_served_beside_others(platform):
    adapter = CovoAudioFactory().build("tiny", torch.device("cpu"), torch.float32)
    graphs = EncoderGraphs(adapter, platform, Settings(warmups=1, self_check=SelfCheck.QUICK))
    assert graphs.capture().dropped == []
    for counts in ([0, 5], [5, 0], [0], [0, 0], [0, 3, 0]):
        features = torch.randn(len(counts), adapter.mel, adapter.frames)
        outputs = graphs.run({"audio_features": features, "audio_num_tokens": counts})
        assert [tuple(output.shape) for output in outputs] == [(count, 32) for count in counts]
        every = adapter.downsampler(adapter.encoder(features).last_hidden_state)
        for output, clip, count in zip(outputs, every, counts, strict=True):
            torch.testing.assert_close(output, clip[:count].detach(), rtol=0, atol=1e-5)
    assert graphs.stats()["hits"] == {"audio": 7}


def test_a_film_of_very_many_frames_is_planned_at_once():
    toy = ToyEncoder(paths=("video",))
    planner = Planner(toy.capacities(Settings()), Policy.SINGLE, toy.path, lambda _: None)
    frames = 20_000
    touched = 0

    class Film(ItemSpec):
        def chunk(self, first, frames):
            nonlocal touched
            touched += frames
            return super().chunk(first, frames)

    (item,) = toy.item_specs({"grids": [(frames, 2, "video")], "pixels": range(frames * 2)})
    film = Film(**{name: getattr(item, name) for name in ItemSpec.__slots__})
    steps = planner.plan((film,)).steps
    assert sum(part.frames for step in steps for part in step.items) == frames
    assert touched < 20 * frames


def test_features_without_dimensions_are_refused_by_name(platform):
    for factory, key in ((CovoAudioFactory(), "audio_features"), (SiglipFactory(), "pixel_values")):
        adapter = factory.build("tiny", torch.device("cpu"), torch.float32)
        with pytest.raises(InputError, match=f"{key} must be"):
            adapter.item_specs({key: torch.tensor(1.0)})
    with pytest.raises(InputError, match=r"^audio_features must be tensors, got int"):
        CovoAudioFactory().build("tiny", torch.device("cpu"), torch.float32).item_specs(
            {"audio_features": 5}
        )


@pytest.mark.parametrize("value", ["9" * 400, "9" * 400 + "GiB"])
def test_more_bytes_than_a_number_holds_is_a_settings_error(value):
    with pytest.raises(SettingsError, match=r"^option 'memory_limit': that is more than"):
        Settings(memory_limit=value)


def test_a_file_whose_name_is_no_text_has_a_label_and_a_report(tmp_path):
    path = tmp_path / os.fsdecode(b"bad\xff.png")
    Image.new("RGB", (64, 64)).save(path)
    labels = [line.label for line in image_inputs([path], tmp_path)]
    assert labels == ["bad? 64×64", "4 × bad? 64×64"]
    machine = {"summary": "", "platform": "cpu", "device": "", "preset": "", "versions": {}}
    machine |= {"settings": {"policy": "single"}, "date": "", "threads": 1, "graphhal": ""}
    write_report(tmp_path / "report.html", machine, [], [path], [])
    assert "bad?.png" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_outputs_without_tokens_agree():
    found = Difference.between(torch.empty(0, 3), torch.empty(0, 3))
    assert found.bit_equal
    assert not found.exceeds(1e-5)
