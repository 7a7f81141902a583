"""Faults of the capture hook."""

import weakref
from contextlib import suppress
from dataclasses import replace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphhal.errors import CaptureError, HostReadError, ReplayError
from graphhal.hookspecs import hookimpl
from graphhal.plan import GraphKey
from graphhal.platform import CapturedGraph
from tests.broken_platforms.fault import caught_by
from tests.broken_platforms.tape_platform import Pool, Tape, TapePlatform, map_foreign_tensors


@caught_by("capture_returns_what_was_asked")
class RenamesTheGraph(TapePlatform):
    @hookimpl
    def graphhal_capture(self, request):
        graph = super().graphhal_capture(request)
        graph.request = replace(request, key=GraphKey("tape", "anything", 0))
        return graph


@caught_by("capture_warms_up_first")
class WarmsUpTwiceWhateverIsAsked(TapePlatform):
    def warm_up(self, request):
        super().warm_up(replace(request, warmups=2))


@caught_by("capture_refuses_host_reads")
class SwallowsAnIllegalOperation(TapePlatform):
    @hookimpl
    def graphhal_capture(self, request):
        try:
            return super().graphhal_capture(request)
        except HostReadError:
            return CapturedGraph(request, Tape(), Pool())


@caught_by("a_failed_capture_is_a_capture_error")
class LetsWarmUpFailuresThrough(TapePlatform):
    @hookimpl
    def graphhal_capture(self, request):
        self.warm_up(request)
        return super().graphhal_capture(request)


@caught_by("a_failed_capture_is_a_capture_error")
class HidesTheCause(TapePlatform):
    @hookimpl
    def graphhal_capture(self, request):
        with suppress(CaptureError):
            return super().graphhal_capture(request)
        raise CaptureError("capture failed")


@caught_by("capture_restores_the_callers_state")
class LeavesGradModeOff(TapePlatform):
    @hookimpl
    def graphhal_capture(self, request):
        graph = super().graphhal_capture(request)
        torch.set_grad_enabled(False)
        return graph


@caught_by("capture_restores_the_callers_state")
class SeedsTheGenerator(TapePlatform):
    @hookimpl
    def graphhal_capture(self, request):
        graph = super().graphhal_capture(request)
        torch.manual_seed(torch.initial_seed() + 1)
        return graph


@caught_by("capture_restores_the_callers_state")
class TakesTheThreads(TapePlatform):
    @hookimpl
    def graphhal_capture(self, request):
        graph = super().graphhal_capture(request)
        torch.set_num_threads(torch.get_num_threads() + 1)
        return graph


@caught_by("a_failed_capture_restores_the_callers_state")
class KeepsItsModeAfterAFailure(TapePlatform):
    @hookimpl
    def graphhal_capture(self, request):
        try:
            return super().graphhal_capture(request)
        except CaptureError:
            Bystander().__enter__()
            raise


class Bystander(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@caught_by("a_failed_capture_keeps_nothing")
class LeaksOnFailure(TapePlatform):
    @hookimpl
    def graphhal_capture(self, request):
        try:
            return super().graphhal_capture(request)
        except CaptureError:
            self.failed_requests = [request]
            raise


@caught_by("a_failed_capture_spares_the_pool")
class AFailureEndsThePool(TapePlatform):
    def __init__(self):
        super().__init__()
        self.captured = []

    @hookimpl
    def graphhal_capture(self, request):
        try:
            graph = super().graphhal_capture(request)
        except CaptureError:
            for tape, pool in self.captured:
                if pool is request.pool:
                    tape.launches.clear()
            raise
        self.captured.append((graph.handle, graph.pool))
        return graph

    @hookimpl
    def graphhal_release(self, graphs):
        gone = [graph.handle for graph in graphs]
        self.captured = [entry for entry in self.captured if entry[0] not in gone]
        super().graphhal_release(graphs)


@caught_by("capture_in_inference_mode_serves_outside")
class InferenceTensorsStayInside(TapePlatform):
    @hookimpl
    def graphhal_capture(self, request):
        graph = super().graphhal_capture(request)
        graph.handle.inside = torch.is_inference_mode_enabled()
        return graph

    @hookimpl
    def graphhal_replay(self, graph):
        outside = not torch.is_inference_mode_enabled()
        if outside and graph.handle is not None and graph.handle.inside:
            raise RuntimeError("in-place update of an inference tensor")
        super().graphhal_replay(graph)


@caught_by("a_graph_holds_what_it_reads")
class HoldsWeightsWeakly(TapePlatform):
    @hookimpl
    def graphhal_capture(self, request):
        graph = super().graphhal_capture(request)
        map_foreign_tensors(graph, weakref.ref)
        graph.request = replace(request, forward=lambda: None)
        return graph

    @hookimpl
    def graphhal_replay(self, graph):
        if graph.handle is None:
            raise ReplayError("released")
        with torch.inference_mode():
            for launch in graph.handle.launches:
                args = [a() if isinstance(a, weakref.ref) else a for a in launch.args]
                replace(launch, args=args).run()


@caught_by("graphs_of_one_key_are_distinct")
class BringsBackReleasedGraphs(TapePlatform):
    def __init__(self):
        super().__init__()
        self.parked = {}

    @hookimpl
    def graphhal_capture(self, request):
        graph = super().graphhal_capture(request)
        graph.handle = self.parked.pop(request.key, graph.handle)
        return graph

    @hookimpl
    def graphhal_release(self, graphs):
        for graph in graphs:
            if graph.handle is not None and graph.key.path == "again":
                self.parked[graph.key] = graph.handle
        super().graphhal_release(graphs)


@caught_by("the_engine_serves_by_replay")
class HasRoomForThreeGraphs(TapePlatform):
    def __init__(self):
        super().__init__()
        self.live = 0

    @hookimpl
    def graphhal_capture(self, request):
        if self.live == 3:
            raise CaptureError("no stream is left")
        graph = super().graphhal_capture(request)
        self.live += 1
        return graph

    @hookimpl
    def graphhal_release(self, graphs):
        self.live -= sum(graph.handle is not None for graph in graphs)
        super().graphhal_release(graphs)
