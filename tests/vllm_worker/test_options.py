"""One flag, options from three places, refusals: what is on, off, or an error."""

import ast
import re
import types
from collections.abc import Iterator
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch

from graphhal.errors import AdapterError, SettingsError
from graphhal.settings import Settings
from graphhal.vllm_worker import refusals
from graphhal.vllm_worker.limits import (
    Limits,
    dense_budgets,
    frames_of,
    limits_of,
    merged,
    most_tokens,
    with_free_slots,
)
from graphhal.vllm_worker.switch import wants_encoder_graphs

ROOT = Path(__file__).resolve().parents[2]


def compilation(**options: Any) -> Any:
    known = {
        "cudagraph_mm_encoder": True,
        "encoder_cudagraph_token_budgets": [],
        "encoder_cudagraph_max_vision_items_per_batch": 0,
        "encoder_cudagraph_max_frames_per_batch": None,
        "cudagraph_mode": "FULL",
    }
    return types.SimpleNamespace(**(known | options))


def multimodal(**limits: int) -> Any:
    return types.SimpleNamespace(get_limit_per_prompt=lambda name: limits.get(name, 1))


def config(**options: Any) -> Any:
    return types.SimpleNamespace(
        compilation_config=compilation(**options),
        model_config=types.SimpleNamespace(multimodal_config=multimodal(), enforce_eager=False),
        scheduler_config=types.SimpleNamespace(max_num_batched_tokens=2048),
        lora_config=None,
    )


@pytest.mark.parametrize(
    ("vllm_config", "wanted"),
    [
        (config(), True),
        (config(cudagraph_mm_encoder=False), False),
        (config(cudagraph_mm_encoder="true"), False),
        (types.SimpleNamespace(compilation_config=types.SimpleNamespace()), False),
        (types.SimpleNamespace(), False),
        (None, False),
    ],
)
def test_unknown_means_no(vllm_config: Any, wanted: bool) -> None:
    assert wants_encoder_graphs(vllm_config) is wanted


def test_vllms_options_are_honoured() -> None:
    settings = merged(
        Settings(),
        compilation(
            encoder_cudagraph_token_budgets=[256, 64, 64],
            encoder_cudagraph_max_vision_items_per_batch=3,
            encoder_cudagraph_max_frames_per_batch=12,
        ),
    )
    assert settings.token_budgets == (64, 256)
    assert (settings.max_items, settings.max_frames) == (3, 12)


@pytest.mark.parametrize(
    ("own", "theirs", "names"),
    [
        (
            {"token_budgets": [64]},
            {"encoder_cudagraph_token_budgets": [128]},
            ("encoder_cudagraph_token_budgets is [128]", "token_budgets is [64]"),
        ),
        (
            {"max_items": 2},
            {"encoder_cudagraph_max_vision_items_per_batch": 4},
            ("max_vision_items_per_batch is 4", "max_items is 2"),
        ),
        (
            {"max_frames": 2},
            {"encoder_cudagraph_max_frames_per_batch": 4},
            ("max_frames_per_batch is 4", "max_frames is 2"),
        ),
    ],
)
def test_a_conflict_is_an_error_that_names_both(
    own: dict[str, Any], theirs: dict[str, Any], names: tuple[str, str]
) -> None:
    with pytest.raises(SettingsError) as raised:
        merged(Settings(**own), compilation(**theirs))
    assert all(name in str(raised.value) for name in names)


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ({"encoder_cudagraph_token_budgets": [64, 0]}, r"budgets is \[0, 64\]; .* from 1 on"),
        ({"encoder_cudagraph_token_budgets": [-1]}, r"budgets is \[-1\]; .* from 1 on"),
        ({"encoder_cudagraph_max_vision_items_per_batch": -3}, "batch is -3; .* from 0 on"),
        ({"encoder_cudagraph_max_frames_per_batch": -1}, "batch is -1; .* from 0 on"),
    ],
)
def test_sizes_that_none_can_be_are_an_error(theirs: dict[str, Any], said: str) -> None:
    """They would cost all graphs, by a division by zero far from the option."""
    with pytest.raises(SettingsError, match=rf"^vLLM's compilation_config\..*{said}"):
        merged(Settings(), compilation(**theirs))


def test_the_environment_conflicts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHHAL_MAX_ITEMS", "2")
    with pytest.raises(SettingsError, match="max_items is 2"):
        merged(Settings(), compilation(encoder_cudagraph_max_vision_items_per_batch=4))


def test_equal_options_are_no_conflict() -> None:
    settings = merged(
        Settings(token_budgets=[64, 128]), compilation(encoder_cudagraph_token_budgets=[128, 64])
    )
    assert settings.token_budgets == (64, 128)


@pytest.mark.parametrize(
    ("name", "own", "theirs", "conflict"),
    [
        ("MAX_ITEMS", 4, "2", True),
        ("MAX_ITEMS", "2", "2", False),
        ("TOKEN_BUDGETS", [64, 128], "128,64", False),
        ("TOKEN_BUDGETS", [64], "128", True),
        ("MEMORY_LIMIT", "1GiB", "1024MiB", False),
        ("MEMORY_LIMIT", "1GiB", "10%", True),
        ("SELF_CHECK", "quick", "off", True),
        ("SELF_CHECK", "quick", "quick", False),
    ],
)
def test_both_places_for_an_option_must_agree(
    monkeypatch: pytest.MonkeyPatch, name: str, own: Any, theirs: str, conflict: bool
) -> None:
    from graphhal.vllm_worker.towers import settings_of

    monkeypatch.setenv(f"GRAPHHAL_{name}", theirs)
    monkeypatch.setenv("GRAPHHAL_WARMUPS", "3")
    engine = types.SimpleNamespace(additional_config={"graphhal": {name.lower(): own}})
    if conflict:
        with pytest.raises(SettingsError, match=rf"sets {name.lower()} to .*GRAPHHAL_{name} to"):
            settings_of(engine)
        return
    assert settings_of(engine).warmups == 3
    assert settings_of(engine) == settings_of(types.SimpleNamespace())


class MMEncoderAttention(torch.nn.Module):
    """As vLLM's, in what is asked of it."""

    def __init__(self, backend: str, version: int | None = None) -> None:
        super().__init__()
        self.attn_backend = types.SimpleNamespace(name=backend)
        self._fa_version = version


class AnotherAttention(MMEncoderAttention):
    """A fork's."""


class Attention(torch.nn.Module):
    """The text model's: its backend is a class."""

    attn_backend = dict


@pytest.mark.parametrize(
    ("layers", "own", "items"),
    [
        ([MMEncoderAttention("FLASH_ATTN", 3)], {}, 64),
        ([AnotherAttention("FLASH_ATTN", 4), Attention()], {}, 64),
        ([MMEncoderAttention("FLASH_ATTN", 2)], {}, 8),
        ([MMEncoderAttention("FLASH_ATTN")], {}, 8),
        ([MMEncoderAttention("ROCM_AITER_FA")], {}, 8),
        ([MMEncoderAttention("FLASH_ATTN", 3)], {"max_items": 8}, 8),
        ([MMEncoderAttention("FLASH_ATTN", 3), MMEncoderAttention("TRITON_ATTN")], {}, 8),
        ([MMEncoderAttention("TORCH_SDPA")], {}, 8),
        ([Attention()], {}, 8),
        ([], {}, 8),
    ],
)
def test_graphs_take_as_many_items_as_vllms_where_slots_are_free(
    layers: list[torch.nn.Module], own: dict[str, Any], items: int
) -> None:
    model = torch.nn.Sequential(*layers)
    settings = merged(Settings(**own), compilation())
    assert with_free_slots(settings, model, allow_empty=True).max_items == items
    assert with_free_slots(settings, model, allow_empty=False).max_items == 8
    theirs = merged(Settings(), compilation(encoder_cudagraph_max_vision_items_per_batch=3))
    assert with_free_slots(theirs, model, allow_empty=True).max_items == 3


def test_unknown_option_in_additional_config() -> None:
    from graphhal.vllm_worker.towers import settings_of

    with pytest.raises(SettingsError, match="unknown option 'budgets'"):
        settings_of(types.SimpleNamespace(additional_config={"graphhal": {"budgets": [1]}}))
    with pytest.raises(SettingsError, match="'gemma' is not known"):
        settings_of(types.SimpleNamespace(additional_config={"graphhal": {"vllm_models": "gemma"}}))
    for wrong in (None, [], "policy=packed"):
        with pytest.raises(SettingsError, match=r"additional_config\['graphhal'\] must be"):
            settings_of(types.SimpleNamespace(additional_config={"graphhal": wrong}))
    for key in ("GraphHAL", "graph_hal", "graphal"):
        with pytest.raises(SettingsError, match=f"{key!r}, which nothing reads; graphhal's"):
            settings_of(types.SimpleNamespace(additional_config={key: {"policy": "packed"}}))
    others = {"graphhal": {}, "ascend_scheduler_config": {}, "graph_pool": 1, 7: None}
    assert settings_of(types.SimpleNamespace(additional_config=others)) == Settings()
    assert settings_of(types.SimpleNamespace(additional_config=None)).vllm_models == ()
    assert settings_of(types.SimpleNamespace()).vllm_models == ()


def test_chosen_ladder_stays_in_the_models_range() -> None:
    model = types.SimpleNamespace(get_encoder_cudagraph_budget_range=lambda _: (64, 2048))
    limits = limits_of(Settings(max_tokens=512), config(), model)
    assert (limits.low, limits.high) == (64, 512)
    limits = limits_of(Settings(max_tokens=32), config(), model)
    assert (limits.low, limits.high) == (32, 32)
    small = types.SimpleNamespace(get_encoder_cudagraph_budget_range=lambda _: (1, 1))
    limits = limits_of(Settings(), config(), small)
    assert (limits.low, limits.high) == (1, 1)
    named = limits_of(Settings(token_budgets=[96, 8, 16]), config(), model)
    assert (named.budgets, named.low, named.high) == ((8, 16, 96), 8, 96)
    nothing = limits_of(Settings(token_budgets=[]), config(), model)
    assert (nothing.budgets, nothing.high) == ((), Settings().max_tokens)
    vllm_config = config()
    assert most_tokens(Settings(), vllm_config) == 2048
    assert most_tokens(Settings(max_tokens=32), vllm_config) == 32
    vllm_config.scheduler_config.max_num_batched_tokens = None
    assert most_tokens(Settings(), vllm_config) == Settings().max_tokens
    budgets = dense_budgets(2048)
    assert budgets[-1] == 2048
    assert all(b / a <= 1.126 for a, b in pairwise(budgets) if a >= 128)


def test_items_and_frames_never_exceed_a_graphs_tokens() -> None:
    model = types.SimpleNamespace(get_encoder_cudagraph_budget_range=lambda _: (64, 2048))
    limits = limits_of(Settings(max_items=8, max_frames=64), config(), model)
    assert (limits.items_for(4), limits.frames_for(4)) == (4, 4)
    assert (limits.items_for(512), limits.frames_for(512)) == (8, 64)


@pytest.mark.parametrize("most", [1, 5, 8, 64])
def test_a_graph_takes_as_many_items_as_divide_it(most: int) -> None:
    """208 tokens for 64 items were once a graph of 256."""
    budgets = dense_budgets(4096)
    limits = Limits(None, 16, 4096, most, 0)
    for budget in budgets:
        items = limits.items_for(budget)
        assert min(most, budget) // 2 < items <= min(most, budget)
        room = -(-budget // items) * items
        assert room == budget or (most == 5 and room - budget < 3) or budget == 4096
    assert Limits(None, 16, 4096, 64, 0).items_for(208) == 52
    named = Limits((97, 101), 97, 101, 8, 0)
    assert (named.items_for(97), named.items_for(101)) == (7, 8)


@pytest.mark.parametrize("most", [1, 5, 8, 64])
@pytest.mark.parametrize("frames", [0, 7, 64])
def test_where_only_exact_ones_count_graphs_are_no_larger_at_all(most: int, frames: int) -> None:
    limits = Limits(None, 16, 4096, most, frames, exact=True)
    for budget in (*dense_budgets(4096), 97):
        items = limits.items_for(budget)
        each = limits.frames_for(budget) // items
        assert items <= min(most, budget)
        assert items * each * ceil(ceil(budget / items) / each) == budget


@pytest.mark.parametrize("named", [(0, 64), (-1, 64), (64, 0)])
def test_a_budget_range_that_none_can_be_is_the_models_mistake(named: tuple[int, int]) -> None:
    model = types.SimpleNamespace(get_encoder_cudagraph_budget_range=lambda _: named)
    with pytest.raises(SettingsError, match=f"names the budget range {named[0]} to {named[1]}"):
        limits_of(Settings(), config(), model)


def test_films_make_a_graph_little_larger_either() -> None:
    for most in (4, 8, 64):
        limits = Limits(None, 64, 4096, most, 64)
        for budget in dense_budgets(4096):
            items, frames = limits.items_for(budget), limits.frames_for(budget)
            assert min(64, budget) / 3 < frames <= min(64, budget)
            each = frames // items
            assert items * each * ceil(ceil(budget / items) / each) <= 1.03 * budget
    assert Limits(None, 64, 4096, 8, 64).items_for(208) == 7
    many = Limits(None, 16, 4096, 64, 64)  # one frame an item makes room for others at no cost
    assert (many.items_for(208), many.frames_for(208)) == (52, 64)
    pictures = Limits(None, 16, 4096, 64, 0)  # each is a frame as well
    assert (pictures.items_for(208), pictures.frames_for(208)) == (52, 52)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c, m: setattr(c.compilation_config, "cudagraph_mode", "NONE"), "NONE"),
        (lambda c, m: setattr(c.compilation_config, "cudagraph_mode", None), "mode is unknown"),
        (lambda c, m: delattr(c.compilation_config, "cudagraph_mode"), "mode is unknown"),
        (
            lambda c, m: setattr(
                c.compilation_config, "cudagraph_mode", types.SimpleNamespace(name="NONE")
            ),
            "NONE",
        ),
        (lambda c, m: setattr(c.model_config, "enforce_eager", True), "enforce_eager is on"),
        (lambda c, m: delattr(c.model_config, "enforce_eager"), "enforce_eager is unknown"),
        (lambda c, m: delattr(c, "lora_config"), "enable_tower_connector_lora is unknown"),
        (
            lambda c, m: setattr(c, "lora_config", types.SimpleNamespace()),
            "enable_tower_connector_lora is unknown",
        ),
        (
            lambda c, m: setattr(
                c, "lora_config", types.SimpleNamespace(enable_tower_connector_lora=True)
            ),
            "LoRA",
        ),
        (lambda c, m: setattr(m, "is_multimodal_pruning_enabled", True), "pruning"),
        (lambda c, m: setattr(m, "is_multimodal_pruning_enabled", 0.5), "pruning"),
        (lambda c, m: setattr(c.model_config, "multimodal_config", None), "no multimodal"),
        (
            lambda c, m: setattr(m, "input_norm", types.SimpleNamespace(is_identity=False)),
            "pixels are normalised before",
        ),
    ],
)
def test_engines_that_must_not_have_graphs(change: Any, reason: str) -> None:
    vllm_config, model = config(), types.SimpleNamespace()
    assert refusals.engine_refusal(vllm_config, model, is_first_stage=True) is None
    change(vllm_config, model)
    refusal = refusals.engine_refusal(vllm_config, model, is_first_stage=True)
    assert refusal is not None
    assert reason in refusal


@pytest.mark.parametrize(
    "step",
    [
        "embed_multimodal",
        "_parse_and_validate_multimodal_inputs",
        "_parse_and_validate_image_input",
        "_parse_and_validate_video_input",
        "_parse_and_validate_audio_input",
        "_process_image_input",
        "_process_video_input",
        "_process_audio_input",
    ],
)
def test_a_derived_class_that_encodes_in_its_own_way_has_no_graphs(step: str) -> None:
    graphs = dict.fromkeys(("encoder_cudagraph_forward", step), lambda self: None)
    parent = type("Parent", (), graphs)
    derived = type("Derived", (parent,), {step: lambda self: None})
    assert refusals.engine_refusal(config(), parent(), True) is None
    said = f"Derived.{step} is its own, but its code for graphs that of Parent"
    assert refusals.engine_refusal(config(), derived(), True) == said


def test_lora_of_the_language_model_alone_is_allowed() -> None:
    vllm_config = config()
    vllm_config.lora_config = types.SimpleNamespace(enable_tower_connector_lora=False)
    assert refusals.engine_refusal(vllm_config, types.SimpleNamespace(), True) is None


def test_later_pipeline_ranks_capture_nothing() -> None:
    refusal = refusals.engine_refusal(config(), types.SimpleNamespace(), is_first_stage=False)
    assert refusal == "only the first pipeline rank encodes"


def test_dynamic_fp8_scales_change_on_the_host() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    assert refusals.engine_refusal(config(), model, True) is None
    for on in (True, torch.tensor(1)):
        model[0]._fp8_dynamic_scale = on
        refusal = refusals.engine_refusal(config(), model, True)
        assert refusal is not None
        assert "fp8" in refusal


def test_modalities_that_no_request_can_carry_get_no_graphs() -> None:
    vllm_config = config()
    vllm_config.model_config.multimodal_config = multimodal(video=0)
    assert refusals.enabled_modalities(("image", "video"), vllm_config, Settings()) == ("image",)
    assert frames_of(Settings(), vllm_config) == 0
    assert frames_of(Settings(), config()) == Settings().max_frames


def test_no_frames_in_a_batch_are_no_films() -> None:
    """Only None lets vLLM choose."""
    without = compilation(encoder_cudagraph_max_frames_per_batch=0)
    settings = merged(Settings(), without)
    assert refusals.enabled_modalities(("image", "video"), config(), settings) == ("image",)
    one = Settings(max_frames=1)
    assert refusals.enabled_modalities(("image", "video"), config(), one) == ("image", "video")
    with pytest.raises(SettingsError, match=r"max_frames_per_batch is 0, .* max_frames is 8"):
        merged(Settings(max_frames=8), without)


def platform(boundary_order: str, *capabilities: str) -> Any:
    info = types.SimpleNamespace(
        name="odd", boundary_order=boundary_order, capabilities=frozenset(capabilities)
    )
    return types.SimpleNamespace(info=info)


@pytest.mark.parametrize(
    ("backend", "order", "said"),
    [
        *[(name, "before", None) for name in ("FLASH_ATTN", "TRITON_ATTN", "TORCH_SDPA")],
        ("ROCM_AITER_FA", "before", None),
        ("FLASH_ATTN", "after", "platform odd hands boundaries to the attention kernel itself"),
        ("FLASHINFER", "before", "attention FLASHINFER reads boundaries in another way"),
    ],
)
def test_boundaries_must_reach_the_attention_of_a_tower(
    backend: str, order: str, said: str | None
) -> None:
    """Where they do not, every replay would keep those of the capture."""
    from graphhal.vllm_worker.held_tower import HeldTower

    tower = torch.nn.Linear(1, 1)
    tower.attn_backend = types.SimpleNamespace(name=backend)  # type: ignore[assignment]
    held = HeldTower(tower, ())
    if said is None:
        held.prepare(platform(order))
        return
    with pytest.raises(AdapterError, match=said):
        held.prepare(platform(order))


def test_items_of_an_eager_call_are_of_that_call_alone() -> None:
    """A later forward without a request of its own must not get those of the one before."""
    from graphhal.vllm_worker.held_tower import HeldTower

    held = HeldTower(object(), ())
    held.name, held._eager_items = "some", ()
    assert held._take_eager_items() == ()
    with pytest.raises(AdapterError, match=r"^some: an eager forward needs"):
        held._take_eager_items()


@pytest.mark.parametrize("needs", [platform("after"), platform("before", "host_ends")])
def test_windowed_boundaries_of_the_protocol_stay_on_the_device(needs: Any) -> None:
    from graphhal.vllm_worker.protocol_adapter import ProtocolAdapter

    adapter = ProtocolAdapter.__new__(ProtocolAdapter)
    adapter.name = "Some"
    keys = ("pixel_values", "cu_seqlens", "cu_window_seqlens")
    adapter.config = types.SimpleNamespace(buffer_keys=keys)
    adapter.prepare(platform("before"))
    with pytest.raises(AdapterError, match=r"needs them on the host, and its boundaries cu_seqle"):
        adapter.prepare(needs)
    adapter.config = types.SimpleNamespace(buffer_keys=keys[:1])
    adapter.prepare(needs)


def reasons() -> Iterator[str]:
    """What `refusals` may return for a reason, up to its details."""
    tree = ast.parse(Path(refusals.__file__).read_text())
    functions = ("engine_refusal", "_outgrown", "own_code_fails", "request_refusal")
    for function in tree.body:
        if isinstance(function, ast.FunctionDef) and function.name in functions:
            for returned in (n for n in ast.walk(function) if isinstance(n, ast.Return)):
                texts = [n.value for n in ast.walk(returned) if isinstance(n, ast.Constant)]
                words = [text for text in texts if isinstance(text, str) and " " in text]
                yield from (re.split("[:;,]", text)[0].strip() for text in words[:1])


@pytest.mark.parametrize(
    "reason",
    [
        *reasons(),
        *(
            f"{each} is unknown"
            for each in ("cudagraph_mode", "enforce_eager", "enable_tower_connector_lora")
        ),
        "ranks differ",
        "no encoder takes these inputs",
        "graphhal's own code failed",
    ],
)
def test_the_guide_has_every_reason_in_the_words_of_log_and_counters(reason: str) -> None:
    assert reason in (ROOT / "docs" / "vllm.md").read_text()


@pytest.mark.parametrize("axes", [(1,), ("large",), ((4, 4, 1),), ((4, 4), 1)])
def test_only_grids_are_outgrown(axes: Any) -> None:
    """Axes of other kinds may stand beside sizes of slices."""
    torch = pytest.importorskip("torch")
    sizes = {"tgt_sizes": [torch.tensor([[5, 4], [4, 4]]), torch.zeros(0, 2)]}
    assert refusals.outgrows(sizes, axes) is ((4, 4) in axes)


def test_embeddings_are_refused_and_pixels_are_not() -> None:
    for key in ("image_embeds", "vision_embedding"):
        assert refusals.request_refusal({key: 1}) == "pre-computed embeddings"
    assert refusals.request_refusal({"image_embeds": None, "pixel_values": 1}) is None
