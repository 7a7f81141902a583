"""The two spellings of vLLM's encoder-graph protocol: 0.26, and 0.27 to 0.33; a model's towers."""

import inspect
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from graphhal.errors import AdapterError
from graphhal.weights import registrations

AXIS_KEYS = "encoder_cudagraph_axis_keys"
"""Where a model leaves its resolved capture axes among the selected kwargs (0.30 on)."""


def has_protocol(model: Any) -> bool:
    """Whether vLLM's own manager can serve a model; one that is not known (None) may have it."""
    return model is None or hasattr(model, "encoder_cudagraph_forward")


@dataclass(frozen=True, slots=True)
class PathRule:
    """Budgets of one of a model's paths.

    Attributes:
        minimum: smallest budget; None for the model's own range.
    """

    minimum: int | None = None


class Dialect:
    """How the installed vLLM spells the protocol of one model; read from the model's signatures.

    Args:
        model: unwrapped.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._may_spread: tuple[int, list[Any]] | None = None

    def paths(self, config: Any) -> dict[str, PathRule]:
        """The model's paths, by name."""
        if getattr(config, "enable_dual_path_graph", False):
            return {
                "global": PathRule(config.global_token_per_image),
                "local": PathRule(config.local_token_per_patch),
            }
        paths = getattr(config, "paths", None)
        if not paths:
            return {"default": PathRule()}
        return {name: PathRule(rule.min_token_budget) for name, rule in paths.items()}

    def axes(self, config: Any) -> Sequence[Sequence[Hashable]]:
        """Capture axes beside the token budget; none before 0.30."""
        axes: Sequence[Sequence[Hashable]] = getattr(config, "capture_axes", ())
        return axes

    def path_tokens(self, spec: Any, path: str) -> int:
        """Output tokens that one item takes on a path; 0 where it is not there."""
        by_path = getattr(spec, "path_output_tokens", {})
        if path == "default" and not by_path:
            return int(spec.output_tokens)
        return int(by_path.get(path, getattr(spec, f"{path}_output_tokens", 0)))

    def select(
        self, mm_kwargs: Mapping[str, Any], positions: list[int]
    ) -> tuple[dict[str, Any], tuple[Hashable, ...]]:
        """The kwargs of some items, and their capture axes."""
        selected = dict(self._model.select_encoder_cudagraph_items(dict(mm_kwargs), positions))
        return selected, tuple(selected.pop(AXIS_KEYS, ()))

    def capture_inputs(
        self,
        budget: int,
        items: int,
        frames: int,
        device: torch.device,
        dtype: torch.dtype,
        path: str,
        axes: tuple[Hashable, ...],
    ) -> dict[str, torch.Tensor | None]:
        """The model's dummy inputs for one graph."""
        prepare = self._model.prepare_encoder_cudagraph_capture_inputs
        asked = (budget, items, frames, device, dtype, path)
        made = prepare(*asked, axes) if _takes(prepare, len(asked) + 1) else prepare(*asked)
        return dict(made.values)

    def forward(self, values: dict[str, torch.Tensor], path: str) -> torch.Tensor:
        """(rows, width): what a graph of one of the model's paths computes."""
        with self._alone():
            output: torch.Tensor = self._model.encoder_cudagraph_forward(values, path=path)
        return output.reshape(-1, output.shape[-1])

    def eager(self, mm_kwargs: Mapping[str, Any], path: str) -> torch.Tensor:
        """(tokens, width): the model's own output for one of its paths; some models of 0.26 know
        no path."""
        rest = {} if path == "default" else {"path": path}
        with self._alone():
            output = self._model.encoder_eager_forward(dict(mm_kwargs), **rest)
        made = output if isinstance(output, torch.Tensor) else torch.cat(list(output))
        return made.reshape(-1, made.shape[-1])

    def scatters_only(self) -> bool:
        """Whether the model's items are consecutive rows of its output: the protocol's default."""
        from vllm.model_executor.models.interfaces import SupportsEncoderCudaGraph

        own = getattr(type(self._model), "postprocess_encoder_output", None)
        return own is SupportsEncoderCudaGraph.postprocess_encoder_output

    def postprocess(
        self,
        outputs: Mapping[str, torch.Tensor],
        tokens: Sequence[int],
        mm_kwargs: Mapping[str, Any],
    ) -> list[torch.Tensor]:
        """One tensor per item, by the model's own postprocessing of what its paths made.

        Raises:
            AdapterError: the items have not as many rows as they were said to have.
        """
        found: dict[int, torch.Tensor] = {}
        indices = list(range(len(tokens)))
        local: dict[str, torch.Tensor | None] = {}
        of_paths: Any = dict(outputs)
        if not self._takes_every_path:
            of_paths = outputs.get("default", outputs.get("global"))
            local["local_output"] = outputs.get("local")
        self._model.postprocess_encoder_output(
            of_paths,
            indices,
            list(tokens),
            found,
            clone=False,
            batch_mm_kwargs=dict(mm_kwargs),
            **local,
        )
        items = [found[index] for index in indices]
        made = [len(item) for item in items]
        if made != list(tokens):
            raise AdapterError(f"postprocessing makes {made} rows of items of {list(tokens)}")
        return items

    @cached_property
    def _takes_every_path(self) -> bool:
        """Whether the model's postprocessing takes the paths' outputs by name (0.27 on)."""
        parameters = inspect.signature(self._model.postprocess_encoder_output).parameters
        return not {"output", "local_output"} & parameters.keys()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Without spreading over ranks, which the others would not come to: each encodes its share
        by itself. The model spreads items (Kimi K2.5, StepVL), or its tower does (InternVL,
        MiniCPM-V); whoever may has whole weights."""
        spread = [m for m in self._who_may_spread() if m.use_data_parallel is True]
        for module in spread:
            module.use_data_parallel = False
        try:
            yield
        finally:
            for module in spread:
                module.use_data_parallel = True

    def _who_may_spread(self) -> list[Any]:
        """The model and modules of its towers that can; looked for again where any module of the
        process got another one, since a walk takes a millisecond."""
        now = registrations()
        if self._may_spread is None or self._may_spread[0] != now:
            towers = tower_modules(self._model)
            parts = dict.fromkeys(module for tower in towers for module in tower.modules())
            able = [m for m in (self._model, *parts) if hasattr(m, "use_data_parallel")]
            self._may_spread = now, able
        return self._may_spread[1]


def _takes(function: Any, arguments: int) -> bool:
    """Whether a function takes so many arguments by position."""
    try:
        inspect.signature(function).bind(*range(arguments))
    except TypeError:
        return False
    return True


def tower_modules(model: Any) -> tuple[torch.nn.Module, ...]:
    """The modules of a vLLM model that its encoders read: towers and connectors it names."""
    try:
        mapping = model.get_mm_mapping()
        prefixes = [*mapping.tower_model, *mapping.connector]
        found = [model.get_submodule(prefix.strip(".")) for prefix in prefixes]
    except (AttributeError, NotImplementedError, TypeError):
        found = []
    if not found and isinstance(model, torch.nn.Module):
        found = [model]
    return tuple(dict.fromkeys(found))
