"""The commands, run in process on the reference platform with small ladders."""

import base64
import io
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from rich.console import Console
from rich.text import Text
from typer.testing import CliRunner, Result

import graphhal
from graphhal import discovery
from graphhal.bench import measure, workload
from graphhal.cli import screen
from graphhal.cli.app import app, main
from graphhal.hookspecs import hookimpl
from graphhal.platform import Unavailable
from graphhal.runner import EncoderGraphs
from graphhal.stats import Statistics

SMALL = ["--platform", "cpu", "--set", "token_budgets=16,32", "--set", "audio_chunks=1-2"]
QUICK = [*SMALL, "--set", "self_check=quick", "--repeat", "3"]
NAN = float("nan")
VISION, AUDIO = "qwen3_omni_vision", "qwen3_omni_audio"


@pytest.fixture(autouse=True)
def few_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SECONDS_PER_INPUT", 0.0)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def output_json(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def photograph(tmp_path: Path) -> Path:
    path = tmp_path / "a <i>$[b]$&.png"
    noise = np.random.default_rng(0).integers(0, 255, (96, 128, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    return path


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    path = tmp_path / "clip.wav"
    noise = np.random.default_rng(0).normal(size=2 * 16_000).astype(np.float32) / 10
    soundfile.write(path, noise, 16_000)
    return path


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"graphhal {graphhal.__version__}\n")


def test_platforms_says_why_each_is_or_is_not_usable() -> None:
    found = output_json(run("platforms", "--json"))
    by_name = {platform["name"]: platform for platform in found["platforms"]}
    assert set(by_name) >= {"cpu", "cuda", "npu", "rocm"}
    assert by_name["cpu"]["usable"]
    assert by_name["cpu"]["distribution"] == "graphhal"
    assert by_name["cpu"]["version"] == graphhal.__version__
    for platform in by_name.values():
        assert platform["usable"] or re.match("not (usable|loaded): .", platform["status"])
    assert [p["name"] for p in found["platforms"] if p["active"]] == [found["active"]]


def test_platforms_table_names_the_active_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHHAL_PLATFORM", "cpu")
    result = run("platforms")
    assert result.exit_code == 0
    assert "active: cpu" in result.stdout


def test_a_plugin_that_is_called_like_the_active_one_is_not_active(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GRAPHHAL_PLATFORM", "cpu")
    other = discovery.FoundPlugin("cpu", "vendor", "1.0", "another plugin is already called cpu")
    module = sys.modules["graphhal.cli.platforms"]
    monkeypatch.setattr(module, "find_plugins", lambda _: [*discovery.find_plugins(), other])
    found = output_json(run("platforms", "--json"))
    assert [p["distribution"] for p in found["platforms"] if p["active"]] == ["graphhal"]
    assert run("platforms").stdout.count("│ active │") == 1


@pytest.mark.parametrize(("width", "framed"), [(160, True), (52, True), (51, False), (40, False)])
def test_a_narrow_terminal_breaks_no_word(
    monkeypatch: pytest.MonkeyPatch, width: int, framed: bool
) -> None:
    written = io.StringIO()
    monkeypatch.setattr(screen, "console", lambda: Console(file=written, width=width))
    rows = [["photograph 224×224", "41.3 (40.8–41.7)", "bit-equal", "miss: no graph is captured"]]
    rows += [["astronaut", "7.37", Text("rel. L2 1.2e-07, cos ≥ 0.999999"), "hit"]]
    columns = ("input", "graph milliseconds", "parity", "how it was served")
    screen.print_table("bench", columns, rows, right=columns[1:2])
    shown = written.getvalue()
    assert ("│" in shown) == framed
    words = re.split(r"[\s│┃:]+", shown)
    for cell in (*columns[width == 40 :], *rows[0], *map(str, rows[1])):
        assert set(re.split(r"[\s:]+", cell)) <= set(words)
    lines = [line.rstrip() for line in shown.splitlines()]
    assert width == 40 or max(map(len, lines)) <= width
    if width == 40:
        assert lines[1:3] == ["photograph 224×224", "  graph milliseconds: 41.3 (40.8–41.7)"]


@pytest.mark.parametrize("json_too", [True, False])
def test_what_plugins_print_is_not_on_standard_output(
    monkeypatch: pytest.MonkeyPatch, json_too: bool
) -> None:
    class Talkative:
        @hookimpl
        def graphhal_probe(self) -> Unavailable:
            print("looking for devices")
            return Unavailable("there is none", absent=True)

    found = discovery.FoundPlugin("talkative", "vendor", "1", "loaded", Talkative())
    load = discovery._load
    monkeypatch.setattr(discovery, "_load", lambda *a: [*load(*a), found])
    result = run("platforms", *["--json"] * json_too)
    assert result.exit_code == 0
    assert "looking for devices" not in result.stdout
    assert "looking for devices" in result.stderr
    assert "there is none" in result.stdout
    assert not json_too or json.loads(result.stdout)["active"] == "cpu"


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_results_go_nowhere_where_the_output_is_closed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    monkeypatch.setattr("sys.stdout", None)
    assert app(["platforms", *options], standalone_mode=False) is None
    assert capsys.readouterr().err == ""


def test_an_output_of_few_characters_shows_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr("sys.argv", ["graphhal", "plan", *SMALL, "--tower", AUDIO])
    monkeypatch.setattr(screen, "human_bytes", lambda count: "½ MiB")
    with pytest.raises(SystemExit, match=r"^0$"):
        main()
    assert b"? MiB" in written.getvalue()


def test_platforms_diagnoses_where_none_can_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHHAL_BLOCK_PLUGINS", "cpu")
    found = output_json(run("platforms", "--json"))
    assert found["active"] is None
    assert found["problem"].startswith("0 platforms can serve")


def test_platforms_warns_of_names_that_no_plugin_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHHAL_BLOCK_PLUGINS", "cdua")
    result = run("platforms", "--json")
    assert output_json(result)["active"] is not None
    (warning,) = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    assert "GRAPHHAL_BLOCK_PLUGINS names cdua, which is not installed. Installed: " in warning


def test_platforms_says_where_no_platform_has_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHHAL_PLATFORM", "cdua")
    found = output_json(run("platforms", "--json"))
    assert found["problem"].startswith("no platform is called 'cdua'. Platforms: ")


def test_bench_encodes_a_picture_and_reports_parity_time_and_memory(photograph: Path) -> None:
    document = output_json(run("bench", *QUICK, "--tower", VISION, "--image", photograph, "--json"))
    assert document["schema"] == 1
    assert document["agrees"]
    (tower,) = document["towers"]
    alone, group = tower["inputs"]
    assert alone["label"] == "a <i>$[b]$& 128×96"
    assert alone["tokens"] == 12
    assert alone["served"] == "hit"
    assert alone["replays"] == {"qwen3_omni_vision/image[16]": 1}
    assert alone["padding_waste"] == pytest.approx(1 - 12 / 16)
    assert alone["difference"]["relative_l2"] <= tower["tolerance"]
    assert alone["difference"]["min_cosine"] > 0.99999
    assert alone["eager"]["low_ms"] <= alone["eager"]["median_ms"] <= alone["eager"]["high_ms"]
    assert alone["eager"]["repeats"] >= 3
    assert alone["speed_up"] == alone["eager"]["median_ms"] / alone["graph"]["median_ms"]
    assert group["tokens"] == 48
    assert group["served"] == "miss: more rows than the largest graph"
    assert group["misses"] == {"more rows than the largest graph": 4}
    assert [graph["key"] for graph in tower["capture"]["graphs"]] == [
        "qwen3_omni_vision/image[32]",
        "qwen3_omni_vision/image[16]",
    ]
    assert tower["capture"]["bytes"] > 0
    assert tower["stats"]["graph_count"] == 2


def test_bench_encodes_a_clip_whole_and_shortened(clip: Path) -> None:
    document = output_json(run("bench", *QUICK, "--tower", AUDIO, "--audio", clip, "--json"))
    (tower,) = document["towers"]
    assert [line["label"] for line in tower["inputs"]] == [
        "clip first 1 s",
        "clip 2.0 s",
        "4 × clip first 1 s",
        "2 different clips",
    ]
    assert [line["tokens"] for line in tower["inputs"]] == [13, 26, 52, 39]


def test_bench_prints_tables_and_writes_a_report(
    photograph: Path, clip: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report.html"
    towers = ["--tower", VISION, "--tower", AUDIO]
    files = ["--image", photograph, "--audio", clip]
    result = run("bench", *QUICK, *towers, *files, "--report", report)
    assert result.exit_code == 0, result.output
    assert "a <i>$[b]$& 128×96" in result.stdout
    for shown in ("speed-up", "parity", "graphs captured in", VISION, AUDIO, f"report: {report}"):
        assert shown in result.stdout
    page = report.read_text()
    assert "a &lt;i&gt;$[b]$&amp;.png" in page
    assert "<i>" not in page
    assert page.count("data:image/jpeg;base64,") == 1
    assert page.count("data:image/svg+xml;base64,") == 1 + 2 * 4
    for source in re.findall(r'(?:src|href)="([^"]*)"', page):
        assert source.startswith("data:")
    assert "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\"" in page
    assert not re.search(r"<script|<link|@import|url\(|https?:", page)
    for chart in re.findall(r"svg\+xml;base64,([^\"]*)", page):
        drawn = base64.b64decode(chart).decode()
        assert drawn.startswith("<svg")
        assert not re.search(r"<(image|script|!DOCTYPE)", drawn)
        assert not re.search(r'xlink:href="[^#]', drawn)


def test_bench_under_a_limit_runs_eagerly_and_lists_what_was_dropped(
    clip: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report.html"
    options = ["--tower", AUDIO, "--audio", clip, "--set", "memory_limit=1", "--report", report]
    result = run("bench", *QUICK, *options)
    assert result.exit_code == 0, result.output
    assert "miss: no graph is captured" in result.stdout
    assert "dropped qwen3_omni_audio/audio[2]: memory_limit" in result.stdout
    page = report.read_text()
    assert "Dropped graphs" in page
    assert "<code>qwen3_omni_audio/audio[2]</code> memory_limit" in page


@pytest.mark.parametrize("policy", ["single", "packed"])
def test_bench_honours_the_policy(photograph: Path, policy: str) -> None:
    options = ["--image", photograph, "--policy", policy, "--json"]
    document = output_json(run("bench", *QUICK, "--tower", VISION, *options))
    group = document["towers"][0]["inputs"][-1]
    assert document["machine"]["settings"]["policy"] == policy
    assert (group["served"] == "hit") == (policy == "packed")


def test_bench_fails_where_graph_and_eager_disagree(
    photograph: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = EncoderGraphs.run
    monkeypatch.setattr(EncoderGraphs, "run", lambda self, kw: [o * NAN for o in right(self, kw)])
    result = run("bench", *QUICK, "--tower", VISION, "--image", photograph, "--json")
    assert result.exit_code == 1
    assert "graph and eager disagree" in result.stderr
    document = json.loads(result.stdout, parse_constant=pytest.fail)
    assert document["towers"][0]["inputs"][0]["difference"]["relative_l2"] is None


def test_a_slow_input_is_repeated_less_often(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SECONDS_PER_INPUT", 1000.0)
    options = [*SMALL, "--set", "self_check=quick", "--tower", AUDIO, "--audio", clip, "--json"]
    document = output_json(run("bench", "--repeat", 5, *options))
    assert document["towers"][0]["inputs"][0]["eager"]["repeats"] == 5
    monkeypatch.setattr(measure, "SECONDS_PER_INPUT", 0.0)
    document = output_json(run("bench", "--repeat", 5, *options))
    assert document["towers"][0]["inputs"][0]["eager"]["repeats"] == measure.FEWEST_REPEATS


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["bench", "--tower", "nonsense"], 2, "no tower is called 'nonsense'. Towers: qwen3_omni"),
        (["check", "--platform", "abacus"], 2, "no platform is called 'abacus'. Platforms: "),
        (["bench", "--platform", "rocm"], 2, "platform 'rocm' cannot serve this process"),
        (["bench", "--set", "polcy=single"], 2, "unknown option 'polcy'. Options: "),
        (["bench", "--set", "policy"], 2, "--set takes NAME=VALUE, got 'policy'"),
        (["bench", "--set", "policy=fast"], 2, "option 'policy'"),
        (["check", "--set", "policy=fast"], 2, "option 'policy'"),
        (["bench", "--preset", "huge"], 2, "'--preset': 'huge' is not one of"),
        (["bench", "--repeat", "0"], 2, "repeat"),
        (["bench", "--seed", str(2**64)], 2, "seed"),
        (["bench", "--tower", AUDIO, "--image", "x.png"], 2, f"no tower of {AUDIO} encodes --im"),
        (["bench", "--tower", VISION, "--audio", "x.wav"], 2, "encodes --audio x.wav"),
        (["bench", "--report", "/"], 2, "--report / cannot be written; name a file"),
        (["bench", "--report", "/nowhere/r.html"], 2, "/nowhere/r.html cannot be written"),
        (["check", "--platform", "cpu", "--set", "audio_chunks=[]", "--tower", AUDIO], 1, "no g"),
        (["plan", "--platform", "cpu", "--trace", "/dev/zero"], 1, "/dev/zero is larger than"),
        (["plan", "--limit", "much"], 2, "memory_limit"),
        (["nonsense"], 2, "nonsense"),
    ],
)
def test_mistakes_are_told_without_a_traceback(
    arguments: list[str], status: int, message: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == status
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_an_unknown_environment_variable_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHHAL_POLCY", "single")
    result = run("platforms")
    assert result.exit_code == 2
    assert "GRAPHHAL_POLCY is not an option" in result.stderr


@pytest.mark.parametrize(
    ("option", "tower", "content"),
    [
        ("--image", VISION, b"no picture"),
        ("--image", VISION, b"\x89PNG\r\n\x1a\n cut off"),
        ("--image", VISION, None),
        ("--audio", AUDIO, b"no sound"),
        ("--audio", AUDIO, None),
    ],
)
def test_a_file_that_cannot_be_decoded_is_named(
    tmp_path: Path, option: str, tower: str, content: bytes | None
) -> None:
    path = tmp_path / "broken"
    if content is not None:
        path.write_bytes(content)
    result = run("bench", *QUICK, "--tower", tower, option, path)
    assert result.exit_code == 1
    said = r"no such\s+file" if content is None else r"cannot\s+be\s+decoded"
    assert re.search(rf"error: item 0: .*broken.*{said}", result.stderr, re.DOTALL)


def test_check_compares_every_graph() -> None:
    found = output_json(run("check", *SMALL, "--tower", AUDIO, "--json"))
    assert [line["key"] for line in found["graphs"]] == [
        "qwen3_omni_audio/audio[1]",
        "qwen3_omni_audio/audio[2]",
    ]
    for line in found["graphs"]:
        assert line["reason"] is None
        assert line["cases"] > 0
        assert line["relative_l2"] <= 1e-5


def test_check_replays_every_worst_case_on_its_own_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHHAL_POLICY", "measured")
    monkeypatch.setenv("GRAPHHAL_EXACT_ONLY", "1")
    replayed: Counter[str] = Counter()
    count = Statistics.count_replay

    def spy(self: Statistics, key: str, used: int, rows: int) -> None:
        replayed[key] += 1
        count(self, key, used, rows)

    monkeypatch.setattr(Statistics, "count_replay", spy)
    options = ["--platform", "cpu", "--set", "audio_chunks=1-4", "--tower", AUDIO, "--json"]
    graphs = output_json(run("check", *options))["graphs"]
    assert [line["cases"] for line in graphs] == [1, 4, 5, 5]
    assert replayed == {line["key"]: line["cases"] for line in graphs}


def test_check_fails_for_a_graph_that_disagrees(monkeypatch: pytest.MonkeyPatch) -> None:
    right = EncoderGraphs.run
    monkeypatch.setattr(EncoderGraphs, "run", lambda self, kw: [o + 0.1 for o in right(self, kw)])
    result = run("check", *SMALL, "--tower", AUDIO)
    assert result.exit_code == 1
    assert "2 of 2 graphs are not right" in result.stderr
    assert "differs from eager" in result.stdout


def test_check_goes_on_where_a_tower_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no weights of this size")

    monkeypatch.setattr("graphhal.adapters.siglip.SiglipFactory.build", broken)
    result = run("check", *SMALL, "--tower", "siglip", "--tower", AUDIO, "--json")
    assert isinstance(result.exception, ValueError)
    first, *others = json.loads(result.stdout)["graphs"]
    assert (first["tower"], first["reason"]) == ("siglip", "ValueError: no weights of this size")
    assert [(line["tower"], line["reason"]) for line in others] == [(AUDIO, None)] * 2


def test_bench_leaves_out_a_tower_for_which_it_has_no_input(
    clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphhal.adapters.qwen3_omni_vision.Qwen3OmniVisionFactory.modality", "3d")
    monkeypatch.setattr("graphhal.adapters.siglip.SiglipFactory.modality", "3d")
    towers = output_json(run("bench", *QUICK, "--audio", clip, "--json"))["towers"]
    assert [each["tower"] for each in towers] == [AUDIO]
    named = run("bench", *QUICK, "--tower", "siglip")
    assert named.exit_code == 1
    assert "error: tower siglip encodes 3d, which has no bench input" in named.stderr


def test_check_fails_for_a_graph_that_was_dropped() -> None:
    result = run("check", *SMALL, "--tower", AUDIO, "--set", "memory_limit=1", "--json")
    assert result.exit_code == 1
    reasons = [line["reason"] for line in json.loads(result.stdout)["graphs"]]
    assert all(reason.startswith("memory_limit: ") for reason in reasons)


def test_plan_says_what_a_workload_needs(tmp_path: Path) -> None:
    groups = [
        {"items": [{"modality": "image", "tokens": 12}], "count": 5},
        {"items": [{"modality": "image", "tokens": 40}]},
        {"items": [{"modality": "audio", "tokens": 20}], "count": 3},
    ]
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"schema": 1, "groups": groups}))
    vision, audio = output_json(
        run("plan", *SMALL, "--trace", trace, "--tower", VISION, "--tower", AUDIO, "--json")
    )["towers"]
    assert [graph["key"] for graph in vision["graphs"]] == ["qwen3_omni_vision/image[16]"]
    assert vision["options"] == {"token_budgets": [16]}
    assert vision["coverage"]["hits"] == 5
    assert vision["coverage"]["misses"] == {"more rows than the largest graph": 1}
    assert vision["coverage"]["padding_waste"] == pytest.approx(0.25)
    assert vision["bytes"] > 0
    assert audio["options"] == {"audio_chunks": [2]}
    assert audio["options_ask_for"] == 1
    assert audio["coverage"]["hit_rate"] == 1.0


@pytest.mark.parametrize(
    ("tower", "modality", "counts", "options", "asked_for", "line"),
    [
        ("siglip", "image", [1, 3], {"max_items": 3}, 3, "MAX_ITEMS=3 asks for 3 graphs, these"),
        ("covo_audio", "audio", [1], {"token_budgets": [188]}, 1, "TOKEN_BUDGETS=188\n"),
        (AUDIO, "audio", [2], {"audio_chunks": [2]}, 1, "AUDIO_CHUNKS=2\n"),
    ],
)
def test_plan_names_an_option_that_the_tower_heeds(
    tmp_path: Path,
    tower: str,
    modality: str,
    counts: list[int],
    options: dict[str, Any],
    asked_for: int,
    line: str,
) -> None:
    tokens = {"siglip": 196, "covo_audio": 188, AUDIO: 13}[tower]
    groups = [{"items": [{"modality": modality, "tokens": tokens}] * count} for count in counts]
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"schema": 1, "groups": groups}))
    asked = ["plan", "--platform", "cpu", "--trace", trace, "--tower", tower]
    (found,) = output_json(run(*asked, "--json"))["towers"]
    assert found["options"] == options
    assert found["options_ask_for"] == asked_for
    assert f"GRAPHHAL_{line}" in run(*asked).stdout
    name, value = next(iter(options.items()))
    given = ",".join(map(str, value)) if isinstance(value, list) else value
    again = output_json(run(*asked, "--set", f"{name}={given}", "--json"))["towers"][0]
    assert again["ladder"] == asked_for
    assert [each["key"] for each in again["graphs"]] == [each["key"] for each in found["graphs"]]


def test_plan_runs_eagerly_what_the_tower_refuses(tmp_path: Path) -> None:
    groups = [
        {"items": [{"modality": "audio", "tokens": 5}, {"modality": "audio", "tokens": 12}]},
        {"items": [{"modality": "audio", "tokens": 5}, {"modality": "audio", "tokens": 13}]},
    ]
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"schema": 1, "groups": groups}))
    (tower,) = output_json(run("plan", *SMALL, "--trace", trace, "--tower", AUDIO, "--json"))[
        "towers"
    ]
    assert tower["coverage"]["hits"] == 2
    assert tower["coverage"]["misses"] == {"the adapter does not replay such a group": 2}


def test_plan_says_why_an_image_misses_where_no_image_needs_a_graph(tmp_path: Path) -> None:
    items = [{"modality": "image", "tokens": 70}, {"modality": "video", "tokens": 16, "frames": 4}]
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"schema": 1, "groups": [{"items": items}]}))
    (tower,) = output_json(run("plan", *SMALL, "--trace", trace, "--tower", VISION, "--json"))[
        "towers"
    ]
    assert [graph["key"] for graph in tower["graphs"]] == ["qwen3_omni_vision/video[16]"]
    assert tower["coverage"]["misses"] == {"more rows than the largest graph": 1}


def test_plan_prints_no_empty_table(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    items = [{"modality": "image", "tokens": 70}]
    trace.write_text(json.dumps({"schema": 1, "groups": [{"items": items}]}))
    result = run("plan", *SMALL, "--trace", trace, "--tower", VISION, "--tower", AUDIO)
    assert result.exit_code == 0
    printed = result.stdout
    assert f"{VISION}: no graph to capture" in printed
    assert "0 of 1 items replayed" in printed
    assert f"{AUDIO}: the trace has no item that it encodes" in printed
    assert "added" not in printed


def test_plan_names_modalities_that_no_tower_encodes(tmp_path: Path) -> None:
    groups = [
        {"items": [{"modality": "audios", "tokens": 5}] * 2, "count": 4},
        {"items": [{"modality": "audio", "tokens": 13}, {"modality": "audios", "tokens": 13}]},
    ]
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"schema": 1, "groups": groups}))
    options = ["plan", *SMALL, "--trace", trace, "--tower", AUDIO]
    assert output_json(run(*options, "--json"))["left_out"] == {"audios": 9}
    shown = run(*options).stdout
    assert "9 items of modality 'audios' are left out; the towers encode audio\n" in shown


def test_plan_under_a_limit_names_what_is_dropped() -> None:
    found = output_json(run("plan", *SMALL, "--tower", AUDIO, "--limit", "1", "--json"))
    (tower,) = found["towers"]
    assert tower["graphs"] == []
    assert len(tower["dropped"]) == 2


def test_plan_without_a_trace_prints_the_ladder() -> None:
    result = run("plan", *SMALL, "--tower", AUDIO)
    assert result.exit_code == 0
    assert "qwen3_omni_audio/audio[2]" in result.stdout
    assert "2 of 2 graphs" in result.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Invalid JSON"),
        ('{"schema": 2, "groups": []}', "schema: Input should be 1"),
        ('{"schema": 1, "groups": []}', "groups: List should have at least 1 item"),
        ('{"schema": 1, "groups": [{"items": [{"modality": "image", "tokens": 0}]}]}', "tokens"),
        ('{"schema": 1, "groups": [{"items": [{"modality": "image", "tokens": "9"}]}]}', "tokens"),
        (
            '{"schema": 1, "groups": [{"items": [{"modality": "image", "tokens": 1000000000}]}]}',
            "tokens: Input should be less than or equal to 16777216",
        ),
        (
            '{"schema":1,"groups":[{"items":[{"modality":"video","tokens":9,"frames":2}]}]}',
            "9 tokens cannot be 2 equal frames",
        ),
        ('{"schema": 1, "groups": [{"items": [{"modality": "image", "tokens": 4}], "n": 1}]}', "n"),
    ],
)
def test_a_malformed_trace_is_told(tmp_path: Path, text: str, message: str) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text(text)
    result = run("plan", "--platform", "cpu", "--trace", trace)
    assert result.exit_code == 1
    assert f"error: trace {trace}: " in result.stderr.replace("\n", "")
    assert message in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        (["--set", "max_tokens=48"], [16, 32, 48]),
        (["--set", "token_budgets=40"], [40]),
    ],
)
def test_the_short_ladder_of_the_reference_platform_gives_way(
    options: list[str], sizes: list[int]
) -> None:
    found = output_json(run("plan", "--platform", "cpu", *options, "--tower", VISION, "--json"))
    keys = {graph["key"] for graph in found["towers"][0]["graphs"]}
    assert {int(key.split("[")[1].split("]")[0].split(",")[0]) for key in keys} == set(sizes)


def test_a_missing_trace_is_told(tmp_path: Path) -> None:
    result = run("plan", "--platform", "cpu", "--trace", tmp_path / "none.json")
    assert result.exit_code == 1
    assert "cannot be read: No such file" in result.stderr


def test_a_trace_that_is_too_large_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "LARGEST_TRACE_BYTES", 10)
    trace = tmp_path / "trace.json"
    trace.write_text('{"schema": 1, "groups": []}')
    result = run("plan", "--platform", "cpu", "--trace", trace)
    assert result.exit_code == 1
    assert "is larger than" in result.stderr


@pytest.mark.parametrize(("package", "told"), [("transformers", True), ("our_own_typo", False)])
def test_an_extra_that_is_not_installed_is_told(
    monkeypatch: pytest.MonkeyPatch, package: str, told: bool
) -> None:
    def missing(*_: object) -> None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=f"{package}.models")

    monkeypatch.setattr("graphhal.cli.towers.find_adapters", missing)
    result = run("check", *SMALL)
    assert result.exit_code == 1
    needs = f"error: the package {package} is not installed; this command needs graphhal[bench]"
    assert (needs in result.stderr) == told
    assert isinstance(result.exception, SystemExit if told else ModuleNotFoundError)


def test_a_report_that_may_not_be_written_is_told_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    result = run("bench", "--report", tmp_path / "r.html")
    assert result.exit_code == 2
    assert "r.html may not be written; name another file" in result.stderr


def test_a_full_disk_is_told(photograph: Path) -> None:
    options = ["--tower", VISION, "--image", photograph, "--report", "/dev/full"]
    result = run("bench", *QUICK, *options)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert "error: [Errno 28] No space left on device" in result.stderr


@pytest.mark.parametrize("command", ["bench", "check", "plan"])
def test_towers_that_cannot_be_loaded_are_told(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise ModuleNotFoundError("No module named 'transformers'")

    monkeypatch.setattr("graphhal.adapters.plugin.graphhal_adapters", hookimpl(broken))
    monkeypatch.setenv("GRAPHHAL_PLUGINS", "nosuch")
    result = run(command, "--platform", "cpu")
    assert result.exit_code == 1
    left_out = "warning: adapters of plugin builtin are left out: ModuleNotFoundError: No mod"
    assert left_out in result.stderr
    assert "warning: GRAPHHAL_PLUGINS names nosuch, which is not installed" in result.stderr
    assert "error: no tower is installed; graphhal's own come with graphhal[bench]" in result.stderr


def test_a_bug_is_not_hidden_behind_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: EncoderGraphs, *_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(EncoderGraphs, "capture", broken)
    result = run("check", *SMALL, "--tower", AUDIO)
    assert isinstance(result.exception, torch.OutOfMemoryError)
