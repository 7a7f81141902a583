"""Hazards of the Qwen3-Omni audio adapter: widths, tails, windows, staging, lengths."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    chunk_and_pad_features,
    get_audio_cu_seqlens,
    get_valid_indices,
)

from graphhal.adapters.qwen3_omni_audio import FRAMES, Qwen3OmniAudio, Qwen3OmniAudioFactory
from graphhal.adapters.sample_files import read_sound, sample_speech
from graphhal.arena import Layout
from graphhal.errors import InputError, SettingsError
from graphhal.plan import Eager, MissReason, Planner, Replay
from graphhal.platform import Platform
from graphhal.settings import Policy, Settings

CPU = torch.device("cpu")
FACTORY = Qwen3OmniAudioFactory()


@pytest.fixture(scope="module")
def tower(platform_stub: Platform) -> tuple[Qwen3OmniAudio, Any]:
    """The adapter, and the encoder as transformers runs it by itself."""
    adapter = FACTORY.build("tiny", CPU, torch.float32, seed=3)
    ordinary = copy.deepcopy(adapter.encoder)
    adapter.prepare(platform_stub)
    return adapter, ordinary


def request_of(adapter: Qwen3OmniAudio, lengths: Any, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(adapter.mel, sum(lengths), generator=generator)
    return {"input_features": features, "feature_lens": torch.tensor(lengths)}


def ordinary_output(encoder: Any, request: dict[str, Any]) -> torch.Tensor:
    return encoder(request["input_features"], request["feature_lens"]).last_hidden_state


def capacity_of(adapter: Qwen3OmniAudio, chunks: int, **options: Any) -> Any:
    (capacity,) = adapter.capacities(Settings(audio_chunks=chunks, **options))
    return capacity


@pytest.mark.parametrize(
    "lengths",
    [[100], [101], [99], [1], [30, 20], [99, 98, 1], [250, 50], [1, 100], [800], [805, 1700, 7],
     [3001, 3001], [100, 200, 300]],
)  # fmt: skip
def test_eager_equals_the_ordinary_forward(tower, encode, lengths):
    adapter, ordinary = tower
    request = request_of(adapter, lengths)
    (ours,) = encode(adapter, request)
    torch.testing.assert_close(ours, ordinary_output(ordinary, request), rtol=0, atol=1e-6)


def test_a_group_of_more_windows_than_one_convolution_takes_is_equal_too(tower, encode):
    adapter, ordinary = tower
    request = request_of(adapter, [70_050])
    assert adapter.item_specs(request)[0].rows > ordinary.conv_chunksize
    (ours,) = encode(adapter, request)
    torch.testing.assert_close(ours, ordinary_output(ordinary, request), rtol=0, atol=1e-6)


def test_metadata_and_windows_are_bit_equal_to_transformers(tower):
    adapter, ordinary = tower
    rng = np.random.default_rng(2)
    groups = [rng.integers(1, 3101, size=rng.integers(1, 6)).tolist() for _ in range(60)]
    groups += [rng.integers(1, 100, size=rng.integers(1, 6)).tolist() for _ in range(20)]
    groups += [[length] for length in (1, 2, 99, 100, 101, 799, 800, 801, 3000, 3001, 3100)]
    for lengths in groups:
        request = request_of(adapter, lengths)
        items = adapter.item_specs(request)
        lens = request["feature_lens"]
        windows, chunk_lengths = chunk_and_pad_features(
            request["input_features"], lens, ordinary.n_window
        )
        ours = adapter.eager_inputs(request, items)["padded_feature"]
        valid = get_valid_indices(chunk_lengths, ordinary.n_window)
        if ours.shape == windows.shape:
            assert torch.equal(ours, windows)
            np.testing.assert_array_equal(adapter.metadata(items)["valid_indices"], valid.numpy())
        else:  # a short group that is equal at full width
            more = ours.shape[2] - windows.shape[2]
            assert torch.equal(ours, torch.nn.functional.pad(windows, (0, more)))
            assert len(adapter.metadata(items)["valid_indices"]) == len(valid)
        ends = get_audio_cu_seqlens(
            chunk_lengths, lens, ordinary.n_window_infer, ordinary.n_window
        ).tolist()
        sequences = [n for item in items for n in item.sequences["cu_seqlens"]]
        assert np.cumsum([0, *sequences]).tolist() == ends, lengths
        assert sum(item.tokens for item in items) == ends[-1] == len(valid)


def test_full_width_graphs_equal_eager_with_poisoned_padding(tower, encode):
    adapter, _ = tower
    rng = np.random.default_rng(4)
    for seed in range(30):
        lengths = rng.integers(1, 500, size=rng.integers(1, 5)).tolist()
        lengths[int(rng.integers(len(lengths)))] += 100
        request = request_of(adapter, lengths, seed)
        items = adapter.item_specs(request)
        capacity = capacity_of(adapter, sum(item.rows for item in items) + seed % 4)
        assert capacity.misfit(items) is None
        (padded,) = encode(adapter, request, capacity)
        (exact,) = encode(adapter, request)
        torch.testing.assert_close(padded, exact, rtol=0, atol=5e-6)


def test_clips_made_for_a_trace_have_its_tokens_in_whole_windows_and_a_short_tail(tower):
    adapter, _ = tower
    for tokens in range(1, 60):
        (item,) = adapter.sized("audio", [tokens])
        tail = item.signature[0] % adapter.width
        assert item.tokens == tokens
        assert tail == 0 or adapter._tokens(tail - 1) < adapter._tokens(tail)
        assert (adapter.refusal([item]) is None) == (tokens >= adapter.window_tokens)
    assert adapter.refusal(adapter.sized("audio", [3, 13])) is None


def test_short_groups_are_refused_just_where_full_width_would_differ(tower):
    adapter, ordinary = tower
    replayed = []
    for longest in range(1, 100):
        request = request_of(adapter, [longest, (longest + 1) // 2], seed=longest)
        items = adapter.item_specs(request)
        full = tuple(_with_width(item, 100) for item in items)
        wide = _run(adapter, full, adapter.eager_inputs(request, full)["padded_feature"])
        difference = (wide - ordinary_output(ordinary, request)).abs().max()
        if adapter.refusal(items) is None:
            replayed.append(longest)
            assert difference < 2e-6, longest
        else:
            assert adapter.refusal(items) == "every clip is shorter than a window of 100 frames"
            assert adapter.eager_inputs(request, items)["padded_feature"].shape[2] == longest
            assert difference > 1e-4, f"{longest}: equal after all, the refusal can go"
    assert replayed == [n for n in range(1, 97) if n % 8 in (0, 7)] + [99]


def _with_width(item: Any, width: int) -> Any:
    from dataclasses import replace

    return replace(item, signature=(item.signature[0], width))


def _run(adapter: Any, items: Any, windows: torch.Tensor) -> torch.Tensor:
    ends = np.cumsum([0, *(n for item in items for n in item.sequences["cu_seqlens"])])
    inputs = {
        "padded_feature": windows,
        "valid_indices": torch.from_numpy(adapter.metadata(items)["valid_indices"]),
        "cu_seqlens": torch.from_numpy(ends.astype(np.int32)),
    }
    return adapter.forward(inputs, {"cu_seqlens": 104})


def test_a_short_clip_split_off_its_group_keeps_the_groups_width(tower, encode):
    """Packing [250, 50] as 250 and 50 must not turn 50 into a short group."""
    adapter, ordinary = tower
    request = request_of(adapter, [250, 50])
    items = adapter.item_specs(request)
    capacities = adapter.capacities(Settings(audio_chunks="1,3"))
    planner = Planner(capacities, Policy.PACKED, adapter.path, adapter.refusal)
    plan = planner.plan(items)
    assert [isinstance(step, Replay) for step in plan.steps] == [True, True]
    whole = ordinary_output(ordinary, request)
    for step in plan.steps:
        (item,) = step.items
        windows = adapter.eager_inputs(request, (item,))["padded_feature"]
        start = sum(i.tokens for i in items[: item.index])
        torch.testing.assert_close(
            _run(adapter, (item,), windows), whole[start : start + item.tokens], rtol=0, atol=5e-6
        )


def test_short_and_large_groups_run_eagerly_for_their_own_reason(tower):
    adapter, _ = tower
    planner = Planner(
        adapter.capacities(Settings(audio_chunks="1-64")),
        Policy.SINGLE,
        adapter.path,
        adapter.refusal,
    )
    for lengths, reason in (
        ([60, 90], MissReason.REFUSED),
        ([6401], MissReason.TOO_MANY_ROWS),
        ([100] * 9, MissReason.TOO_MANY_ITEMS),
    ):
        plan = planner.plan(adapter.item_specs(request_of(adapter, lengths)))
        assert plan.steps == (Eager(plan.steps[0].items, reason),)


def test_where_every_slot_needs_a_row_a_nearly_full_group_is_checked(tower):
    """As ROCm's attention has it."""
    adapter, _ = tower
    for capacity in adapter.capacities(Settings(audio_chunks="2-64", max_items=8)):
        cases = adapter.worst_cases(capacity)
        first = next(group for group in cases if capacity.misfit(group, False) is None)
        assert sum(item.tokens for item in first) >= capacity.tokens - 13, capacity.key


def test_every_count_has_slots_for_its_worst_group(tower):
    adapter, _ = tower
    rng = np.random.default_rng(5)
    for capacity in adapter.capacities(Settings(audio_chunks="1-64", max_items=5)):
        assert capacity.sequences["cu_seqlens"].max_seqlen == min(104, 13 * capacity.rows)
        for group in adapter.worst_cases(capacity):
            assert capacity.misfit(group) is None
            assert adapter.refusal(group) is None
        assert capacity.is_exact_for(next(iter(adapter.worst_cases(capacity))))
        for _ in range(40):
            left, lengths = capacity.rows, []
            while left and len(lengths) < capacity.items:
                windows = int(rng.integers(1, left + 1))
                left -= windows
                lengths.append(windows * 100 - int(rng.integers(100)))
            lengths[0] = max(lengths[0], 100)
            items = adapter.item_specs(
                {"input_features": torch.empty(128, sum(lengths)), "feature_lens": lengths}
            )
            assert capacity.misfit(items) is None, lengths
            ends = capacity.boundaries(items)["cu_seqlens"]
            assert ends.max_seqlen <= capacity.sequences["cu_seqlens"].max_seqlen


def test_slots_are_no_more_than_a_group_and_its_padding_can_use(tower):
    """One more would be an empty sequence in every graph, which some kernels cannot take."""
    adapter, _ = tower
    one = capacity_of(adapter, 1)
    assert one.boundaries(adapter._items_of([96]))["cu_seqlens"].spare_slots == 0
    assert capacity_of(adapter, 64, max_items=8).sequences["cu_seqlens"].slots == 16


def test_padding_gathers_only_what_exists(tower):
    adapter, _ = tower
    items = adapter.item_specs(request_of(adapter, [150, 30]))
    indices = adapter.metadata(items)["valid_indices"]
    assert indices.tolist() == [*range(20), *range(26, 30)]
    assert adapter.buffers(capacity_of(adapter, 8))["valid_indices"].shape == (104,)


def staged(adapter, request, items, rows):
    """(windows, mel, width) that a graph of so many rows makes of what was staged; the rest of its
    inputs is not a number, as after a poisoned replay."""
    capacity = capacity_of(adapter, rows)
    layout = Layout(adapter.buffers(capacity))
    block = torch.zeros(layout.packed_bytes, dtype=torch.uint8)
    arrays = dict(adapter.metadata(items))
    arrays["cu_seqlens"] = capacity.boundaries(items)["cu_seqlens"].cu_seqlens
    inputs = layout.packed_views(layout.pack(arrays, block))
    inputs[FRAMES] = torch.full((adapter.mel, rows * adapter.width), torch.nan)
    adapter.stage(request, items, inputs)
    return adapter.windows(inputs)


@pytest.mark.parametrize("lengths", [[3000], [1500, 300, 100], [3001], [3001] * 4, [100, 250, 30]])
def test_staging_is_one_copy_whatever_the_lengths(tower, monkeypatch, lengths):
    adapter, _ = tower
    request = request_of(adapter, lengths)
    items = adapter.item_specs(request)
    rows = sum(item.rows for item in items)
    inputs = {FRAMES: torch.full((adapter.mel, rows * adapter.width), torch.nan)}
    stage = adapter.stager(items, inputs)
    copied = []
    copy_ = torch.Tensor.copy_
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "copy_", lambda s, o: copied.append(s.shape) or copy_(s, o))
        stage(request)
    assert copied == [(128, sum(lengths))]
    assert torch.equal(inputs[FRAMES][:, : sum(lengths)], request["input_features"])


@pytest.mark.parametrize("more", [0, 3])
def test_windows_are_those_of_the_encoder_whatever_was_left_in_the_inputs(tower, more):
    adapter, _ = tower
    for lengths in ([3000], [250, 120, 120, 300], [3001] * 4, [100, 30], [30, 100], [101]):
        request = request_of(adapter, lengths)
        items = adapter.item_specs(request)
        expected, _ = chunk_and_pad_features(request["input_features"], request["feature_lens"], 50)
        features = request["input_features"]
        wide = torch.zeros(128, 2 * features.shape[1])
        wide[:, ::2] = features
        for strided in (features, features.T.contiguous().T, wide[:, ::2]):
            asked = request | {"input_features": strided}
            found = staged(adapter, asked, items, len(expected) + more)
            assert torch.equal(found[: len(expected)], expected)
            assert found.is_contiguous() and not found[len(expected) :].any()


def test_a_clip_that_is_not_finite_does_not_reach_the_others_padding(tower):
    adapter, _ = tower
    request = request_of(adapter, [150, 130])
    request["input_features"][:, :150] = torch.nan
    found = staged(adapter, request, adapter.item_specs(request), 6)
    assert found[:2, :, 0].isnan().all() and not found[1, :, 50:].any()
    assert found[2:].isfinite().all()


def test_staging_follows_the_order_of_the_items(tower):
    adapter, _ = tower
    request = request_of(adapter, [200, 150, 100])
    items = adapter.item_specs(request)
    target = staged(adapter, request, (items[2], items[0], items[1]), 5)
    features = request["input_features"]
    assert torch.equal(target[0], features[:, 350:450])
    assert torch.equal(target[1:3], features[:, :200].view(128, 2, 100).transpose(0, 1))
    assert torch.equal(target[4, :, :50], features[:, 300:350])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"feature_lens": [200, 0]}, r"^item 1: feature_lens is 0; a clip has 1 frame or more"),
        ({"feature_lens": [201, -1]}, r"^item 1: feature_lens is -1"),
        ({"feature_lens": [100, 101]}, r"^input_features has 200 frames.*sum to 201"),
        ({"feature_lens": [150]}, r"^item 0: input_features has 200 frames"),
        ({"feature_lens": [100.0, 100.0]}, r"^item 0: feature_lens must be one whole number"),
        ({"feature_lens": 200}, r"^feature_lens must hold one whole number for each item"),
        ({"feature_lens": "200"}, r"^feature_lens must hold one whole number for each item"),
        ({"feature_lens": None}, r"^input_features came without feature_lens"),
        ({"feature_lens": []}, r"^the group is empty"),
        ({"input_features": None}, r"^the group is empty; pass input_features"),
        ({"input_features": torch.zeros(80, 200)}, r"^input_features must be \(128, frames"),
        ({"input_features": torch.zeros(2, 128, 100)}, r"^input_features must be \(128, frames"),
        ({"input_features": torch.zeros(128, 200).int()}, r"floating-point mel features"),
        ({"input_features": [torch.zeros(128, 100)] * 2}, r"concatenate the clips"),
        ({"input_features": torch.zeros(128, 200, device="meta")}, r"on meta, the encoder on cpu"),
        ({"input_features": torch.zeros(128, 200).to_sparse()}, r"sparse_coo; pass a dense tensor"),
        (
            {"feature_lens": torch.ones(2).to("meta")},
            r"^feature_lens is .*on meta; pass its values",
        ),
    ],
)
def test_a_wrong_clip_is_named_with_the_fix(tower, change, message):
    adapter, _ = tower
    request = request_of(adapter, [100, 100]) | change
    with pytest.raises(InputError, match=message):
        adapter.item_specs(request)


@pytest.mark.parametrize("spelling", ["tensor", "column", "array", "list", "tensors", "tuple"])
def test_lengths_and_features_come_in_vllms_spelling_too(tower, encode, spelling):
    adapter, _ = tower
    request = request_of(adapter, [150, 100])
    lengths = request["feature_lens"]
    spelt = {
        "tensor": lengths,
        "column": lengths[:, None],
        "array": lengths.numpy(),
        "list": [150, 100],
        "tensors": list(lengths[:, None]),
        "tuple": (150, 100),
    }[spelling]
    renamed = {
        "input_audio_features": request["input_features"],
        "audio_feature_lengths": spelt,
        "feature_attention_mask": "left alone",
    }
    assert adapter.item_specs(renamed) == adapter.item_specs(request)
    assert torch.equal(encode(adapter, renamed)[0], encode(adapter, request)[0])


def test_a_nan_stays_in_its_own_clip(tower, encode):
    adapter, _ = tower
    request = request_of(adapter, [150, 150])
    request["input_features"][0, 20] = torch.nan
    (out,) = encode(adapter, request)
    assert out[:20].isnan().any()
    assert out[20:].isfinite().all()


def test_attention_windows_come_from_the_configuration(platform_stub, encode):
    adapter = FACTORY.build("tiny", CPU, torch.float32)
    adapter.encoder.n_window_infer = 200
    other = Qwen3OmniAudio(adapter.encoder)
    ordinary = copy.deepcopy(adapter.encoder)
    other.prepare(platform_stub)
    request = request_of(other, [450])
    (item,) = other.item_specs(request)
    assert item.sequences == {"cu_seqlens": (26, 26, 7)}
    (ours,) = encode(other, request)
    torch.testing.assert_close(ours, ordinary_output(ordinary, request), rtol=0, atol=1e-6)


def test_linear_layers_need_no_weight_tensor(tower):
    """Of a quantised layer `weight` is a function."""

    class Packed(torch.nn.Module):
        def weight(self) -> None: ...

    encoder = copy.deepcopy(tower[1])
    encoder.conv_out = Packed()
    adapter = FACTORY.wrap(encoder)
    assert (adapter.device, adapter.dtype) == (CPU, torch.float32)


def test_the_full_preset_has_the_published_sizes():
    config = FACTORY.presets["full"]()
    sizes = (config.encoder_layers, config.d_model, config.output_dim, config.n_window)
    assert sizes == (32, 1280, 2048, 50)
    assert config.n_window_infer == 800
    with pytest.raises(SettingsError, match=r"^unknown preset 'huge'; presets: tiny, full"):
        FACTORY.build("huge", CPU, torch.float32)


def test_other_modules_are_not_wrapped(tower):
    adapter, _ = tower
    assert FACTORY.wrap(torch.nn.Linear(1, 1)) is None
    assert isinstance(FACTORY.wrap(adapter.encoder), Qwen3OmniAudio)


def test_sound_files_load_through_the_feature_extractor(tower, encode, tmp_path: Path):
    adapter, ordinary = tower
    speech = read_sound(sample_speech(), 0, 16_000)
    assert np.abs(speech).max() > 0.05
    stereo = np.stack([speech[:24_000], speech[:24_000]], axis=1)
    soundfile.write(tmp_path / "a.flac", stereo, 16_000)
    soundfile.write(tmp_path / "b.wav", speech[: 3 * 48_000], 48_000)
    request = FACTORY.load(adapter, [tmp_path / "a.flac", tmp_path / "b.wav"])
    assert request["feature_lens"].tolist() == [150, 300]
    (ours,) = encode(adapter, request)
    torch.testing.assert_close(ours, ordinary_output(ordinary, request), rtol=0, atol=1e-6)
    sample = FACTORY.load(adapter, [])
    assert sample["input_features"].shape[1] == sample["feature_lens"].item() > 100


def test_a_sound_that_cannot_be_decoded_is_named(tower, tmp_path: Path):
    adapter, _ = tower
    (tmp_path / "x.wav").write_bytes(b"RIFF")
    soundfile.write(tmp_path / "empty.wav", np.zeros(0), 16_000)
    soundfile.write(tmp_path / "click.wav", np.zeros(40), 16_000)
    for name, message in (
        ("x.wav", "cannot be decoded as sound"),
        ("gone.wav", "no such file"),
        ("empty.wav", "holds no sample"),
        ("click.wav", "holds 40 samples at 16000 Hz; the spectrum needs 201"),
    ):
        with pytest.raises(InputError, match=rf"^item 1: .*{name}.*{message}"):
            FACTORY.load(adapter, [sample_speech(), tmp_path / name])


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("lengths", [[100], [101], [200, 200], [350, 350, 1], [100, 50]])
def test_a_kept_stager_puts_every_frame_where_it_belongs(tower, lengths, first):
    adapter, _ = tower
    everything = [100] * first + lengths  # the items may be some of a larger request
    items = adapter.item_specs(request_of(adapter, everything))[first:]
    used = sum(lengths)
    target = torch.empty((adapter.mel, used + 100))
    stage = adapter.stager(items, {FRAMES: target})
    for seed in range(3):
        request = request_of(adapter, everything, seed)
        expected = request["input_features"][:, 100 * first :]
        for features in (request["input_features"], request["input_features"].T.contiguous().T):
            target.fill_(float("nan"))
            stage({**request, "input_features": features})
            assert torch.equal(target[:, :used], expected)
            assert target[:, used:].isnan().all()
