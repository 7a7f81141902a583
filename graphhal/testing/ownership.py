"""Checks of the step: who owns its outputs, and what it leaves behind on leaving."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from graphhal.plan import GraphKey
from graphhal.testing.caller_state import CallerState
from graphhal.testing.check import check
from graphhal.testing.check_failure import CheckFailure
from graphhal.testing.subject import EXAMPLE, Subject, ToyGraph

_EMPTY = "graphhal_step: StepScope.empty"


def _expect_kept(
    subject: Subject, toy: ToyGraph, output: torch.Tensor, mm_kwargs: Any, after: str
) -> None:
    subject.expect_reference(
        output,
        toy.encoder,
        mm_kwargs,
        f"an output kept until after {after}",
        "memory that the caller owns: encoder caches keep outputs across requests",
    )


@check(_EMPTY)
def outputs_survive_later_replays(subject: Subject) -> None:
    """What a request got is not overwritten by the requests after it."""
    toy = subject.capture()
    mm_kwargs = toy.encoder.request(EXAMPLE, seed=1)
    output = toy.replay(mm_kwargs)
    for seed in (2, 3):
        toy.replay(toy.encoder.request(EXAMPLE, seed))
    _expect_kept(subject, toy, output, mm_kwargs, "two later replays")


@check(_EMPTY)
def outputs_survive_a_later_capture(subject: Subject) -> None:
    """Outputs lie outside the graph pool: a later capture in it does not reach them."""
    toy = subject.capture(rows=32)
    mm_kwargs = toy.encoder.request(EXAMPLE, seed=1)
    output = toy.replay(mm_kwargs)
    subject.capture(toy.encoder, beside=toy)
    _expect_kept(subject, toy, output, mm_kwargs, "a later capture in the same pool")


@check(_EMPTY)
def outputs_survive_release(subject: Subject) -> None:
    """Outputs outlive the graphs that made them."""
    toy = subject.capture()
    mm_kwargs = toy.encoder.request(EXAMPLE, seed=1)
    output = toy.replay(mm_kwargs)
    subject.platform.release([toy.graph])
    _expect_kept(subject, toy, output, mm_kwargs, "the release of its graph")


@check(_EMPTY)
def outputs_of_one_step_are_apart(subject: Subject) -> None:
    """Two outputs asked for in one step do not share memory, equal shapes or not."""
    toy = subject.capture()
    with toy.launched(toy.encoder.request(EXAMPLE, seed=1)) as scope:
        first = scope.empty((5, 8), subject.dtype)
        second = scope.empty((5, 8), subject.dtype)
        first.fill_(1.0)
        second.fill_(2.0)
    if not bool((first.float() == 1.0).all().cpu()):
        raise CheckFailure("a second scope.empty overwrote the first", "fresh memory each time")


@check(_EMPTY)
def empty_is_what_was_asked(subject: Subject) -> None:
    """`scope.empty` has the shape, dtype and device asked for, rows side by side, size 0 too."""
    toy = subject.capture()
    replay = subject.step("replay", toy.graph, toy.inputs, toy.graph.request.boundaries)
    eager = subject.step("eager", None, {}, toy.graph.request.boundaries)
    wanted = (((3, 5), subject.dtype), ((0, 4), subject.dtype), ((7,), torch.int64))
    for kind, step in (("replay", replay), ("eager", eager)):
        with step as scope:
            for shape, dtype in wanted:
                got = scope.empty(shape, dtype)
                asked = (shape, dtype, subject.device, True)
                found = (tuple(got.shape), got.dtype, got.device, got.is_contiguous())
                if found != asked:
                    raise CheckFailure(
                        f"in a step of kind {kind}, empty{(shape, dtype)} gave {found}",
                        f"(shape, dtype, device, contiguous) {asked}",
                    )


@check("graphhal_step")
def a_step_restores_the_callers_state(subject: Subject) -> None:
    """After a step, replay or eager, modes, current stream and defaults are as they were."""
    toy = subject.capture()
    mm_kwargs = toy.encoder.request(EXAMPLE, seed=1)
    state = CallerState(subject.device)
    toy.replay(mm_kwargs)
    state.expect_unchanged("after a replay step")
    subject.eager(toy.encoder, mm_kwargs)
    state.expect_unchanged("after an eager step")


@check("graphhal_step")
def a_failed_step_restores_the_callers_state(subject: Subject) -> None:
    """A step left by an exception restores the caller's state all the same."""
    toy = subject.capture()
    state = CallerState(subject.device)
    with suppress(KeyError), toy.launched(toy.encoder.request(EXAMPLE, seed=1)):
        raise KeyError("the copy-out fails on purpose")
    state.expect_unchanged("after a step that an exception left")


@check("graphhal_step")
def errors_leave_a_step(subject: Subject) -> None:
    """An exception inside a step comes out of it as it is, never swallowed or replaced."""
    toy = subject.capture()
    fault = KeyError("the copy-out fails on purpose")
    try:
        with subject.step("replay", toy.graph, toy.inputs, toy.graph.request.boundaries):
            raise fault
    except KeyError as error:
        if error is fault:
            return
    raise CheckFailure("an exception inside a step did not come out", "the same exception")


@check("graphhal_step", waivable=True)
def no_step_inside_a_capture(subject: Subject) -> None:
    """While a capture runs, `graphhal_step` returns None: the engine then stays out of it."""
    toy = subject.capture()
    answers: list[object] = []

    def forward(inputs: object, output: torch.Tensor) -> None:
        answers.append(
            subject.platform.step("replay", toy.graph, toy.inputs, toy.graph.request.boundaries)
        )
        output.fill_(1.0)

    request = replace(subject.request(forward), key=GraphKey("toy", "outer", 16))
    subject.capture_request(request)
    if answers[-1] is not None:
        raise CheckFailure(
            f"a step inside a capture got {answers[-1]!r}",
            "None: a replay there would be recorded into a host's graph, or break it",
        )
