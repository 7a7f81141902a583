"""Hazards of streams, pools and captures, on a fake device that keeps CUDA's rules."""

import contextlib
import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphhal import stream_capture
from graphhal.boundaries import Boundaries
from graphhal.cuda import plugin
from graphhal.errors import (
    CaptureError,
    HostReadError,
    PluginError,
    ReplayError,
    ResourceExhaustedError,
    UnsupportedOperationError,
)
from graphhal.plan import GraphKey
from graphhal.platform import CapturedGraph, CaptureRequest, HostUpdate
from graphhal.stream_capture import pool as pool_module
from graphhal.stream_capture.failure import explained
from tests.platforms.fake_streams import install

BOTH = pytest.mark.parametrize("cleans_up", [False, True], ids=["up-to-2.13", "from-2.14"])


@pytest.fixture
def cleans_up() -> bool:
    return False


@pytest.fixture
def fake(monkeypatch, cleans_up):
    return install(monkeypatch, cleans_up)


def request_for(fake, forward=None, pool=None, size=8, warmups=2, tokens=4) -> CaptureRequest:
    return CaptureRequest(
        key=GraphKey("toy", "image", size),
        forward=forward or (lambda: fake.work("forward")),
        inputs={},
        packed=torch.zeros(16, dtype=torch.uint8),
        output=torch.zeros(tokens, 2),
        boundaries={"cu_seqlens": Boundaries((4,))},
        warmups=warmups,
        pool=pool,
        device=torch.device("cuda", 0),
    )


def captured(fake, **options) -> CapturedGraph:
    return plugin.graphhal_capture(request_for(fake, **options))


def replay_on(fake, graph, stream, name="replay") -> None:
    with fake.stream_context(stream), plugin.graphhal_step("replay", graph, {}, {}):
        fake.work(f"stage {name}")
        plugin.graphhal_replay(graph)
        fake.work(f"copy out {name}")


# --- capture


def test_warm_up_and_capture_run_on_one_stream_that_is_not_the_callers(fake):
    seen = []
    caller = fake.current()
    graph = captured(fake, forward=lambda: seen.append(fake.current().stream_id))
    assert seen == [graph.pool.stream.stream_id] * 3
    assert fake.current() == caller
    assert caller.stream_id != seen[0]


def test_capture_starts_after_what_the_caller_staged(fake):
    fake.work("stage")
    captured(fake)
    assert fake.ordered("stage", "forward")


def test_captures_are_thread_local(fake):
    captured(fake)
    assert "begin thread_local" in fake.log


def test_graphs_share_one_pool(fake):
    first = captured(fake)
    second = captured(fake, pool=first.pool)
    assert second.pool is first.pool
    assert fake.pool_users == {first.pool.id: 3}


def test_workspaces_are_allocated_inside_the_pool_before_the_first_warm_up(fake):
    steps: list[str] = []
    captured(fake, forward=lambda: steps.append(f"pool={fake.routed() is not None}"))
    zeros = [line for line in fake.log if line.startswith("zeros")]
    assert zeros
    assert all("pool=True" in line for line in zeros)
    assert steps[:2] == ["pool=False"] * 2  # what a warm-up keeps must not lie in graph memory


def peaking(fake, bytes_at_once: list[int]):
    """A forward that holds so many bytes at once, pass by pass."""
    passes = iter(bytes_at_once)

    def forward() -> None:
        fake.peak = max(fake.peak, fake.allocated + next(passes))
        fake.log.append("forward")

    return forward


def reserved(fake) -> list[str]:
    return [line for line in fake.log if "bytes=" in line or line.startswith(("begin", "forward"))]


def test_a_pool_begins_with_one_piece_for_what_the_last_warm_up_held(fake):
    graph = captured(fake, forward=peaking(fake, [900, 500, 0]))
    piece = f"empty pool=True stream={graph.pool.stream.stream_id} bytes={500 + 500 // 16}"
    assert reserved(fake) == ["forward", "forward", piece, "begin thread_local", "forward"]
    assert not fake.routing
    fake.log.clear()
    captured(fake, pool=graph.pool, forward=peaking(fake, [300, 300, 0]))
    assert reserved(fake) == ["forward", "forward", "begin thread_local", "forward"]


def of_two_graphs(fake, free: list[int], peaks: tuple[int, int], tokens: tuple[int, int]):
    """What the second of two graphs holds while it is captured, MiB: peaks in MiB, and free pieces
    after the first."""
    mib = 2**20

    def one(number: int, **options: Any) -> CapturedGraph:
        forward = peaking(fake, [0, peaks[number] * mib, 0])
        return captured(fake, forward=forward, tokens=tokens[number], **options)

    first = one(0)
    pool = first.pool
    fake.free[pool.id] = [("large", size * mib, pool.stream.cuda_stream) for size in free]
    fake.free[pool.id].append(("large", 900 * mib, 17))
    fake.log.clear()
    one(1, pool=pool)
    assert not fake.routing
    lines = reserved(fake)
    assert [line.split()[0] for line in lines if "bytes=" not in line][-2:] == ["begin", "forward"]
    held = [line for line in lines if "bytes=" in line]
    assert all(line.startswith(f"empty pool=True stream={pool.stream.stream_id} ") for line in held)
    assert not held or lines.index(held[0]) == len(lines) - 3
    return [int(line.rpartition("=")[2]) / mib for line in held]


def test_a_smaller_graph_gets_its_share_of_the_piece_and_the_rest_is_held_meanwhile(fake):
    assert of_two_graphs(fake, [180, 20], peaks=(160, 80), tokens=(64, 32)) == [95]


@pytest.mark.parametrize(
    ("peaks", "tokens"),
    [
        ((160, 160), (64, 64)),  # needs all of it
        ((160, 300), (64, 120)),  # and more
        ((160, 150), (64, 32)),  # its memory does not grow with its tokens
        ((160, 20), (64, 32)),
    ],
)
def test_a_graph_that_needs_the_piece_or_lies_otherwise_in_it_gets_it_whole(fake, peaks, tokens):
    assert of_two_graphs(fake, [170], peaks, tokens) == []


MIB = 2**20


def lacking_room(fake, peak: int, needs: float, lacks: int = 240, workspace: int = 0):
    """A forward that holds `peak` at once, and takes `lacks` besides from the allocator where the
    free piece that it finds is of less than `needs`; and the pieces that it found. MiB."""
    found: list[float] = []

    def forward() -> None:
        pool = pool_module.pools[-1]
        stream = pool.stream.cuda_stream
        pieces = fake.free.setdefault(pool.id, [("large", workspace * MIB, stream)])
        fake.peak = fake.allocated + peak * MIB
        fake.log.append("forward")
        if capturing(fake):
            asked = [line for line in fake.log if "bytes=" in line]
            found.append(int(asked[-1].rpartition("=")[2]) / MIB if asked else 0)
            sizes = [found[-1] or peak, *([lacks] if found[-1] < needs else [])]
            pieces += [("large", int(size * MIB), stream) for size in sizes]

    return forward, found


@pytest.mark.parametrize(
    ("peak", "needs", "lacks", "workspace", "pieces"),
    [
        (480, 0, 240, 0, [510]),
        (480, 0, 240, 64, [510]),  # what was there before is not the graph's
        (480, 640, 240, 0, [510, 540, 600, 660]),
        (480, 9999, 240, 0, [510, 540, 600, 660, 720, 510]),  # it took 750
        (480, 9999, 100, 0, [510, 540, 600, 510]),
        (480, 9999, 29, 0, [510]),  # a larger piece would be of more than it took
        (32, 9999, 18, 0, [34]),  # less than the allocator takes at the least
    ],
)
def test_a_first_graph_that_lacks_room_in_its_piece_begins_again_with_a_larger_one(
    fake, peak, needs, lacks, workspace, pieces
):
    """The clips of a server's audio tower took 202 MiB more, of 746, with one graph of many."""
    forward, found = lacking_room(fake, peak, needs, lacks, workspace)
    graph = captured(fake, forward=forward)
    assert found == pieces
    assert graph.pool.graphs == 1
    assert [users for users in fake.pool_users.values() if users] == [2]
    assert not fake.routing
    second = captured(fake, forward=forward, pool=graph.pool)
    assert len(found) == len(pieces) + 1
    plugin.graphhal_release([graph, second])
    captured(fake, forward=forward)
    assert found[len(pieces) + 1] == pieces[0]


def test_a_smaller_graph_gets_as_large_a_share_as_the_first_one_needs(fake):
    forward, _ = lacking_room(fake, 480, needs=640)
    first = captured(fake, forward=forward, tokens=64)
    fake.log.clear()
    captured(fake, forward=peaking(fake, [0, 240 * MIB, 0]), tokens=32, pool=first.pool)
    held = [int(line.rpartition("=")[2]) for line in fake.log if "bytes=" in line]
    assert held == [(660 - 330) * MIB]


@pytest.mark.parametrize("left", ["no piece", "no warm-up"])
def test_a_graph_without_a_piece_of_its_own_is_captured_once(fake, left):
    outgrown, _ = lacking_room(fake, 480, needs=9999)
    plugin.graphhal_release([captured(fake, forward=outgrown)])
    fake.max_split_size = 2**20 if left == "no piece" else -1
    fake.log.clear()
    forward, found = lacking_room(fake, 480, needs=9999)
    captured(fake, forward=forward, warmups=0 if left == "no warm-up" else 2)
    assert len(found) == 1


def test_without_a_warm_up_nothing_is_reserved(fake):
    fake.peak = 2 * fake.allocated
    captured(fake, warmups=0)
    assert not any("bytes=" in line for line in fake.log)


@pytest.mark.parametrize(("largest_cut", "pieces"), [(-1, 1), (530, 0), (531, 1)])
def test_no_piece_is_reserved_that_the_allocator_would_not_cut(fake, largest_cut, pieces):
    fake.max_split_size = largest_cut
    captured(fake, forward=peaking(fake, [500, 500, 0]))
    assert sum("bytes=" in line for line in fake.log) == pieces


def test_a_piece_that_cannot_be_had_is_done_without(fake, monkeypatch):
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(fake, "empty", full)
    captured(fake, forward=peaking(fake, [500, 500, 0]))
    assert not fake.routing


def test_workspaces_are_allocated_again_after_any_graph_is_reset(fake):
    first = captured(fake)
    second = captured(fake, pool=first.pool)
    before = sum(line.startswith("zeros") for line in fake.log)
    captured(fake, pool=first.pool)
    assert sum(line.startswith("zeros") for line in fake.log) == before
    plugin.graphhal_release([second])
    captured(fake, pool=first.pool)
    assert sum(line.startswith("zeros") for line in fake.log) > before


def test_garbage_collection_rests_during_capture_and_goes_on_afterwards(fake):
    states: list[bool] = []
    captured(fake, forward=lambda: states.append(gc.isenabled()))
    assert states == [True, True, False]
    assert gc.isenabled()


def test_a_foreign_pool_is_refused(fake):
    with pytest.raises(PluginError, match=r"^toy/image\[8\]: pool is not one of this platform"):
        captured(fake, pool=object())


def test_capture_inside_another_capture_is_refused(fake):
    fake.capturing[0] = SimpleNamespace(invalid=False)
    with pytest.raises(CaptureError, match="another capture is running"):
        captured(fake)


# --- failed captures


def capturing(fake) -> bool:
    return fake.current().stream_id in fake.capturing


def fail_with(fake, message):
    def forward() -> None:
        if capturing(fake):
            fake.capturing[fake.current().stream_id].invalid = True
            raise RuntimeError(message)

    return forward


@BOTH
def test_a_host_read_is_named_with_its_line(fake):
    with pytest.raises(HostReadError) as caught:
        captured(fake, forward=fake.host_read)
    assert "waits for a device value" in str(caught.value)
    assert "fake_streams.py" in str(caught.value)
    assert "`raise RuntimeError(" in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)


@BOTH
@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("CUDA error: operation not permitted when stream is capturing", HostReadError),
        ("CUDA error: capturing stream has unjoined work", UnsupportedOperationError),
        ("dependency created on uncaptured work in another stream", UnsupportedOperationError),
        ("Cannot copy unless the CPU tensor is pinned", UnsupportedOperationError),
        ("CUDA error: out of memory", ResourceExhaustedError),
        ("the model has a bug", UnsupportedOperationError),  # the device had ended the capture
    ],
)
def test_a_failed_capture_leaves_everything_usable(fake, message, kind):
    first = captured(fake)
    users = dict(fake.pool_users)
    caller = fake.current()
    with pytest.raises(CaptureError) as caught:
        captured(fake, forward=fail_with(fake, message), pool=first.pool)
    assert type(caught.value) is kind
    assert fake.current() == caller
    assert not fake.capturing
    assert not fake.generator_captures
    assert not fake.routing
    assert gc.isenabled()
    assert {pool: n for pool, n in fake.pool_users.items() if n} == users
    replay_on(fake, first, caller)
    again = captured(fake, pool=first.pool)
    replay_on(fake, again, caller)


@BOTH
def test_an_exception_that_the_device_does_not_know_of_leaves_the_pool_as_it_was(fake):
    first = captured(fake)
    users = dict(fake.pool_users)

    def forward() -> None:
        if capturing(fake):
            raise KeyError("the model's own mistake")

    with pytest.raises(CaptureError, match=r"capture failed at .*KeyError"):
        captured(fake, forward=forward, pool=first.pool)
    assert fake.pool_users == users
    assert not fake.routing


@BOTH
def test_a_swallowed_host_read_still_fails_the_capture(fake):
    def forward() -> None:
        with contextlib.suppress(RuntimeError):
            fake.host_read()

    with pytest.raises(UnsupportedOperationError, match="the code went on"):
        captured(fake, forward=forward)
    assert not fake.routing


@BOTH
def test_a_later_call_that_fails_for_a_swallowed_host_read_is_explained_by_the_end(fake):
    def forward() -> None:
        with contextlib.suppress(RuntimeError):
            fake.host_read()
        if capturing(fake):
            raise RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling a product")

    with pytest.raises(UnsupportedOperationError, match=r"the code went on. \[.*CUBLAS") as caught:
        captured(fake, forward=forward)
    assert "CUBLAS" in str(caught.value.__cause__)


REFUSAL = """
def refuse(*_, **__):
    raise RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture")
"""


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("target.tolist()", HostReadError),
        ("'Ä'; target.tolist(); target.copy_(host)", HostReadError),
        ("size = len(\n  [\n    target\n    .tolist()\n  ]\n)", HostReadError),
        ("target.to('cpu', non_blocking=True)", HostReadError),
        ("target.copy_(host)", UnsupportedOperationError),
        ("target.copy_(host.tolist())", UnsupportedOperationError),
        ("target.copy_(\n  host\n  .tolist()\n)", UnsupportedOperationError),
    ],
)
def test_copies_to_and_from_the_host_are_told_apart_by_the_call(tmp_path, code, kind):
    """PyTorch says the same of both."""
    inside: dict[str, Any] = {"__name__": "torch.inside"}
    exec(REFUSAL, inside)
    refuse = inside["refuse"]
    target = SimpleNamespace(tolist=refuse, copy_=refuse, to=refuse)
    path = tmp_path / "model.py"
    path.write_text(code)
    names = {"__name__": "model", "target": target, "host": torch.ones(2)}
    with pytest.raises(RuntimeError) as caught:
        exec(compile(code, str(path), "exec"), names)
    error = explained(GraphKey("toy", "image", 8), caught.value, "capture")
    assert type(error) is kind
    assert f"{path}:" in str(error)


@BOTH
def test_a_failed_capture_frees_what_its_frames_hold(fake):
    kept: list[Any] = []

    def forward() -> None:
        big = torch.zeros(4)
        kept[:] = [weakref.ref(big)]
        if capturing(fake):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    with pytest.raises(ResourceExhaustedError) as caught:
        captured(fake, forward=forward)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert kept[0]() is None


def test_out_of_memory_in_warm_up_is_the_same_error(fake):
    def forward() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    with pytest.raises(ResourceExhaustedError, match=r"warm-up failed.*memory_limit"):
        captured(fake, forward=forward)
    assert not any(line.startswith("begin") for line in fake.log)


@BOTH
def test_a_warning_of_an_empty_graph_is_no_error_where_warnings_are(fake):
    def forward() -> None:
        if capturing(fake):
            raise KeyError("the model's own mistake")

    with pytest.raises(CaptureError, match="KeyError"):
        captured(fake, forward=forward)
    assert not fake.routing


def test_an_interrupt_passes_through_and_ends_the_capture(fake):
    def forward() -> None:
        if capturing(fake):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        captured(fake, forward=forward)
    assert not fake.capturing
    assert not fake.routing


def test_a_capture_that_cannot_be_ended_retires_the_pool_not_the_process(fake, monkeypatch, caplog):
    first = captured(fake)
    # The spare pool of the mending is the one that is still recorded to: it must fail.
    monkeypatch.setattr(fake.cuda, "graph_pool_handle", lambda: first.pool.id)
    with pytest.raises(HostReadError):
        captured(fake, forward=fake.host_read, pool=first.pool)
    assert "could not be ended cleanly" in caplog.text
    with pytest.raises(ResourceExhaustedError, match="takes no more graphs"):
        captured(fake, pool=first.pool)
    replay_on(fake, first, fake.current())


# --- replay


def test_replays_on_two_streams_are_ordered_on_the_device(fake):
    graph = captured(fake)
    one, two = fake.Stream(), fake.Stream()
    replay_on(fake, graph, one, "a")
    replay_on(fake, graph, two, "b")
    assert fake.ordered("copy out a", "stage b")


def test_replays_on_one_stream_need_no_wait(fake):
    graph = captured(fake)
    stream = fake.Stream()
    replay_on(fake, graph, stream)
    waits = fake.log.count(f"wait {stream.stream_id}")
    for _ in range(3):
        replay_on(fake, graph, stream)
    assert fake.log.count(f"wait {stream.stream_id}") == waits


def test_a_replay_never_waits_on_the_host(fake):
    graph = captured(fake)
    fake.log.clear()
    replay_on(fake, graph, fake.Stream())
    assert "synchronize" not in fake.log


def test_two_threads_do_not_interleave_their_steps(fake):
    graph = captured(fake)
    inside, worst = [0], [0]

    def work() -> None:
        for _ in range(50):
            with plugin.graphhal_step("replay", graph, {}, {}):
                inside[0] += 1
                worst[0] = max(worst[0], inside[0])
                plugin.graphhal_replay(graph)
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert worst == [1]


def test_no_replay_inside_an_outer_capture(fake):
    graph = captured(fake)
    fake.capturing[0] = SimpleNamespace(invalid=False)
    assert plugin.graphhal_step("replay", graph, {}, {}) is None
    eager = plugin.graphhal_step("eager", None, {}, {})
    with eager as scope:
        assert fake.current().stream_id == 0
        assert fake.routed() is None
        scope.empty((2,), torch.float32)


@pytest.mark.parametrize("dropped", [False, True])
def test_a_capture_of_the_callers_survives_a_release(fake, dropped):
    """A wait for the device, or a graph that is destroyed, would end it: both come later."""
    graph = captured(fake)
    outer = fake.capturing[0] = SimpleNamespace(invalid=False)
    if dropped:
        del graph
        gc.collect()
    else:
        plugin.graphhal_release([graph])
    assert not outer.invalid
    assert not any(line.startswith("reset") for line in fake.log)
    del fake.capturing[0]
    again = captured(fake)
    assert sum(line.startswith("reset") for line in fake.log) == 1
    plugin.graphhal_release([again])
    assert sum(line.startswith("reset") for line in fake.log) == 2
    assert fake.log.count("pool died with 0 users") == 2


def test_what_was_released_within_a_capture_goes_with_the_next_release(fake):
    first, second = captured(fake), captured(fake)
    fake.capturing[0] = SimpleNamespace(invalid=False)
    plugin.graphhal_release([first])
    del fake.capturing[0]
    plugin.graphhal_release([second])
    assert sum(line.startswith("reset") for line in fake.log) == 2


def test_nothing_starts_up_within_a_capture_of_the_callers(fake):
    outer = fake.capturing[0] = SimpleNamespace(invalid=False)
    with pytest.raises(CaptureError, match=r"^another capture runs on the current stream"):
        plugin.graphhal_step("reference", None, {}, {})
    assert not outer.invalid


def test_an_error_inside_a_step_releases_the_pool(fake):
    graph = captured(fake)
    with pytest.raises(ValueError, match="bad item"), plugin.graphhal_step("replay", graph, {}, {}):
        raise ValueError("bad item")
    done: list[bool] = []
    other = threading.Thread(
        target=lambda: (replay_on(fake, graph, fake.Stream()), done.append(True))
    )
    other.start()
    other.join(timeout=10)
    assert done == [True]


def test_a_device_that_fails_as_a_step_begins_leaves_the_pool_to_others(fake, monkeypatch):
    graph = captured(fake)

    def fail(_):
        raise RuntimeError("CUDA error: device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(graph.pool, "wait_for_last_use", fail)
        with pytest.raises(RuntimeError, match="gone"), fake.stream_context(fake.Stream()):
            plugin.graphhal_step("replay", graph, {}, {}).__enter__()
    free: list[bool] = []
    other = threading.Thread(target=lambda: free.append(graph.pool.lock.acquire(timeout=1)))
    other.start()
    other.join()
    assert free == [True]


def test_boundaries_travel_in_one_copy_of_the_block(fake):
    graph = captured(fake)
    block = torch.arange(8, dtype=torch.uint8)
    plugin.graphhal_update_boundaries(graph, HostUpdate({}, block))
    assert graph.request.packed.tolist() == [*range(8), *([0] * 8)]
    plugin.graphhal_update_boundaries(graph, HostUpdate({}, torch.full((16,), 7).to(torch.uint8)))
    assert graph.request.packed.tolist() == [7] * 16


# --- eager calls


def test_eager_runs_on_the_capture_stream_inside_the_pool(fake):
    graph = captured(fake)
    caller = fake.current()
    fake.work("inputs")
    with plugin.graphhal_step("eager", None, {}, {}):
        assert fake.current() == graph.pool.stream
        assert fake.routed() == graph.pool.id
        fake.work("eager")
    assert fake.current() == caller
    assert fake.routed() is None
    fake.work("use")
    assert fake.ordered("inputs", "eager")
    assert fake.ordered("eager", "use")


def test_eager_and_replay_on_different_streams_are_ordered_both_ways(fake):
    graph = captured(fake)
    one, two, three = fake.Stream(), fake.Stream(), fake.Stream()
    replay_on(fake, graph, one, "a")
    with fake.stream_context(two), plugin.graphhal_step("eager", None, {}, {}):
        fake.work("eager")
    replay_on(fake, graph, three, "b")
    assert fake.ordered("copy out a", "eager")
    assert fake.ordered("eager", "stage b")


def test_eager_output_lies_outside_the_pool_on_the_callers_stream(fake):
    graph = captured(fake)
    caller = fake.Stream()
    with fake.stream_context(caller), plugin.graphhal_step("eager", None, {}, {}) as scope:
        fake.log.clear()
        scope.empty((2, 2), torch.float32)
        assert fake.log[0] == f"empty pool=False stream={caller.stream_id}"
        assert fake.current() == graph.pool.stream
        assert fake.routed() == graph.pool.id
    assert fake.pool_users[graph.pool.id] == 2


def test_eager_output_waits_for_the_last_use_of_its_memory(fake):
    """The block may have been freed on the caller's stream after the step began."""
    graph = captured(fake)
    caller = fake.Stream()
    with fake.stream_context(caller), plugin.graphhal_step("eager", None, {}, {}) as scope:
        with fake.stream_context(caller):
            fake.work("another thread's last use")
        scope.empty((2, 2), torch.float32)
        assert fake.current() == graph.pool.stream
        fake.work("write output")
    assert fake.ordered("another thread's last use", "write output")


def test_a_failed_eager_call_restores_stream_and_allocator(fake):
    graph = captured(fake)
    caller = fake.current()
    with pytest.raises(ValueError, match="bad item"), plugin.graphhal_step("eager", None, {}, {}):
        raise ValueError("bad item")
    assert fake.current() == caller
    assert not fake.routing
    assert fake.pool_users[graph.pool.id] == 2
    assert plugin.graphhal_step("replay", graph, {}, {}) is not None


def test_eager_without_graphs_is_left_alone(fake):
    with plugin.graphhal_step("eager", None, {}, {}) as scope:
        assert fake.current().stream_id == 0
        scope.empty((2,), torch.float32)
    assert fake.log == ["empty pool=False stream=0"]


def test_a_reference_runs_outside_the_pool_on_the_callers_stream(fake):
    captured(fake)
    caller = fake.Stream()
    with fake.stream_context(caller), plugin.graphhal_step("reference", None, {}, {}) as scope:
        assert fake.current() == caller
        assert fake.routed() is None
        fake.log.clear()
        scope.empty((2, 2), torch.float32)
        assert fake.log == [f"empty pool=False stream={caller.stream_id}"]


def test_out_of_memory_in_the_pool_sends_the_next_eager_call_outside(fake):
    graph = captured(fake)

    def run_out() -> None:
        assert fake.routed() == graph.pool.id
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError), plugin.graphhal_step("eager", None, {}, {}):
        run_out()
    with plugin.graphhal_step("eager", None, {}, {}):
        assert fake.routed() is None
    assert plugin.graphhal_step("replay", graph, {}, {}) is not None


def test_what_an_eager_call_keeps_in_the_pool_stops_replays(fake, caplog):
    graph = captured(fake)
    pool = graph.pool
    with plugin.graphhal_step("eager", None, {}, {}):
        fake.live[pool.id] = {4096: 512}
    assert plugin.graphhal_step("replay", graph, {}, {}) is None
    assert "kept 1 tensors (512 bytes)" in caplog.text
    with plugin.graphhal_step("eager", None, {}, {}):
        assert fake.routed() is None
    with pytest.raises(CaptureError, match="left tensors in the graph pool"):
        captured(fake, pool=pool)
    plugin.graphhal_release([graph])
    again = captured(fake, pool=pool)
    assert plugin.graphhal_step("replay", again, {}, {}) is not None


def test_what_capture_keeps_in_the_pool_is_no_leftover(fake):
    graph = captured(fake)
    fake.live[graph.pool.id] = {64: 512}
    second = captured(fake, pool=graph.pool)
    with plugin.graphhal_step("eager", None, {}, {}):
        pass
    assert plugin.graphhal_step("replay", second, {}, {}) is not None


def test_a_failed_eager_calls_traceback_is_no_leftover(fake):
    graph = captured(fake)

    def fail() -> None:
        fake.live[graph.pool.id] = {64: 512}
        raise ValueError("bad item")

    with pytest.raises(ValueError, match="bad item"), plugin.graphhal_step("eager", None, {}, {}):
        fail()
    assert plugin.graphhal_step("replay", graph, {}, {}) is not None


# --- poison


def test_poison_fills_exactly_the_free_blocks_of_the_capture_stream(fake):
    graph = captured(fake)
    raw = graph.pool.stream.cuda_stream
    fake.free[graph.pool.id] = [
        ("large", 5 * 2**20, raw),
        ("small", 2**20 + 512, raw),
        ("large", 9 * 2**20, raw + 1),
    ]
    fake.log.clear()
    graph.poison()
    fills = [line for line in fake.log if line.startswith("full")]
    assert fills == [f"full {size} pool=True" for size in (5 * 2**20, 2**20, 512)]


def test_poison_after_release_is_harmless(fake):
    graph = captured(fake)
    poison = graph.poison
    plugin.graphhal_release([graph])
    poison()
    assert not any(line.startswith("full") for line in fake.log)


# --- release


def test_a_pool_dies_after_its_last_graph(fake):
    first = captured(fake)
    second = captured(fake, pool=first.pool)
    plugin.graphhal_release([first])
    assert not any("died" in line for line in fake.log)
    plugin.graphhal_release([second])
    assert fake.log.index("pool died with 0 users") > max(
        n for n, line in enumerate(fake.log) if line.startswith("reset")
    )


def test_a_pool_that_nobody_released_dies_after_its_graphs(fake):
    graphs = [captured(fake)]
    graphs.append(captured(fake, pool=graphs[0].pool))
    graphs[0].request.inputs["cycle"] = graphs
    del graphs
    gc.collect()
    assert [line for line in fake.log if "died" in line] == ["pool died with 0 users"]


def test_everything_is_closed_before_the_interpreter_ends(fake):
    graph = captured(fake)
    stream_capture.release_all()
    assert "pool died with 0 users" in fake.log
    with pytest.raises(ReplayError):
        plugin.graphhal_replay(graph)


def test_a_pool_can_be_used_again_after_clear(fake):
    graph = captured(fake)
    pool, name = graph.pool, graph.pool.id
    plugin.graphhal_release([graph])
    assert pool.id is None
    again = captured(fake, pool=pool)
    assert again.pool is pool
    assert pool.id not in (None, name)
    replay_on(fake, again, fake.current())


def test_a_new_owner_gets_the_stream_of_one_that_is_gone(fake):
    """A stream's BLAS workspace can outlive its graphs: new streams would leave them all."""
    streams = set()
    for _ in range(3):
        graph = captured(fake)
        streams.add(graph.pool.stream.stream_id)
        plugin.graphhal_release([graph])
    assert len(streams) == 1


def test_an_owner_that_was_never_closed_leaves_its_stream_to_the_next(fake):
    graphs = [captured(fake)]
    graphs[0].request.inputs["cycle"] = graphs
    stream = graphs[0].pool.stream
    del graphs
    gc.collect()
    again = captured(fake)
    assert again.pool.stream is stream
    with plugin.graphhal_step("eager", None, {}, {}):
        assert fake.routed() == again.pool.id


def test_two_owners_at_a_time_have_pools_of_their_own(fake):
    first, second = captured(fake), captured(fake)
    assert first.pool is not second.pool
    assert first.pool.stream != second.pool.stream


def test_a_pool_that_could_not_end_a_capture_goes_to_nobody_else(fake, monkeypatch):
    first = captured(fake)
    stuck = first.pool
    monkeypatch.setattr(fake.cuda, "graph_pool_handle", lambda: stuck.id)
    with pytest.raises(HostReadError):
        captured(fake, forward=fake.host_read, pool=stuck)
    plugin.graphhal_release([first])
    assert captured(fake).pool is not stuck


def test_a_failed_warm_up_leaves_nothing_cached(fake):
    def forward() -> None:
        fake.cached = 7 * 2**20
        raise ValueError("bad item")

    with pytest.raises(CaptureError):
        captured(fake, forward=forward)
    assert fake.cached == 0


def test_a_pool_whose_only_capture_failed_keeps_no_memory(fake):
    graph = captured(fake)
    pool = graph.pool
    plugin.graphhal_release([graph])
    with pytest.raises(HostReadError):
        captured(fake, forward=fake.host_read, pool=pool)
    assert pool.id is None
    assert [users for users in fake.pool_users.values() if users] == []


def test_a_recording_closes_once(fake):
    first = captured(fake)
    second = captured(fake, pool=first.pool)
    recording = first.handle
    recording.close()
    recording.close()
    assert second.pool.graphs == 1


def test_release_twice_is_harmless(fake):
    graph = captured(fake)
    plugin.graphhal_release([graph, graph])
    plugin.graphhal_release([graph])
    assert sum(line.startswith("reset") for line in fake.log) == 1


def test_release_after_the_device_is_gone_is_harmless(fake):
    graph = captured(fake)
    fake.device_gone = True
    plugin.graphhal_release([graph])
    assert graph.handle is None


def test_a_released_graph_is_not_replayed(fake):
    graph = captured(fake)
    plugin.graphhal_release([graph])
    with pytest.raises(ReplayError, match=r"^toy/image\[8\] was released"):
        plugin.graphhal_replay(graph)


def test_a_launch_that_the_device_refuses_is_a_replay_error(fake):
    graph = captured(fake)
    fake.device_gone = True
    with pytest.raises(ReplayError, match="device is gone"):
        plugin.graphhal_replay(graph)


# --- memory


def test_a_graphs_bytes_are_what_it_added_and_no_other_process_took(fake):
    def forward() -> None:
        if capturing(fake):
            fake.reserved += 100 * 2**20
            fake.free_bytes -= 103 * 2**20

    assert captured(fake, forward=forward).num_bytes == 103 * 2**20

    def beside_another_process() -> None:
        if capturing(fake):
            fake.free_bytes -= 9 * 2**30

    bytes_told = captured(fake, forward=beside_another_process).num_bytes
    assert bytes_told == 64 * 2**20


def sized(fake, amounts):
    """Requests whose capture grows the pool by the amounts given, by size."""

    def forward(size):
        def run() -> None:
            if capturing(fake):
                fake.reserved += amounts[size]
                fake.free_bytes -= amounts[size]

        return run

    return [request_for(fake, forward=forward(size), size=size) for size in amounts]


def test_a_profile_captures_a_sample_and_interpolates_the_rest(fake):
    mib = 2**20
    amounts = {800: 500 * mib, 750: 45 * mib, 700: 40 * mib, 400: 25 * mib, 100: 10 * mib}
    profile = plugin.graphhal_profile_memory(sized(fake, amounts))
    by_size = {key.size: size / mib for key, size in profile.per_graph.items()}
    assert by_size == {800: 500, 750: 45, 700: 40, 400: 25, 100: 10}
    assert profile.settled_bytes == 620 * mib
    assert sum(line.startswith("begin") for line in fake.log) == 4


def test_a_profile_does_not_expect_the_pools_growth_of_every_graph(fake):
    """Sixteen graphs of 120 MiB were once expected to take 250: the second needed one more piece
    beside the first one's."""
    mib = 2**20
    amounts = {4096: 100 * mib, 3840: 18 * mib} | dict.fromkeys(range(3584, 0, -256), 0)
    profile = plugin.graphhal_profile_memory(sized(fake, amounts))
    assert profile.settled_bytes == 118 * mib
    two = plugin.graphhal_profile_memory(sized(fake, {800: 50 * mib, 700: 4 * mib, 300: 2 * mib}))
    assert two.settled_bytes == 56 * mib


def test_a_profile_keeps_nothing(fake):
    graphs: list[CapturedGraph] = []

    def keep(request: CaptureRequest) -> CapturedGraph:
        graphs.append(plugin.graphhal_capture(request))
        return graphs[-1]

    stream_capture.profile(sized(fake, {8: 1, 4: 1, 2: 1}), keep)
    assert [graph.handle for graph in graphs] == [None] * 3
    assert [users for users in fake.pool_users.values() if users] == []


def test_a_transient_is_counted_apart(fake):
    def forward() -> None:
        if not capturing(fake):
            fake.cached = 7 * 2**20
        else:
            fake.reserved += 2 * 2**20
            fake.free_bytes -= 2 * 2**20

    requests = [request_for(fake, forward=forward, size=size) for size in (8, 4)]
    profile = plugin.graphhal_profile_memory(requests)
    assert profile.settled_bytes == 4 * 2**20
    assert profile.transient_bytes == 5 * 2**20  # 2 settled and 7 cached, of which 4 stay


def test_what_warm_up_leaves_allocated_counts_as_the_graphs(fake):
    def forward() -> None:
        if not capturing(fake) and not fake.reserved:
            fake.reserved += 32 * 2**20

    assert captured(fake, forward=forward).num_bytes == 32 * 2**20


def test_a_profile_that_runs_out_of_memory_charges_the_rest_nothing(fake):
    def exhausted() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    requests = sized(fake, {800: 500, 700: 1, 400: 1, 100: 1})
    object.__setattr__(requests[1], "forward", exhausted)
    profile = plugin.graphhal_profile_memory(requests)
    assert list(profile.per_graph.values()) == [500, 0, 0, 0]


def test_a_profile_survives_what_capture_will_not(fake):
    requests = [
        request_for(fake, forward=fake.host_read, size=8),
        request_for(fake, size=4),
    ]
    profile = plugin.graphhal_profile_memory(requests)
    assert [key.size for key in profile.per_graph] == [8, 4]
