"""What an operator sees: counters across processes, lines that fire, a JSON file."""

import functools
import json
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
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
        "stats['graph_count'] = 5\n"
        "reporter.served(stats)\n"
        "other = Reporter('N', 0, None)\n"
        "other.captured(stats)\n"
        "other.released()\n"
        "first, second = (Reporter('P', 0, None) for _ in range(2))\n"
        "first.captured(stats)\n"
        "second.captured(stats)\n"
        "first.released()\n"
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
    # Graphs given up since capture, and all of them after the release.
    assert 'graphhal_encoder_graphs{model="M"} 5.0' in text
    assert 'graphhal_encoder_graphs{model="N"} 0.0' in text
    # The engine before is collected after the one that follows has captured.
    assert 'graphhal_encoder_graphs{model="P"} 5.0' in text
    assert 'graphhal_encoder_graph_bytes{model="N"} 0.0' in text


@pytest.mark.parametrize("why", ["no folder", "a name that is taken"])
def test_metrics_that_cannot_be_published_end_no_worker(tmp_path: Path, why: str) -> None:
    """A folder of an engine that has ended, or another's metric."""
    pytest.importorskip("prometheus_client")
    code = (
        "import json, logging, sys\n"
        "logging.basicConfig(stream=sys.stdout, level='WARNING')\n"
        "if sys.argv[2]:\n"
        "    import prometheus_client\n"
        "    prometheus_client.Counter('graphhal_encoder_misses', 'text', ('model',))\n"
        "from graphhal.vllm_worker.metrics import Reporter\n"
        "reporter = Reporter('M', 0, None)\n"
        "stats = json.loads(sys.argv[1])\n"
        "reporter.captured(stats)\n"
        "reporter.served(stats)\n"
        "reporter.served(stats, final=True)\n"
        "reporter.released()\n"
    )
    environment = dict(os.environ)
    if why == "no folder":
        environment["PROMETHEUS_MULTIPROC_DIR"] = str(tmp_path / "absent")
    taken = "" if why == "no folder" else "taken"
    found = subprocess.run(
        [sys.executable, "-c", code, json.dumps(STATS), taken],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    (line,) = found.stdout.splitlines()
    assert "no metrics are published: " in line


def test_an_engine_without_the_client_publishes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert not metrics.Prometheus("M")._works


def test_counters_that_begin_again_end_no_metrics(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a model is given up in a later capture: the client refuses to count down."""
    client = pytest.importorskip("prometheus_client")
    monkeypatch.setattr(metrics, "_metrics", {})
    registry = client.CollectorRegistry()
    for kind in ("Counter", "Gauge"):
        plain = getattr(client, kind)
        monkeypatch.setattr(client, kind, functools.partial(plain, registry=registry))
    prometheus = metrics.Prometheus("M")
    for hits in (5, 2, 7):
        prometheus.served({**STATS, "hits": {"image": hits}})
    assert not caplog.records
    labels = {"model": "M", "modality": "image"}
    assert registry.get_sample_value("graphhal_encoder_hits_total", labels) == 7


class Source:
    """Whose counters are reported."""

    def __init__(self) -> None:
        self.hits = 0

    def stats(self) -> dict[str, Any]:
        return {**STATS, "graph_hits": self.hits, "graph_misses": 0}


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it did not happen within ten seconds")


def test_the_last_requests_before_a_pause_are_published(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No further request comes that could notice that a line is due."""
    monkeypatch.setattr(metrics, "PUBLISH_SECONDS", 0.02)
    source = Source()
    reporter = metrics.Reporter("M", 0.2, None, source.stats)
    published: list[int] = []
    monkeypatch.setattr(
        reporter._prometheus, "served", lambda stats: published.append(stats["graph_hits"])
    )
    with caplog.at_level("INFO", logger=metrics.log.name):
        source.hits = 3
        reporter.touch()
        wait_until(lambda: 3 in published)
        wait_until(lambda: any("hits" in r.getMessage() for r in caplog.records))
        source.hits = 4
        reporter.touch()
        wait_until(lambda: 4 in published)
    reporter.stop()
    count = len(published)
    time.sleep(0.1)
    assert len(published) == count
    reporter.touch()
    wait_until(lambda: len(published) > count)
    reporter.stop()


def test_nothing_is_published_again_while_nothing_happens() -> None:
    source = Source()
    reporter = metrics.Reporter("M", 1e-9, None, source.stats)  # a line would always be due
    calls: list[Any] = []
    reporter.served = lambda stats, final=False: calls.append(stats)  # type: ignore[method-assign]
    reporter._news = True
    assert reporter.publish()
    assert reporter.publish()
    assert len(calls) == 1


def test_a_request_within_a_publication_is_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source()
    reporter = metrics.Reporter("M", 0, None, source.stats)
    reporter._news, held = True, list[bool]()

    def published(stats: Any) -> None:
        held.append(reporter._lock.locked())  # the main thread's last one waits, and adds nothing
        reporter._news = True

    monkeypatch.setattr(reporter._prometheus, "served", published)
    assert reporter.publish()
    assert reporter._news
    assert held == [True]


def test_last_words_that_fail_keep_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source()
    reporter = metrics.Reporter("M", 0, None, source.stats)
    monkeypatch.setattr(metrics, "line", lambda stats: 1 / 0)
    source.hits = 1
    with pytest.raises(ZeroDivisionError):
        reporter.last_words()
    assert not reporter._lock.locked()


def test_a_thread_that_is_stopped_is_over_unless_it_stops_itself() -> None:
    source = Source()
    reporter = metrics.Reporter("M", 0, None, source.stats)
    reporter.touch()
    thread = reporter._thread
    assert thread is not None
    reporter.stop()
    assert not thread.is_alive()
    reporter._thread = threading.current_thread()  # an executor that its own thread collects
    reporter.stop()
    assert reporter._thread is None


def test_the_thread_ends_with_what_it_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "PUBLISH_SECONDS", 0.02)
    source = Source()
    reporter = metrics.Reporter("M", 0, None, source.stats)
    reporter.touch()
    thread = reporter._thread
    assert thread is not None
    assert thread.daemon
    del source
    wait_until(lambda: not thread.is_alive())
    source, turns = Source(), list[int]()
    reporter = metrics.Reporter("M", 0, None, source.stats)
    reporter._prometheus.served = lambda _: turns.append(1)  # type: ignore[method-assign]
    reporter.touch()
    thread = reporter._thread
    assert thread is not None
    wait_until(lambda: bool(turns))
    del reporter  # the thread keeps it no longer than a publication takes
    wait_until(lambda: not thread.is_alive())


def test_a_failed_publication_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics, "PUBLISH_SECONDS", 0.02)
    reporter = metrics.Reporter("M", 0, None, Source().stats)
    turns: list[int] = []

    def publish() -> bool:
        turns.append(1)
        if len(turns) == 1:
            raise RuntimeError("dictionary changed size during iteration")
        return len(turns) < 3

    reporter.publish = publish  # type: ignore[method-assign]
    reporter.touch()
    wait_until(lambda: len(turns) == 3)
    assert "could not be published" in caplog.text


def test_a_system_without_threads_still_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    source = Source()
    reporter = metrics.Reporter("M", 0, None, source.stats)
    with monkeypatch.context() as full, caplog.at_level(logging.WARNING):
        full.setattr(threading.Thread, "start", no_thread)
        reporter.touch()
        reporter.touch()
    assert [record.getMessage() for record in caplog.records] == [
        "graphhal: counters are published late: can't start new thread"
    ]
    reporter.touch()
    assert reporter._thread is not None
    reporter.stop()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_publishes_as_well() -> None:
    code = (
        "import os, time\n"
        "from graphhal.vllm_worker import metrics\n"
        "metrics.PUBLISH_SECONDS = 0.02\n"
        "class Source:\n"
        "    def stats(self):\n"
        "        return {'graph_hits': 1, 'graph_misses': 0}\n"
        "source = Source()\n"
        "reporter = metrics.Reporter('M', 0, None, source.stats)\n"
        "seen = []\n"
        "reporter._prometheus.served = lambda stats: seen.append(os.getpid())\n"
        "reporter.touch()\n"
        "while not seen: time.sleep(0.02)\n"
        "if os.fork() == 0:\n"
        "    reporter.touch()\n"
        "    while os.getpid() not in seen: time.sleep(0.02)\n"
        "    os._exit(7)\n"
        "print(os.waitstatus_to_exitcode(os.wait()[1]))\n"
    )
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert out.stdout.strip() == "7"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_process_forked_while_a_line_is_written_says_its_own() -> None:
    """The thread that holds the lock is not there to let go of it."""
    reporter = metrics.Reporter("M", 0, None)
    with reporter._lock:
        child = multiprocessing.get_context("fork").Process(
            target=reporter.served, args=(STATS,), kwargs={"final": True}
        )
        child.start()
    child.join(timeout=20)
    hangs = child.is_alive()
    child.kill()
    assert not hangs
    assert child.exitcode == 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(metrics, "monotonic", lambda: now[0])
    return now


def test_the_periodic_line_fires_by_the_clock(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """Counting requests modulo a number misses when groups step over it."""
    reporter, never = metrics.Reporter("M", 10, None), metrics.Reporter("M", 0, None)
    with caplog.at_level("INFO", logger=metrics.log.name):
        reporter.served(STATS)
        assert caplog.records == []
        clock[0] = 10.5
        never.served(STATS)
        assert caplog.records == []
        assert reporter.due()
        reporter.served(STATS)
        assert not reporter.due()
    (record,) = caplog.records
    assert record.getMessage() == (
        "graphhal: M: image 3 hits, 2 misses (2 more rows than the largest graph); "
        "padding 21.9%; item tokens ≤64: 5"
    )


def test_a_line_tells_of_every_modality_and_of_nothing_that_was_not() -> None:
    stats = {"hits": {"image": 1}, "misses": {"video": {"why": 2}}, "item_tokens": {}}
    assert metrics.line({**stats, "padding_waste": 0.0}) == (
        "image 1 hits, 0 misses; video 0 hits, 2 misses (2 why); padding 0.0%"
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


def test_start_up_says_what_there_is(caplog: pytest.LogCaptureFixture) -> None:
    """What was dropped and why, the engine has said before."""
    reporter = metrics.Reporter("M", 0, None)
    dropped = [(f"t/image[{n}]", "memory_limit") for n in range(9)]
    with caplog.at_level("INFO", logger=metrics.log.name):
        reporter.captured({**STATS, "dropped": dropped})
    (line,) = (record.getMessage() for record in caplog.records)
    assert line == (
        "graphhal: M: 7 encoder graphs (image) in 1.5 s and 0.5 s of self-check, 5 MiB, 9 dropped"
    )


def test_json_is_written_and_a_bad_place_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "stats.json"
    metrics.Reporter("M", 0, file).captured(STATS)
    assert json.loads(file.read_text())["graph_hits"] == 3
    for bad in ("absent/stats.json", "no\0name"):
        caplog.clear()
        reporter = metrics.Reporter("M", 0, tmp_path / bad)
        for _ in range(2):
            reporter.captured(STATS)
        assert len([r for r in caplog.records if "cannot be written" in r.getMessage()]) == 1


def test_a_reader_of_the_json_never_finds_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk, or a worker that is killed, while it is written."""
    file, link = tmp_path / "stats.json", tmp_path / "link.json"
    link.symlink_to(file)
    reporter = metrics.Reporter("M", 0, link)
    reporter.captured(STATS)
    write = Path.write_text

    def half(self: Path, text: str, *args: Any) -> int:
        assert f".{os.getpid()}." in self.name, "another worker may write the same file now"
        write(self, text[: len(text) // 2])
        assert json.loads(file.read_text())["graph_hits"] == 3
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    reporter.captured({**STATS, "graph_hits": 4})
    assert "no space left" in caplog.text
    assert json.loads(file.read_text())["graph_hits"] == 3
    assert sorted(tmp_path.iterdir()) == [link, file]
    assert link.is_symlink()


def test_json_goes_into_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True)
    metrics.Reporter("M", 0, pipe).captured(STATS)
    out, _ = reader.communicate(timeout=30)
    assert json.loads(out)["graph_hits"] == 3
    assert pipe.is_fifo()
