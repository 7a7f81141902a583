"""A platform as the engine sees it: what crosses the plugin contract, and its bound hooks."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import compress
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from graphhal.boundaries import Boundaries
from graphhal.errors import PluginError
from graphhal.memory_limits import first_to_keep, fitting
from graphhal.plan import GraphKey

if TYPE_CHECKING:
    import torch

BoundaryOrder = Literal["before", "after"]
StepKind = Literal["replay", "eager", "reference"]
"""`eager` may use the graphs' memory; `reference` is an eager call at start-up, whose memory is
given back afterwards and must not grow the pool. Start-up also replays within a reference."""


class VarlenAttention(Protocol):
    """Packed attention that honours boundaries without reading them on the host.

    `query`, `key`, `value` are (rows, heads, head_dim); `cu_seqlens` is an int32 device tensor of
    n+1 entries; `max_seqlen` a host int, baked at capture. Returns (rows, heads, head_dim). Rows
    past the last end, and rows of spare slots, must come back finite or untouched, never read; an
    attention that cannot take such boundaries refuses them with `BoundariesError`.
    """

    def __call__(
        self,
        query: "torch.Tensor",
        key: "torch.Tensor",
        value: "torch.Tensor",
        cu_seqlens: "torch.Tensor",
        max_seqlen: int,
        scale: float,
    ) -> "torch.Tensor":
        """Attend within each sequence."""
        ...


@dataclass(frozen=True, slots=True)
class PlatformInfo:
    """What a usable platform says of itself.

    Attributes:
        name: what `GRAPHHAL_PLATFORM` calls it.
        device_type: PyTorch's word for the device (`"cuda"`, `"npu"`, `"cpu"`, …).
        versions: of the libraries and drivers that decide behaviour.
        boundary_order: whether boundaries are updated before the replay or after its launch.
        attention: the platform's packed attention, for towers that take one.
        boundaries_persist: boundaries stay valid over replays, so that an unchanged update can
            be skipped (a static buffer); False where every replay needs one (Ascend's task update).
        reference: a platform for checking, not for speed; never chosen beside an accelerator.
        free_bytes: memory that is free now on the current device; None where the platform cannot
            say.
        allow_empty: the attention takes empty sequences (spare slots); else every slot needs a row.
        capabilities: further facts, as words: `"collectives"` can be captured; `"host_ends"`: the
            attention takes boundaries from the host, by the address of their buffer; `"poison"`
            fills free memory with NaN; `"mem_pool_eager"` runs eager calls in the graphs' memory;
            `"ordinary_outputs"`: a tensor made within a replay's step is the caller's already.
        unclaimed: conformance checks that the platform does not claim to pass, and why, in words;
            only checks that may be waived (`python -m graphhal.testing --list` says which).
        lone_sequence_from: rows of an attention sequence from which `attention` is faster in a
            graph that holds no other sequence but its padding; None where that makes no difference.

    Raises:
        PluginError: a field is of another kind; names it.
    """

    name: str
    device_type: str
    versions: Mapping[str, str]
    attention: VarlenAttention
    boundary_order: BoundaryOrder = "before"
    boundaries_persist: bool = True
    reference: bool = False
    free_bytes: Callable[[], int] | None = None
    allow_empty: bool = True
    capabilities: frozenset[str] = frozenset()
    unclaimed: Mapping[str, str] = field(default_factory=dict)
    lone_sequence_from: int | None = None

    def __post_init__(self) -> None:
        for name in ("name", "device_type"):
            self._refuse_unless(name, isinstance(getattr(self, name), str), "a word")
        for name in ("versions", "unclaimed"):
            self._refuse_unless(name, isinstance(getattr(self, name), Mapping), "a mapping")
        for name in ("attention", "free_bytes"):
            given = getattr(self, name)
            self._refuse_unless(name, given is None or callable(given), "a function or None")
        known = self.boundary_order in get_args(BoundaryOrder)
        self._refuse_unless("boundary_order", known, "'before' or 'after'")
        rows = self.lone_sequence_from
        whole = rows is None or (isinstance(rows, int) and rows > 0)
        self._refuse_unless("lone_sequence_from", whole, "a number of rows or None")
        words = isinstance(self.capabilities, AbstractSet)
        self._refuse_unless("capabilities", words, "a set of words")

    def _refuse_unless(self, name: str, right: bool, wanted: str) -> None:
        if not right:
            raise PluginError(f"PlatformInfo.{name} must be {wanted}, got {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True)
class Unavailable:
    """Why a platform cannot serve this process.

    Attributes:
        reason: one sentence for the operator.
        absent: neither its device nor its library is here (rather than here and unusable).
    """

    reason: str
    absent: bool = False


@dataclass(frozen=True, slots=True)
class HostUpdate:
    """All host-born data of one replay: boundaries by set, and the packed block that holds them.

    Attributes:
        boundaries: per boundary set, padded to the graph's rows and slots.
        block: uint8 host tensor (pinned where the device is not the host), laid out like the
            graph's `packed` buffer: `cu_seqlens`, positions and all other host metadata.
    """

    boundaries: Mapping[str, Boundaries]
    block: "torch.Tensor"


@dataclass(frozen=True, slots=True, eq=False)
class CaptureRequest:
    """One graph to record.

    Attributes:
        key: names the graph in logs, statistics and registries.
        forward: no arguments; reads the static inputs and writes the static output; to be warmed
            up and then captured. Must be called on the stream that captures.
        inputs: every static buffer that `forward` reads, by name; the ones named in `boundaries`
            hold `cu_seqlens`.
        packed: uint8 device buffer that `HostUpdate.block` is copied to; holds some `inputs`.
        output: the static output that `forward` writes.
        boundaries: boundaries for warm-up and capture, by set name.
        warmups: eager passes before capture.
        pool: opaque pool of the graphs captured before, or None for a new one.
        device: PyTorch device the buffers live on.
    """

    key: GraphKey
    forward: Callable[[], None]
    inputs: Mapping[str, "torch.Tensor"]
    packed: "torch.Tensor"
    output: "torch.Tensor"
    boundaries: Mapping[str, Boundaries]
    warmups: int
    pool: Any
    device: "torch.device"


@dataclass(slots=True, eq=False)
class CapturedGraph:
    """A recorded graph: warm-up, capture, replay*, release.

    It holds, strongly, all that a replay reads or writes. A replay overwrites `request.output`;
    one of a released graph raises `ReplayError`. After `poison`, boundaries are updated again
    before the next replay.

    Attributes:
        request: what was captured; keeps the static buffers alive.
        handle: the platform's own object; None after release.
        pool: opaque, to be handed to the next `CaptureRequest` of the same owner.
        num_bytes: device memory that this capture added to the pool, settled.
        poison: fills the free memory of the graph's pool with NaN, for the self-check; None where
            the platform cannot.
    """

    request: CaptureRequest
    handle: Any
    pool: Any
    num_bytes: int = 0
    poison: Callable[[], None] | None = None

    @property
    def key(self) -> GraphKey:
        """Key of the graph."""
        return self.request.key


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Device memory that capture would take, in bytes.

    Attributes:
        settled_bytes: what stays after capture, in all.
        transient_bytes: what is needed on top while capturing, and given back.
        per_graph: settled bytes that each key adds, captured in the order given.
    """

    settled_bytes: int
    transient_bytes: int
    per_graph: Mapping[GraphKey, int] = field(default_factory=dict)

    def kept_within(
        self, limit: int | None, arenas: int, rows: Mapping[GraphKey, int]
    ) -> "MemoryProfile":
        """The profile with arenas of `arenas` bytes counted in, and the graphs that capture would
        drop beyond `limit` bytes left out. Where some are, what the others take is not known, but
        at most the limit. `rows` are those of every graph."""
        beside = arenas + self.settled_bytes - sum(self.per_graph.values())
        total, kept = arenas + self.settled_bytes, dict(self.per_graph)
        if limit is not None and total > limit:
            costs = [(rows[key], num_bytes) for key, num_bytes in kept.items()]
            start = first_to_keep(costs, beside, limit)
            fits = [*[False] * start, *fitting(costs, beside, limit, start)] if costs else []
            kept = dict(compress(kept.items(), fits))
            total = limit
        return MemoryProfile(total, self.transient_bytes, kept)


class StepScope(Protocol):
    """Where the device work of one step is queued; entered once per replay or eager call."""

    def empty(self, shape: Sequence[int], dtype: "torch.dtype") -> "torch.Tensor":
        """Uninitialised memory that the caller owns: outside any graph pool, on its stream."""
        ...


class Step(Protocol):
    """Hook signature: see `graphhal.hookspecs.graphhal_step`."""

    def __call__(
        self,
        kind: StepKind,
        graph: CapturedGraph | None,
        inputs: Mapping[str, "torch.Tensor"],
        boundaries: Mapping[str, Boundaries],
    ) -> AbstractContextManager[StepScope] | None:
        """Enter one step."""
        ...


@dataclass(frozen=True, slots=True)
class Platform:
    """The active platform: its plugin's hook implementations, bound once.

    A general pluggy call walks every plugin and costs a microsecond or two; the engine calls
    these directly.
    """

    info: PlatformInfo
    capture: Callable[[CaptureRequest], CapturedGraph]
    replay: Callable[[CapturedGraph], None]
    update_boundaries: Callable[[CapturedGraph, HostUpdate], None]
    profile_memory: Callable[[Sequence[CaptureRequest]], MemoryProfile]
    release: Callable[[Sequence[CapturedGraph]], None]
    step: Step
