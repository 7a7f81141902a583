"""What a ladder of graphs takes of an Ascend device's memory."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch_npu import npu

from graphhal.errors import CaptureError, ResourceExhaustedError
from graphhal.npu.acl_errors import capture_error
from graphhal.npu.capture_state import direct_launches, put_back
from graphhal.npu.graph import capture, release
from graphhal.npu.pool import settled_bytes
from graphhal.npu.task_update import TASK_UPDATE, lane_of
from graphhal.platform import CapturedGraph, CaptureRequest, MemoryProfile

WHAT = "memory profile"

log = logging.getLogger(__name__)


def profile_memory(requests: Sequence[CaptureRequest]) -> MemoryProfile:
    """Settled and transient bytes of capturing these requests in this order; keeps nothing.

    Raises:
        CaptureError: the device hangs or fails, or the caller is captured: nothing can be measured.
    """
    with TASK_UPDATE:  # nobody else captures between what is read before and after
        try:
            with direct_launches():
                return _profile(requests)
        except RuntimeError as error:
            raise capture_error(error, WHAT) from error


def _profile(requests: Sequence[CaptureRequest]) -> MemoryProfile:
    captured: list[CapturedGraph] = []
    pool: Any = None
    given = (request.device.index for request in requests if request.device.index is not None)
    index = next(given, npu.current_device())
    lane = lane_of(torch.device("npu", index))
    lane.refuse(WHAT)
    with put_back(lane):
        lane.settle(WHAT)
    before = settled_bytes(index)
    npu.reset_peak_memory_stats(index)
    reserved = npu.memory_reserved(index)
    try:
        for request in requests:
            try:
                captured.append(capture(replace(request, pool=pool)))
            except ResourceExhaustedError as error:
                log.warning("memory profile stops at %s: %s", request.key, error)
                break
            except CaptureError as error:
                log.info("memory profile leaves out %s: %s", request.key, error)
                continue
            pool = captured[-1].pool
        lane.refuse(WHAT)
        settled = max(0, settled_bytes(index) - before)
        peak = int(npu.max_memory_reserved(index)) - reserved
        per_graph = {graph.key: graph.num_bytes for graph in captured}
    finally:
        release(captured)
    return MemoryProfile(settled, max(0, peak - settled), per_graph)
