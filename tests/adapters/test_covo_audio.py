"""Hazards of the CoVo-Audio adapter: token counts, limits to the sample, trimming, layouts."""

import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from graphhal import EncoderGraphs, open_platform
from graphhal.adapters.covo_audio import CovoAudio, CovoAudioFactory
from graphhal.errors import AdapterError, InputError, SettingsError
from graphhal.plan import Eager, MissReason, Planner
from graphhal.settings import Policy, Settings

CPU = torch.device("cpu")
FACTORY = CovoAudioFactory()


@pytest.fixture(scope="module")
def adapter() -> CovoAudio:
    return FACTORY.build("tiny", CPU, torch.float32, seed=3)


def request_of(adapter: CovoAudio, counts: Any, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(len(counts), adapter.mel, adapter.frames, generator=generator)
    return {"audio_features": features, "audio_num_tokens": torch.tensor(counts)}


def ordinary_output(adapter: CovoAudio, request: dict[str, Any]) -> torch.Tensor:
    """What the stage does without graphhal: encode all clips, then trim each."""
    features = adapter.downsampler(adapter.encoder(request["audio_features"]).last_hidden_state)
    counts = request["audio_num_tokens"].tolist()
    return torch.cat([clip[:count] for clip, count in zip(features, counts, strict=True)])


def test_sizes_follow_from_the_configuration(adapter):
    assert (adapter.frames, adapter.tokens_per_clip, adapter.most_samples) == (3000, 188, 480_000)
    smaller = FACTORY.build("tiny", CPU, torch.float32).encoder.config
    smaller.max_source_positions = 300
    stage = type("Stage", (), {"encoder": adapter.encoder, "audio_adapter": adapter.downsampler})
    config, adapter.encoder.config = adapter.encoder.config, smaller
    try:
        short = CovoAudio(stage)
    finally:
        adapter.encoder.config = config
    assert (short.frames, short.tokens_per_clip, short.most_samples) == (600, 38, 96_000)
    assert [c.tokens for c in short.capacities(Settings())] == [38, 76]


@pytest.mark.parametrize("name", ["encoder", "audio_adapter"])
def test_a_module_that_the_stage_replaces_is_noticed(name):
    adapter, other = (FACTORY.build("tiny", CPU, torch.float32, seed=seed) for seed in (3, 4))
    graphs = EncoderGraphs(adapter, open_platform("cpu"), Settings(self_check="off"))
    graphs.capture()
    request = request_of(adapter, [5, 100])
    assert graphs.try_replay(request) is not None
    setattr(adapter.owner, name, getattr(other.owner, name))
    assert graphs.try_replay(request) is None
    assert graphs.stats()["misses"] == {"audio": {"weights were rebound after capture": 2}}
    now = CovoAudio(adapter.owner)
    assert torch.equal(torch.cat(graphs.run(request)), ordinary_output(now, request))
    graphs.capture(keys=[graphs.ladder()[-1].key])
    replayed = graphs.try_replay(request)
    assert replayed is not None
    assert torch.allclose(torch.cat(replayed), ordinary_output(now, request), atol=1e-5)


def test_a_stage_of_another_dtype_is_followed():
    adapter = FACTORY.build("tiny", CPU, torch.float32, seed=3)
    graphs = EncoderGraphs(adapter, open_platform("cpu"), Settings(self_check="off"))
    graphs.capture(keys=[graphs.ladder()[0].key])
    adapter.owner.double()
    request = request_of(adapter, [100])
    wanted = ordinary_output(
        adapter, request | {"audio_features": request["audio_features"].double()}
    )
    assert torch.equal(torch.cat(graphs.run(request)), wanted)
    graphs.capture(keys=[graphs.ladder()[0].key])
    replayed = graphs.try_replay(request)
    assert replayed is not None
    assert torch.allclose(torch.cat(replayed), wanted, rtol=0, atol=1e-12)


def test_a_stage_that_is_no_module_is_captured_too(adapter):
    stage = types.SimpleNamespace(encoder=adapter.encoder, audio_adapter=adapter.downsampler)
    graphs = EncoderGraphs(CovoAudio(stage), open_platform("cpu"), Settings(self_check="off"))
    assert graphs.capture().dropped == []
    assert graphs.try_replay(request_of(adapter, [5])) is not None


def test_budgets_are_one_and_two_clips(adapter):
    sizes = [(c.key.size, c.rows, c.items) for c in adapter.capacities(Settings())]
    assert sizes == [(188, 1, 1), (376, 2, 2)]
    assert [c.rows for c in adapter.capacities(Settings(token_budgets="100,188,375,800"))] == [1, 4]
    assert [c.rows for c in adapter.capacities(Settings(max_items=1))] == [1]


@pytest.mark.parametrize("counts", [[188], [5, 100, 188], [0, 7], [0]])
def test_eager_is_the_stage_and_every_clip_is_trimmed(adapter, encode, counts):
    request = request_of(adapter, counts)
    (ours,) = encode(adapter, request)
    assert ours.shape == (sum(counts), 32)
    torch.testing.assert_close(ours, ordinary_output(adapter, request), rtol=0, atol=1e-6)


@pytest.mark.parametrize("counts", [[1], [100, 188]])
def test_padded_graphs_equal_eager(adapter, encode, counts):
    request = request_of(adapter, counts)
    two = adapter.capacities(Settings())[1]
    (padded,) = encode(adapter, request, two)
    (exact,) = encode(adapter, request)
    torch.testing.assert_close(padded, exact, rtol=0, atol=2e-6)


def test_three_clips_are_one_eager_call_of_three(adapter):
    planner = Planner(adapter.capacities(Settings()), Policy.SINGLE, adapter.path, adapter.refusal)
    items = adapter.item_specs(request_of(adapter, [188, 5, 100]))
    assert planner.plan(items).steps == (Eager(items, MissReason.TOO_MANY_ROWS),)


@pytest.mark.parametrize("count", [-3, -1, 189, 200])
def test_a_count_outside_the_clip_is_refused_not_clipped(adapter, count):
    request = request_of(adapter, [188, 188]) | {"audio_num_tokens": [188, count]}
    message = rf"^item 1: audio_num_tokens is {count}; a clip has 0 to 188 tokens"
    with pytest.raises(ValueError, match=message):
        adapter.item_specs(request)


def test_counts_come_as_tensor_list_or_array(adapter):
    request = request_of(adapter, [188, 7])
    expected = adapter.item_specs(request)
    for counts in ([188, 7], np.array([188, 7]), torch.tensor([[188], [7]]), (188, 7)):
        untouched = object()
        other = request | {"audio_num_tokens": counts, "unknown": untouched}
        assert adapter.item_specs(other) == expected
        assert other["unknown"] is untouched
    del request["audio_num_tokens"]
    assert [spec.tokens for spec in adapter.item_specs(request)] == [188, 188]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"audio_features": None}, r"^the group is empty"),
        ({"audio_features": torch.zeros(0, 128, 3000)}, r"^the group is empty"),
        ({"audio_features": torch.zeros(2, 80, 3000)}, r"^audio_features must be \(2, 128, 3000\)"),
        ({"audio_features": torch.zeros(2, 128, 2999)}, r"pad clips to the encoder's window"),
        ({"audio_features": [torch.zeros(128, 3000), torch.zeros(128, 30)]}, r"^item 1: .*must be"),
        ({"audio_features": [torch.zeros(128, 3000), 3]}, r"^item 1: audio_features must be tens"),
        ({"audio_features": torch.zeros(2, 128, 3000).int()}, r"pass floating-point features"),
        ({"audio_features": torch.zeros(2, 128, 3000, device="meta")}, r"is on meta"),
        ({"audio_features": torch.zeros(128, 3000)}, r"^audio_features .*\(clips, .*; stack the"),
        ({"audio_num_tokens": torch.tensor([True, False])}, r"^item 0: .* whole number, got True"),
        ({"audio_num_tokens": [1, False]}, r"^item 1: audio_num_tokens must be one whole number"),
        ({"audio_features": torch.zeros(2, 128, 3000).to_sparse()}, r"sparse_coo; pass a dense"),
        (
            {"audio_num_tokens": torch.ones(2).to("meta")},
            r"^audio_num_tokens is .*on meta; pass its",
        ),
        (
            {"audio_num_tokens": [1, torch.ones(1).to("meta")]},
            r"^item 1: audio_num.* on meta; pass",
        ),
        ({"audio_num_tokens": torch.ones(2).int().to_sparse()}, r"^audio_num.*sparse_coo on cpu"),
        ({"audio_num_tokens": {0: 188, 1: 188}}, r"^audio_num_tokens must hold one whole number"),
        ({"audio_num_tokens": {188, 7}}, r"^audio_num_tokens must hold one whole number for each"),
        ({"audio_num_tokens": [188]}, r"^audio_num_tokens has 1 counts for 2 clips"),
        ({"audio_num_tokens": [188, 1.5]}, r"^item 1: audio_num_tokens must be one whole number"),
    ],
)
def test_a_wrong_clip_is_named_with_the_fix(adapter, change, message):
    with pytest.raises(InputError, match=message):
        adapter.item_specs(request_of(adapter, [188, 188]) | change)


def test_a_list_of_clips_and_strided_features_are_staged_alike(adapter):
    request = request_of(adapter, [188, 7])
    items = adapter.item_specs(request)
    features = request["audio_features"]
    for spelt in (features, list(features), features.mT.contiguous().mT):
        for order in (items, items[::-1]):
            target = torch.full((3, adapter.mel, adapter.frames), torch.nan)
            adapter.stage(request | {"audio_features": spelt}, order, {"audio_features": target})
            assert torch.equal(target[:2], features[[item.index for item in order]])
            assert not target[2].any()


def test_a_group_is_staged_in_one_copy(adapter, monkeypatch):
    request = request_of(adapter, [188, 7])
    copies, copy_ = [], torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda s, o: copies.append(s.shape) or copy_(s, o))
    target = torch.empty(2, adapter.mel, adapter.frames)
    adapter.stage(request, adapter.item_specs(request), {"audio_features": target})
    assert copies == [(2, 128, 3000)]


def test_the_clip_limit_is_checked_to_the_sample(adapter):
    assert adapter.num_tokens(480_000, 16_000) == 188
    for samples in (480_001, 481_600):
        message = (
            rf"^item 2: the clip lasts 30\.\d+ s \({samples} samples\); at most 30 s "
            r"\(480000 samples at 16000 Hz\) fit"
        )
        with pytest.raises(InputError, match=message):
            adapter.num_tokens(samples, 16_000, 2)
    with pytest.raises(InputError, match=r"^item 0: the clip has 44100 .*resample it to 16000"):
        adapter.num_tokens(1000, 44_100, 0)
    with pytest.raises(InputError, match=r"^the clip holds no sample"):
        adapter.num_tokens(0, 16_000)
    for odd in (480_000.0, float("nan"), "480000", True, None):
        with pytest.raises(InputError, match=r"^item 2: the number of samples must be one whole"):
            adapter.num_tokens(odd, 16_000, 2)
    for same in (np.int64(480_000), torch.tensor(480_000)):
        assert type(adapter.num_tokens(same, 16_000)) is int


@pytest.mark.parametrize("samples", [1, 159, 160, 16_000, 51_234, 479_999])
def test_token_counts_are_the_published_formula(adapter, samples):
    length = samples * 100 // 16_000
    for _ in range(4):
        length = (length + 1) // 2
    assert adapter.num_tokens(samples, 16_000) == length <= adapter.tokens_per_clip


def test_vllm_omnis_stage_is_wrapped_wherever_it_hangs(adapter):
    class Stage(torch.nn.Module):
        encoder, audio_adapter = adapter.encoder, adapter.downsampler

    class Model(torch.nn.Module):
        fused_thinker_talker = Stage()

    assert isinstance(FACTORY.wrap(Model()), CovoAudio)
    assert isinstance(FACTORY.wrap(Model.fused_thinker_talker), CovoAudio)
    assert FACTORY.wrap(torch.nn.Linear(1, 1)) is None
    assert FACTORY.wrap(adapter.encoder) is None


def test_an_encoder_with_packed_attention_is_refused():
    built = FACTORY.build("tiny", CPU, torch.float32)
    built.encoder.config._attn_implementation = "flash_attention_2"
    stage = type("Stage", (), {"encoder": built.encoder, "audio_adapter": built.downsampler})
    with pytest.raises(AdapterError, match=r"^covo_audio: build the Whisper encoder with sdpa"):
        CovoAudio(stage)


def test_worst_cases_fit_and_the_first_is_full(adapter):
    for capacity in adapter.capacities(Settings(token_budgets="188,376,800")):
        groups = list(adapter.worst_cases(capacity))
        assert all(capacity.misfit(group) is None for group in groups)
        assert all(capacity.is_exact_for(g) == (len(g) == capacity.rows) for g in groups)
        for group in groups:
            assert adapter.item_specs(adapter.example(group, seed=1)) == group


def test_speech_files_load_and_a_long_one_is_refused(adapter, tmp_path: Path):
    request = FACTORY.load(adapter, [])
    assert request["audio_features"].shape == (1, 128, 3000)
    assert 0 < request["audio_num_tokens"].item() < 188
    path = tmp_path / "long.flac"
    soundfile.write(path, np.zeros(480_001), 16_000)
    with pytest.raises(InputError, match=r"^item 0: the clip lasts 30\.0001 s"):
        FACTORY.load(adapter, [path])
    with pytest.raises(SettingsError, match="unknown preset"):
        FACTORY.build("huge", CPU, torch.float32)


def test_trimmed_clips_that_fill_a_graph_are_exact(adapter):
    graph = adapter.capacities(Settings())[-1]
    clips = adapter.item_specs(request_of(adapter, [3, 5]))
    assert graph.is_exact_for(clips)
    assert not graph.is_exact_for(clips[:1])
