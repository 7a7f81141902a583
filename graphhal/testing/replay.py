"""Checks of the replay hook: new contents, frozen host values, its own rows only."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from graphhal.testing.check import check
from graphhal.testing.check_failure import CheckFailure
from graphhal.testing.subject import EXAMPLE, Subject

Inputs = Mapping[str, torch.Tensor]


@check("graphhal_replay")
def replay_sees_new_pixels(subject: Subject) -> None:
    """A second replay of equal sizes reads what was staged for it."""
    toy = subject.capture()
    for seed in (1, 2):
        mm_kwargs = toy.encoder.request(EXAMPLE, seed)
        output = toy.replay(mm_kwargs)
    subject.expect_reference(
        output, toy.encoder, mm_kwargs, "replay 2", "the output of the pixels staged for replay 2"
    )


@check("graphhal_replay")
def replay_is_repeatable(subject: Subject) -> None:
    """Replaying the same inputs again writes the same output, bit by bit."""
    toy = subject.capture()
    mm_kwargs = toy.encoder.request(EXAMPLE, seed=1)
    first, second = (toy.replay(mm_kwargs).cpu().clone() for _ in range(2))
    if not torch.equal(first, second):
        off = float((first.double() - second.double()).abs().max())
        raise CheckFailure(
            f"the same replay twice differs by up to {off:.3g}",
            "equal bits: a replay overwrites what the one before left",
        )


@check("graphhal_replay")
def replay_freezes_host_values(subject: Subject) -> None:
    """A Python number that the forward used is the capture's; replay runs no Python of it."""
    factor = [2.0]

    def forward(inputs: Inputs, output: torch.Tensor) -> None:
        output.fill_(1.0)
        output.mul_(factor[0])

    request = subject.request(forward)
    graph = subject.capture_request(request)
    factor[0] = 5.0
    found = float(subject.launch(graph).mean())
    if abs(found - 2.0) > 0.01:
        raise CheckFailure(
            f"a factor of 2 at capture, 5 at replay, gave {found:g}",
            "2: a platform that computes it anew hides what a device would get wrong",
        )


@check("graphhal_replay")
def replay_reads_weights_in_place(subject: Subject) -> None:
    """A weight that was updated in place after capture is read with its new values."""
    toy = subject.capture()
    with torch.no_grad():
        toy.encoder.weights["level_1"].mul_(-2.0)
    mm_kwargs = toy.encoder.request(EXAMPLE, seed=1)
    subject.expect_reference(
        toy.replay(mm_kwargs),
        toy.encoder,
        mm_kwargs,
        "a replay after a weight changed in place",
        "weights read by address; no copy of them baked into the graph",
        "graphhal_capture",
    )


@check("graphhal_replay")
def replay_stays_in_its_rows(subject: Subject) -> None:
    """A replay writes its own rows of the shared static output, and no input."""
    large = subject.capture(rows=32)
    small = subject.capture(large.encoder, beside=large)
    large.arena.output.fill_(7.0)
    mm_kwargs = small.encoder.request(EXAMPLE, seed=1)
    with small.launched(mm_kwargs):
        pass
    spared = large.arena.output[len(small.output) :].float().cpu()
    if not bool((spared == 7.0).all()):
        raise CheckFailure(
            "a replay wrote rows of the shared output beyond its own",
            f"rows {len(small.output)} and later untouched",
        )
    host = small.update(mm_kwargs)
    with subject.step("replay", small.graph, small.inputs, host.boundaries), torch.no_grad():
        small.encoder.stage(mm_kwargs, small.encoder.item_specs(mm_kwargs), small.inputs)
        staged = {name: view.cpu().clone() for name, view in small.inputs.items()}
        subject.replay_updated(small.graph, host)
    for name, before in staged.items():
        if not torch.equal(small.inputs[name].cpu(), before):
            raise CheckFailure(f"a replay changed its input {name!r}", "inputs only read")


@check("graphhal_replay")
def graphs_of_two_sizes_take_turns(subject: Subject) -> None:
    """Two graphs over one arena and pool, replayed in turn, each give their own output."""
    large = subject.capture(rows=96)
    small = subject.capture(large.encoder, beside=large)
    for turn, (toy, items) in enumerate(((small, (8, 2)), (large, (4, 4, 2))) * 2):
        mm_kwargs = toy.encoder.request(items, seed=turn)
        subject.expect_reference(
            toy.replay(mm_kwargs),
            toy.encoder,
            mm_kwargs,
            f"turn {turn}, a graph of {toy.capacity.rows} rows",
            "the graph that was asked for to run, whichever was captured last",
        )


@check("graphhal_replay")
def replay_works_in_inference_mode(subject: Subject) -> None:
    """A graph captured outside `torch.inference_mode()` replays inside of it, as hosts do."""
    toy = subject.capture()
    mm_kwargs = toy.encoder.request(EXAMPLE, seed=1)
    with torch.inference_mode():
        output = toy.replay(mm_kwargs)
    subject.expect_reference(
        output, toy.encoder, mm_kwargs, "a replay in inference mode", "the same output"
    )


@check("graphhal_replay")
def replay_works_from_another_thread(subject: Subject) -> None:
    """A thread that did not capture can replay; streams and devices are per thread."""
    toy = subject.capture()
    mm_kwargs = toy.encoder.request(EXAMPLE, seed=1)
    outcome: list[Any] = []

    def serve() -> None:
        try:
            outcome.append(toy.replay(mm_kwargs).cpu())
        except Exception as error:  # noqa: BLE001  (handed to the thread that judges it)
            outcome.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    if isinstance(outcome[0], Exception):
        raise CheckFailure(
            f"a replay in another thread raised {outcome[0]!r}", "it to work"
        ) from outcome[0]
    subject.expect_reference(
        outcome[0], toy.encoder, mm_kwargs, "a replay in another thread", "the same output"
    )


@check("graphhal_replay")
def replay_never_waits(subject: Subject) -> None:
    """Replay, boundary update and step ask for no synchronisation with the device."""
    toy = subject.capture()
    mm_kwargs = toy.encoder.request(EXAMPLE, seed=1)
    toy.replay(mm_kwargs)
    pixels = {**mm_kwargs, "pixels": mm_kwargs["pixels"].to(subject.device)}
    waits: list[str] = []
    with _counted(subject, waits):
        toy.replay(pixels)
    if waits:
        raise CheckFailure(
            f"a replay called {', '.join(sorted(set(waits)))}",
            "work only queued: a wait costs every request the depth of the queue",
        )


@contextmanager
def _counted(subject: Subject, waits: list[str]) -> Iterator[None]:
    """Note calls of everything in PyTorch that waits for the device."""
    places: list[tuple[Any, str]] = [(torch.accelerator, "synchronize")]
    if subject.device.type != "cpu":
        module = torch.get_device_module(subject.device)
        places.append((module, "synchronize"))
        places += [
            (kind, "synchronize")
            for name in ("Stream", "Event")
            if isinstance(kind := getattr(module, name, None), type)
        ]
    with ExitStack() as stack:
        for place, name in places:
            shown = f"{getattr(place, '__name__', place)}.{name}"
            stack.enter_context(mock.patch.object(place, name, _noting(shown, waits)))
        yield


def _noting(shown: str, waits: list[str]) -> Callable[..., None]:
    def note(*_: object, **__: object) -> None:
        waits.append(shown)

    return note
