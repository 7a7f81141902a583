"""Capture, replay and release on Ascend.

Everything runs on the two streams of `lane.Lane`; `task_update` holds the facts about their
order. Facts about torch_npu that shape this one:

- `torch.npu.graph` does not restore the current stream and the dispatch modes where ending the
  capture fails, so capture is begun and ended here; `capture_state` puts both back.
- A kernel launch that fails in torch_npu's queue ends all computing of the process in silence, so
  captures and replays launch directly (`capture_state.direct_launches`).
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial

import torch
from torch_npu import npu

from graphhal.boundaries import Boundaries
from graphhal.errors import ReplayError
from graphhal.npu.acl_errors import capture_error
from graphhal.npu.attention import Serving, serve
from graphhal.npu.capture_state import capture_options, direct_launches, put_back, undone_begin
from graphhal.npu.lane import Lane
from graphhal.npu.pool import give_caches_back, poison, settled_bytes
from graphhal.npu.recording import Recording, discard, free_finished
from graphhal.npu.step_scope import eager_scope, replay_scope
from graphhal.npu.task_update import TASK_UPDATE, TaskUpdates, lane_of
from graphhal.platform import CapturedGraph, CaptureRequest, HostUpdate, StepKind, StepScope


def capture(request: CaptureRequest) -> CapturedGraph:
    """Warm up and capture on the replay stream.

    Raises:
        CaptureError: typed by cause; the device, its options, the current stream and the
            dispatch modes are as they were.
    """
    what = f"{request.key}: capture"
    with TASK_UPDATE:
        lane = lane_of(request.device)
        lane.refuse(what)
        free_finished()
        try:
            with direct_launches(), put_back(lane), capture_options(), npu.stream(lane.replay):
                return _capture(request, lane, what)
        except Exception as error:
            lane.hold(request)
            raise capture_error(error, what) from error


def _capture(request: CaptureRequest, lane: Lane, what: str) -> CapturedGraph:
    with serve(Serving(request.inputs, request.boundaries)):
        for _ in range(request.warmups):
            request.forward()
    lane.settle(f"{what}: warm-up")
    before = settled_bytes(lane.index)
    graph = npu.NPUGraph()
    pool = npu.graph_pool_handle() if request.pool is None else request.pool
    serving = Serving(request.inputs, request.boundaries, tasks=[])
    try:
        with undone_begin(lane, pool):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        with serve(serving):
            request.forward()
        _end(graph, lane)
    except BaseException:
        with suppress(RuntimeError):
            _end(graph, lane)  # where that did not happen yet
        discard(graph)
        raise
    recording = Recording(graph, lane, TaskUpdates(lane, serving.tasks or ()))
    try:
        recording.try_out(request.boundaries)
        lane.settle(f"{what}: first replay")
    except BaseException:
        recording.free(what)
        raise
    added = max(0, settled_bytes(lane.index) - before)
    fill = partial(poison, lane.index, graph.pool(), lane.replay)
    return CapturedGraph(request, recording, graph.pool(), added, fill)


def _end(graph: npu.NPUGraph, lane: Lane) -> None:
    npu.set_stream(lane.replay)  # a capture ends only on the stream where it began
    graph.capture_end()


def _recording(graph: CapturedGraph) -> Recording:
    if graph.handle is None:
        raise ReplayError(f"{graph.key} was released; capture it again")
    recording: Recording = graph.handle
    return recording


def update_boundaries(graph: CapturedGraph, update: HostUpdate) -> None:
    """Copy the packed block and rewrite every attention task; never waits.

    Raises:
        ReplayError: the update does not belong to this graph; nothing was queued.
    """
    recording, request = _recording(graph), graph.request
    ends = {}
    for name in {task.boundary_set for task in recording.updates.tasks}:
        bounds = update.boundaries.get(name)
        rows = request.boundaries[name].rows
        if bounds is None or bounds.rows != rows:
            covered = "nothing" if bounds is None else f"{bounds.rows} rows"
            raise ReplayError(
                f"{graph.key}: the update of {name} covers {covered}, the graph has {rows} rows; "
                "pad the boundaries to the graph (Boundaries.padded_to)"
            )
        ends[name] = bounds.actual_seq_lengths
    if update.block.shape != request.packed.shape:
        raise ReplayError(
            f"{graph.key}: the packed block has {tuple(update.block.shape)} bytes, the graph's "
            f"buffer {tuple(request.packed.shape)}"
        )
    request.packed.copy_(update.block, non_blocking=True)
    recording.updates.queue(ends)


def replay(graph: CapturedGraph) -> None:
    """Launch the graph on the replay stream; never waits.

    Raises:
        ReplayError: no update came since the last replay (the device would wait for ever), or
            the graph was released.
    """
    recording = _recording(graph)
    if not recording.updates.armed:
        raise ReplayError(f"{graph.key}: update its boundaries before every replay")
    recording.updates.launch(recording.graph)


def step(
    kind: StepKind,
    graph: CapturedGraph | None,
    inputs: Mapping[str, torch.Tensor],
    boundaries: Mapping[str, Boundaries],
) -> AbstractContextManager[StepScope] | None:
    """Scope of one replay or eager call; None for a replay within an outer capture.

    In a replay's scope every failure of the runtime becomes a `ReplayError`, in a reference's,
    which runs at start-up, a `CaptureError`; the process can compute afterwards.
    """
    serving = Serving(inputs, boundaries)
    if kind == "replay" and graph is not None:
        return replay_scope(_recording(graph).lane, f"{graph.key}: replay", serving)
    return eager_scope(serving, kind == "reference")


def release(graphs: Sequence[CapturedGraph]) -> None:
    """Destroy graphs. Safe twice, safe after the device is gone.

    A graph that the device does not finish is kept until it does rather than freed under it; so is
    one that is released within a capture of the caller's, which a wait for the device would end,
    or in a forked process, whose device it is not.
    """
    lanes = set()
    with TASK_UPDATE:  # as it would another thread's
        for graph in graphs:
            recording, graph.handle = graph.handle, None
            if recording is None:
                continue
            if not recording.lane.may_free:
                recording.keep()
                continue
            recording.free(f"{graph.key}: release")
            recording.lane.hold(graph.request)
            lanes.add(recording.lane)
        if lanes and not any(lane.hangs for lane in lanes):
            with suppress(RuntimeError):
                give_caches_back()
