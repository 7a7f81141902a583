"""Checks of the capture hook: warm-up, refusals, and what it leaves behind."""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from graphhal.errors import CaptureError
from graphhal.plan import GraphKey
from graphhal.platform import CaptureRequest
from graphhal.testing.caller_state import CallerState, still_alive, young_garbage
from graphhal.testing.check import check
from graphhal.testing.check_failure import CheckFailure
from graphhal.testing.subject import EXAMPLE, Subject, ToyGraph
from graphhal.testing.toy_encoder import FULL

Inputs = Mapping[str, torch.Tensor]
_ROUNDING = 0.01


class _ToyFaultError(Exception):
    """What the toy forwards below raise."""


@check("graphhal_capture")
def capture_returns_what_was_asked(subject: Subject) -> None:
    """The captured graph carries its request, a handle, and the bytes that it added."""
    toy = subject.capture()
    graph = toy.graph
    if graph.key != toy.capacity.key:
        raise CheckFailure(f"the graph says it is {graph.key}", f"{toy.capacity.key}")
    if graph.request.output.data_ptr() != toy.output.data_ptr():
        raise CheckFailure("graph.request is of another output", "the request that was captured")
    if graph.handle is None:
        raise CheckFailure("graph.handle is None", "the platform's own object until release")
    if not isinstance(graph.num_bytes, int) or graph.num_bytes < 0:
        raise CheckFailure(f"graph.num_bytes is {graph.num_bytes!r}", "bytes, an int of 0 or more")


@check("graphhal_capture")
def capture_warms_up_first(subject: Subject) -> None:
    """The forward runs `warmups` times before the capture: lazy workspaces are made there."""
    calls = 0

    def forward(inputs: Inputs, output: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        output.fill_(1.0)

    subject.capture_request(subject.request(forward, warmups=3))
    if calls < 4:
        raise CheckFailure(f"the forward ran {calls} times in all", "3 warm-ups and the capture")


@check("graphhal_capture")
def capture_refuses_host_reads(subject: Subject) -> None:
    """A value that the device has not computed yet cannot be read: `CaptureError`, no graph."""
    for spelling, read in _HOST_READS.items():

        def forward(
            inputs: Inputs, output: torch.Tensor, read: Callable[[torch.Tensor], object] = read
        ) -> None:
            read(inputs["phases"] + 1.0)
            output.copy_(output * 1.0)

        request = subject.request(forward)
        try:
            subject.capture_request(request)
        except CaptureError:
            continue
        raise CheckFailure(
            f"a forward that calls {spelling} was captured",
            "a HostReadError: a replay would go on with the value of the capture",
        )


_HOST_READS: dict[str, Callable[[torch.Tensor], object]] = {
    ".item()": lambda t: t[0, 0].item(),
    ".tolist()": lambda t: t.tolist(),
    "bool()": lambda t: bool(t[0, 0]),
    "float()": lambda t: float(t[0, 0]),
    ".cpu().numpy()": lambda t: t.cpu().numpy(),
    "nonzero()": torch.nonzero,
}


@check("graphhal_capture")
def a_failed_capture_is_a_capture_error(subject: Subject) -> None:
    """A forward that raises, in warm-up or in capture, becomes a `CaptureError` with its cause."""
    for failing_call, phase in ((1, "warm-up"), (3, "capture")):
        try:
            subject.capture_request(_failing(subject, failing_call))
        except CaptureError as error:
            chain: BaseException | None = error
            while chain is not None and not isinstance(chain, _ToyFaultError):
                chain = chain.__cause__ or chain.__context__
            if chain is None:
                raise CheckFailure(
                    f"the CaptureError of a failed {phase} hides its cause: {error!r}",
                    "raise CaptureError(…) from error",
                ) from error
        except Exception as error:
            raise CheckFailure(
                f"a forward that fails in {phase} came out as {type(error).__name__}",
                "a graphhal.errors.CaptureError; its inputs then run eagerly",
            ) from error
        else:
            raise CheckFailure(f"a forward that fails in {phase} was captured", "a CaptureError")


@check("graphhal_capture")
def capture_restores_the_callers_state(subject: Subject) -> None:
    """After a capture, modes, current stream and defaults are as they were."""
    state = CallerState(subject.device)
    subject.capture()
    state.expect_unchanged("after a capture")


@check("graphhal_capture")
def a_failed_capture_restores_the_callers_state(subject: Subject) -> None:
    """After a failed capture, modes, current stream and defaults are as they were."""
    state = CallerState(subject.device)
    _fail(subject, _failing(subject, 3))
    state.expect_unchanged("after a failed capture")


@check("graphhal_capture")
def a_failed_capture_keeps_nothing(subject: Subject) -> None:
    """After a failed capture nobody holds the request's buffers any more."""
    with young_garbage():
        request = _failing(subject, 3)
        buffers = [weakref.ref(request.output), *map(weakref.ref, request.inputs.values())]
        _fail(subject, request)
        del request
        alive = still_alive(buffers)
    if alive:
        raise CheckFailure(
            f"{alive} of {len(buffers)} static buffers of the failed request are still held",
            "no reference to a request whose capture failed",
        )


@check("graphhal_capture")
def a_failed_capture_spares_the_pool(subject: Subject) -> None:
    """After a failed capture in a pool, its graphs replay and it takes further graphs."""
    large = subject.capture(rows=32)
    _fail(subject, replace(_failing(subject, 3), pool=large.graph.pool))
    small = subject.capture(large.encoder, beside=large)
    for toy, which in ((large, "the graph before it"), (small, "a graph after it")):
        mm_kwargs = toy.encoder.request(EXAMPLE, seed=1)
        subject.expect_reference(
            toy.replay(mm_kwargs),
            toy.encoder,
            mm_kwargs,
            f"a replay of {which}",
            "a failed capture to change nothing for the other graphs of its pool",
        )


@check("graphhal_capture")
def capture_in_inference_mode_serves_outside(subject: Subject) -> None:
    """A graph captured under `torch.inference_mode()` replays outside of it."""
    encoder = subject.encoder()
    toy = ToyGraph(subject, encoder, encoder.capacity(16), None)
    request = toy.request(EXAMPLE, None)
    with torch.inference_mode():
        toy.graph = subject.capture_request(request)
    mm_kwargs = encoder.request(EXAMPLE, seed=1)
    subject.expect_reference(
        toy.replay(mm_kwargs), encoder, mm_kwargs, "the replay", "the same output in either mode"
    )


@check("graphhal_capture")
def a_graph_holds_what_it_reads(subject: Subject) -> None:
    """A graph keeps alive every tensor that a replay touches, weights and workspaces included."""

    def make() -> tuple[CaptureRequest, "weakref.ref[torch.Tensor]"]:
        weight = torch.full((16, 1), 3.0, dtype=torch.float32, device=subject.device)

        def forward(inputs: Inputs, output: torch.Tensor) -> None:
            output.copy_((weight * 2.0)[: len(output)].expand(output.shape))

        return subject.request(forward), weakref.ref(weight)

    with young_garbage():
        request, weight = make()
        graph = subject.capture_request(request)
        del request
        alive = still_alive([weight])
    if not alive:
        raise CheckFailure(
            "a tensor that the captured forward reads was freed while the graph lives",
            "strong references to all that a replay reads, until release",
        )
    output = subject.launch(graph)
    subject.expect_close(output, torch.full_like(output, 6.0), "the replay", "6.0 everywhere")


@check("graphhal_capture")
def graphs_of_one_key_are_distinct(subject: Subject) -> None:
    """Capturing a key again, after release, captures anew; nothing is remembered by key."""
    values = {}
    for value in (1.0, 2.0):

        def forward(inputs: Inputs, output: torch.Tensor, value: float = value) -> None:
            output.fill_(value)

        request = replace(subject.request(forward), key=GraphKey("toy", "again", 16))
        graph = subject.capture_request(request)
        values[value] = float(subject.launch(graph).mean())
        subject.platform.release([graph])
    if any(abs(wanted - found) > _ROUNDING for wanted, found in values.items()):
        raise CheckFailure(
            f"the graphs that write 1 and 2 left {list(values.values())}",
            "each capture to record the forward of its own request",
        )


def _failing(subject: Subject, failing_call: int) -> CaptureRequest:
    calls = 0

    def forward(inputs: Inputs, output: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        output.copy_(output + inputs[FULL][0])
        if calls == failing_call:
            raise _ToyFaultError("the toy forward fails on purpose")

    return subject.request(forward)


def _fail(subject: Subject, request: CaptureRequest) -> None:
    try:
        subject.capture_request(request)
    except CaptureError:
        return
    raise CheckFailure("a forward that raises was captured", "a CaptureError")
