"""Counters: hits, misses by reason, padding waste, histogram."""

import json

import pytest

from graphhal.items import ItemSpec
from graphhal.plan import MissReason
from graphhal.stats import TOKEN_EDGES, Statistics


def items(*tokens: int, modality: str = "image") -> list[ItemSpec]:
    return [ItemSpec(i, modality, n, n, {}, n) for i, n in enumerate(tokens)]


def test_nothing_happened_yet():
    counted = Statistics().as_dict()
    assert counted["hits"] == counted["misses"] == counted["replays"] == {}
    assert counted["padding_waste"] == 0.0
    json.dumps(counted)


def test_items_are_counted_by_modality_and_reason():
    stats = Statistics()
    stats.count_hits(items(4, 5))
    stats.count_hits(items(7, modality="video"))
    stats.count_misses(items(4, 5, 6), MissReason.NOT_EXACT)
    stats.count_misses(items(4), MissReason.NO_GRAPHS)
    stats.count_misses(items(9, modality="video"), MissReason.NOT_EXACT)
    counted = stats.as_dict()
    assert counted["hits"] == {"image": 2, "video": 1}
    assert counted["misses"] == {
        "image": {str(MissReason.NO_GRAPHS): 1, str(MissReason.NOT_EXACT): 3},
        "video": {str(MissReason.NOT_EXACT): 1},
    }


def test_eager_calls_are_calls_not_items():
    stats = Statistics()
    stats.count_misses(items(4, 5, 6), MissReason.REFUSED)
    assert stats.as_dict()["eager_calls"] == {str(MissReason.REFUSED): 1}


def test_padding_waste_is_computed_rows_that_nobody_asked_for():
    stats = Statistics()
    stats.count_replay("a[8]", 4, 8)
    stats.count_replay("a[8]", 8, 8)
    stats.count_replay("a[32]", 32, 32)
    counted = stats.as_dict()
    assert counted["replays"] == {"a[32]": 1, "a[8]": 2}
    assert counted["padding_waste"] == pytest.approx(4 / 48)
    assert counted["padding_waste_by_graph"] == {"a[32]": 0.0, "a[8]": 0.25}


def test_the_histogram_has_upper_edges():
    stats = Statistics()
    stats.count_hits(items(1, 16, 17, 32, TOKEN_EDGES[-1]))
    stats.count_misses(items(TOKEN_EDGES[-1] + 1), MissReason.TOO_MANY_ROWS)
    assert stats.as_dict()["item_tokens"] == {
        "16": 2,
        "32": 2,
        str(TOKEN_EDGES[-1]): 1,
        "inf": 1,
    }


def test_reasons_read_as_words_in_json():
    stats = Statistics()
    stats.count_misses(items(4), MissReason.OUTER_CAPTURE)
    text = json.dumps(stats.as_dict())
    assert "another capture is running on this stream" in text
    assert "MissReason" not in text
