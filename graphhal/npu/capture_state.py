"""What a capture changes in a process, and how it is put back, also after a failure."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch_npu
from torch_npu import npu

from graphhal.npu.task_update import Lane

OPTIONS = ("jitCompile", "ALLOW_INTERNAL_FORMAT")
"""Off during capture: convolutions can be captured through ACLNN only, in plain formats only."""


@contextmanager
def put_back(lane: Lane) -> Iterator[None]:
    """The caller's stream and dispatch modes afterwards, whatever happened; streams in order."""
    with npu.device(lane.index):
        caller = npu.current_stream()
        depth = torch._C._len_torch_dispatch_stack()
        lane.hand_in(caller)
        try:
            yield
        finally:
            while torch._C._len_torch_dispatch_stack() > depth:
                torch._C._pop_torch_dispatch_stack(None)
            npu.set_stream(caller)
            lane.hand_back(caller)


@contextmanager
def capture_options() -> Iterator[None]:
    """ACLNN kernels in plain formats, for the time of a capture."""
    former = {name: torch_npu._C._npu_getOption(name) for name in OPTIONS}
    torch_npu._C._npu_setOption(dict.fromkeys(OPTIONS, "disable"))
    try:
        yield
    finally:
        known = {name: value.decode() for name, value in former.items() if value}
        if known:
            torch_npu._C._npu_setOption(known)
