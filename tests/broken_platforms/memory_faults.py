"""Faults of pools, of reported bytes, of poison, and of release."""

from dataclasses import replace

from graphhal.errors import ReplayError
from graphhal.hookspecs import hookimpl
from graphhal.platform import MemoryProfile
from tests.broken_platforms.fault import caught_by
from tests.broken_platforms.tape_platform import TapePlatform


@caught_by("graphs_share_the_pool")
class IgnoresThePool(TapePlatform):
    @hookimpl
    def graphhal_capture(self, request):
        graph = super().graphhal_capture(replace(request, pool=None))
        graph.request = request
        return graph


@caught_by("graph_bytes_are_measured")
class CountsItsHandlesOnly(TapePlatform):
    @hookimpl
    def graphhal_capture(self, request):
        graph = super().graphhal_capture(request)
        graph.num_bytes = 64 if request.pool is None else 0
        return graph

    @hookimpl
    def graphhal_profile_memory(self, requests):
        profile = super().graphhal_profile_memory(requests)
        return replace(profile, settled_bytes=64)


@caught_by("the_profile_foretells_capture")
class ProfilesNothing(TapePlatform):
    @hookimpl
    def graphhal_profile_memory(self, requests):
        return MemoryProfile(0, 0, {request.key: 0 for request in requests})


@caught_by("the_profile_foretells_capture")
class ChargesForWhatIsGivenBack(TapePlatform):
    @hookimpl
    def graphhal_profile_memory(self, requests):
        profile = super().graphhal_profile_memory(requests)
        return replace(profile, settled_bytes=5 * profile.settled_bytes)


@caught_by("the_profile_names_every_graph")
class ProfilesInTotalOnly(TapePlatform):
    @hookimpl
    def graphhal_profile_memory(self, requests):
        return replace(super().graphhal_profile_memory(requests), per_graph={})


@caught_by("the_profile_keeps_nothing")
class KeepsWhatItProfiled(TapePlatform):
    @hookimpl
    def graphhal_profile_memory(self, requests):
        self.profiled = list(requests)
        return super().graphhal_profile_memory(requests)


@caught_by("poison_shows_unwritten_rows")
class PoisonsNothing(TapePlatform):
    @hookimpl
    def graphhal_capture(self, request):
        graph = super().graphhal_capture(request)
        graph.poison = lambda: None
        return graph


@caught_by("poison_shows_unwritten_rows")
class HasNoPoisonAndDoesNotSay(TapePlatform):
    @hookimpl
    def graphhal_capture(self, request):
        return replace(super().graphhal_capture(request), poison=None)


@caught_by("release_works_twice")
class ReleasesTwiceBadly(TapePlatform):
    @hookimpl
    def graphhal_release(self, graphs):
        for graph in graphs:
            if graph.handle is None:
                raise RuntimeError("double free")
        super().graphhal_release(graphs)


@caught_by("release_of_nothing_works")
class ReleasesAtLeastOne(TapePlatform):
    @hookimpl
    def graphhal_release(self, graphs):
        first = graphs[0]
        super().graphhal_release([first, *graphs[1:]])


@caught_by("release_clears_the_handle")
class KeepsTheHandle(TapePlatform):
    @hookimpl
    def graphhal_release(self, graphs):
        for graph in graphs:
            if graph.handle is not None:
                graph.handle.launches.clear()

    @hookimpl
    def graphhal_replay(self, graph):
        if graph.handle is None or not graph.handle.launches:
            raise ReplayError("released")
        super().graphhal_replay(graph)


@caught_by("release_frees_the_buffers")
class RegistersGraphsForGood(TapePlatform):
    def __init__(self):
        super().__init__()
        self.registry = []

    @hookimpl
    def graphhal_capture(self, request):
        graph = super().graphhal_capture(request)
        self.registry.append(request)
        return graph


@caught_by("release_spares_the_others")
class ReleasesThePoolWithOneGraph(TapePlatform):
    def __init__(self):
        super().__init__()
        self.pools = []

    @hookimpl
    def graphhal_capture(self, request):
        graph = super().graphhal_capture(request)
        self.pools.append((graph.pool, graph.handle))
        return graph

    @hookimpl
    def graphhal_release(self, graphs):
        for graph in graphs:
            for pool, tape in self.pools:
                if pool is graph.pool:
                    tape.launches.clear()
        self.pools = [entry for entry in self.pools if entry[1].launches]
        super().graphhal_release(graphs)
