"""The counters of all encoders of a model, summed."""

from collections.abc import Iterable, Mapping
from typing import Any

from graphhal.runner import EncoderGraphs


def summed(
    encoders: Iterable[EncoderGraphs], unsized: Mapping[tuple[str, str], int]
) -> dict[str, Any]:
    """Counters and graphs as plain data.

    Args:
        encoders: graphs of each.
        unsized: misses that no encoder counted, by modality and reason.
    """
    hits: dict[str, int] = {}
    misses: dict[str, dict[str, int]] = {}
    replays: dict[str, int] = {}
    tokens: dict[str, int] = {}
    dropped: list[tuple[str, str]] = []
    used = computed = graph_count = graph_bytes = 0
    seconds = check_seconds = 0.0
    # Copied at once, here and below: the thread that publishes asks while requests count.
    for (modality, reason), count in list(unsized.items()):
        misses.setdefault(modality, {})[reason] = count
    for graphs in encoders:
        one = graphs.stats()
        _add(hits, one["hits"])
        _add(replays, one["replays"])
        _add(tokens, one["item_tokens"])
        for modality, reasons in one["misses"].items():
            _add(misses.setdefault(modality, {}), reasons)
        used += sum(list(graphs.statistics.rows_used.values()))
        computed += sum(list(graphs.statistics.rows_replayed.values()))
        graph_count += one["graph_count"]
        graph_bytes += one["graph_bytes"]
        seconds += one["capture"]["seconds"]
        check_seconds += one["capture"]["self_check_seconds"]
        dropped += [(d["key"], d["reason"]) for d in one["capture"]["dropped"]]
    return {
        "graph_hits": sum(hits.values()),
        "graph_misses": sum(sum(reasons.values()) for reasons in misses.values()),
        "hits": hits,
        "misses": misses,
        "replays": replays,
        "item_tokens": tokens,
        "rows": {"used": used, "computed": computed},
        "padding_waste": 1 - used / computed if computed else 0.0,
        "graph_count": graph_count,
        "graph_bytes": graph_bytes,
        "capture_seconds": seconds,
        "self_check_seconds": check_seconds,
        "dropped": dropped,
    }


def _add(totals: dict[str, int], more: Mapping[str, int]) -> None:
    for key, count in more.items():
        totals[key] = totals.get(key, 0) + count
