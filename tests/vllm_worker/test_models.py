"""vLLM's own classes with the protocol, small, that have no adapter of graphhal's own."""

import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from graphhal.vllm_worker import compatibility, executor, host_ends
from graphhal.vllm_worker.grid_requests import GridRequests, TileRequests
from graphhal.vllm_worker.host_ends import GRIDS
from tests.vllm_worker import vllm_on_cpu
from tests.vllm_worker.small_models import Made, around, kimi_vl, lfm2_vl, qwen2_vl

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        not compatibility.installed_version().startswith("0.31."),
        reason="what these models' classes want beside their towers was read in vLLM 0.31",
    ),
]


def idefics3(engine: Any) -> Made:
    """Pictures of several tiles, whose masks tell the positions of their patches."""
    from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
    from vllm.model_executor.models import idefics3 as idefics

    vision = Idefics3VisionConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        image_size=32, patch_size=4,
    )  # fmt: skip
    config = types.SimpleNamespace(
        vision_config=vision, text_config=types.SimpleNamespace(hidden_size=48), scale_factor=2
    )
    inner = idefics.Idefics3Model.__new__(idefics.Idefics3Model)
    torch.nn.Module.__init__(inner)
    inner.config, inner.image_seq_len = config, 16
    inner.vision_model = idefics.Idefics3VisionTransformer(vision)
    inner.connector = idefics.Idefics3Connector(config)
    model = around(
        engine,
        idefics.Idefics3ForConditionalGeneration,
        config=config,
        model_config=engine.model_config,
        model=inner,
    )

    def pictures(*tiles: int) -> dict[str, Any]:
        masks = torch.ones(sum(tiles), 32, 32, dtype=torch.bool)
        masks[-1, 20:], masks[0, :, 16:] = False, False
        return {
            "pixel_values": torch.randn(sum(tiles), 3, 32, 32),
            "pixel_attention_mask": masks,
            "num_patches": torch.tensor(tiles),
        }

    return model, [pictures(1), pictures(2, 1), pictures(1, 1, 1)]


def gemma3(engine: Any) -> Made:
    """Pictures of several crops; a graph holds as many as it holds items."""
    from transformers import SiglipVisionConfig
    from vllm.model_executor.models import gemma3_mm

    vision = SiglipVisionConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        image_size=32, patch_size=4,
    )  # fmt: skip
    config = types.SimpleNamespace(
        vision_config=vision,
        text_config=types.SimpleNamespace(hidden_size=48),
        mm_tokens_per_image=16,
    )
    model = around(
        engine,
        gemma3_mm.Gemma3ForConditionalGeneration,
        config=config,
        model_config=engine.model_config,
        vision_tower=gemma3_mm.SiglipVisionModel(vision),
        multi_modal_projector=gemma3_mm.Gemma3MultiModalProjector(config),
        vit_positions_per_patch=64,
    )

    def pictures(*crops: int) -> dict[str, Any]:
        return {
            "pixel_values": torch.randn(sum(crops), 3, 32, 32),
            "num_patches": torch.tensor(crops),
        }

    return model, [pictures(1), pictures(2, 1), pictures(1, 1, 1)]


def served(engine: Any, model: Any, most: int = 64) -> Any:

    engine.compilation_config.encoder_cudagraph_token_budgets = []
    engine.scheduler_config.max_num_batched_tokens = 512
    engine.model_config.max_model_len = 512
    engine.additional_config["graphhal"] = {"max_tokens": most}
    made = executor.build(engine, torch.device("cpu"), torch.float32, model)
    made.capture(None)
    return made


@pytest.fixture(params=["on the device", "on the host"])
def boundaries(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the platform's attention takes them from."""
    if request.param == "on the host":
        platform_takes_ends_from_the_host(monkeypatch)
    where: str = request.param
    return where


def platform_takes_ends_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = executor.open_platform

    def open_platform(*args: Any) -> Any:
        platform = plain(*args)
        words = platform.info.capabilities | {"host_ends"}
        return replace(platform, info=replace(platform.info, capabilities=words))

    monkeypatch.setattr(executor, "open_platform", open_platform)


@pytest.mark.usefixtures("boundaries")
@pytest.mark.parametrize("make", [qwen2_vl, kimi_vl, lfm2_vl])
def test_replays_equal_the_models_own_code(
    engine: Any, make: Callable[[Any], Made], boundaries: str
) -> None:
    model, groups = make(engine)
    manager = served(engine, model)
    assert manager.stats()["dropped"] == []
    (graphs,) = manager._graphs()
    kept = [bool(each.sequences) for each in graphs.ladder()]
    assert set(kept) == {boundaries == "on the host"}
    for group in groups:
        expected = model.embed_multimodal(**group)
        ours = manager.execute(dict(group))
        assert ours is not None, manager.stats()["misses"]
        for one, other in zip(ours, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert manager.stats()["graph_misses"] == 0
    copied = [kind for kind, come in graphs.adapter._requests._come_selected.items() if not come]
    assert not copied, "a selection of all items says no more than the request"


def test_pictures_that_graphs_are_checked_with_are_no_strips(engine: Any) -> None:
    """Kimi's table of positions ends at 512 patches, and 383 tokens are a strip of 766: its
    self-check would fail, and cost other graphs as well."""
    model, _ = kimi_vl(engine)
    engine.additional_config["graphhal"]["token_budgets"] = [1, 3, 47, 384, 397, 1280]
    engine.compilation_config.encoder_cudagraph_token_budgets = []
    for items in (1, 2, 5, 8):
        engine.compilation_config.encoder_cudagraph_max_vision_items_per_batch = items
        made = executor.build(engine, torch.device("cpu"), torch.float32, model)
        (graphs,) = made._graphs()
        for capacity in graphs.ladder():
            cases = [*graphs.adapter.worst_cases(capacity)]
            assert max(map(len, cases)) <= capacity.items
            full = max(sum(item.rows for item in case) for case in cases)
            assert capacity.rows * 0.9 <= full <= capacity.rows
            assert full == capacity.rows or items < 3
            for case in cases:
                sides = graphs.adapter.example(case, 0)["image_grid_hws"].tolist()
                assert all(w <= 4 * h for h, w in sides), sides


class OneSequence:
    """A film's frames attend to each other: no boundaries that follow from its sizes alone."""

    def prepare_encoder_cudagraph_replay_buffers(self, mm_kwargs: Any, *rest: Any) -> Any:
        prepared = super().prepare_encoder_cudagraph_replay_buffers(mm_kwargs, *rest)
        if "video_grid_thw" in mm_kwargs:
            ends = prepared.values["cu_seqlens"]
            prepared.values["cu_seqlens"] = torch.stack((ends[0], ends[-1]))
        return prepared


def test_boundaries_that_sizes_do_not_tell_are_never_made_up(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform_takes_ends_from_the_host(monkeypatch)
    model, groups = qwen2_vl(engine)
    model.__class__ = type("Derived", (OneSequence, type(model)), {})
    manager = served(engine, model)
    for group in groups:
        assert manager.execute(dict(group)) is None
    (reason,) = manager.stats()["misses"]["video"]
    assert "its boundaries are (48,), its inputs' sizes make (24, 48)" in reason


def test_items_whose_rows_their_sizes_do_not_tell_run_eagerly(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform_takes_ends_from_the_host(monkeypatch)
    model, (group, *_) = kimi_vl(engine)
    manager = served(engine, model, 16)
    assert manager.execute(dict(group)) is not None
    specs = model.get_encoder_cudagraph_item_specs(group)
    model.get_encoder_cudagraph_item_specs = lambda _: [replace(s, input_size=65) for s in specs]
    assert manager.execute(dict(group)) is None
    model.get_encoder_cudagraph_item_specs = lambda _: specs
    for wrong in ([(64, 0)], [(32, 32), (64,)]):  # a sequence without rows, sizes of no item
        monkeypatch.setattr(host_ends, "lengths_of", lambda _, wrong=wrong: wrong)
        assert manager.execute(dict(group)) is None
    assert manager.stats()["misses"] == {"image": {"inputs that the adapter does not know": 3}}


def test_windows_are_not_made_up(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    platform_takes_ends_from_the_host(monkeypatch)
    engine.additional_config["graphhal"]["vllm_adapter"] = "protocol"
    model = vllm_on_cpu.qwen2_5_vl(engine)
    made = executor.build(engine, torch.device("cpu"), torch.float32, model)
    assert "cu_seqlens, cu_window_seqlens are of another kind" in made.refusal


@pytest.mark.parametrize(
    ("kwargs", "problem"),
    [
        ({"pixel_values": torch.zeros(4, 8)}, "none of image_grid_thw"),
        (
            {"spatial_shapes": torch.ones(3, 2), "num_patches": torch.tensor([1, 1])},
            "2 tiles are told of, 3 came",
        ),
    ],
)
def test_sizes_that_do_not_tell_every_sequence(kwargs: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=f"^{problem}"):
        host_ends.lengths_of(kwargs)


def test_sizes_come_as_lists_too_and_none_is_no_size() -> None:
    """vLLM's own selections of items make lists of grids."""
    tiles = {"spatial_shapes": None, "num_patches": None}
    grids = {"image_grid_thw": None, "video_grid_thw": [[2, 4, 6], [1, 2, 2]]}
    assert host_ends.lengths_of(tiles | grids) == [(24, 24), (4,)]


@pytest.mark.parametrize(
    ("requests", "films", "problem"),
    [
        (None, False, "its inputs are of no known kind"),
        (TileRequests(2, 8, torch.float32), True, "its inputs are of no known kind"),
        (GridRequests(GRIDS[2], 2, 2, (8,), torch.float32), True, "its inputs are of no known"),
        (GridRequests(GRIDS[0], 3, 2, (8,), torch.float32), True, "its boundaries are None, "),
    ],
)
def test_boundaries_that_nobody_can_ask_for(requests: Any, films: bool, problem: str) -> None:
    found = host_ends.problem(requests, films, torch.device("cpu"), lambda _: {})
    assert str(found).startswith(problem)


@pytest.mark.parametrize("make", [idefics3, gemma3])
def test_tiles_that_are_missing_are_for_eager_to_refuse(
    engine: Any, make: Callable[[Any], Made]
) -> None:
    """A graph would take zeros for them. What came before must not vouch for such a group."""
    model, groups = make(engine)
    manager = served(engine, model)
    for group in groups:
        manager.execute(dict(group))
    for group in groups[1:]:
        less = dict(group)
        less["pixel_values"] = less["pixel_values"][:-1]
        assert manager.execute(dict(less)) is None
        with pytest.raises((RuntimeError, ValueError)):
            model.embed_multimodal(**less)


def test_gemma_4_films_are_never_answered_wrongly(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.31 gathers a film's tokens as if a graph's slots were of the film's own size."""
    import transformers.masking_utils
    from transformers import AutoModel
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig, Gemma4VisionConfig
    from vllm.model_executor.models import gemma4_mm

    # As while a device records: transformers reads a mask on the host otherwise.
    monkeypatch.setattr(transformers.masking_utils, "is_tracing", lambda *_: True)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda *_: (10**9, 10**9))
    vision = Gemma4VisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=8, patch_size=4, pooling_kernel_size=3,
        position_embedding_size=64,
    )  # fmt: skip
    vision._attn_implementation = "sdpa"
    text = Gemma4TextConfig(hidden_size=48)
    model = around(
        engine,
        gemma4_mm.Gemma4ForConditionalGeneration,
        vision_tower=AutoModel.from_config(vision),
        embed_vision=gemma4_mm.Gemma4MultimodalEmbedder(vision, text),
        config=types.SimpleNamespace(vision_config=vision, text_config=text),
        model_dtype=torch.float32,
        _enable_mm_lora=False,
    )
    # Eight tokens a frame, where Gemma 4 has 70: attention takes the square of it.
    model.get_encoder_cudagraph_budget_range = lambda _: (8, 16)
    engine.compilation_config.encoder_cudagraph_max_vision_items_per_batch = 2
    engine.compilation_config.encoder_cudagraph_max_frames_per_batch = 2
    manager = served(engine, model, most=16)
    for _ in range(2):
        for frames in (1, 2):
            places = torch.cartesian_prod(torch.arange(6), torch.arange(12)).flip(-1)
            group = {
                "pixel_values_videos": torch.rand(frames, 72, 48),
                "pixel_position_ids_videos": places.expand(frames, -1, -1).contiguous(),
                "video_frame_counts": torch.tensor([frames]),
            }
            ours = manager.execute(dict(group))
            if ours is not None:
                torch.testing.assert_close(ours[0], model.embed_multimodal(**group)[0])
    stats = manager.stats()
    assert stats["graph_count"] > 0
    assert stats["misses"] == {"video": {"the adapter does not replay such a group": 2}}
