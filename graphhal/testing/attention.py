"""Checks of `PlatformInfo.attention` and of eager steps, without any graph."""

from contextlib import suppress

import torch

from graphhal.boundaries import Boundaries
from graphhal.errors import BoundariesError
from graphhal.platform import StepKind
from graphhal.testing.check import check
from graphhal.testing.check_failure import CheckFailure
from graphhal.testing.subject import Subject
from graphhal.testing.toy_encoder import FULL, HEAD_DIM, HEADS, ToyItem, reference_attention

_ATTENTION = "PlatformInfo.attention"


@check("graphhal_step and PlatformInfo.attention")
def eager_matches_the_reference(subject: Subject) -> None:
    """Eager steps, of requests and of start-up, compute what the host computes."""
    encoder = subject.encoder()
    mm_kwargs = encoder.request([ToyItem(8, window=4, phase=1.0), 2, 6], seed=1)
    kinds: tuple[StepKind, ...] = ("eager", "reference")
    for kind in kinds:
        subject.expect_reference(
            subject.eager(encoder, mm_kwargs, kind),
            encoder,
            mm_kwargs,
            f"a step of kind {kind!r}",
            "attention within each sequence of the boundaries given to the step",
        )


@check(_ATTENTION)
def attention_uses_the_scale(subject: Subject) -> None:
    """`scale` multiplies the scores as it was passed, whatever the head size."""
    _attend(subject, scale=0.5, strided=False, unused_rows=0, what="with scale 0.5")


@check(_ATTENTION)
def attention_takes_strided_rows(subject: Subject) -> None:
    """`query`, `key` and `value` may be views of one fused projection."""
    _attend(subject, HEAD_DIM**-0.5, strided=True, unused_rows=0, what="of strided views")


@check(_ATTENTION)
def attention_ignores_rows_past_the_end(subject: Subject) -> None:
    """Rows past the last end are in no sequence: NaN there reaches no real row, or is refused."""
    with suppress(BoundariesError):
        _attend(subject, HEAD_DIM**-0.5, strided=False, unused_rows=4, what="beside 4 rows of NaN")


def _attend(subject: Subject, scale: float, strided: bool, unused_rows: int, what: str) -> None:
    lengths = (6, 2, 4)
    ends = Boundaries.from_lengths(lengths)
    rows = ends.rows + unused_rows
    draw = torch.Generator().manual_seed(3)
    fused = torch.randn(rows, 3, HEADS, HEAD_DIM, generator=draw, device="cpu").to(subject.dtype)
    fused[ends.rows :] = float("nan")
    device = fused.to(subject.device)
    query, key, value = device.unbind(1)
    if not strided:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    cu_seqlens = torch.from_numpy(ends.cu_seqlens.copy()).to(subject.device)
    inputs: dict[str, torch.Tensor] = {FULL: cu_seqlens}
    with subject.step("eager", None, inputs, {FULL: ends}) as scope, torch.no_grad():
        mixed = subject.info.attention(query, key, value, cu_seqlens, ends.max_seqlen, scale)
        owned = scope.empty(mixed.shape, mixed.dtype)
        owned.copy_(mixed)
    if owned.shape != (rows, HEADS, HEAD_DIM):
        raise CheckFailure(
            f"attention returned shape {tuple(owned.shape)}", f"({rows}, {HEADS}, {HEAD_DIM})"
        )
    query, key, value = fused[: ends.rows].double().unbind(1)
    subject.expect_close(
        owned[: ends.rows].reshape(ends.rows, -1),
        reference_attention(query, key, value, lengths, scale).reshape(ends.rows, -1),
        f"attention {what}",
        "softmax(scale · query · key) · value within each sequence",
    )
