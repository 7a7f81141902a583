"""Fused inference attention: eager calls, and tasks of a graph whose boundaries change per replay.

The kernel takes boundaries as host integers (`actual_seq_lengths`: cumulative ends, no zero), the
towers pass `cu_seqlens`. Whoever runs a forward says which static buffer stands for which boundary
set (`Serving`), so an attention call finds its host integers by the address of its `cu_seqlens`,
and nothing is read back from the device.

A captured call keeps only weak references to what it reads: its tensors lie in the graph's pool,
like the operands of every other captured kernel, and strong ones would keep the activations of all
layers alive. Its result and workspace are allocated during capture, so that they lie there too.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
import torch_npu
from torch_npu import npu

from graphhal.boundaries import Boundaries
from graphhal.errors import BoundariesError, HostReadError, UnsupportedOperationError
from graphhal.npu.fused_attention import FusedAttention, fused_attention

HEAD_DIMS = (64, 128, 192, 256)
"""Head dims that the TND kernel takes; others are padded with zeros up to the next one."""


@dataclass(slots=True)
class AttentionTask:
    """One captured attention call.

    Attributes:
        boundary_set: whose ends it reads.
        handle: the task group, as the runtime names it.
        flag: external event that the captured call waits for and clears; set once per replay.
    """

    boundary_set: str
    handle: Any
    flag: Any
    _operator: FusedAttention
    _arguments: Mapping[str, Any]

    def issue(self, ends: list[int]) -> None:
        """Issue the call with these ends, into whatever the current stream collects."""
        self._operator.operator.out(**self._arguments, **self._operator.ends(ends))


@dataclass(slots=True)
class Serving:
    """A forward that runs now: its static buffers, its boundaries, and its tasks under capture.

    Attributes:
        inputs: static buffers by name; may be filled after the forward began.
        boundaries: host boundaries, named like the buffer that carries their `cu_seqlens`.
        tasks: filled by capture; None for an eager forward.
    """

    inputs: Mapping[str, torch.Tensor]
    boundaries: Mapping[str, Boundaries]
    tasks: list[AttentionTask] | None = None
    workspaces: dict[Any, torch.Tensor] = field(default_factory=dict)

    def set_of(self, cu_seqlens: torch.Tensor) -> str | None:
        """The boundary set whose buffer this is."""
        address = cu_seqlens.data_ptr()
        for name in self.boundaries:
            buffer = self.inputs.get(name)
            if buffer is not None and buffer.data_ptr() == address:
                return name
        return None


_serving: ContextVar[Serving | None] = ContextVar("graphhal_npu_serving", default=None)


@contextmanager
def serve(serving: Serving) -> Iterator[None]:
    """Attention calls of this thread belong to this forward."""
    token = _serving.set(serving)
    try:
        yield
    finally:
        _serving.reset(token)


def ends_are_known(cu_seqlens: torch.Tensor) -> bool:
    """Whether a forward runs in this thread that told the host ends of this buffer."""
    serving = _serving.get()
    return serving is not None and serving.set_of(cu_seqlens) is not None


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    scale: float,
) -> torch.Tensor:
    """Packed attention on (rows, heads, head_dim); see `graphhal.platform.VarlenAttention`.

    Raises:
        HostReadError: in a capture, `cu_seqlens` is none of the graph's boundary buffers.
        BoundariesError: the boundaries do not cover the rows.
    """
    serving = _serving.get()
    name = None if serving is None else serving.set_of(cu_seqlens)
    if serving is None or name is None:
        bounds = _read_back(cu_seqlens, query.shape[0])
    else:
        bounds = serving.boundaries[name]
    rows = (query.shape[0], key.shape[0], value.shape[0])
    if any(count != bounds.rows for count in rows):
        raise BoundariesError(
            f"{name or 'cu_seqlens'} covers {bounds.rows} rows; queries, keys and values have "
            f"{', '.join(map(str, rows))}; every row, padding included, needs a sequence"
        )
    width = value.shape[2]
    padded = _padded_dim(max(query.shape[2], width))
    operator = _operator()
    arguments = operator.arguments(
        _padded(query, padded), _padded(key, padded), _padded(value, padded), scale
    )
    ends = bounds.actual_seq_lengths
    out: torch.Tensor
    if serving is None or serving.tasks is None or name is None:
        out = operator.operator(**arguments, **operator.ends(ends))[0]
    else:
        out, task = _captured(operator, arguments, ends, serving.workspaces, name)
        serving.tasks.append(task)
    return out[..., :width]


def _captured(
    operator: FusedAttention,
    arguments: dict[str, Any],
    ends: list[int],
    workspaces: dict[Any, torch.Tensor],
    boundary_set: str,
) -> tuple[torch.Tensor, AttentionTask]:
    """Capture one call as a task group that waits for its flag."""
    query = arguments["query"]
    signature = (query.shape, arguments["key"].shape, query.dtype)
    if signature not in workspaces:
        workspaces[signature] = operator.workspace(arguments, ends)
    out, lse = torch.empty_like(query), query.new_empty(1, dtype=torch.float32)
    full = {**arguments, "workspace": workspaces[signature], "out": [out, lse]}
    stream = npu.current_stream()
    flag = npu.ExternalEvent()
    flag.wait(stream)
    flag.reset(stream)  # in torch_npu 2.13 the wait clears it by itself
    npu.graph_task_group_begin(stream)
    try:
        operator.operator.out(**full, **operator.ends(ends))
    finally:
        handle = npu.graph_task_group_end(stream)
    weak = torch_npu._C._weak_ref_tensor
    kept = {**full, "out": [weak(out), lse]}
    kept.update({part: weak(full[part]) for part in ("query", "key", "value")})
    return out, AttentionTask(boundary_set, handle, flag, operator, kept)


def _operator() -> FusedAttention:
    operator = fused_attention()
    if operator is None:
        raise UnsupportedOperationError("this torch_npu has no fused inference attention")
    return operator


def _padded(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Zeros behind each row, as contiguous memory; padding by nothing would still be a copy."""
    missing = dim - tensor.shape[2]
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor.contiguous()


def _padded_dim(dim: int) -> int:
    for allowed in HEAD_DIMS:
        if dim <= allowed:
            return allowed
    raise UnsupportedOperationError(f"head dim {dim} is above {HEAD_DIMS[-1]}, the kernel's limit")


def _read_back(cu_seqlens: torch.Tensor, rows: int) -> Boundaries:
    """Boundaries of foreign code, read from the device: only where nobody told them."""
    if npu.is_current_stream_capturing():
        raise HostReadError(
            "attention got a cu_seqlens that is none of the graph's boundary buffers, so its ends "
            "would have to be read from the device. Pass the buffer itself: name it in "
            "EncoderAdapter.buffers, and do not cast, slice from the middle or copy it"
        )
    ends = [end for end, _ in groupby(cu_seqlens.tolist())]  # a repeated one: an empty sequence
    return Boundaries.from_cu_seqlens(ends, rows)
