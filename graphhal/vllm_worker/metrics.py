"""What an operator sees: Prometheus counters, log lines, a JSON file."""

import json
import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

from graphhal.vllm_worker.last_words import before_the_end
from graphhal.vllm_worker.vllms_log import warn_once

log = logging.getLogger(__name__)

PUBLISH_SECONDS = 2.0
"""How far counters may lag behind; requests pay for no more than a mark."""
LAST_WORDS_SECONDS = 0.5
"""How long the last summary waits for one that is just being written."""


class Prometheus:
    """Counters and gauges that appear on vLLM's `/metrics`.

    vLLM collects from worker processes where `PROMETHEUS_MULTIPROC_DIR` is set, as it is with
    several API servers; workers inherit it. Without the package nothing is published, nor where the
    client fails (a folder that is gone, another's metric of the name): the engine goes on.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._published: Counter[tuple[str, ...]] = Counter()
        self._held = (0, 0)
        self._works = False
        try:
            import prometheus_client
        except ImportError:
            log.debug("prometheus_client is not installed; no metrics are published")
            return
        with self._or_none():
            self._make(prometheus_client)

    def _make(self, prometheus_client: Any) -> None:
        self._hits = _metric(
            prometheus_client.Counter,
            "graphhal_encoder_hits",
            "Items served by replaying a graph.",
            ("model", "modality"),
        )
        self._misses = _metric(
            prometheus_client.Counter,
            "graphhal_encoder_misses",
            "Items that ran eagerly, by reason.",
            ("model", "modality", "reason"),
        )
        self._replays = _metric(
            prometheus_client.Counter,
            "graphhal_encoder_replays",
            "Graphs launched.",
            ("model", "graph"),
        )
        self._rows = _metric(
            prometheus_client.Counter,
            "graphhal_encoder_rows",
            "Input rows of replays: used, and computed with padding.",
            ("model", "kind"),
        )
        self._tokens = _metric(
            prometheus_client.Counter,
            "graphhal_encoder_item_tokens",
            "Items by output tokens; the label is the upper edge.",
            ("model", "edge"),
        )
        self._graphs = _metric(
            prometheus_client.Gauge,
            "graphhal_encoder_graphs",
            "Graphs that can be replayed.",
            ("model",),
            multiprocess_mode="livesum",
        )
        self._bytes = _metric(
            prometheus_client.Gauge,
            "graphhal_encoder_graph_bytes",
            "Device bytes of graphs and their static buffers.",
            ("model",),
            multiprocess_mode="livesum",
        )
        self._works = True

    @contextmanager
    def _or_none(self) -> Iterator[None]:
        """Where the client fails, nothing is published from then on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  (the client's code)
            self._works = False
            log.warning("graphhal: no metrics are published: %s: %s", type(error).__name__, error)

    def held(self, graphs: int, num_bytes: int) -> None:
        """Publish what is there: after capture, after graphs were given up, after the release.
        Engines of one process that serve the same model add up."""
        if self._works:
            before, self._held = self._held, (graphs, num_bytes)
            with self._or_none():
                self._graphs.labels(self._model).inc(graphs - before[0])
                self._bytes.labels(self._model).inc(num_bytes - before[1])

    def served(self, stats: Mapping[str, Any]) -> None:
        """Publish what changed since the last call; `stats` is `EncoderGraphExecutor.stats()`."""
        self.held(stats["graph_count"], stats["graph_bytes"])
        if self._works:
            with self._or_none():
                self._count(stats)

    def _count(self, stats: Mapping[str, Any]) -> None:
        for modality, count in stats["hits"].items():
            self._add(self._hits, count, modality)
        for modality, reasons in stats["misses"].items():
            for reason, count in reasons.items():
                self._add(self._misses, count, modality, reason)
        for graph, count in stats["replays"].items():
            self._add(self._replays, count, graph)
        for kind in ("used", "computed"):
            self._add(self._rows, stats["rows"][kind], kind)
        for edge, count in stats["item_tokens"].items():
            self._add(self._tokens, count, edge)

    def _add(self, metric: Any, count: int, *labels: str) -> None:
        key = (metric._name, *labels)
        new = count - self._published[key]
        if new > 0:
            self._published[key] = count
            metric.labels(self._model, *labels).inc(new)


_metrics: dict[str, Any] = {}


def _metric(kind: Any, name: str, text: str, labels: tuple[str, ...], **options: Any) -> Any:
    """One metric of a process: the client refuses a second of the same name."""
    if name not in _metrics:
        _metrics[name] = kind(name, text, labels, **options)
    return _metrics[name]


_reporters: "weakref.WeakSet[Reporter]" = weakref.WeakSet()


def _free_locks() -> None:
    """In a forked process: the thread that held a lock is not there to let go of it."""
    for reporter in _reporters:
        reporter._lock = threading.Lock()


os.register_at_fork(after_in_child=_free_locks)


def _last_words() -> None:
    for reporter in list(_reporters):
        reporter.last_words()


class Reporter:
    """Publishes what an executor did: at start-up, every so often while serving, at the end.

    A thread of its own publishes, so that the last requests before a pause are seen as well. It
    starts with the first request of a process, and ends with `stop` or with the executor.

    Args:
        model: names it in metrics and lines.
        seconds: between two lines; 0 for none.
        file: JSON written with every line; None for none.
        stats: method that tells the counters, `EncoderGraphExecutor.stats`; not kept alive.
    """

    def __init__(
        self,
        model: str,
        seconds: float,
        file: Path | None,
        stats: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        self.model = model
        self._stats = None if stats is None else weakref.WeakMethod(stats)
        self._news = False
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._seconds = seconds
        self._file = file
        self._prometheus = Prometheus(model)
        self._next = monotonic() + seconds
        self._published = self._reported = 0
        _reporters.add(self)

    def touch(self) -> None:
        """A request is served: what it counts is published soon."""
        if not self._news:
            before_the_end(_last_words)
        self._news = True
        if self._thread is None or not self._thread.is_alive():  # a fork has no threads
            self._stop = threading.Event()
            thread = threading.Thread(
                target=_publish, args=(weakref.ref(self), self._stop), daemon=True,
                name="graphhal-metrics",
            )  # fmt: skip
            try:
                thread.start()
            except RuntimeError as error:  # the system has no thread left: serve all the same
                warn_once(log, "graphhal: counters are published late", str(error))
                return
            self._thread = thread

    def publish(self) -> bool:
        """Publish where something new happened or a line is due; False once the source is gone."""
        source = None if self._stats is None else self._stats()
        if source is None:
            return False
        if self._news or (self.due() and self._published > self._reported):
            self._news = False
            self.served(source())
        return True

    def stop(self) -> None:
        """End the thread; the next request starts another."""
        thread, self._thread = self._thread, None
        self._stop.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5)

    def captured(self, stats: Mapping[str, Any]) -> None:
        """The start-up summary."""
        self._prometheus.held(stats["graph_count"], stats["graph_bytes"])
        log.info(
            "graphhal: %s: %d encoder graphs (%s) in %.1f s and %.1f s of self-check, %.0f MiB, "
            "%d dropped",
            self.model,
            stats["graph_count"],
            ", ".join(stats["modalities"]) or "no modality",
            stats["capture_seconds"],
            stats["self_check_seconds"],
            stats["graph_bytes"] / 2**20,
            len(stats["dropped"]),
        )
        self._write(stats)

    def released(self) -> None:
        """No graph is there any more."""
        self._prometheus.held(0, 0)

    def due(self) -> bool:
        """Whether a line is due now."""
        return self._seconds > 0 and monotonic() >= self._next

    def served(self, stats: Mapping[str, Any], final: bool = False) -> None:
        """Publish; with a line where one is due, or at the end where anything was served."""
        with self._lock:
            self._prometheus.served(stats)
            self._published = stats["graph_hits"] + stats["graph_misses"]
            self._say(stats, final)

    def last_words(self) -> None:
        """The summary of a process that is told to end, within the handler of that signal: without
        the counters, whose client the main thread may be in the middle of."""
        source = None if self._stats is None else self._stats()
        # The main thread itself may hold it, and goes on only when the handler has returned.
        if source is not None and self._lock.acquire(timeout=LAST_WORDS_SECONDS):
            try:
                self._say(source(), final=True)
            finally:
                self._lock.release()

    def _say(self, stats: Mapping[str, Any], final: bool) -> None:
        total = stats["graph_hits"] + stats["graph_misses"]
        if total <= self._reported or not (final or self.due()):
            return
        self._next = monotonic() + self._seconds
        self._reported = total
        self._write(stats)
        log.info("graphhal: %s: %s", self.model, line(stats))

    def _write(self, stats: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            _replace(self._file.resolve(), json.dumps(stats, indent=1) + "\n")
        except (OSError, ValueError) as error:  # ValueError: no name for a file
            log.warning("graphhal: %s cannot be written: %s", self._file, error)
            self._file = None


def _replace(file: Path, text: str) -> None:
    """Write a file so that whoever reads it finds the old text or the new one, whole."""
    if file.exists() and not file.is_file():  # a pipe, a device
        file.write_text(text)
        return
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        part.write_text(text)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def _publish(reference: "weakref.ref[Reporter]", stop: threading.Event) -> None:
    """Body of the thread; holds the reporter no longer than a publication takes."""
    while not stop.wait(PUBLISH_SECONDS):
        reporter = reference()
        try:
            if reporter is None or not reporter.publish():
                return
        except Exception:
            log.exception("counters could not be published; the next try is in a moment")
        del reporter


def line(stats: Mapping[str, Any]) -> str:
    """Hits, misses by reason, padding and tokens, on one line."""
    parts = []
    for modality in sorted({*stats["hits"], *stats["misses"]}):
        misses = stats["misses"].get(modality, {})
        hits = stats["hits"].get(modality, 0)
        reasons = ", ".join(f"{count} {reason}" for reason, count in misses.items())
        parts.append(
            f"{modality} {hits} hits, {sum(misses.values())} misses"
            + (f" ({reasons})" if reasons else "")
        )
    tokens = ", ".join(f"≤{edge}: {count}" for edge, count in stats["item_tokens"].items())
    parts.append(f"padding {stats['padding_waste']:.1%}")
    if tokens:
        parts.append(f"item tokens {tokens}")
    return "; ".join(parts)
