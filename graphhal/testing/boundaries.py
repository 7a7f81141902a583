"""Checks of the boundary update: every way in which sequences differ between two replays."""

from contextlib import suppress

import torch

from graphhal.testing.check import check
from graphhal.testing.check_failure import CheckFailure, NotApplicable
from graphhal.testing.subject import EXAMPLE, Subject, ToyGraph, Toys
from graphhal.testing.toy_encoder import ToyItem

_UPDATE = "graphhal_update_boundaries"


def _replay(subject: Subject, toy: ToyGraph, items: Toys, seed: int, expected: str) -> None:
    mm_kwargs = toy.encoder.request(items, seed)
    shown = [item if isinstance(item, int) else item.windows for item in items]
    subject.expect_reference(
        toy.replay(mm_kwargs), toy.encoder, mm_kwargs, f"a replay of sequences {shown}", expected
    )


@check(_UPDATE)
def other_ends_are_read(subject: Subject) -> None:
    """Captured with lengths 8 and 2, replayed with 2 and 8: as many sequences, other ends."""
    toy = subject.capture(example=(8, 2))
    _replay(subject, toy, (2, 8), 1, "attention within the ends of this replay")


@check(_UPDATE)
def fewer_sequences_leave_no_tail(subject: Subject) -> None:
    """After five short sequences, two: nothing of the longer boundary list stays behind."""
    toy = subject.capture(example=(2, 2, 2, 2, 2))
    _replay(subject, toy, (6, 4), 1, "the old ends past the new last one to be gone")


@check(_UPDATE)
def a_lone_sequence_is_not_stretched(subject: Subject) -> None:
    """One short sequence in a wide graph: the padding is no part of it."""
    toy = subject.capture()
    _replay(subject, toy, (2,), 1, "the slack in a sequence of its own")


@check(_UPDATE)
def a_full_graph_has_empty_slots(subject: Subject) -> None:
    """All rows real, sequence slots to spare: the last row counts, empty slots change nothing."""
    items: Toys = (10, 6) if subject.info.allow_empty else (6, 2, 2, 2, 2, 2)
    toy = subject.capture(example=items)
    _replay(subject, toy, items, 1, "every row right, the last one included")


@check(_UPDATE)
def padding_rows_are_written(subject: Subject) -> None:
    """Padding rows come out finite although all free memory held NaN: nothing is left unwritten."""
    toy = subject.capture()
    toy.poison()
    with toy.launched(toy.encoder.request(EXAMPLE, seed=1)):
        pass
    finite = toy.output.float().isfinite().all(dim=1).cpu()
    if not bool(finite.all()):
        rows = [row for row, good in enumerate(finite.tolist()) if not good]
        raise CheckFailure(
            f"output rows {rows} are not finite; the real ones are 0 to 4",
            "padding rows attended within their own sequence, or cleared: a maximum or a scale "
            "over all rows would carry NaN into real ones",
        )


@check(_UPDATE)
def two_layers_have_their_own_ends(subject: Subject) -> None:
    """The windowed layer and the full layer of one graph get different boundaries."""
    toy = subject.capture()
    items = (ToyItem(8, window=4), 2, 2)
    _replay(subject, toy, items, 1, "each boundary set to reach the layers that read it")


@check("the attention's use of max_seqlen")
def the_bound_is_the_captured_one(subject: Subject) -> None:
    """A sequence as long as the captured bound, longer than any that capture itself saw."""
    # No more slots than rows for each: some kernels take no empty sequence.
    toy = subject.capture(subject.encoder(slots=4), example=(8, 2, 2), max_seqlen=12)
    _replay(subject, toy, (12, 2), 1, "max_seqlen as it was passed, not the example's longest")


@check(_UPDATE)
def an_update_is_for_its_graph(subject: Subject) -> None:
    """Two encoders with graphs of equal size: an update reaches the graph that it names."""
    image = subject.capture(subject.encoder(path="image"))
    video = subject.capture(subject.encoder(path="video"))
    for seed, toy in enumerate((image, video)):
        _replay(subject, toy, (4, 4, 2), seed, "registries keyed by the whole graph key")


@check(_UPDATE)
def back_to_back_replays_keep_theirs(subject: Subject) -> None:
    """Eight replays queued without a wait, each with other boundaries: none is merged or late."""
    toy = subject.capture()
    requests = [toy.encoder.request(((8, 2), (4, 4, 2))[n % 2], seed=n) for n in range(8)]
    outputs = [toy.replay(mm_kwargs).clone() for mm_kwargs in requests]
    for number, (output, mm_kwargs) in enumerate(zip(outputs, requests, strict=True)):
        subject.expect_reference(
            output,
            toy.encoder,
            mm_kwargs,
            f"replay {number} of 8 in a row",
            "the boundaries that were given for it",
        )


@check(_UPDATE)
def the_packed_block_arrives_whole(subject: Subject) -> None:
    """Host metadata beside the boundaries (positions and the like) is copied with every update,
    also where the ends are those of the update before."""
    toy = subject.capture()
    for phase in (2.0, -3.0):
        items = (ToyItem(8, phase=phase), ToyItem(2, phase=-phase))
        _replay(subject, toy, items, 1, "all bytes of HostUpdate.block on the device")


@check("PlatformInfo.boundaries_persist")
def boundaries_persist_as_claimed(subject: Subject) -> None:
    """With `boundaries_persist`, a replay without an update uses the boundaries of the last one."""
    if not subject.info.boundaries_persist:
        raise NotApplicable("PlatformInfo.boundaries_persist is False: every replay is updated")
    toy = subject.capture()
    toy.replay(toy.encoder.request((4, 4, 2), seed=1))
    mm_kwargs = toy.encoder.request((4, 4, 2), seed=2)
    subject.expect_reference(
        toy.replay(mm_kwargs, update=False),
        toy.encoder,
        mm_kwargs,
        "a replay whose unchanged boundaries were not updated again",
        "the boundaries still there, or boundaries_persist=False",
    )


@check("graphhal_step")
def an_eager_call_leaves_boundaries_alone(subject: Subject) -> None:
    """An eager call between two replays does not change what the second one reads."""
    toy = subject.capture()
    encoder = toy.encoder
    toy.replay(encoder.request((4, 4, 2), seed=1))
    subject.eager(encoder, encoder.request((6, 2), seed=2))
    mm_kwargs = encoder.request((4, 4, 2), seed=3)
    subject.expect_reference(
        toy.replay(mm_kwargs, update=not subject.info.boundaries_persist),
        encoder,
        mm_kwargs,
        "a replay after an eager call",
        "boundaries of eager calls kept apart from the graphs'",
    )


@check("graphhal_step")
def a_step_that_fails_leaves_no_debt(subject: Subject) -> None:
    """A step left by an exception after its update does not spoil the next replay."""
    toy = subject.capture()
    with suppress(KeyError), toy.launched(toy.encoder.request((4, 4, 2), seed=1)):
        raise KeyError("the copy-out fails on purpose")
    _replay(subject, toy, EXAMPLE, 2, "the next step to start afresh")


@check(_UPDATE)
def a_block_may_be_reused(subject: Subject) -> None:
    """One host block and its boundaries serve many replays; the update does not consume them."""
    toy = subject.capture()
    mm_kwargs = toy.encoder.request((4, 4, 2), seed=1)
    host = toy.update(mm_kwargs)
    before = host.block.clone()
    with subject.step("replay", toy.graph, toy.inputs, host.boundaries):
        subject.platform.update_boundaries(toy.graph, host)
        subject.platform.replay(toy.graph)
    toy.output.cpu()
    if not torch.equal(host.block, before):
        raise CheckFailure("the update wrote into HostUpdate.block", "the block only read")
