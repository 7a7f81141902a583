"""What an operator sees: counters across processes, lines that fire, a JSON file."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from graphhal.vllm_worker import metrics

STATS: dict[str, Any] = {
    "model": "M",
    "modalities": ["image"],
    "graph_hits": 3,
    "graph_misses": 2,
    "hits": {"image": 3},
    "misses": {"image": {"more rows than the largest graph": 2}},
    "replays": {"t/image[64]": 3},
    "item_tokens": {"64": 5},
    "rows": {"used": 600, "computed": 768},
    "padding_waste": 1 - 600 / 768,
    "graph_count": 7,
    "graph_bytes": 5 * 2**20,
    "capture_seconds": 1.5,
    "self_check_seconds": 0.5,
    "dropped": [],
}


def test_counters_of_a_worker_appear_in_another_process(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    worker = (
        "import json, sys\n"
        "from graphhal.vllm_worker.metrics import Reporter\n"
        "stats = json.loads(sys.argv[1])\n"
        "reporter = Reporter('M', 0, None)\n"
        "reporter.captured(stats)\n"
        "reporter.served(stats)\n"
        "reporter.served(stats)\n"
        "stats['hits']['image'] = 10\n"
        "reporter.served(stats)\n"
    )
    server = (
        "import prometheus_client, prometheus_client.multiprocess as m, sys\n"
        "registry = prometheus_client.CollectorRegistry()\n"
        "m.MultiProcessCollector(registry)\n"
        "sys.stdout.write(prometheus_client.generate_latest(registry).decode())\n"
    )
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for code, arguments in ((worker, [json.dumps(STATS)]), (server, [])):
        found = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert found.returncode == 0, found.stderr
    text = found.stdout
    assert 'graphhal_encoder_hits_total{modality="image",model="M"} 10.0' in text
    assert (
        'graphhal_encoder_misses_total{modality="image",model="M",'
        'reason="more rows than the largest graph"} 2.0' in text
    )
    assert 'graphhal_encoder_replays_total{graph="t/image[64]",model="M"} 3.0' in text
    assert 'graphhal_encoder_rows_total{kind="computed",model="M"} 768.0' in text
    assert 'graphhal_encoder_item_tokens_total{edge="64",model="M"} 5.0' in text


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(metrics, "monotonic", lambda: now[0])
    return now


def test_the_periodic_line_fires_by_the_clock(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """Counting requests modulo a number misses when groups step over it."""
    reporter = metrics.Reporter("M", 10, None)
    with caplog.at_level("INFO", logger=metrics.log.name):
        reporter.served(STATS)
        assert caplog.records == []
        clock[0] = 10.5
        assert reporter.due()
        reporter.served(STATS)
        assert not reporter.due()
    (record,) = caplog.records
    assert record.getMessage() == (
        "graphhal: M: image 3 hits, 2 misses (2 more rows than the largest graph); "
        "padding 21.9%; item tokens ≤64: 5"
    )


def test_a_summary_at_the_end_only_where_something_was_served(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    reporter = metrics.Reporter("M", 0, None)
    with caplog.at_level("INFO", logger=metrics.log.name):
        reporter.served({**STATS, "graph_hits": 0, "graph_misses": 0}, final=True)
        assert caplog.records == []
        reporter.served(STATS, final=True)
        reporter.served(STATS, final=True)
    assert len(caplog.records) == 1


def test_start_up_says_what_was_dropped_and_why(caplog: pytest.LogCaptureFixture) -> None:
    reporter = metrics.Reporter("M", 0, None)
    dropped = [(f"t/image[{n}]", "memory_limit: 2 bytes needed, 1 allowed") for n in range(9)]
    with caplog.at_level("INFO", logger=metrics.log.name):
        reporter.captured({**STATS, "dropped": dropped})
    lines = [record.getMessage() for record in caplog.records]
    assert (
        lines[0] == "graphhal: M: 7 encoder graphs (image) in 1.5 s and 0.5 s of self-check, 5 MiB"
    )
    assert lines[1].startswith("graphhal: M: 9 graphs dropped (t/image[0], t/image[1]")
    assert lines[1].endswith("…): memory_limit: 2 bytes needed, 1 allowed")


def test_json_is_written_and_a_bad_place_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "stats.json"
    metrics.Reporter("M", 0, file).captured(STATS)
    assert json.loads(file.read_text())["graph_hits"] == 3
    reporter = metrics.Reporter("M", 0, tmp_path / "absent" / "stats.json")
    for _ in range(2):
        reporter.captured(STATS)
    assert len([r for r in caplog.records if "cannot be written" in r.getMessage()]) == 1
