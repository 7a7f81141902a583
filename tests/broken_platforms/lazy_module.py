"""The correct platform as a plugin module that imports nothing before its probe."""

from functools import cache

from graphhal.hookspecs import hookimpl


@cache
def _platform():
    from tests.broken_platforms.tape_platform import TapePlatform

    return TapePlatform()


@hookimpl
def graphhal_probe():
    return _platform().graphhal_probe()


@hookimpl
def graphhal_capture(request):
    return _platform().graphhal_capture(request)


@hookimpl
def graphhal_replay(graph):
    _platform().graphhal_replay(graph)


@hookimpl
def graphhal_update_boundaries(graph, boundaries):
    _platform().graphhal_update_boundaries(graph, boundaries)


@hookimpl
def graphhal_step(kind, graph, inputs, boundaries):
    return _platform().graphhal_step(kind, graph, inputs, boundaries)


@hookimpl
def graphhal_profile_memory(requests):
    return _platform().graphhal_profile_memory(requests)


@hookimpl
def graphhal_release(graphs):
    _platform().graphhal_release(graphs)
