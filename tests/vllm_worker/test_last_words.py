"""A server kills its engine right after it has told it to end: what was served is said first."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from graphhal.vllm_worker import last_words, metrics
from tests.vllm_worker.test_metrics import STATS

ENGINE = """
import json, logging, signal, sys, time
from graphhal.vllm_worker.metrics import Reporter
logging.basicConfig(level="INFO", stream=sys.stdout, format="%(message)s")

class Executor:
    def stats(self):
        return json.loads(sys.argv[1])

executor = Executor()
reporter = Reporter("M", 0, __import__("pathlib").Path(sys.argv[2]), executor.stats)
signal.signal(signal.SIGTERM, lambda *_: time.sleep(60))  # an end in order takes its time
reporter.touch()
print("SERVED", flush=True)
time.sleep(60)
"""


class Host:
    """Handles a signal, as vLLM's engines and workers do; and executors of its process."""

    def __init__(self) -> None:
        self.order: list[Any] = []
        self.reporters: list[metrics.Reporter] = []

    def handle(self, number: int, frame: object) -> None:
        self.order.append((number, frame is not None))

    def stats(self) -> dict[str, Any]:
        self.order.append("asked")
        return STATS

    def serve(self) -> metrics.Reporter:
        """A request: its executor looks whether the host has handlers by now."""
        reporter = metrics.Reporter("M", 0, None, self.stats)
        reporter._prometheus._works = False
        self.reporters.append(reporter)
        last_words.before_the_end(metrics._last_words)
        return reporter


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    before = {number: signal.getsignal(number) for number in last_words.SIGNALS}
    monkeypatch.setattr(last_words, "_next", {})
    monkeypatch.setattr(last_words, "_say", None)
    monkeypatch.setattr(metrics, "_reporters", type(metrics._reporters)())
    yield Host()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_what_was_served_is_said_though_the_engine_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "stats.json"
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, json.dumps(STATS), str(file)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert engine.stdout is not None
    try:
        assert engine.stdout.readline() == "SERVED\n"
        engine.send_signal(signal.SIGTERM)
        said = engine.stdout.readline()
    finally:
        engine.kill()
        engine.communicate()
    assert said.startswith("graphhal: M: image 3 hits, 2 misses")
    assert json.loads(file.read_text())["graph_hits"] == 3


@pytest.mark.parametrize("number", last_words.SIGNALS)
def test_the_host_ends_as_it_would_without(
    host: Host, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    signal.signal(number, host.handle)
    reporters = [host.serve(), host.serve()]
    with caplog.at_level("INFO", logger=metrics.log.name):
        signal.raise_signal(number)
        signal.raise_signal(number)
        for reporter in reporters:
            reporter.served(STATS, final=True)
    ends = [(number, True)]
    assert host.order == [*["asked"] * 2, *ends, *["asked"] * 2, *ends]
    assert len(caplog.records) == 2, "each executor once, whatever comes after"


def test_handlers_that_the_host_sets_later_are_found(host: Host) -> None:
    host.serve()
    signal.signal(signal.SIGTERM, host.handle)
    host.serve()
    host.reporters.clear()  # executors that are gone have nothing to say
    signal.raise_signal(signal.SIGTERM)
    assert host.order == [(signal.SIGTERM, True)]


def test_counters_are_left_alone(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread may hold the lock of their client, and would wait for itself."""
    signal.signal(signal.SIGTERM, host.handle)
    reporter, published = host.serve(), list[object]()
    monkeypatch.setattr(reporter._prometheus, "served", published.append)
    signal.raise_signal(signal.SIGTERM)
    assert published == []
    assert reporter._reported == 5
    reporter.served(STATS)
    assert published == [STATS]


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler])
def test_a_host_that_handles_no_signal_keeps_its_own(host: Host, handler: Any) -> None:
    for number in last_words.SIGNALS:
        signal.signal(number, handler)
    host.serve()
    assert [signal.getsignal(number) for number in last_words.SIGNALS] == [handler] * 2


def test_a_request_of_another_thread_sets_no_handler(host: Host) -> None:
    signal.signal(signal.SIGTERM, host.handle)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(host.serve).result()  # raises what it raised
    assert signal.getsignal(signal.SIGTERM) == host.handle


def _fails() -> None:
    raise RuntimeError("reentrant call inside a writer")


def _holds(reporter: metrics.Reporter) -> Callable[[], None]:
    def end() -> None:
        with reporter._lock:
            signal.raise_signal(signal.SIGTERM)

    return end


@pytest.mark.parametrize("case", ["fails", "interrupted while it writes", "forked"])
def test_the_end_comes_all_the_same(host: Host, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    signal.signal(signal.SIGTERM, host.handle)
    reporter = host.serve()
    end = _holds(reporter) if "while" in case else lambda: signal.raise_signal(signal.SIGTERM)
    if case == "fails":
        monkeypatch.setattr(last_words, "_say", _fails)
    if case == "forked":
        monkeypatch.setattr(os, "getpid", lambda: -1)
    monkeypatch.setattr(metrics, "LAST_WORDS_SECONDS", 0.05)
    end()
    assert host.order == [(signal.SIGTERM, True)]
    assert reporter._reported == 0
    assert not reporter._lock.locked()


def test_a_request_listens_once_until_it_is_published(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    monkeypatch.setattr(metrics, "before_the_end", calls.append)
    reporter = metrics.Reporter("M", 0, None, host.stats)
    reporter._prometheus._works = False
    reporter.touch()
    reporter.touch()
    assert calls == [metrics._last_words]
    reporter.publish()
    reporter.touch()
    assert len(calls) == 2
    reporter.stop()
