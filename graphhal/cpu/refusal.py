"""What a device graph cannot hold, and the words in which the reference platform says so.

Two nets, because neither is enough: a dispatch mode (`tape.Tape`) sees every operator, also those
that PyTorch's own C++ calls, but `.tolist()`, `.numpy()` and raw pointers are no operators; a
function mode (`guard.Refusals`) sees those, but not what runs inside another PyTorch function.

Where a tensor came from decides what may be done with it. `DEVICE`: static memory, all that is
computed from it, and what a function makes that was given a device or a tensor from there. `HOST`:
made of Python or NumPy data, and computed from that alone: on a device it stays on the host, where
reading it is harmless. `EITHER`: made by a factory without `device=`; moving it is refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any

import torch

from graphhal.cpu.memory import tensors_in
from graphhal.cpu.recording import KNOWN_NAMESPACES
from graphhal.errors import CaptureError, HostReadError, UnsupportedOperationError

_aten = torch.ops.aten


class Origin(IntEnum):
    """Where a tensor came from; the origin of a result is the largest of its operands'."""

    EITHER = 0
    HOST = 1
    DEVICE = 2


_READING_OPS = frozenset(
    (
        _aten._linalg_check_errors.default,
        _aten.quantize_per_tensor_dynamic.default,
        _aten._pack_padded_sequence.default,
    )
)
_SPARSE_OPS = frozenset((_aten._to_sparse, _aten._to_sparse_csr))
_INDEXING = frozenset((_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_))
_MOVING = _INDEXING | {_aten.copy_}
_REBINDING = frozenset((_aten.set_, _aten.resize_, _aten.resize_as_))


def host_read(what: str) -> HostReadError:
    """The error for a read of device data."""
    return HostReadError(
        f"{what} reads device data on the host. During capture a device has not computed it yet, "
        "and a graph would freeze the value. Keep it on the device, compute it from host integers "
        "before the forward, or pass it in as a host integer or a static input"
    )


def host_data(what: str) -> UnsupportedOperationError:
    """The error for host data that would have to be copied to the device."""
    return UnsupportedOperationError(
        f"{what} brings host data into captured code. A device would have to copy it from pageable "
        "host memory, which cannot be captured. Make the tensor before the forward (a buffer or a "
        "static input), or on the device (torch.full, torch.arange(..., device=...))"
    )


def dynamic_shape(what: str) -> UnsupportedOperationError:
    """The error for a result whose shape depends on device data."""
    return UnsupportedOperationError(
        f"{what} makes a result whose shape depends on device data; the shapes of a device graph "
        "are fixed at capture. Use a form of fixed shape (torch.where, masked_fill, output_size=), "
        "or compute indices from host integers and pass them in as a static input"
    )


def raw_memory(what: str) -> UnsupportedOperationError:
    """The error for work that the tape could not follow."""
    return UnsupportedOperationError(
        f"{what} takes a tensor's memory out of PyTorch's sight; what is done with it would be "
        "missing from the graph. Register the work as an operator (torch.library)"
    )


def rebinding(what: str) -> UnsupportedOperationError:
    """The error for a tensor that changes its memory during capture."""
    return UnsupportedOperationError(
        f"{what} gives a tensor other memory; a device graph keeps the addresses of capture. "
        "Copy into the tensor in place, or allocate a new one of the final size"
    )


def foreign_memory(shape: Sequence[int]) -> UnsupportedOperationError:
    """The error for a tensor that no operator made."""
    return UnsupportedOperationError(
        f"a tensor of shape {tuple(shape)} was made inside the forward, but by no operator "
        "(torch.frombuffer, DLPack, nn.Parameter of a computed tensor); a replay would read what "
        "it held at capture. Make it before the forward"
    )


def reseeding() -> UnsupportedOperationError:
    """The error for a forward that changes the seed."""
    return UnsupportedOperationError(
        "the forward seeds the random generator (torch.manual_seed); a device refuses that during "
        "capture, and a replay would go on drawing. Seed before the request"
    )


def higher_order(what: str) -> UnsupportedOperationError:
    """The error for an operator that takes functions: `torch.cond`, `flex_attention`."""
    return UnsupportedOperationError(
        f"{what} calls functions of its own, by device data or compiled, which no tape follows. "
        "Write the branches with torch.where, attention with scaled_dot_product_attention or the "
        "platform's own"
    )


def check_operator(
    op: Any,
    operands: Sequence[tuple[torch.Tensor, Origin]],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    seed: int,
) -> CaptureError | None:
    """Why this operator cannot be captured, or None. Schema and origins decide, never values;
    and whether the generator has still the seed that the capture began with."""
    if isinstance(op, torch._ops.HigherOrderOperator):
        return higher_order(str(op))
    if torch.Tag.nondeterministic_seeded in op.tags and torch.initial_seed() != seed:
        return reseeding()
    generator = kwargs.get("generator")
    if generator is not None and generator is not torch.default_generator:
        return UnsupportedOperationError(
            f"{op} draws from a generator of its own, which a device graph does not know. Draw "
            "from the default generator, or pass the random numbers in as a static input"
        )
    if op.overloadpacket in _REBINDING:
        return rebinding(str(op))
    if not any(origin is Origin.DEVICE for _, origin in operands):
        return None
    if torch.Tag.data_dependent_output in op.tags or op in _READING_OPS:
        return host_read(_spelling(op))
    if op.namespace not in KNOWN_NAMESPACES and any(
        str(value.type) in ("int", "float", "bool", "number", "str", "SymInt")
        for value in op._schema.returns
    ):
        return host_read(f"{op}, which returns a host value,")
    for tensor, origin in operands:
        moved = origin is Origin.EITHER and op.overloadpacket in _MOVING
        if tensor.dim() > 0 and (origin is Origin.HOST or moved):
            return host_data(f"{op} on a tensor of shape {tuple(tensor.shape)} made on the host")
    if op.overloadpacket in _INDEXING:
        masks = any(t.dtype in (torch.bool, torch.uint8) for t in tensors_in(args[1]))
        return (
            dynamic_shape(f"indexing with a mask ({op})")
            if masks and not (len(args) > 2 and _fills(args[2], operands))
            else None
        )
    sized = op is _aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None
    if op.overloadpacket in _SPARSE_OPS or (
        torch.Tag.dynamic_output_shape in op.tags and not sized
    ):
        return dynamic_shape(str(op))
    return None


def _fills(value: torch.Tensor, operands: Sequence[tuple[torch.Tensor, Origin]]) -> bool:
    """Whether `x[mask] = value` is a masked fill: one value that the host knows."""
    return value.numel() == 1 and any(
        tensor is value and origin is not Origin.DEVICE for tensor, origin in operands
    )


def _spelling(op: Any) -> str:
    if op is _aten._local_scalar_dense.default:
        return ".item(), int(), float() or bool() of a tensor"
    return str(op)


def written(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Tensors that the operator's schema says it writes."""
    for index, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(args[index] if index < len(args) else kwargs.get(argument.name))
