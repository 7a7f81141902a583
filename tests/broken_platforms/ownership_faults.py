"""Faults of the step: who owns outputs, and what is left behind."""

import contextlib

import torch

from graphhal.hookspecs import hookimpl
from tests.broken_platforms.fault import caught_by
from tests.broken_platforms.tape_platform import Scope, TapePlatform


@caught_by("outputs_survive_later_replays", "outputs_of_one_step_are_apart")
class ReturnsTheStaticOutput(TapePlatform):
    """Outputs are views of one buffer, whatever their size."""

    def __init__(self):
        super().__init__()
        self.buffer = torch.zeros(64 * 2**10, dtype=torch.uint8)

    def scope(self, kind):
        return Carved(self.buffer)


class Carved(Scope):
    def __init__(self, buffer):
        self.buffer = buffer

    def empty(self, shape, dtype):
        size = torch.Size(shape).numel() * dtype.itemsize
        return self.buffer[:size].view(dtype).view(tuple(shape))


@caught_by("outputs_survive_later_replays")
class ReusesItsBuffers(TapePlatform):
    """One buffer a shape, given out again in the next step."""

    def __init__(self):
        super().__init__()
        self.given = {}

    def scope(self, kind):
        return Remembering(self.given)


class Remembering(Scope):
    def __init__(self, given):
        self.given = given
        self.in_this_step = set()

    def empty(self, shape, dtype):
        key = (tuple(shape), dtype)
        if key in self.in_this_step or key not in self.given:
            self.given[key] = super().empty(shape, dtype)
        self.in_this_step.add(key)
        return self.given[key]


@caught_by("outputs_of_one_step_are_apart")
class GivesOneBufferAStep(TapePlatform):
    def scope(self, kind):
        return OneBuffer()


class OneBuffer(Scope):
    def __init__(self):
        self.given = {}

    def empty(self, shape, dtype):
        key = (tuple(shape), dtype)
        return self.given.setdefault(key, super().empty(shape, dtype))


class Noting(Scope):
    """Keeps what it gave out; for platforms that then trample on it."""

    def __init__(self, given):
        self.given = given

    def empty(self, shape, dtype):
        self.given.append(super().empty(shape, dtype))
        return self.given[-1]


class TramplesOnOutputs(TapePlatform):
    def __init__(self):
        super().__init__()
        self.given = []

    def scope(self, kind):
        return Noting(self.given)

    def trample(self):
        for tensor in self.given:
            tensor.zero_()
        self.given.clear()


@caught_by("outputs_survive_a_later_capture")
class CapturesOverOutputs(TramplesOnOutputs):
    @hookimpl
    def graphhal_capture(self, request):
        self.trample()
        return super().graphhal_capture(request)


@caught_by("outputs_survive_release")
class ReleasesOutputs(TramplesOnOutputs):
    @hookimpl
    def graphhal_release(self, graphs):
        super().graphhal_release(graphs)
        self.trample()


@caught_by("poison_spares_what_is_in_use")
class PoisonsOutputs(TramplesOnOutputs):
    @hookimpl
    def graphhal_capture(self, request):
        graph = super().graphhal_capture(request)
        poison = graph.poison
        graph.poison = lambda: (poison(), self.trample())
        return graph


@caught_by("empty_is_what_was_asked")
class GivesFloatsWhateverIsAsked(TapePlatform):
    def scope(self, kind):
        return Floats()


class Floats(Scope):
    def empty(self, shape, dtype):
        return super().empty(shape, torch.float32)


@caught_by("empty_is_what_was_asked")
class GivesMemoryOfAnotherDevice(TapePlatform):
    """Right for floats; positions and the like end up elsewhere."""

    def scope(self, kind):
        return Elsewhere()


class Elsewhere(Scope):
    def empty(self, shape, dtype):
        device = "cpu" if dtype.is_floating_point else "meta"
        return super().empty(shape, dtype).to(device)


@caught_by("a_step_restores_the_callers_state")
class StepsLeaveGradModeOff(TapePlatform):
    @contextlib.contextmanager
    def enter(self, kind):
        with super().enter(kind) as scope:
            yield scope
        torch.set_grad_enabled(False)


@caught_by("a_failed_step_restores_the_callers_state")
class FailedStepsLeaveTheirMode(TapePlatform):
    @contextlib.contextmanager
    def enter(self, kind):
        try:
            with super().enter(kind) as scope:
                yield scope
        except KeyError:
            torch.set_grad_enabled(False)
            raise


@caught_by("errors_leave_a_step")
class SwallowsErrors(TapePlatform):
    @contextlib.contextmanager
    def enter(self, kind):
        with contextlib.suppress(KeyError), super().enter(kind) as scope:
            yield scope


@caught_by("no_step_inside_a_capture")
class StepsInsideACapture(TapePlatform):
    @hookimpl
    def graphhal_step(self, kind, graph, inputs, boundaries):
        return self.enter(kind)


@caught_by("the_engine_counts_its_misses")
class EagerCallsFitTheLargestGraphOnly(TapePlatform):
    rows = None

    @hookimpl
    def graphhal_capture(self, request):
        graph = super().graphhal_capture(request)
        self.rows = max(self.rows or 0, *(ends.rows for ends in request.boundaries.values()))
        return graph

    @hookimpl
    def graphhal_step(self, kind, graph, inputs, boundaries):
        rows = max((ends.rows for ends in boundaries.values()), default=0)
        if kind == "eager" and self.rows is not None and rows > self.rows:
            raise RuntimeError(f"workspace holds {self.rows} rows, {rows} are asked for")
        return super().graphhal_step(kind, graph, inputs, boundaries)


@caught_by("the_engine_serves_by_replay")
class RefusesStepsOfLargeGraphs(TapePlatform):
    """None without a capture anywhere: the engine serves eagerly, and nobody notices."""

    @hookimpl
    def graphhal_step(self, kind, graph, inputs, boundaries):
        if graph is not None and graph.key.size == 48:
            return None
        return super().graphhal_step(kind, graph, inputs, boundaries)
