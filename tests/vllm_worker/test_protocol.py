"""Special cases of vLLM's encoder-graph protocol: paths, axes, padding, rounding, refusals."""

import types
from typing import Any

import pytest
import torch

from graphhal.errors import RefusedError
from graphhal.vllm_worker import executor

pytestmark = pytest.mark.vllm


def executor_for(engine: Any, model: Any, self_check: str = "full") -> Any:
    engine.compilation_config.encoder_cudagraph_token_budgets = []
    engine.additional_config["graphhal"]["self_check"] = self_check
    made = executor.build(engine, torch.device("cpu"), torch.float32, model)
    made.capture(None)
    return made


def equal(ours: Any, theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(
        torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, theirs, strict=True)
    )


def test_rows_of_a_fixed_size_keep_vllms_ladder(engine: Any) -> None:
    from protocol_models import Base

    model = Base()
    served = executor_for(engine, model)
    assert served.token_budgets == [4, 8, 16, 32]
    for images in (1, 2, 3, 4):
        group = {"pixel_values": torch.randn(images, 4, 8)}
        assert equal(served.execute(group), model.embed_multimodal(**group))
    assert served.execute({"pixel_values": torch.randn(9, 4, 8)}) is None
    assert served.stats()["graph_misses"] == 9


@pytest.mark.parametrize("name", ["TwoPaths", "PathsWithDefault"])
def test_several_paths_are_replayed_together(engine: Any, name: str) -> None:
    import protocol_models

    model = getattr(protocol_models, name)()
    served = executor_for(engine, model)
    for crops in ([1, 0, 2], [0], [3], [0, 0]):
        group = {
            "pixel_values": torch.randn(len(crops), 4, 8),
            "crops": torch.randn(sum(crops), 2, 8),
            "num_crops": crops,
        }
        ours = served.execute(group)
        assert ours is not None, served.stats()
        assert equal(ours, model.embed_multimodal(**group))
    replays = served.stats()["replays"]
    assert any("local" in key for key in replays)
    assert any(f"/{model.wholes}[" in key for key in replays)


def test_one_path_too_large_makes_the_whole_group_eager(engine: Any) -> None:
    from protocol_models import TwoPaths

    model = TwoPaths()
    served = executor_for(engine, model)
    group = {
        "pixel_values": torch.randn(1, 4, 8),
        "crops": torch.randn(40, 2, 8),
        "num_crops": [40],
    }
    assert served.execute(group) is None


def test_padding_logic_of_the_model_is_used(engine: Any) -> None:
    from protocol_models import PaddedPositions

    model = PaddedPositions()
    served = executor_for(engine, model)
    assert served.stats()["dropped"] == []
    for images in (1, 3):
        group = {
            "pixel_values": torch.randn(images, 4, 8),
            "positions": torch.randint(0, 8, (images, 4)),
        }
        assert equal(served.execute(group), model.embed_multimodal(**group))


@pytest.mark.parametrize(
    ("name", "beside"),
    [
        ("Base", {}),
        ("FewItems", {}),
        ("PaddedPositions", {"positions": torch.arange(8).view(2, 4)}),
        ("CaptureAxes", {"scales": [1, 2]}),
    ],
)
def test_budgets_that_are_no_multiple_of_an_item_have_graphs(
    engine: Any, name: str, beside: dict[str, Any]
) -> None:
    """As 1000 for Gemma 3's and InternVL's 256 tokens: of the rest of a budget the model's dummy
    inputs make no rows, and a larger graph makes those of a picture of zeros."""
    import protocol_models

    model = getattr(protocol_models, name)()
    engine.additional_config["graphhal"]["token_budgets"] = [6, 11, 32, 73, 128]
    engine.compilation_config.encoder_cudagraph_max_vision_items_per_batch = 13
    served = executor_for(engine, model)
    assert served.stats()["dropped"] == []
    group = {"pixel_values": torch.randn(2, model.rows, 8)} | beside
    assert equal(served.execute(group), model.embed_multimodal(**group))


def test_every_combination_of_capture_axes_has_its_graph(engine: Any) -> None:
    from protocol_models import CaptureAxes

    model = CaptureAxes()
    served = executor_for(engine, model)
    assert served.get_num_graphs_to_capture() == 4 * 3
    for scales in ([1], [3, 1], [2, 2, 1]):
        group = {"pixel_values": torch.randn(len(scales), 4, 8), "scales": scales}
        assert equal(served.execute(group), model.embed_multimodal(**group))
    assert served.stats()["graph_misses"] == 0


def test_axes_that_were_not_captured_run_eagerly(engine: Any) -> None:
    from protocol_models import CaptureAxes

    model = CaptureAxes()
    served = executor_for(engine, model)
    assert served.execute({"pixel_values": torch.randn(1, 4, 8), "scales": [7]}) is None
    misses = served.stats()["misses"]
    assert misses == {"image": {"the adapter does not replay such a group": 1}}


@pytest.mark.parametrize(("key", "form"), [("tgt_sizes", torch.cat), ("video_tgt_sizes", list)])
def test_a_long_picture_that_no_grid_of_the_axis_covers_runs_eagerly(
    engine: Any, key: str, form: Any
) -> None:
    """It has as many tokens as one that was compared with eager: only its sizes tell. MiniCPM-V
    takes its largest grid for it, in which the outer columns have the place of the last."""
    from protocol_models import SizedGrids

    model = SizedGrids()
    served = executor_for(engine, model)
    for size in ((3, 4), (1, 2), (4, 4), (1, 9), (9, 1), (4, 3)):
        group = {"pixel_values": torch.randn(1, 4, 8), key: form([torch.tensor([size])])}
        ours = served.execute(group)
        if max(size) > 4:
            assert ours is None, size
        else:
            assert equal(ours, model.embed_multimodal(**group)), size
    misses = served.stats()["misses"]
    assert misses == {"image": {"the adapter does not replay such a group": 2}}


@pytest.mark.parametrize("name", ["CaptureAxes", "BakedAxes"])
def test_a_ranks_share_with_other_axes_runs_eagerly(engine: Any, name: str) -> None:
    """The whole group resolved to axis 3; this rank's items alone resolve to 1."""
    from dataclasses import replace

    import protocol_models

    model = getattr(protocol_models, name)()
    served = executor_for(engine, model, self_check="off")  # which would find it out as well
    assert served.stats()["graph_count"] == 4 * 3
    (graphs,) = served._graphs()
    group = {"pixel_values": torch.randn(2, 4, 8), "scales": [3, 1]}
    share = (replace(graphs.adapter.item_specs(group)[1], index=0),)
    alone = {"pixel_values": group["pixel_values"][1:], "scales": [1]}
    assert equal(graphs.run_items(group, share), model.embed_multimodal(**alone))
    misses = graphs.stats()["misses"]
    assert misses == {"image": {"the adapter does not replay such a group": 1}}


def test_a_ranks_share_of_several_paths_is_its_own(engine: Any) -> None:
    """As for Step3-VL, whose ranks may share items: the others' must not come along."""
    from dataclasses import replace

    from protocol_models import TwoPaths

    model = TwoPaths()
    served = executor_for(engine, model)
    (encoder,) = served._served
    group = {
        "pixel_values": torch.randn(4, 4, 8),
        "crops": torch.randn(4, 2, 8),
        "num_crops": [1, 0, 2, 1],
    }
    whole = {path: graphs.run(group) for path, graphs in encoder.graphs.items()}
    for path, graphs in encoder.graphs.items():
        items = graphs.adapter.item_specs(group)
        for share in ([0], [1, 2], [2], [2, 1]):
            mine = tuple(replace(items[i], index=n) for n, i in enumerate(share))
            assert equal(graphs.run_items(group, mine), [whole[path][i] for i in share])
        assert graphs.stats()["misses"] == {}


@pytest.mark.parametrize("where", ["model", "tower"])
def test_a_rank_encodes_its_share_without_the_others(
    engine: Any, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kimi K2.5's eager code gathers from all ranks, StepVL's and the towers of InternVL, MiniCPM-V
    and Step3-VL in graphs as well, where ours asks one of them alone."""
    from protocol_models import Base

    class Spreads(torch.nn.Linear):
        use_data_parallel = where == "tower"

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            assert not self.use_data_parallel, "the other ranks do not come"
            assert not model.use_data_parallel, "the other ranks do not come"
            return super().forward(pixels)

    from graphhal.vllm_worker import protocol

    found: list[Any] = []
    walk = protocol.tower_modules
    monkeypatch.setattr(protocol, "tower_modules", lambda m: found.append(m) or walk(m))
    model = Base()
    model.tower = Spreads(8, 6)
    model.use_data_parallel = where == "model"  # type: ignore[assignment]
    served = executor_for(engine, model)
    (graphs,) = served._graphs()
    assert (model.use_data_parallel, model.tower.use_data_parallel) == (
        where == "model", where == "tower",
    )  # fmt: skip
    group = {"pixel_values": torch.randn(9, 4, 8)}
    eager = graphs.run(group)
    found.clear()
    graphs.run(group)
    assert found == []  # it takes a millisecond: not for each request
    few = {"pixel_values": group["pixel_values"][:2]}
    replayed = served.execute(few)
    assert replayed is not None
    weights = model.tower.state_dict()
    model.tower = Spreads(8, 6)
    model.tower.load_state_dict(weights)
    assert equal(graphs.run(group), eager)
    assert found == [model]
    model.use_data_parallel = model.tower.use_data_parallel = False  # type: ignore[assignment]
    assert equal(eager, model.embed_multimodal(**group))
    assert equal(replayed, model.embed_multimodal(**few))


def test_ranks_that_share_items_have_graphs_or_leave_it_to_the_model(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One without items would ask a graph for the width of outputs, and there is none."""
    from protocol_models import Base, TwoPaths
    from vllm.distributed.parallel_state import get_tp_group

    from graphhal.peers import Peers
    from graphhal.vllm_worker import ranks

    group = get_tp_group().device_group
    monkeypatch.setattr(ranks, "sharing", lambda *_: (Peers(), group))
    pixels = torch.randn(1, 4, 8)
    for model, budgets in ((Base(), []), (TwoPaths(), [2])):
        engine.additional_config["graphhal"]["token_budgets"] = budgets
        served = executor_for(engine, model)
        crops = {"crops": torch.randn(1, 2, 8), "num_crops": [1]}
        assert served.execute({"pixel_values": pixels} | crops) is None
        assert served.stats()["misses"] == {"image": {"no graph is asked for": 1}}


def test_a_path_whose_smallest_item_is_above_all_budgets_has_no_graph(engine: Any) -> None:
    from protocol_models import TwoPaths

    engine.additional_config["graphhal"]["token_budgets"] = [2]
    served = executor_for(engine, TwoPaths())
    assert served.stats()["graph_count"] == 1
    assert served.token_budgets == [2]
    assert served.stats()["dropped"] == []


def test_a_paths_ladder_doubles_from_its_smallest_item_unless_none_is_asked_for(
    engine: Any,
) -> None:
    from protocol_models import TwoPaths

    class Packed(TwoPaths):
        def prepare_encoder_cudagraph_capture_inputs(self, *args: Any, **more: Any) -> Any:
            made = super().prepare_encoder_cudagraph_capture_inputs(*args, **more)
            made.values["cu_seqlens"] = torch.tensor([0, args[0]], dtype=torch.int32)
            return made

    for asked, found in (([3, 8], [2, 4, 8]), ([], [])):
        engine.additional_config["graphhal"]["token_budgets"] = asked
        engine.compilation_config.encoder_cudagraph_token_budgets = []
        made = executor.build(engine, torch.device("cpu"), torch.float32, Packed())
        assert made is not None
        assert made.token_budgets == found


def test_a_models_code_works_on_a_copy_of_the_kwargs(engine: Any) -> None:
    """What it takes out would be missing where the group runs eagerly after all."""
    from protocol_models import Base

    class Takes(Base):
        def prepare_encoder_cudagraph_replay_buffers(
            self, mm_kwargs: dict[str, Any], *rest: Any, **options: Any
        ) -> Any:
            return types.SimpleNamespace(values={"pixel_values": mm_kwargs.pop("pixel_values")})

        def encoder_eager_forward(
            self, mm_kwargs: dict[str, Any], path: str = "default"
        ) -> torch.Tensor:
            return self.tower(mm_kwargs.pop("pixel_values")).flatten(0, 1)

    model = Takes()
    served = executor_for(engine, model)
    (graphs,) = served._graphs()
    group = {"pixel_values": torch.randn(2, 4, 8)}
    assert equal(served.execute(group), model.embed_multimodal(**group))
    assert equal(graphs.run_eager(group), model.embed_multimodal(**group))


def test_a_buffer_without_a_value_is_refused_not_stale(engine: Any) -> None:
    from protocol_models import PaddedPositions

    model = PaddedPositions()
    served = executor_for(engine, model)
    full = {"pixel_values": torch.randn(1, 4, 8), "positions": torch.zeros(1, 4, dtype=torch.long)}
    assert served.execute(full) is not None
    assert served.execute({"pixel_values": torch.randn(1, 4, 8)}) is None


def test_a_tower_whose_graph_differs_from_eager_loses_it(engine: Any) -> None:
    from protocol_models import Base

    class Differs(Base):
        def encoder_cudagraph_forward(self, inputs: Any, path: str = "default") -> torch.Tensor:
            noise = torch.rand(1, 6, device=inputs["pixel_values"].device)
            return super().encoder_cudagraph_forward(inputs, path) + noise

    served = executor_for(engine, Differs())
    assert served.stats()["graph_count"] == 0
    assert served.execute({"pixel_values": torch.randn(1, 4, 8)}) is None


def test_buffers_that_a_model_prepares_wrongly_are_never_replayed(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As Gemma 4 does for films: its dummy inputs cannot show it, so the first group of every
    layout is compared with eager."""
    import vllm_on_cpu as on_cpu
    from protocol_models import Slots

    model = Slots()
    served = executor_for(engine, model)
    assert served.stats()["dropped"] == []
    one, two = torch.randn(1, 2, 8), torch.randn(2, 2, 8)
    full = {"pixel_values": torch.randn(2, 4, 8)}
    for _ in range(2):
        assert equal(
            served.execute({"pixel_values": one}), model.embed_multimodal(pixel_values=one)
        )
        assert equal(served.execute(full), model.embed_multimodal(**full))
    with on_cpu.log_of("graphhal.vllm_worker.layout_check", caplog):
        assert served.execute({"pixel_values": two}) is None
    assert "2 items of 2, 2 tokens" in caplog.text
    model.encoder_eager_forward = lambda *a, **k: pytest.fail("compared again")  # type: ignore[method-assign]
    assert served.execute({"pixel_values": two}) is None
    assert equal(served.execute(full), model.embed_multimodal(**full))
    stats = served.stats()
    assert stats["misses"] == {"image": {"the adapter does not replay such a group": 4}}
    assert stats["hits"] == {"image": 8}


@pytest.mark.parametrize("who", ["graph", "eager"])
def test_a_model_that_works_in_place_is_replayed_and_its_request_is_left_alone(
    engine: Any, who: str
) -> None:
    """The comparison encodes a second time: what either forward leaves in its inputs must reach
    neither the replay nor the runner's own call."""
    from protocol_models import Slots

    class InPlace(Slots):
        def encode(self, pixels: torch.Tensor, in_place: bool) -> torch.Tensor:
            return self.tower(pixels.mul_(2) if in_place else pixels * 2)

        def encoder_cudagraph_forward(
            self, inputs: dict[str, torch.Tensor], path: str = "default"
        ) -> torch.Tensor:
            encoded = self.encode(inputs["pixel_values"], who == "graph")
            return encoded.flatten(0, 1)[inputs["gather"]]

        def encoder_eager_forward(
            self, mm_kwargs: dict[str, Any], path: str = "default"
        ) -> torch.Tensor:
            return self.encode(mm_kwargs["pixel_values"], who == "eager").flatten(0, 1)

        def embed_multimodal(self, **mm_kwargs: Any) -> list[torch.Tensor]:
            return list(self.encode(mm_kwargs["pixel_values"], who == "eager"))

    for right in (True, False):
        model = InPlace(right)
        served = executor_for(engine, model)
        for _ in range(2):
            for tokens in (4, 2):
                pixels = torch.randn(2, tokens, 8)
                group = {"pixel_values": pixels.clone()}
                ours = served.execute(group)
                assert torch.equal(group["pixel_values"], pixels)
                assert (ours is not None) == (right or tokens == 4)
                assert ours is None or equal(ours, model.embed_multimodal(**group))


def test_layouts_are_not_compared_where_the_self_check_is_off(engine: Any) -> None:
    from protocol_models import Slots

    model = Slots(right=True)
    served = executor_for(engine, model, self_check="off")
    model.encoder_eager_forward = lambda *a, **k: pytest.fail("compared")  # type: ignore[method-assign]
    group = {"pixel_values": torch.randn(2, 2, 8)}
    assert equal(served.execute(group), model.embed_multimodal(**group))


def test_a_single_key_on_an_axis_is_still_selected_for(engine: Any) -> None:
    from protocol_models import OneAxis

    model = OneAxis()
    served = executor_for(engine, model)
    group = {"pixel_values": torch.randn(2, 4, 8), "scales": [1, 1]}
    assert equal(served.execute(group), model.embed_multimodal(**group))
    assert served.execute({"pixel_values": torch.randn(1, 4, 8), "scales": [7]}) is None


@pytest.mark.parametrize("policy", ["single", "packed"])
@pytest.mark.parametrize("how", ["keys", "numbers", "axes"])
def test_what_a_model_selects_is_what_its_code_gets(engine: Any, how: str, policy: str) -> None:
    """vLLM's manager hands every group through the selection, a whole one as well."""
    from protocol_models import Selects

    engine.additional_config["graphhal"]["policy"] = policy
    model = Selects(how)
    served = executor_for(engine, model)
    for images in (1, 3, 2):
        group = {"pixel_values": torch.randn(images, 4, 8)}
        assert equal(served.execute(group), model.embed_multimodal(**group))
    assert served.stats()["graph_misses"] == 0


@pytest.mark.parametrize("odd", [None, float("nan")])
def test_a_whole_group_is_copied_by_no_selection_that_changes_nothing(
    engine: Any, odd: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from protocol_models import Base

    model, asked = Base(), list[list[int]]()
    served = executor_for(engine, model)

    def selection(mm_kwargs: dict[str, Any], indices: list[int]) -> dict[str, Any]:
        asked.append(indices)
        return Base.select_encoder_cudagraph_items(model, mm_kwargs, indices)

    monkeypatch.setattr(model, "select_encoder_cudagraph_items", selection)
    for _ in range(2):
        group = {"pixel_values": torch.randn(2, 4, 8), "ids": ["a", "b"], "rest": None}
        if odd is not None:
            group["pixel_values"][0, 0, 0] = odd  # type: ignore[index]
        served.execute(group)
    assert asked == [[0, 1]], "of the first group, to compare"


GRIDS = torch.tensor([[1, 2, 2], [1, 4, 4]])


@pytest.mark.parametrize(
    ("one", "same"),
    [
        ([[1, 2, 2], [1, 4, 4]], True),
        ([GRIDS[0], [1, 4, 4]], True),
        ([[1, 2, 2], [1, 4, 2]], False),
        (GRIDS * 2, False),
        (GRIDS.float(), False),
        ([[1, 2, 2]], None),
        (GRIDS[:1], None),
        ([1, [1, 4, 4]], None),
        ("grids", False),
        (None, False),
    ],
)
def test_inputs_are_the_same_whatever_holds_their_numbers(one: Any, same: bool | None) -> None:
    from graphhal.vllm_worker.protocol_requests import _is_same

    assert _is_same(one, GRIDS) is same
    assert _is_same(["a", None, 1.5, one], ["a", None, 1.5, GRIDS]) is same


def test_a_selection_that_fails_is_done_without(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole groups need none."""
    from protocol_models import Base

    monkeypatch.delattr(Base, "select_encoder_cudagraph_items")
    model = Base()
    served = executor_for(engine, model)
    group = {"pixel_values": torch.randn(2, 4, 8)}
    assert equal(served.execute(group), model.embed_multimodal(**group))


def test_rows_are_rows_whatever_dimensions_a_model_gives_them(engine: Any) -> None:
    from protocol_models import Batched

    model = Batched()
    served = executor_for(engine, model)
    group = {"pixel_values": torch.randn(2, 4, 8)}
    assert equal(served.execute(group), model.embed_multimodal(**group))


def test_items_that_are_put_together_with_other_rows_run_eagerly(engine: Any) -> None:
    """vLLM would find too few for the places in the prompt, and end."""
    from protocol_models import LosesRows

    served = executor_for(engine, LosesRows())
    assert served.execute({"pixel_values": torch.randn(2, 4, 8)}) is None
    assert served.stats()["misses"] == {"image": {"the adapter does not replay such a group": 2}}


@pytest.mark.parametrize(
    "step", ["prepare_encoder_cudagraph_replay_buffers", "get_encoder_cudagraph_item_specs"]
)
def test_what_a_models_code_raises_costs_the_replay_alone(engine: Any, step: str) -> None:
    """As where films overflow what was captured: eager would serve them."""
    from protocol_models import Base

    model = Base()
    served = executor_for(engine, model)
    group = {"pixel_values": torch.randn(2, 4, 8)}
    assert served.execute(group) is not None

    def overflow(*args: Any) -> Any:
        raise ValueError("index can't contain negative values")

    own = getattr(model, step)
    setattr(model, step, overflow)
    assert served.execute(group) is None
    setattr(model, step, own)
    assert served.execute(group) is not None
    assert served.stats()["graph_misses"] > 0
    assert served.stats()["hits"] == {"image": 4}


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("Base", "prepare_encoder_cudagraph_replay_buffers"),
        ("Base", "encoder_eager_forward"),
        ("MergesAfterwards", "postprocess_encoder_output"),
    ],
)
def test_a_rank_that_alone_is_out_of_memory_does_not_encode_alone(
    engine: Any, name: str, step: str
) -> None:
    """The others replay: inside, they would wait for a rank that encodes eagerly for ever."""
    import protocol_models

    from graphhal.peers import Peers

    class Two(Peers):
        size = 2

    def full(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    model = getattr(protocol_models, name)()
    served = executor_for(engine, model)
    (graphs,) = served._graphs()
    group = pictures((8, 8)) if name != "Base" else {"pixel_values": torch.randn(2, 4, 8)}
    setattr(model, step, full)
    assert served.execute(group) is None  # one rank alone may try it eagerly
    graphs.peers = Two()
    with pytest.raises((torch.OutOfMemoryError, RefusedError), match="no room"):
        served.execute(group)


@pytest.mark.parametrize("step", ["item_specs", "stager"])
def test_a_fault_of_ours_costs_the_replay_and_not_the_engine(
    engine: Any, step: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Beside ranks that replay it has to end the request: they would wait for this one."""
    import vllm_on_cpu as on_cpu
    from protocol_models import Base

    from graphhal.peers import Peers

    class Two(Peers):
        size = 2

    def fault(*args: Any) -> Any:
        raise ZeroDivisionError("a fault of ours")

    served = executor_for(engine, Base())
    (graphs,) = served._graphs()
    group = {"pixel_values": torch.randn(2, 4, 8)}
    with monkeypatch.context() as broken, on_cpu.log_of("graphhal.vllm_worker.executor", caplog):
        broken.setattr(type(graphs.adapter), step, fault)
        assert served.execute(group) is None
        assert served.execute(group) is None
        graphs.peers = Two()
        with pytest.raises(ZeroDivisionError):
            served.execute(group)
    graphs.peers = Peers()
    assert served.execute(group) is not None
    assert served.stats()["hits"] == {"image": 2}
    assert served.stats()["misses"] == {"image": {"graphhal's own code failed": 4}}
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "in fault" in caplog.text


@pytest.mark.parametrize("tokens", [[2**30], [4, -3], []])
def test_an_item_that_no_graph_may_take_runs_in_the_models_own_code(
    engine: Any, tokens: list[int]
) -> None:
    """Kimi K2.5 gives chunks of films 2**30 tokens; an eager call of ours would make fewer. And
    sizes that none can be are the model's to refuse: an error here would end the engine."""
    from protocol_models import Base, spec

    model = Base()
    served = executor_for(engine, model)
    model.get_encoder_cudagraph_item_specs = lambda _: [spec(4, n) for n in tokens]  # type: ignore[method-assign]
    (encoder,) = served._served
    assert served.execute({"pixel_values": torch.randn(1, 4, 8)}) is None
    encoder._shared = encoder.graphs  # ranks that share items always encode: never this one
    assert served.execute({"pixel_values": torch.randn(1, 4, 8)}) is None
    assert served.stats()["misses"] == {"image": {"inputs that the adapter does not know": 2}}


def test_what_no_adapter_sized_counts_under_the_models_only_modality(engine: Any) -> None:
    """Kimi K2.5's hits are of chunks, whose keys are those of pictures; so are its misses."""
    from protocol_models import Base, config, spec

    model = Base()
    chunks = config(modalities=["vision_chunk"])
    model.get_encoder_cudagraph_config = lambda: chunks  # type: ignore[method-assign]
    served = executor_for(engine, model)
    group = {"pixel_values": torch.randn(1, 4, 8)}
    assert served.execute(group) is not None
    model.get_encoder_cudagraph_item_specs = lambda _: [spec(4, 2**30)]  # type: ignore[method-assign]
    assert served.execute(group) is None
    stats = served.stats()
    assert stats["hits"].keys() == stats["misses"].keys() == {"vision_chunk"}


def test_an_item_of_several_paths_counts_once(engine: Any) -> None:
    from protocol_models import TwoPaths

    served = executor_for(engine, TwoPaths())
    for crops in ([1, 0, 2], [40], [2]):
        group = {
            "pixel_values": torch.randn(len(crops), 4, 8),
            "crops": torch.randn(sum(crops), 2, 8),
            "num_crops": crops,
        }
        served.execute(group)
    stats = served.stats()
    assert stats["hits"] == {"image": 4}
    assert stats["misses"] == {"image": {"more rows than the largest graph": 1}}
    assert sum(stats["item_tokens"].values()) == 5
    assert stats["replays"]["TwoPaths_global/global[16]"] == 1


def test_items_that_a_graph_would_leave_out_are_for_eager(engine: Any) -> None:
    """One without tokens has an output all the same; films beside pictures have theirs, whatever
    the model calls them (InternVL, MiniCPM-V)."""
    from protocol_models import Base, spec

    model = Base()
    served = executor_for(engine, model)
    pixels = torch.randn(2, 4, 8)
    for films in ("pixel_values_videos", "pixel_values_flat_video", "video_pixel_values"):
        assert served.execute({"pixel_values": pixels, films: pixels}) is None, films
    assert served.execute({"pixel_values": pixels, "video_pixel_values": None}) is not None
    hits = served.stats()["graph_hits"]
    model.get_encoder_cudagraph_item_specs = lambda _: [spec(4, 4), spec(0, 0)]  # type: ignore[method-assign]
    assert served.execute({"pixel_values": pixels}) is None
    reasons = served.stats()["misses"]
    assert {reason for of in reasons.values() for reason in of} == {
        "inputs that the adapter does not know"
    }
    assert served.stats()["graph_hits"] == hits == 2


def test_sound_beside_pictures_is_for_eager(engine: Any) -> None:
    """Models' code for graphs takes the pictures alone: Gemma 4's, MiniCPM-o's."""
    from protocol_models import Base

    served = executor_for(engine, Base())
    pixels = torch.randn(2, 4, 8)
    for sound in ("input_features", "input_features_padded", "audio_features"):
        assert served.execute({"pixel_values": pixels, sound: pixels}) is None, sound
    assert served.stats()["misses"] == {"image": {"no encoder takes these inputs": 6}}


def pictures(*sizes: tuple[int, int]) -> dict[str, torch.Tensor]:
    rows = sum(h * w for h, w in sizes)
    return {"pixel_values": torch.randn(rows, 8), "image_grid_hws": torch.tensor(sizes)}


@pytest.mark.parametrize("name", ["Patches", "MergesAfterwards"])
def test_pictures_of_patches_are_replayed(engine: Any, name: str) -> None:
    """As for Kimi VL, which bakes a bound of tokens, and Ernie 4.5 VL, which merges afterwards."""
    import protocol_models

    model = getattr(protocol_models, name)()
    served = executor_for(engine, model)
    assert served.stats()["dropped"] == []
    model.bounds.clear()
    for group in (pictures((8, 8)), pictures((4, 4), (2, 6)), pictures((2, 2), (2, 2), (8, 6))):
        assert equal(served.execute(group), model.embed_multimodal(**group))
    assert served.stats()["graph_misses"] == 0
    assert model.bounds == [], "the self-check had real groups: nothing is compared again"
    served.capture(None)
    assert model.bounds
    assert all(bound >= rows for bound, rows in model.bounds), "one picture may have all patches"


def test_a_postprocessing_that_fails_costs_the_replay_alone(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from protocol_models import Base, MergesAfterwards

    model = MergesAfterwards()
    served = executor_for(engine, model)
    monkeypatch.delattr(Base, "postprocess_encoder_output")
    assert served.execute(pictures((8, 8))) is None
    assert served.stats()["misses"] == {"image": {"the adapter does not replay such a group": 1}}


@pytest.mark.parametrize(
    "step", ["get_encoder_cudagraph_config", "prepare_encoder_cudagraph_capture_inputs"]
)
def test_a_model_whose_own_code_fails_at_start_up_runs_eagerly_and_says_so(
    engine: Any, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    """As a subclass without the tower that its parent's protocol asks for."""
    import vllm_on_cpu as on_cpu
    from protocol_models import Base

    def without_tower(*args: Any, **options: Any) -> Any:
        raise AttributeError("no attribute 'vision_tower'")

    model = Base()
    setattr(model, step, without_tower)
    with on_cpu.log_of("graphhal.vllm_worker.serving", caplog):
        served = executor_for(engine, model)
    assert "Base runs eagerly: its own code for graphs fails" in caplog.text
    assert served.supports_modality("image")
    assert served.get_num_graphs_to_capture() == 0
    assert served.execute({"pixel_values": torch.randn(1, 4, 8)}) is None
    ((reason, count),) = served.stats()["misses"]["image"].items()
    assert "no attribute 'vision_tower'" in reason
    assert count == 1


def test_the_old_spelling_of_two_paths() -> None:
    from graphhal.vllm_worker.protocol import Dialect

    old = types.SimpleNamespace(
        enable_dual_path_graph=True, global_token_per_image=272, local_token_per_patch=100
    )

    class Old:
        def postprocess_encoder_output(
            self, output: Any, indices: Any, tokens: Any, dest: Any, clone: bool = False,
            batch_mm_kwargs: Any = None, local_output: Any = None,
        ) -> None:  # fmt: skip
            dest[0] = torch.cat([output, local_output])

    dialect = Dialect(Old())
    paths = dialect.paths(old)
    assert (paths["global"].minimum, paths["local"].minimum) == (272, 100)
    assert dialect.axes(old) == ()
    spec = types.SimpleNamespace(
        output_tokens=372, global_output_tokens=272, local_output_tokens=100
    )
    assert dialect.path_tokens(spec, "local") == 100
    made = {"global": torch.ones(272, 1), "local": torch.zeros(100, 1)}
    (item,) = dialect.postprocess(made, [372], {})
    assert torch.equal(item, torch.cat([made["global"], made["local"]]))


def test_methods_that_are_wrapped_are_called_as_those_of_the_newest_vllm() -> None:
    from graphhal.vllm_worker.protocol import Dialect

    class Wrapped:
        def prepare_encoder_cudagraph_capture_inputs(self, *arguments: Any) -> Any:
            return types.SimpleNamespace(values={"axes": arguments[6]})

        def postprocess_encoder_output(self, *arguments: Any, **named: Any) -> None:
            outputs, _, _, dest = arguments
            dest[0] = outputs["default"]

    dialect = Dialect(Wrapped())
    device = torch.device("cpu")
    made = dialect.capture_inputs(4, 1, 1, device, torch.float32, "default", (1,))
    assert made == {"axes": (1,)}
    rows = torch.ones(2, 1)
    assert dialect.postprocess({"default": rows}, [2], {}) == [rows]
