"""Checks of release: twice, of nothing, of one among many, and at the end of a process."""

import weakref

from graphhal.errors import ReplayError
from graphhal.testing.caller_state import still_alive, young_garbage
from graphhal.testing.check import check
from graphhal.testing.check_failure import CheckFailure, NotApplicable
from graphhal.testing.contract import in_fresh_process
from graphhal.testing.subject import EXAMPLE, Subject

_RELEASE = "graphhal_release"


@check(_RELEASE)
def release_works_twice(subject: Subject) -> None:
    """Releasing a released graph does nothing."""
    toy = subject.capture()
    subject.platform.release([toy.graph])
    try:
        subject.platform.release([toy.graph])
    except Exception as error:
        raise CheckFailure(f"a second release raised {error!r}", "nothing to happen") from error


@check(_RELEASE)
def release_of_nothing_works(subject: Subject) -> None:
    """An empty sequence of graphs is no error."""
    try:
        subject.platform.release([])
    except Exception as error:
        raise CheckFailure(f"release([]) raised {error!r}", "nothing to happen") from error


@check(_RELEASE)
def release_clears_the_handle(subject: Subject) -> None:
    """After release, `handle` is None."""
    toy = subject.capture()
    subject.platform.release([toy.graph])
    handle, toy.graph.handle = toy.graph.handle, None
    if handle is not None:
        raise CheckFailure(f"the handle of a released graph is {handle!r}", "None")


@check(_RELEASE)
def release_frees_the_buffers(subject: Subject) -> None:
    """After release, only the caller holds the static buffers."""
    with young_garbage():
        toy = subject.capture()
        subject.platform.release([toy.graph])
        buffers = [weakref.ref(toy.graph.request.output), weakref.ref(toy.graph.request.packed)]
        subject.close()
        del toy
        alive = still_alive(buffers)
    if alive:
        raise CheckFailure(
            f"{alive} of {len(buffers)} static buffers are still held after release",
            "registries, closures and caches that forget a released graph",
        )


@check(_RELEASE)
def release_spares_the_others(subject: Subject) -> None:
    """Releasing one graph of a pool leaves the others of that pool right."""
    large = subject.capture(rows=32)
    small = subject.capture(large.encoder, beside=large)
    subject.platform.release([large.graph])
    mm_kwargs = small.encoder.request(EXAMPLE, seed=1)
    subject.expect_reference(
        small.replay(mm_kwargs),
        small.encoder,
        mm_kwargs,
        "a replay after another graph of the pool was released",
        "the pool to live as long as any graph in it",
    )


@check("graphhal_replay")
def a_released_graph_does_not_replay(subject: Subject) -> None:
    """Replaying a released graph raises `ReplayError`; it never returns in silence."""
    toy = subject.capture()
    request = toy.graph.request
    subject.platform.release([toy.graph])
    try:
        with subject.step("replay", toy.graph, request.inputs, request.boundaries):
            subject.platform.replay(toy.graph)
    except ReplayError:
        return
    except Exception as error:
        raise CheckFailure(
            f"it raised {type(error).__name__}: {error}", "a graphhal.errors.ReplayError"
        ) from error
    raise CheckFailure("it returned as if it had run", "a graphhal.errors.ReplayError")


@check(_RELEASE)
def a_process_exits_cleanly(subject: Subject) -> None:
    """A process that captured, replayed and released nothing exits with status 0, in silence."""
    if subject.source is None:
        raise NotApplicable("the plugin object was made in this process, not imported by name")
    program = (
        f"import {subject.source} as plugin\n"
        "from graphhal.testing.subject import EXAMPLE, Subject\n"
        f"subject = Subject(plugin, {subject.name!r})\n"
        "toy = subject.capture()\n"
        "kept = toy.replay(toy.encoder.request(EXAMPLE, seed=1))\n"
        "print('replayed', kept.float().isfinite().all().item())\n"
    )
    done = in_fresh_process(program)
    if done.returncode or "replayed True" not in done.stdout:
        raise CheckFailure(
            f"it ended with status {done.returncode}: {done.stderr.strip()[-600:]}",
            "status 0: a run that passes and then aborts at shutdown has failed",
        )
