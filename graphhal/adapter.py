"""The model's side of the contract: what one family of encoders tells the engine."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from graphhal.errors import AdapterError
from graphhal.items import ItemSpec
from graphhal.plan import Capacity, GraphKey
from graphhal.platform import Platform
from graphhal.settings import Settings

Place = tuple[torch.nn.Module, str, torch.nn.Module]
"""Where a module is kept: owner, attribute, module."""


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """A static input of a graph.

    Attributes:
        shape: of the tensor, in elements.
        dtype: PyTorch dtype.
        packed: filled from host data (`EncoderAdapter.metadata`, or boundaries) and carried in
            the one packed copy; otherwise filled by `EncoderAdapter.stage`.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    packed: bool = False

    def __post_init__(self) -> None:
        # A list would be unlike the shape of every array.
        object.__setattr__(self, "shape", tuple(self.shape))


class EncoderAdapter(ABC):
    """One encoder tower, host-independent.

    Knows item sizes, how to stage inputs, and the forward. Knows no device and no policy. Eager
    and graph call the same `forward`, so they cannot drift apart.

    Attributes:
        name: of the family and tower, unique in a process (`"qwen3_omni_vision"`).
        modalities: what `ItemSpec.modality` can be.
        device: where inputs and weights live.
        dtype: of the outputs.
        collectives: whether the forward runs collectives over ranks (tensor-parallel weights).
        whole_model: whether `modules` are a host's whole model, whose attributes change with every
            step, and not encoders alone.
    """

    name: str
    modalities: tuple[str, ...]
    device: torch.device
    dtype: torch.dtype
    collectives: bool = False
    whole_model: bool = False

    def prepare(self, platform: Platform) -> None:  # noqa: B027  (optional)
        """Called once before any forward; take the platform's attention here."""

    @abstractmethod
    def item_specs(self, mm_kwargs: Mapping[str, Any]) -> tuple[ItemSpec, ...]:
        """Sizes of the items, from host integers; check everything the forward relies on.

        Raises:
            InputError: what is wrong with which item, and how to fix it.
        """

    @abstractmethod
    def capacities(self, settings: Settings) -> tuple[Capacity, ...]:
        """The ladder: every graph that could be captured under these settings."""

    @abstractmethod
    def buffers(self, capacity: Capacity) -> Mapping[str, BufferSpec]:
        """Static inputs of such a graph; a `cu_seqlens` buffer is named like its boundary set."""

    @abstractmethod
    def metadata(self, items: Sequence[ItemSpec]) -> Mapping[str, npt.NDArray[np.generic]]:
        """Host metadata of the items for the packed buffers, boundaries left out.

        Arrays hold the real rows only; the engine pads with zeros, which must be harmless.
        """

    @abstractmethod
    def stage(
        self,
        mm_kwargs: Mapping[str, Any],
        items: Sequence[ItemSpec],
        inputs: Mapping[str, torch.Tensor],
    ) -> None:
        """Copy the items' data into the unpacked static inputs, padding tail included (zeros).

        Raises:
            RefusedError: the data cannot be replayed, for a reason that sizes do not tell; then
                override `eager_inputs`, which stages too.
        """

    @abstractmethod
    def forward(
        self, inputs: Mapping[str, torch.Tensor], max_seqlen: Mapping[str, int]
    ) -> torch.Tensor | Sequence[torch.Tensor]:
        """The encoder: eager and captured alike. Tensors that it keeps between calls belong on
        `modules`, where they live as long as the graphs that read them.

        Args:
            inputs: static buffers by name (graph) or fresh tensors of the exact size (eager).
            max_seqlen: host bound of each boundary set, baked at capture.

        Returns:
            (tokens, width), or several of these to stand side by side (DeepStack levels).
        """

    @abstractmethod
    def example(self, items: Sequence[ItemSpec], seed: int) -> dict[str, Any]:
        """A synthetic request of exactly these items, seeded; values like a processor's."""

    @abstractmethod
    def worst_cases(self, capacity: Capacity) -> Iterable[tuple[ItemSpec, ...]]:
        """Groups that a graph must get right: exactly full, one short of full, many short
        sequences, the longest sequence. The exactly full one comes first; each must fit."""

    def forget(self) -> None:  # noqa: B027  (optional)
        """Called before a ladder is captured: what was found out about the modules is to be found
        out again, since they may have been replaced, hooked or patched. Nothing by default."""

    def capture_case(self, capacity: Capacity) -> tuple[ItemSpec, ...] | None:
        """An exactly full group to warm up and capture with, whose attention is cheap: work grows
        with the square of a sequence's length. None: the first worst case. Asked where boundaries
        are data of the graph; what they may become is checked afterwards."""
        return None

    def eager_inputs(
        self, mm_kwargs: Mapping[str, Any], items: Sequence[ItemSpec]
    ) -> dict[str, torch.Tensor]:
        """The unpacked inputs of an eager call; override where no copy is needed."""
        specs = self.buffers(Capacity.of(items, GraphKey(self.name, self.path(items[0]), 0)))
        fresh = {
            name: torch.zeros(spec.shape, dtype=spec.dtype, device=self.device)
            for name, spec in specs.items()
            if not spec.packed
        }
        self.stage(mm_kwargs, items, fresh)
        return fresh

    def stager(
        self, items: Sequence[ItemSpec], inputs: Mapping[str, torch.Tensor]
    ) -> Callable[[Mapping[str, Any]], None]:
        """`stage` for requests of these sizes into these inputs; kept, since sizes come again.
        Override to prepare views of the inputs once."""
        return lambda mm_kwargs: self.stage(mm_kwargs, items, inputs)

    def path(self, item: ItemSpec) -> str:
        """The ladder that an item belongs to."""
        return item.modality

    def refusal(self, items: Sequence[ItemSpec]) -> str | None:
        """Why such a group must not be replayed now, or None. Asked on every request, so it may
        depend on state; cheap, host integers only."""
        return None

    def sized(self, modality: str, tokens: Sequence[int]) -> Sequence[ItemSpec] | None:
        """A group of items that make so many tokens each, for `graphhal plan` to ask `refusal`
        of, as a trace has no more than sizes; None where `refusal` does not depend on them."""
        return None

    def modules(self) -> Iterable[torch.nn.Module]:
        """Modules whose parameters and buffers a graph reads by address; the engine watches them
        and, unless they are a `whole_model`, their attributes."""
        return ()

    def places(self) -> Iterable[Place]:
        """Where the host keeps such modules. The engine watches that they stay there; a tower that
        is replaced as a whole is seen nowhere else."""
        return ()


def wrong_answer(adapter: EncoderAdapter, method: str, wanted: str, got: object) -> AdapterError:
    """The error for a method that returned something else than `wanted`."""
    return AdapterError(f"{adapter.name}: {method} must return {wanted}, got {got!r:.100}")


def refuse_hidden_methods(adapter: EncoderAdapter) -> None:
    """Refuse an adapter one of whose attributes hides a method: a count called `places`.

    Raises:
        AdapterError: names the attribute.
    """
    for name, method in vars(EncoderAdapter).items():
        if callable(method) and not callable(getattr(adapter, name, method)):
            raise AdapterError(
                f"{adapter.name}: its attribute {name!r} hides the method EncoderAdapter.{name}; "
                "call the attribute something else"
            )


def refuse_misplaced(adapter: EncoderAdapter, platform: Platform) -> None:
    """Refuse an adapter whose tower does not lie where the platform serves: a host's memory, or
    nowhere yet.

    Raises:
        AdapterError: names both devices.
    """
    device, info = adapter.device, platform.info
    if not isinstance(device, torch.device):
        raise AdapterError(f"{adapter.name}: its device must be a torch.device, got {device!r}")
    if device.type != info.device_type:
        raise AdapterError(
            f"{adapter.name} is on {device}, but platform {info.name} serves {info.device_type}; "
            "move the tower there before its adapter is made, or open another platform"
        )


class AdapterFactory(Protocol):
    """How a family of encoders is found, wrapped and, for the bench, built.

    Attributes:
        name: what `--tower` calls it.
        modality: `"image"` or `"audio"`: which file of `graphhal bench` it encodes.
    """

    name: str
    modality: str

    def wrap(self, module: torch.nn.Module) -> EncoderAdapter | None:
        """An adapter for this module of a host, or None where it is of another family."""
        ...

    def build(
        self, preset: str, device: torch.device, dtype: torch.dtype, seed: int = 0
    ) -> EncoderAdapter:
        """The tower with seeded random weights from a published configuration (`tiny`, `full`)."""
        ...

    def load(self, adapter: EncoderAdapter, files: Sequence[Path]) -> dict[str, Any]:
        """A request from files, through the family's real processor.

        Raises:
            InputError: a file cannot be decoded.
        """
        ...
