"""Faults of the boundary update, and of the attention that reads boundaries."""

import contextlib

import torch

from graphhal.hookspecs import hookimpl
from graphhal.testing.toy_encoder import FULL, WINDOWED
from tests.broken_platforms.fault import caught_by
from tests.broken_platforms.tape_platform import TapePlatform

OTHER_ENDS = {
    "other_ends_are_read",
    "fewer_sequences_leave_no_tail",
    "a_lone_sequence_is_not_stretched",
    "two_layers_have_their_own_ends",
    "graphs_of_two_sizes_take_turns",
    "the_bound_is_the_captured_one",
    "an_update_is_for_its_graph",
    "back_to_back_replays_keep_theirs",
    "boundaries_persist_as_claimed",
    "an_eager_call_leaves_boundaries_alone",
    "poison_spares_what_is_in_use",
}


@caught_by(*OTHER_ENDS, "the_packed_block_arrives_whole", "the_engine_serves_by_replay")
class SkipsTheBoundaryUpdate(TapePlatform):
    @hookimpl
    def graphhal_update_boundaries(self, graph, boundaries):
        pass


@caught_by(
    *(OTHER_ENDS - {"boundaries_persist_as_claimed", "an_eager_call_leaves_boundaries_alone"}),
    "a_step_that_fails_leaves_no_debt",
    "the_packed_block_arrives_whole",
    "the_engine_serves_by_replay",
)
class UpdatesAfterTheReplay(TapePlatform):
    """It asks for updates before the replay and makes them after it."""

    late = None

    @hookimpl
    def graphhal_update_boundaries(self, graph, boundaries):
        self.late = boundaries

    @hookimpl
    def graphhal_replay(self, graph):
        super().graphhal_replay(graph)
        if self.late is not None:
            super().graphhal_update_boundaries(graph, self.late)
            self.late = None


@caught_by("other_ends_are_read")
class CachesItsPlanByCount(TapePlatform):
    """As many sequences as last time are taken for the same sequences."""

    @hookimpl
    def graphhal_update_boundaries(self, graph, boundaries):
        super().graphhal_update_boundaries(graph, boundaries)
        plans = graph.handle.__dict__.setdefault("plans", dict(graph.request.boundaries))
        for name, ends in boundaries.boundaries.items():
            if len(ends.ends) == len(plans[name].ends):
                cached = torch.from_numpy(plans[name].cu_seqlens.copy())
                graph.request.inputs[name].copy_(cached)
            else:
                plans[name] = ends


@caught_by("fewer_sequences_leave_no_tail")
class LeavesAStaleTail(TapePlatform):
    """Past the new last end, the longer list of the replay before stays."""

    @hookimpl
    def graphhal_update_boundaries(self, graph, boundaries):
        super().graphhal_update_boundaries(graph, boundaries)
        before = graph.handle.__dict__.get("ends", graph.request.boundaries)
        for name, ends in boundaries.boundaries.items():
            used, old = len(ends.ends), before[name].ends
            if len(old) > used:
                tail = torch.tensor(old[used:], dtype=torch.int32)
                graph.request.inputs[name][1 + used : 1 + len(old)].copy_(tail)
        graph.handle.ends = boundaries.boundaries


@caught_by("a_lone_sequence_is_not_stretched")
class StretchesALoneSequence(TapePlatform):
    """Two sequences of which the second is the longer: a lone one and its padding."""

    @hookimpl
    def graphhal_update_boundaries(self, graph, boundaries):
        super().graphhal_update_boundaries(graph, boundaries)
        for name, ends in boundaries.boundaries.items():
            if len(ends.ends) == 2 and ends.lengths[1] > ends.lengths[0]:
                graph.request.inputs[name][1:].fill_(ends.rows)


@caught_by("padding_rows_are_written")
class ForgetsThePadding(TapePlatform):
    @hookimpl
    def graphhal_update_boundaries(self, graph, boundaries):
        super().graphhal_update_boundaries(graph, boundaries)
        for name, ends in boundaries.boundaries.items():
            if len(ends.ends) > 2:
                graph.request.inputs[name][len(ends.ends) :].fill_(ends.ends[-2])


@caught_by("a_full_graph_has_empty_slots")
class IsOffByOneRow(TapePlatform):
    """Graphs with attention, which have many operators, lose their last row."""

    @hookimpl
    def graphhal_replay(self, graph):
        super().graphhal_replay(graph)
        if len(graph.handle.launches) > 20:
            graph.request.output[-1].zero_()


@caught_by("two_layers_have_their_own_ends")
class HasOneListForAllLayers(TapePlatform):
    @hookimpl
    def graphhal_update_boundaries(self, graph, boundaries):
        super().graphhal_update_boundaries(graph, boundaries)
        graph.request.inputs[WINDOWED].copy_(graph.request.inputs[FULL])


@caught_by("the_bound_is_the_captured_one")
class BakesTheExamplesLongest(TapePlatform):
    longest = None

    @hookimpl
    def graphhal_capture(self, request):
        self.longest = max(ends.max_seqlen for ends in request.boundaries.values())
        try:
            return super().graphhal_capture(request)
        finally:
            self.longest = None

    def attend(self, query, key, value, cu_seqlens, max_seqlen, scale):
        bound = max_seqlen if self.longest is None else min(max_seqlen, self.longest)
        return super().attend(query, key, value, cu_seqlens, bound, scale)


@caught_by("an_update_is_for_its_graph")
class KeepsGraphsBySizeAlone(TapePlatform):
    def __init__(self):
        super().__init__()
        self.packed = {}

    @hookimpl
    def graphhal_capture(self, request):
        graph = super().graphhal_capture(request)
        self.packed[request.key.size] = request.packed
        return graph

    @hookimpl
    def graphhal_update_boundaries(self, graph, boundaries):
        self.packed[graph.key.size].copy_(boundaries.block)

    @hookimpl
    def graphhal_release(self, graphs):
        for graph in graphs:
            self.packed.pop(graph.key.size, None)
        super().graphhal_release(graphs)


@caught_by("back_to_back_replays_keep_theirs")
class MergesWakeUps(TapePlatform):
    """Of three updates in a row the third finds the flag of the second still up, and is lost."""

    updates = 0

    @hookimpl
    def graphhal_update_boundaries(self, graph, boundaries):
        self.updates = graph.handle.__dict__.setdefault("updates", 0) + 1
        graph.handle.updates = self.updates
        if self.updates % 3:
            super().graphhal_update_boundaries(graph, boundaries)


@caught_by("the_packed_block_arrives_whole")
class DropsThePackedBlock(TapePlatform):
    """It sends the boundaries and forgets what travels beside them."""

    @hookimpl
    def graphhal_update_boundaries(self, graph, boundaries):
        for name, ends in boundaries.boundaries.items():
            graph.request.inputs[name].copy_(torch.from_numpy(ends.cu_seqlens.copy()))


@caught_by("the_packed_block_arrives_whole")
class SendsNothingForEqualEnds(TapePlatform):
    """Requests of equal ends are taken for equal: pictures of 4 x 16 and of 8 x 8 patches."""

    last = None

    @hookimpl
    def graphhal_update_boundaries(self, graph, boundaries):
        ends = (id(graph), {n: each.ends for n, each in boundaries.boundaries.items()})
        if ends != self.last:
            super().graphhal_update_boundaries(graph, boundaries)
        self.last = ends


@caught_by("boundaries_persist_as_claimed")
class UsesBoundariesUp(TapePlatform):
    """A second replay in a row without an update has none."""

    fresh = True
    kinds = ()

    @hookimpl
    def graphhal_update_boundaries(self, graph, boundaries):
        super().graphhal_update_boundaries(graph, boundaries)
        self.fresh = True

    @contextlib.contextmanager
    def enter(self, kind):
        self.kinds = (*self.kinds[-1:], kind)
        with super().enter(kind) as scope:
            yield scope

    @hookimpl
    def graphhal_replay(self, graph):
        if not self.fresh and self.kinds == ("replay", "replay"):
            inputs = graph.request.inputs
            for name in {FULL, WINDOWED} & set(inputs):
                inputs[name][1:].fill_(int(inputs[name][-1]))
        super().graphhal_replay(graph)
        self.fresh = False


@caught_by("an_eager_call_leaves_boundaries_alone")
class EagerCallsTakeTheBoundaries(TapePlatform):
    def __init__(self):
        super().__init__()
        self.blocks = []

    @hookimpl
    def graphhal_capture(self, request):
        graph = super().graphhal_capture(request)
        self.blocks.append((graph, request.packed.clone()))
        return graph

    @hookimpl
    def graphhal_release(self, graphs):
        super().graphhal_release(graphs)
        self.blocks = [entry for entry in self.blocks if entry[0].handle is not None]

    @contextlib.contextmanager
    def enter(self, kind):
        if kind == "eager":
            for graph, block in self.blocks:
                graph.request.packed.copy_(block)
        with super().enter(kind) as scope:
            yield scope


@caught_by("a_step_that_fails_leaves_no_debt")
class StillWaitsAfterAFailedStep(TapePlatform):
    owed = False

    @contextlib.contextmanager
    def enter(self, kind):
        try:
            with super().enter(kind) as scope:
                yield scope
        except Exception:
            self.owed = True
            raise

    @hookimpl
    def graphhal_update_boundaries(self, graph, boundaries):
        if not self.owed:
            super().graphhal_update_boundaries(graph, boundaries)
        self.owed = False


@caught_by("a_block_may_be_reused")
class ClearsTheHostBlock(TapePlatform):
    @hookimpl
    def graphhal_update_boundaries(self, graph, boundaries):
        super().graphhal_update_boundaries(graph, boundaries)
        boundaries.block.zero_()


@caught_by("eager_matches_the_reference")
class UsesOneSetInEagerCalls(TapePlatform):
    def __init__(self):
        super().__init__()
        self.eager = None

    @hookimpl
    def graphhal_step(self, kind, graph, inputs, boundaries):
        self.eager = boundaries[FULL].cu_seqlens.copy() if kind == "eager" else None
        return super().graphhal_step(kind, graph, inputs, boundaries)

    def attend(self, query, key, value, cu_seqlens, max_seqlen, scale):
        if self.eager is not None and not self.capturing:
            cu_seqlens, max_seqlen = torch.from_numpy(self.eager), len(query)
        self.eager = None if self.capturing else self.eager
        return super().attend(query, key, value, cu_seqlens, max_seqlen, scale)

    @hookimpl
    def graphhal_capture(self, request):
        self.eager = None
        return super().graphhal_capture(request)


@caught_by("attention_uses_the_scale")
class AssumesTheUsualScale(TapePlatform):
    def attend(self, query, key, value, cu_seqlens, max_seqlen, scale):
        usual = query.shape[-1] ** -0.5
        return super().attend(query, key, value, cu_seqlens, max_seqlen, usual)


@caught_by("attention_takes_strided_rows")
class AssumesRowsSideBySide(TapePlatform):
    def attend(self, query, key, value, cu_seqlens, max_seqlen, scale):
        _, heads, size = query.shape
        flat = [t.as_strided(t.shape, (heads * size, size, 1)) for t in (query, key, value)]
        return super().attend(*flat, cu_seqlens, max_seqlen, scale)


@caught_by("attention_ignores_rows_past_the_end")
class ReadsPastTheEnd(TapePlatform):
    def attend(self, query, key, value, cu_seqlens, max_seqlen, scale):
        last = cu_seqlens == cu_seqlens[-1]
        stretched = torch.where(last, len(query), cu_seqlens).to(torch.int32)
        return super().attend(query, key, value, stretched, len(query), scale)
