"""The platform under test, and the toy graphs that checks capture and replay on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from graphhal.arena import Arena, Layout, host_block
from graphhal.boundaries import Boundaries
from graphhal.discovery import bind, find_plugins
from graphhal.errors import NoPlatformError, PluginError
from graphhal.outputs import write_levels
from graphhal.plan import Capacity, GraphKey
from graphhal.platform import (
    CapturedGraph,
    CaptureRequest,
    HostUpdate,
    Platform,
    PlatformInfo,
    StepKind,
    StepScope,
    Unavailable,
)
from graphhal.settings import Settings
from graphhal.testing.check_failure import CheckFailure
from graphhal.testing.toy_encoder import FULL, LEVEL_WIDTH, ToyEncoder, ToyItem

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Relative L2 of any one token against the float64 host reference, by dtype. A foreign row, a
stale end or a lost phase moves a token by 0.1 and more."""

Toys = Sequence[ToyItem | int]
EXAMPLE: Toys = (8, 2)
"""What graphs are captured with unless a check says otherwise: 6 of 16 rows are padding."""


class Subject:
    """A platform plugin under test.

    Args:
        plugin: the plugin object: a module, or an instance with marked hooks.
        name: of the platform.
        info: its probe's answer; by default it is probed here.
        source: import path of the plugin (`"package.plugin"`), for checks in a fresh process.
        dtype: of the toy encoder; by default float32 on the host and bfloat16 on a device.

    Raises:
        NoPlatformError: the platform cannot serve this process; says why.
        PluginError: the plugin breaks the contract so badly that no hook can be bound.
    """

    def __init__(
        self,
        plugin: Any,
        name: str,
        info: PlatformInfo | None = None,
        source: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        status = info or plugin.graphhal_probe()
        if isinstance(status, Unavailable):
            raise NoPlatformError(f"platform {name} is not usable: {status.reason}")
        if not isinstance(status, PlatformInfo):
            raise PluginError(
                f"graphhal_probe returned {status!r}, not a PlatformInfo or Unavailable"
            )
        self.plugin = plugin
        self.name = name
        self.info: PlatformInfo = status
        self.source = source
        self.platform: Platform = bind(plugin, status, name)
        self.device = torch.device(status.device_type)
        if self.device.type != "cpu":
            self.device = torch.device(self.device.type, torch.accelerator.current_device_index())
        self.dtype = dtype or (torch.float32 if self.device.type == "cpu" else torch.bfloat16)
        self._graphs: list[CapturedGraph] = []

    def encoder(
        self, budgets: Sequence[int] = (16, 32), slots: int = 6, path: str = "image"
    ) -> ToyEncoder:
        """A toy encoder that uses the platform's attention."""
        encoder = ToyEncoder(self.device, self.dtype, budgets, slots, path)
        encoder.prepare(self.platform)
        return encoder

    def capture(
        self,
        encoder: ToyEncoder | None = None,
        example: Toys = EXAMPLE,
        rows: int = 16,
        max_seqlen: int | None = None,
        beside: ToyGraph | None = None,
    ) -> ToyGraph:
        """Capture a toy graph; `beside` shares another graph's arenas and pool."""
        encoder = encoder or self.encoder()
        arena = beside.arena if beside is not None else None
        drawn = ToyGraph(self, encoder, encoder.capacity(rows, max_seqlen), arena)
        pool = None if beside is None else beside.graph.pool
        drawn.graph = self.capture_request(drawn.request(example, pool))
        return drawn

    def capture_request(self, request: CaptureRequest) -> CapturedGraph:
        """Call the capture hook; what it returns is released when the check is over."""
        graph = self.platform.capture(request)
        if not isinstance(graph, CapturedGraph):
            raise CheckFailure(
                f"capture returned {graph!r}",
                "a graphhal.platform.CapturedGraph",
                "graphhal_capture",
            )
        self._graphs.append(graph)
        return graph

    def request(
        self,
        forward: Callable[[Mapping[str, torch.Tensor], torch.Tensor], None],
        rows: int = 16,
        pool: Any = None,
        warmups: int = 2,
    ) -> CaptureRequest:
        """A request over toy buffers whose captured code is `forward(inputs, output)`."""
        drawn = ToyGraph(self, self.encoder(), self.encoder().capacity(rows), None)
        request = drawn.request(EXAMPLE, pool)
        call = partial(forward, request.inputs, request.output)
        return replace(request, forward=call, warmups=warmups)

    def launch(self, graph: CapturedGraph) -> torch.Tensor:
        """Replay a graph as captured, over a cleared static output; it as float64 on the host.

        Cleared, since warm-up left there what the replay should write.
        """
        request = graph.request
        request.output.zero_()
        host = HostUpdate(request.boundaries, request.packed.cpu())
        with self.step("replay", graph, request.inputs, request.boundaries):
            self.replay_updated(graph, host)
        return request.output.cpu().double()

    def replay_updated(self, graph: CapturedGraph, host: HostUpdate) -> None:
        """Replay and update, inside a step, in the platform's order."""
        if self.info.boundary_order == "before":
            self.platform.update_boundaries(graph, host)
        self.platform.replay(graph)
        if self.info.boundary_order == "after":
            self.platform.update_boundaries(graph, host)

    def step(
        self,
        kind: StepKind,
        graph: CapturedGraph | None,
        inputs: Mapping[str, torch.Tensor],
        boundaries: Mapping[str, Boundaries],
    ) -> AbstractContextManager[StepScope]:
        """Enter a step that the platform may not refuse."""
        entered = self.platform.step(kind, graph, inputs, boundaries)
        if entered is None:
            raise CheckFailure(
                f"step({kind!r}) returned None outside any capture",
                "a context manager; None is for a step while an outer capture runs",
                "graphhal_step",
            )
        return entered

    def eager(
        self, encoder: ToyEncoder, mm_kwargs: Mapping[str, Any], kind: StepKind = "eager"
    ) -> torch.Tensor:
        """The encoder's forward as the engine calls it eagerly: exact sizes, owned output."""
        items = encoder.item_specs(mm_kwargs)
        capacity = Capacity.of(items, GraphKey(encoder.name, "eager", 0))
        layout = Layout.of(encoder, capacity)
        boundaries = capacity.boundaries(items, self.info.allow_empty)
        block = _block(encoder, layout, items, boundaries)
        inputs: dict[str, torch.Tensor] = {}
        with self.step(kind, None, inputs, boundaries) as scope, torch.no_grad():
            inputs.update(layout.packed_views(block.to(self.device, copy=True)))
            inputs.update(encoder.eager_inputs(mm_kwargs, items))
            bounds = {name: bound.max_seqlen for name, bound in capacity.sequences.items()}
            levels = encoder.forward(inputs, bounds)
            owned = scope.empty((capacity.tokens, 2 * LEVEL_WIDTH), self.dtype)
            write_levels(levels, owned, encoder.name)
        return owned

    def expect_reference(
        self,
        actual: torch.Tensor,
        encoder: ToyEncoder,
        mm_kwargs: Mapping[str, Any],
        what: str,
        expected: str,
        hook: str | None = None,
    ) -> None:
        """Hold an output of the toy encoder against its float64 host reference.

        Raises:
            CheckFailure: names the worst token and how far off it is.
        """
        self.expect_close(actual, torch.cat(encoder.reference(mm_kwargs)), what, expected, hook)

    def expect_close(
        self,
        actual: torch.Tensor,
        reference: torch.Tensor,
        what: str,
        expected: str,
        hook: str | None = None,
    ) -> None:
        """Hold (tokens, width) rows against a float64 host reference of the same shape.

        Raises:
            CheckFailure: names the worst token and how far off it is.
        """
        ours = actual.detach().cpu().double()
        if ours.shape != reference.shape:
            did = f"{what} has shape {tuple(ours.shape)}"
            raise CheckFailure(did, f"shape {tuple(reference.shape)}", hook)
        error = (ours - reference).norm(dim=1) / reference.norm(dim=1).clamp(min=1e-6)
        error = torch.nan_to_num(error, nan=float("inf"))
        worst = int(error.argmax())
        allowed = TOLERANCE[self.dtype]
        if error[worst] > allowed:
            raise CheckFailure(
                f"row {worst} of {what} is off by relative L2 {float(error[worst]):.2g} "
                f"(allowed {allowed:g}; {int((error > allowed).sum())} of {len(error)} rows off)",
                expected,
                hook,
            )

    def close(self) -> None:
        """Release what the check captured and did not release itself."""
        left = [graph for graph in self._graphs if graph.handle is not None]
        self._graphs.clear()
        # Release has checks of its own; its faults must not be laid at another check's door.
        with suppress(Exception):
            self.platform.release(left)


class ToyGraph:
    """A graph of the toy encoder over arenas of its own or of another graph."""

    graph: CapturedGraph

    def __init__(
        self, subject: Subject, encoder: ToyEncoder, capacity: Capacity, arena: Arena | None
    ) -> None:
        self.subject = subject
        self.encoder = encoder
        self.capacity = capacity
        self.layout = Layout.of(encoder, capacity)
        self.arena = arena or self._arena()
        self.inputs = self.layout.bulk_views(self.arena.bulk)
        self.inputs |= self.layout.packed_views(self.arena.packed)

    def _arena(self) -> Arena:
        device, dtype = self.subject.device, self.subject.dtype
        output = torch.zeros((self.capacity.tokens, 2 * LEVEL_WIDTH), dtype=dtype, device=device)
        return Arena(device, self.layout.bulk_bytes, self.layout.packed_bytes, output)

    def request(self, example: Toys, pool: Any) -> CaptureRequest:
        """The capture request, static inputs filled with the example."""
        mm_kwargs = self.encoder.request(example)
        items = self.encoder.item_specs(mm_kwargs)
        update = self.update(mm_kwargs)
        packed = self.arena.packed[: self.layout.packed_bytes]
        packed.copy_(update.block)
        self.encoder.stage(mm_kwargs, items, self.inputs)
        return CaptureRequest(
            key=self.capacity.key,
            forward=partial(self._forward, self.encoder, self.inputs, self.output, self.capacity),
            inputs=self.inputs,
            packed=packed,
            output=self.output,
            boundaries=update.boundaries,
            warmups=2,
            pool=pool,
            device=self.subject.device,
        )

    @staticmethod
    def _forward(
        encoder: ToyEncoder,
        inputs: Mapping[str, torch.Tensor],
        output: torch.Tensor,
        capacity: Capacity,
    ) -> None:
        bounds = {name: bound.max_seqlen for name, bound in capacity.sequences.items()}
        with torch.no_grad():
            write_levels(encoder.forward(inputs, bounds), output, encoder.name)

    @property
    def output(self) -> torch.Tensor:
        """The static output."""
        return self.arena.output[: self.capacity.tokens]

    def update(self, mm_kwargs: Mapping[str, Any]) -> HostUpdate:
        """The host data of a replay of this request."""
        items = self.encoder.item_specs(mm_kwargs)
        boundaries = self.capacity.boundaries(items, self.subject.info.allow_empty)
        return HostUpdate(boundaries, _block(self.encoder, self.layout, items, boundaries))

    def poison(self) -> None:
        """Fill what a replay must write before it reads: bulk inputs, output, the pool's rest."""
        self.arena.bulk.fill_(0xFF)
        self.arena.output.fill_(float("nan"))
        if self.graph.poison is not None:
            self.graph.poison()

    @contextmanager
    def launched(self, mm_kwargs: Mapping[str, Any], update: bool = True) -> Iterator[StepScope]:
        """One replay, up to the copy-out; the hooks in the platform's order."""
        host = self.update(mm_kwargs)
        items = self.encoder.item_specs(mm_kwargs)
        entered = self.subject.step("replay", self.graph, self.inputs, host.boundaries)
        with entered as scope, torch.no_grad():
            self.encoder.stage(mm_kwargs, items, self.inputs)
            if update:
                self.subject.replay_updated(self.graph, host)
            else:
                self.subject.platform.replay(self.graph)
            yield scope

    def replay(self, mm_kwargs: Mapping[str, Any], update: bool = True) -> torch.Tensor:
        """One replay; its (tokens, 96) output, copied to memory of `scope.empty`."""
        tokens = sum(item.tokens for item in self.encoder.item_specs(mm_kwargs))
        with self.launched(mm_kwargs, update) as scope:
            owned = scope.empty((tokens, 2 * LEVEL_WIDTH), self.subject.dtype)
            owned.copy_(self.output[:tokens])
        return owned


def open_subject(name: str, dtype: torch.dtype | None = None) -> Subject:
    """The installed platform of this name, found by entry point.

    Raises:
        NoPlatformError: no such platform is installed, or it cannot serve here; says why.
    """
    found = {plugin.name: plugin for plugin in find_plugins(Settings(platform=name))}
    if name not in found:
        installed = ", ".join(found) or "none"
        raise NoPlatformError(f"no platform {name!r} is installed. Installed: {installed}")
    plugin = found[name]
    if not isinstance(plugin.status, PlatformInfo):
        raise NoPlatformError(f"platform {name} is {plugin.describe()}")
    source = plugin.plugin.__name__ if isinstance(plugin.plugin, type(torch)) else None
    return Subject(plugin.plugin, name, plugin.status, source, dtype)


def _block(
    encoder: ToyEncoder,
    layout: Layout,
    items: Sequence[Any],
    boundaries: Mapping[str, Boundaries],
) -> torch.Tensor:
    arrays = dict(encoder.metadata(items))
    arrays |= {name: ends.cu_seqlens for name, ends in boundaries.items()}
    return layout.pack(arrays, host_block(layout.packed_bytes, encoder.device))


__all__ = ["EXAMPLE", "FULL", "Subject", "ToyGraph", "Toys", "open_subject"]
