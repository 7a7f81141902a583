"""Checks of the engine on the platform: what is replayed, what is missed, and that both count."""

import torch

from graphhal.plan import MissReason
from graphhal.runner import EncoderGraphs
from graphhal.settings import SelfCheck, Settings
from graphhal.testing.check import check
from graphhal.testing.check_failure import CheckFailure
from graphhal.testing.subject import Subject, Toys

_SELF_CHECK = SelfCheck.OFF


@check("graphhal_capture")
def the_engine_serves_by_replay(subject: Subject) -> None:
    """A ladder of four graphs is captured whole and serves requests by replay; all are counted."""
    encoder = subject.encoder(budgets=(16, 24, 32, 48))
    graphs = EncoderGraphs(encoder, subject.platform, Settings(self_check=_SELF_CHECK))
    try:
        report = graphs.capture()
        if report.dropped:
            dropped = "; ".join(f"{d.key}: {d.reason}" for d in report.dropped)
            raise CheckFailure(f"graphs were dropped: {dropped}", "all four captured")
        groups: tuple[Toys, ...] = ((8, 2), (14, 8), (20, 8), (30, 12))
        _serve(subject, graphs, groups)
        stats = graphs.stats()
        items = sum(map(len, groups))
        if stats["hits"] != {"image": items} or stats["misses"]:
            raise CheckFailure(
                f"of {items} items, hits are {stats['hits']} and misses {stats['misses']}",
                "every item served by replay",
                "graphhal_step and graphhal_replay",
            )
    finally:
        graphs.clear()


@check("graphhal_step")
def the_engine_counts_its_misses(subject: Subject) -> None:
    """A request too large for any graph is encoded eagerly, right, and counted with its reason."""
    graphs = EncoderGraphs(
        subject.encoder(budgets=(16,)), subject.platform, Settings(self_check=_SELF_CHECK)
    )
    try:
        graphs.capture()
        _serve(subject, graphs, ((20, 8),))
        misses = graphs.stats()["misses"]
        if misses != {"image": {MissReason.TOO_MANY_ROWS: 2}}:
            raise CheckFailure(f"misses are {misses}", f"2 under {MissReason.TOO_MANY_ROWS!s}")
    finally:
        graphs.clear()


def _serve(subject: Subject, graphs: EncoderGraphs, groups: tuple[Toys, ...]) -> None:
    encoder = subject.encoder()
    requests = [encoder.request(group, seed) for seed, group in enumerate(groups)]
    outputs = [torch.cat(graphs.run(mm_kwargs)) for mm_kwargs in requests]
    for group, output, mm_kwargs in zip(groups, outputs, requests, strict=True):
        subject.expect_reference(
            output, encoder, mm_kwargs, f"request {group}", "the encoder's output, hit or miss"
        )
