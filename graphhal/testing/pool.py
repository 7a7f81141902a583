"""Checks of pools, of the bytes that a platform reports, and of the poison for the self-check."""

import weakref
from collections.abc import Mapping

import torch

from graphhal.errors import CaptureError
from graphhal.testing.caller_state import still_alive, young_garbage
from graphhal.testing.check import check
from graphhal.testing.check_failure import CheckFailure, NotApplicable
from graphhal.testing.subject import EXAMPLE, Subject, ToyGraph

Inputs = Mapping[str, torch.Tensor]


def _heavy(subject: Subject, share: int = 1) -> ToyGraph:
    """A toy graph whose activations are megabytes (or a share of that); not captured."""
    rows = (256 if subject.device.type == "cpu" else 2048) // share
    encoder = subject.encoder(budgets=(rows,))
    return ToyGraph(subject, encoder, encoder.capacity(rows, max_seqlen=rows // 4), None)


@check("graphhal_capture: pool", waivable=True)
def graphs_share_the_pool(subject: Subject) -> None:
    """A smaller graph captured in the pool of a larger one adds little: activations are shared."""
    apart = subject.capture_request(_heavy(subject, 2).request(EXAMPLE, None)).num_bytes
    large = subject.capture_request(_heavy(subject).request(EXAMPLE, None))
    small = subject.capture_request(_heavy(subject, 2).request(EXAMPLE, large.pool))
    if small.num_bytes > 3 * apart // 4:
        raise CheckFailure(
            f"beside a graph twice its size, a graph added {small.num_bytes} bytes "
            f"({apart} in a pool of its own)",
            "CaptureRequest.pool to be used: what the larger graph needs serves the smaller one",
        )


@check("CapturedGraph.num_bytes", waivable=True)
def graph_bytes_are_measured(subject: Subject) -> None:
    """`num_bytes` of a graph with megabytes of activations is that large, not zero."""
    graph = subject.capture_request(_heavy(subject).request(EXAMPLE, None))
    if graph.num_bytes < graph.request.output.nbytes:
        raise CheckFailure(
            f"a graph of {len(graph.request.output)} tokens reports {graph.num_bytes} bytes",
            f"more than the {graph.request.output.nbytes} of one output: memory limits rest on it",
        )


@check("graphhal_profile_memory", waivable=True)
def the_profile_foretells_capture(subject: Subject) -> None:
    """`profile_memory` says what capturing the same requests then takes, within a factor of 2."""
    shares = (1, 2)
    profile = subject.platform.profile_memory(
        [_heavy(subject, share).request(EXAMPLE, None) for share in shares]
    )
    pool, taken = None, 0
    for share in shares:
        graph = subject.capture_request(_heavy(subject, share).request(EXAMPLE, pool))
        pool, taken = graph.pool, taken + graph.num_bytes
    if not taken / 2 <= profile.settled_bytes <= taken * 2:
        raise CheckFailure(
            f"the profile says {profile.settled_bytes} bytes, capture then took {taken}",
            "the same within a factor of 2; the host sizes its KV cache by it",
        )
    if profile.transient_bytes < 0:
        raise CheckFailure(f"transient_bytes is {profile.transient_bytes}", "0 or more")


@check("graphhal_profile_memory")
def the_profile_names_every_graph(subject: Subject) -> None:
    """`per_graph` has the bytes of every requested key, so that a limit can drop the right ones."""
    requests = [_heavy(subject, share).request(EXAMPLE, None) for share in (4, 8)]
    profile = subject.platform.profile_memory(requests)
    missing = [str(r.key) for r in requests if r.key not in profile.per_graph]
    if missing:
        raise CheckFailure(f"per_graph lacks {', '.join(missing)}", "an entry for every request")


@check("graphhal_profile_memory")
def the_profile_keeps_nothing(subject: Subject) -> None:
    """After profiling, nobody holds the requests' buffers: the host's KV cache comes next."""
    with young_garbage():
        request = _heavy(subject, 8).request(EXAMPLE, None)
        buffers = [weakref.ref(request.output), *map(weakref.ref, request.inputs.values())]
        subject.platform.profile_memory([request])
        del request
        alive = still_alive(buffers)
    if alive:
        raise CheckFailure(
            f"{alive} of {len(buffers)} static buffers of the profiled request are still held",
            "everything that profiling captured to be released",
        )


@check("CapturedGraph.poison", waivable=True)
def poison_shows_unwritten_rows(subject: Subject) -> None:
    """After `poison`, a forward that reads memory it never wrote shows NaN, or it is refused."""

    def forward(inputs: Inputs, output: torch.Tensor) -> None:
        scratch = torch.empty_like(output)
        scratch[:4].fill_(1.0)
        output.copy_(scratch * 0.0 + 1.0)

    request = subject.request(forward)
    try:
        graph = subject.capture_request(request)
    except CaptureError as error:  # a platform may compare its first replay with the warm-up
        raise NotApplicable(f"capture refused to read unwritten memory: {error}") from error
    if graph.poison is None:
        raise CheckFailure(
            "poison is None",
            "a callable; or this check's name in PlatformInfo.unclaimed, with the reason",
        )
    graph.poison()
    rows = subject.launch(graph)
    if not bool(rows[4:].isnan().all()):
        raise CheckFailure(
            "rows of scratch memory that nothing writes came out as numbers after poison",
            "NaN: the self-check finds reads of stale memory by it",
        )


@check("CapturedGraph.poison")
def poison_spares_what_is_in_use(subject: Subject) -> None:
    """`poison` fills free memory only: weights, and outputs that callers own, stay."""
    toy = subject.capture()
    if toy.graph.poison is None:
        raise NotApplicable("CapturedGraph.poison is None")
    mm_kwargs = toy.encoder.request((4, 4, 2), seed=1)
    output = toy.replay(mm_kwargs)
    toy.graph.poison()
    again = toy.replay(mm_kwargs)
    for got, which in ((output, "an output from before"), (again, "a replay after")):
        subject.expect_reference(
            got, toy.encoder, mm_kwargs, f"{which} the poison", "only free memory to be filled"
        )
