"""Faults of the replay hook."""

import threading
from contextlib import suppress

import torch

from graphhal.errors import ReplayError
from graphhal.hookspecs import hookimpl
from tests.broken_platforms.fault import caught_by
from tests.broken_platforms.tape_platform import TapePlatform, map_foreign_tensors


@caught_by("replay_sees_new_pixels")
class SkipsTheLaunchForAnEqualBlock(TapePlatform):
    """An equal block twice in a row is taken for an equal request."""

    last = None
    skips = False

    @hookimpl
    def graphhal_update_boundaries(self, graph, boundaries):
        this = (id(graph), bytes(boundaries.block.numpy()))
        self.skips = this == self.last
        self.last = this
        super().graphhal_update_boundaries(graph, boundaries)

    @hookimpl
    def graphhal_replay(self, graph):
        if graph.handle is None or not self.skips:
            super().graphhal_replay(graph)
        self.skips = False


@caught_by("replay_is_repeatable")
class AddsUpWhatItWrote(TapePlatform):
    replays = 0

    @hookimpl
    def graphhal_replay(self, graph):
        super().graphhal_replay(graph)
        self.replays += 1
        graph.request.output.mul_(1 + 1e-6 * self.replays)


@caught_by("replay_freezes_host_values")
class RunsTheForwardAgain(TapePlatform):
    @hookimpl
    def graphhal_replay(self, graph):
        if graph.handle is None or graph.handle.reads_uninitialised:
            super().graphhal_replay(graph)
        else:
            graph.request.forward()


@caught_by("replay_reads_weights_in_place")
class BakesTheWeights(TapePlatform):
    @hookimpl
    def graphhal_capture(self, request):
        graph = super().graphhal_capture(request)
        map_foreign_tensors(graph, torch.clone)
        return graph


@caught_by("replay_stays_in_its_rows")
class ClearsTheWholeArena(TapePlatform):
    @hookimpl
    def graphhal_replay(self, graph):
        super().graphhal_replay(graph)
        output = graph.request.output
        if output._base is not None:
            output._base[len(output) :].zero_()


@caught_by("graphs_of_two_sizes_take_turns")
class ForgetsToSwitchBack(TapePlatform):
    """A graph that ran before gets the one that was switched to last."""

    def __init__(self):
        super().__init__()
        self.switched_to = []

    @hookimpl
    def graphhal_replay(self, graph):
        if graph.handle is None or graph not in self.switched_to:
            self.switched_to.append(graph)
            super().graphhal_replay(graph)
        else:
            super().graphhal_replay(self.switched_to[-1])

    @hookimpl
    def graphhal_release(self, graphs):
        super().graphhal_release(graphs)
        self.switched_to = [g for g in self.switched_to if g.handle is not None]


@caught_by("replay_works_in_inference_mode")
class RefusesInferenceMode(TapePlatform):
    @hookimpl
    def graphhal_replay(self, graph):
        if torch.is_inference_mode_enabled():
            raise ReplayError("cannot update a version counter in inference mode")
        super().graphhal_replay(graph)


@caught_by("replay_works_from_another_thread")
class KeepsItsStreamPerThread(TapePlatform):
    def __init__(self):
        super().__init__()
        self.here = threading.local()
        self.here.stream = 7

    @hookimpl
    def graphhal_replay(self, graph):
        if self.here.stream == 7:
            super().graphhal_replay(graph)


@caught_by("replay_never_waits")
class WaitsForTheDevice(TapePlatform):
    @hookimpl
    def graphhal_replay(self, graph):
        super().graphhal_replay(graph)
        with suppress(Exception):  # there is no accelerator here to wait for
            torch.accelerator.synchronize()


@caught_by("a_released_graph_does_not_replay")
class IgnoresReplaysOfReleasedGraphs(TapePlatform):
    @hookimpl
    def graphhal_replay(self, graph):
        if graph.handle is not None:
            super().graphhal_replay(graph)
