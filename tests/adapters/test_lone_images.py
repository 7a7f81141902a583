"""Graphs for one large image, on a platform whose attention is faster where it is alone."""

from dataclasses import replace

import pytest
import torch

from graphhal import EncoderGraphs, Settings, open_platform
from graphhal.adapters.qwen3_omni_vision import Qwen3OmniVisionFactory

CPU = torch.device("cpu")
FROM = 128


@pytest.fixture(scope="module")
def graphs():
    platform = open_platform("cpu")
    info = replace(platform.info, lone_sequence_from=FROM)
    platform = replace(platform, info=info)
    adapter = Qwen3OmniVisionFactory().build("tiny", CPU, torch.float32)
    settings = Settings(token_budgets="16,32,48", max_items=3)
    served = EncoderGraphs(adapter, platform, settings)
    assert served.capture().dropped == []
    yield served
    served.clear()


def replayed(graphs: EncoderGraphs, grids: list[list[int]]) -> str:
    """The graph that served images of these grids, compared with eager."""
    rows = sum(h * w for _, h, w in grids)
    pixels = torch.randn(rows, graphs.adapter.patch_width)
    request = {"pixel_values": pixels, "image_grid_thw": grids}
    before = graphs.stats()["replays"]
    ours = torch.cat(graphs.run(request))
    torch.testing.assert_close(ours, torch.cat(graphs.run_eager(request)))
    now = graphs.stats()["replays"]
    (key,) = (key for key in now if now[key] != before.get(key, 0))
    return key.split("/")[1]


@pytest.mark.parametrize(
    ("grids", "graph"),
    [
        ([[1, 8, 16]], "image[32,items=1]"),
        ([[1, 10, 12]], "image[32,items=1]"),
        ([[1, 12, 14]], "image[48,items=1]"),
        ([[1, 8, 8], [1, 8, 8]], "image[32]"),
        ([[1, 2, 2], [1, 12, 14]], "image[48]"),
        ([[1, 8, 8]], "image[16]"),
    ],
)
def test_one_large_image_has_a_graph_of_its_own(graphs, grids, graph):
    assert replayed(graphs, grids) == graph


def test_without_its_own_graph_it_takes_the_others(graphs):
    own = [capacity for capacity in graphs.ladder() if capacity.key.axes]
    assert [(c.key.size, c.items, c.sequences["cu_seqlens"].slots) for c in own] == [
        (32, 1, 2),
        (48, 1, 2),
    ]
    several = EncoderGraphs(graphs.adapter, graphs.platform, graphs.settings)
    several.capture(keys=[c.key for c in graphs.ladder() if not c.key.axes])
    assert replayed(several, [[1, 8, 16]]) == "image[32]"
    several.clear()


def test_graphs_of_one_item_are_not_captured_twice(graphs):
    settings = graphs.settings.model_copy(update={"max_items": 1})
    ladder = graphs.adapter.capacities(settings)
    assert [c.key.size for c in ladder if c.key.path == "image"] == [16, 32, 48]


def test_the_default_ladder_has_half_as_many_of_them(graphs):
    settings = Settings(max_tokens=1024)
    ladder = [c for c in graphs.adapter.capacities(settings) if c.key.path == "image"]
    sizes = {lone: [c.key.size for c in ladder if c.lone is lone] for lone in (True, False)}
    assert sizes[True][0] == FROM // graphs.adapter.merge_area
    assert sizes[True][-3:] == [896, 960, 1024]
    assert sizes[False][-3:] == [960, 992, 1024]
    assert set(sizes[True]) < set(sizes[False])


@pytest.mark.parametrize("items", [1, 3])
def test_a_film_of_one_large_frame_is_exact_in_no_graph_of_several_slots(graphs, items):
    """Eager attends to it by the kernel of lone sequences."""
    settings = graphs.settings.model_copy(update={"max_items": items})
    rows = torch.zeros(FROM, graphs.adapter.patch_width)
    for height, exact in ((16, False), (8, True)):
        film = {"pixel_values_videos": rows, "video_grid_thw": [[FROM // 8 // height, height, 8]]}
        specs = graphs.adapter.item_specs(film)
        video = [c for c in graphs.adapter.capacities(settings) if c.key.path == "video"]
        (fits,) = (c for c in video if c.rows == FROM)
        assert fits.misfit(specs) is None
        assert fits.is_exact_for(specs) is exact
