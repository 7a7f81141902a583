"""Any model with vLLM's encoder-graph protocol, where the model's own code prepares the buffers."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from graphhal.adapter import BufferSpec, EncoderAdapter
from graphhal.errors import AdapterError, RefusedError
from graphhal.items import ItemSpec
from graphhal.plan import Capacity, GraphKey, SequenceBound
from graphhal.platform import Platform
from graphhal.settings import SelfCheck, Settings
from graphhal.vllm_worker import grid_requests, host_ends
from graphhal.vllm_worker.layout_check import LayoutCheck
from graphhal.vllm_worker.limits import Limits, ladder_of
from graphhal.vllm_worker.protocol import Dialect, PathRule, tower_modules
from graphhal.vllm_worker.protocol_buffers import BOUNDS, MARKER, ProtocolBuffers
from graphhal.vllm_worker.protocol_examples import (
    CAPTURE_INPUTS,
    CAPTURE_VALUES,
    ProtocolExamples,
)
from graphhal.vllm_worker.protocol_items import are_all, signature_of
from graphhal.vllm_worker.protocol_requests import ProtocolRequests
from graphhal.vllm_worker.protocol_staging import copies

EAGER = "eager_request"
"""The input that tells `forward` to run the model's own eager code."""


class ProtocolAdapter(EncoderAdapter):
    """One path of a model with the protocol.

    The engine sees output tokens as rows; what a graph can hold beyond that is the model's word:
    its capture buffers, against which every prepared replay buffer is checked. `stage` raises
    `RefusedError` where one does not fit, and where a host scalar (a `max_seqlen`, baked at
    capture) is larger than the one that was captured.

    Boundary buffers (`cu_seqlens`, `cu_window_seqlens`) are allocated with room for the padding:
    rows past the last sequence become dummy sequences of their own, no longer than the captured
    bound, so that no kernel leaves them unwritten. Where the platform takes boundaries from the
    host, they come from the sizes of the inputs instead (`keep_ends_on_host`).

    Args:
        model: the model, unwrapped.
        dialect: how this vLLM spells the protocol.
        path: one of the model's paths.
        rule: budgets of that path.
        limits: budgets, items and frames that the options allow.
        settings: whether, and how strictly, layouts are compared with eager.
        device: of the graphs.
        dtype: of the graphs' floating-point inputs.
    """

    def __init__(
        self,
        model: Any,
        dialect: Dialect,
        path: str,
        rule: PathRule,
        limits: Limits,
        settings: Settings,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.model = model
        self.dialect = dialect
        self.path_name = path
        self.rule = rule
        self.limits = limits
        self.device, self.dtype = device, dtype
        self.config = model.get_encoder_cudagraph_config()
        self.modalities = tuple(self.config.modalities)
        suffix = "" if path == "default" else f"_{path}"
        self.name = f"{type(model).__name__}{suffix}"
        self._checks_layouts = settings.self_check is not SelfCheck.OFF
        self._layouts = LayoutCheck(self.name, settings.tolerance)
        self._buffers = ProtocolBuffers(model, dialect, path, limits, device, dtype)
        self._request: tuple[Mapping[str, Any], tuple[ItemSpec, ...]] | None = None
        writes = path == "default" and not dialect.axes(self.config)
        self._examples = ProtocolExamples(self._buffers, self.budgets, writes)
        self._requests = ProtocolRequests(self.name, self.config, self._buffers, self._examples)
        self._budgets: tuple[int, ...] | None = None

    def prepare(self, platform: Platform) -> None:
        """Take boundaries from the host where the platform's kernels do.

        Raises:
            AdapterError: this model's cannot be had there.
        """
        info = platform.info
        if info.boundary_order == "after" or "host_ends" in info.capabilities:
            self.keep_ends_on_host()

    def keep_ends_on_host(self) -> None:
        """Boundaries are made from the sizes of the inputs from now on, if this model makes the
        same of them; a model without boundaries has nothing to keep.

        Raises:
            AdapterError: it does not, or has others than of whole pictures and frames.
        """
        kept = BOUNDS.keys() & set(self.config.buffer_keys)
        if not kept:
            return
        found = f"its boundaries {', '.join(sorted(kept))} are of another kind"
        if kept == {host_ends.ENDS} and not self._buffers.scaled and not self._requests.has_axes:
            films = "video" in self.modalities
            found = (
                host_ends.problem(self._examples.grids(), films, self.device, self._prepared) or ""
            )
        if found:
            raise AdapterError(
                f"{self.name}: vLLM's encoder-graph protocol keeps boundaries on the device, this "
                f"platform needs them on the host, and {found}"
            )
        self._buffers.ends_on_host = True

    def _prepared(self, mm_kwargs: Mapping[str, Any]) -> Mapping[str, torch.Tensor | None]:
        values: Mapping[str, torch.Tensor | None] = (
            self.model.prepare_encoder_cudagraph_replay_buffers(
                dict(mm_kwargs), self.limits.items, self.limits.frames, self.path_name
            ).values
        )
        return values

    @property
    def whole_model(self) -> bool:  # type: ignore[override]  # the towers may be replaced
        """Whether the model names no towers."""
        return self.model in tower_modules(self.model)

    def modules(self) -> Iterable[torch.nn.Module]:
        """The model's towers, where it names them; else the whole model."""
        return tower_modules(self.model)

    def places(self) -> Iterable[tuple[torch.nn.Module, str, torch.nn.Module]]:
        """The attributes of the model that hold them."""
        towers = tower_modules(self.model)
        if not towers:
            return ()
        return tuple(
            (owner, name, held)
            for owner in (self.model, *self.model.children())
            for name, held in owner.named_children()
            if any(held is tower for tower in towers)
        )

    def item_specs(self, mm_kwargs: Mapping[str, Any]) -> tuple[ItemSpec, ...]:
        """Items of this path; rows are output tokens.

        Raises:
            InputError: the model's code for graphs does not take these inputs.
        """
        return self._requests.items(mm_kwargs)

    def whole(self, mm_kwargs: Mapping[str, Any], count: int) -> Mapping[str, Any]:
        """The kwargs of all items, as the model's postprocessing is to have them."""
        return self._requests.whole(mm_kwargs, count)

    def path(self, item: ItemSpec) -> str:
        """The model's path, and the capture axes that the group resolved to."""
        return self._requests.path(item)

    def refusal(self, items: Sequence[ItemSpec]) -> str | None:
        """Groups whose capture axes were never captured, or whose layout differs from eager."""
        axes = signature_of(items[0]).axes
        if axes not in self._requests.axes.values():
            return f"capture axes {axes} were not captured"
        return "such groups differ from eager" if self._layouts.is_wrong(items) else None

    def budgets(self) -> tuple[int, ...]:
        """Token budgets: dense where rows are packed, the model's own powers of two elsewhere."""
        if self._budgets is None:
            self._budgets = ladder_of(self.limits, self.rule.minimum, self._packs_rows)
        return self._budgets

    def _packs_rows(self, budget: int) -> bool:
        """Whether the model's dummy inputs for a graph have boundaries."""
        axes = next(iter(self._requests.axes.values()))
        return any(name in BOUNDS for name in self._buffers.dummies(budget, axes))

    def capacities(self, settings: Settings) -> tuple[Capacity, ...]:
        """One graph for each budget and combination of capture axes."""
        return tuple(
            Capacity(
                GraphKey(self.name, path, budget),
                rows=budget,
                tokens=budget * self._examples.rows_per_token(),
                items=self.limits.items_for(budget),
                sequences=self._bounds(budget),
            )
            for budget in self.budgets()
            for path in self._requests.axes
        )

    def _bounds(self, budget: int) -> Mapping[str, SequenceBound]:
        """What a graph's boundaries can hold, where they come from the host: such a model has one
        path, and no axes."""
        if not self._buffers.ends_on_host:
            return {}
        captured = self._buffers.of(GraphKey(self.name, self.path_name, budget), ())
        return {
            name: SequenceBound(padding.rows, captured.specs[name].shape[0] - 1, padding.bound)
            for name, padding in captured.ends.items()
        }

    def buffers(self, capacity: Capacity) -> Mapping[str, BufferSpec]:
        """The model's capture buffers; boundary buffers get room for dummy sequences."""
        if capacity.key.size == 0:  # an eager call: the model's own code stages
            return {
                name: BufferSpec((bound.slots + 1,), torch.int32, packed=True)
                for name, bound in capacity.sequences.items()
            }
        return self._buffers.of(capacity.key, self._requests.axes[capacity.key.path]).specs

    def metadata(self, items: Sequence[ItemSpec]) -> Mapping[str, npt.NDArray[np.generic]]:
        """None: the model keeps its metadata on the device."""
        return {}

    def stage(
        self,
        mm_kwargs: Mapping[str, Any],
        items: Sequence[ItemSpec],
        inputs: Mapping[str, torch.Tensor],
    ) -> None:
        """Let the model prepare its buffers and copy them, padding included.

        Raises:
            RefusedError: they do not fit this graph.
        """
        self.stager(items, inputs)(mm_kwargs)

    def stager(
        self, items: Sequence[ItemSpec], inputs: Mapping[str, torch.Tensor]
    ) -> Callable[[Mapping[str, Any]], None]:
        """`stage` with the views of the buffers made once."""
        captured = self._buffers.behind(inputs)
        buffers = {
            name: target
            for name, target in inputs.items()
            if name != MARKER and not captured.specs[name].packed
        }
        raw = any(hasattr(tower, "input_norm") for tower in tower_modules(self.model))
        copy = copies(captured, buffers, self.config.padding_logics, raw)
        frozen = tuple(items)
        requests = self._requests
        come_whole = not requests.has_axes and are_all(frozen)
        grids = self._examples.grids()
        doubtful = self._checks_layouts and grids is None
        right: Hashable = None
        patches = None if grids is None else grids.patches(sum(item.rows for item in frozen))

        def stage(mm_kwargs: Mapping[str, Any]) -> None:
            nonlocal right
            if CAPTURE_INPUTS in mm_kwargs:
                copy(mm_kwargs[CAPTURE_VALUES])
                return
            try:
                subset = (
                    requests.whole(mm_kwargs, len(frozen))
                    if come_whole
                    else requests.subset(mm_kwargs, frozen)
                )
                prepared = self.model.prepare_encoder_cudagraph_replay_buffers(
                    dict(subset), captured.items, captured.frames, self.path_name
                )
                if patches is not None:
                    _check_rows(prepared.values.get(grid_requests.PIXELS), patches)
                copy(prepared.values)
            except RefusedError:
                raise
            except Exception as error:  # the model's own code, and its padding: eager needs neither
                raise RefusedError(f"the model prepares no buffers: {error!r}") from error
            shapes = _shapes(prepared.values) if doubtful else None
            if shapes == right:
                return
            if not self._layouts.is_settled(captured.number, frozen, shapes):
                self._layouts.compare(
                    captured.number,
                    frozen,
                    shapes,
                    lambda: self.forward(inputs, {}),
                    lambda: self._own_eager(subset),
                )
                copy(prepared.values)  # again: a forward may have worked on its inputs in place
            right = shapes

        return stage

    def eager_inputs(
        self, mm_kwargs: Mapping[str, Any], items: Sequence[ItemSpec]
    ) -> dict[str, torch.Tensor]:
        """A mark for `forward` to run the model's own eager code on this request."""
        self._request = (mm_kwargs, tuple(items))
        return {EAGER: torch.zeros(1, dtype=torch.uint8)}

    def forward(
        self, inputs: Mapping[str, torch.Tensor], max_seqlen: Mapping[str, int]
    ) -> torch.Tensor:
        """The model's captured forward on static inputs; its eager forward for eager inputs."""
        if EAGER in inputs:
            return self._eager_forward()
        captured = self._buffers.behind(inputs)
        values = {name: value for name, value in inputs.items() if name != MARKER}
        output = self.dialect.forward(values | captured.constants, self.path_name)
        tokens = captured.budget * self._examples.rows_per_token()
        captured.made = min(len(output), tokens)
        return _exactly(output, tokens)

    def _eager_forward(self) -> torch.Tensor:
        if self._request is None:
            raise AdapterError(f"{self.name}: an eager forward needs a request")
        (mm_kwargs, items), self._request = self._request, None
        if CAPTURE_INPUTS in mm_kwargs:
            own = _copied(mm_kwargs[CAPTURE_VALUES])
            values = {name: value for name, value in own.items() if value is not None}
            output = self.dialect.forward(values, self.path_name)
            return _exactly(output, items[0].tokens)
        return self._own_eager(self._requests.subset(mm_kwargs, items, for_graph=False))

    def _own_eager(self, subset: Mapping[str, Any]) -> torch.Tensor:
        own = _copied(subset)  # the request is asked for again
        if self._examples.rows_per_token() > 1:
            return self._examples.unpadded(own)
        return self.dialect.eager(own, self.path_name)

    def example(self, items: Sequence[ItemSpec], seed: int) -> dict[str, Any]:
        """Pictures of a grid, where the model takes such; else the model's own dummy inputs."""
        return self._examples.request(items, seed)

    def worst_cases(self, capacity: Capacity) -> Iterable[tuple[ItemSpec, ...]]:
        """Full, one short of full, many small ones, where the model takes grids; else one full."""
        axes = self._requests.axes[capacity.key.path]
        modality = self.modalities[0] if self.modalities else "image"
        for tokens in self._examples.groups(capacity):
            lengths = self._requests.lengths(self._examples.sizes(tokens), len(tokens))
            yield tuple(
                self._requests.item(n, modality, t, (n, len(tokens)), axes, lengths[n])
                for n, t in enumerate(tokens)
            )


def _copied(value: Any) -> Any:
    """Inputs with tensors of their own: the model may work in place."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, Mapping):
        return {name: _copied(each) for name, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value


def _check_rows(pixels: torch.Tensor | None, rows: int) -> None:
    """Missing patches would become zeros, where eager finds that they are missing."""
    if pixels is not None and len(pixels) != rows:
        raise RefusedError(f"{len(pixels)} patches came, the grids have {rows}")


def _shapes(values: Mapping[str, torch.Tensor | None]) -> Hashable:
    return tuple([(name, value.shape) for name, value in values.items() if value is not None])


def _exactly(output: torch.Tensor, tokens: int) -> torch.Tensor:
    """The first `tokens` rows of a model's output; models round their capture sizes up or down."""
    if len(output) < tokens:
        return torch.nn.functional.pad(output, (0, 0, 0, tokens - len(output)))
    return output[:tokens]
