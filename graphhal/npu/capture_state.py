"""What captures and replays change in a process, and how it is put back, also after a failure."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch_npu
from torch_npu import npu

from graphhal.npu.lane import Lane

OPTIONS = ("jitCompile", "ALLOW_INTERNAL_FORMAT")
"""Off during capture: convolutions can be captured through ACLNN only, in plain formats only."""


@contextmanager
def put_back(lane: Lane) -> Iterator[None]:
    """The caller's stream and dispatch modes afterwards, whatever happened; streams in order.

    No garbage is collected meanwhile: a graph that dies during a capture would end it.
    """
    with npu.device(lane.index):
        caller = npu.current_stream()
        depth = torch._C._len_torch_dispatch_stack()
        lane.hand_in(caller)
        collecting = gc.isenabled()
        try:
            gc.disable()
            yield
        finally:
            while torch._C._len_torch_dispatch_stack() > depth:
                torch._C._pop_torch_dispatch_stack(None)
            npu.set_stream(caller)
            if collecting:
                gc.enable()
            if not lane.hangs:
                lane.hand_back(caller)


@contextmanager
def capture_options() -> Iterator[None]:
    """ACLNN kernels in plain formats, for the time of a capture."""
    compiles, formats = OPTIONS
    former = {compiles: "disable" if npu.is_jit_compile_false() else "enable"}  # set or CANN's own
    if value := torch_npu._C._npu_getOption(formats):
        former[formats] = value.decode()
    try:
        torch_npu._C._npu_setOption(dict.fromkeys(OPTIONS, "disable"))
        yield
    finally:
        torch_npu._C._npu_setOption(former)


@contextmanager
def undone_begin(lane: Lane, pool: Any) -> Iterator[None]:
    """Around the begin of a capture: where the runtime refuses it, torch_npu goes on allocating
    into the pool, and the next begin fails for that reason."""
    try:
        yield
    except RuntimeError:
        with suppress(RuntimeError):
            torch_npu._C._npu_endAllocateToPool(lane.index, pool)
            torch_npu._C._npu_releasePool(lane.index, pool)
        raise


@contextmanager
def direct_launches() -> Iterator[None]:
    """Kernels of this block are launched by the thread that asks for them.

    torch_npu launches from a queue of another thread. A launch that fails there is reported later,
    once, to whoever comes next, and from then on every kernel of the process is dropped in silence
    (2.13; `restart_device` may hang afterwards). Launched directly, it raises where it happens and
    harms nothing else. What was queued before is launched first; if that fails, it raises here.
    """
    npu.current_stream().npu_stream  # noqa: B018  (empties the queue; the device may still work)
    change = getattr(torch_npu._C, "_npu_set_task_queue_enable", None)
    former = torch_npu._C._npu_get_task_queue_enable() if change is not None else 0
    if change is None or former == 0:
        yield
        return
    try:
        change(0)
        yield
    finally:
        change(former)
