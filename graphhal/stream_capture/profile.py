"""What a ladder of graphs would take, measured on a sample of it."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from graphhal.errors import CaptureError, ResourceExhaustedError
from graphhal.plan import GraphKey
from graphhal.platform import CapturedGraph, CaptureRequest, MemoryProfile
from graphhal.stream_capture.recording import release

log = logging.getLogger(__name__)


def profile(
    requests: Sequence[CaptureRequest], capture_one: Callable[[CaptureRequest], CapturedGraph]
) -> MemoryProfile:
    """Bytes that capturing these requests in this order takes; keeps nothing.

    Graphs of one path share their memory, so the first ones decide; the largest three and the
    smallest of each path are captured and the others are interpolated by size.
    """
    pool: Any = None
    graphs: list[CapturedGraph] = []
    measured: dict[int, int] = {}
    settled = need = 0
    try:
        for index in _sample([request.key for request in requests]):
            try:
                graph = capture_one(replace(requests[index], pool=pool))
            except ResourceExhaustedError as error:
                log.warning("memory profile stops: %s", error)
                break
            except CaptureError as error:
                log.info("memory profile leaves one out: %s", error)
                measured[index] = 0
                continue
            graphs.append(graph)
            pool = graph.pool
            measured[index] = graph.num_bytes
            need = max(need, settled + graph.handle.transient_bytes)
            settled += graph.num_bytes
    finally:
        release(graphs)
    sizes = _interpolated([request.key for request in requests], measured)
    total = sum(sizes)
    per_graph = {request.key: size for request, size in zip(requests, sizes, strict=True)}
    return MemoryProfile(total, max(0, need - total), per_graph)


def _path(key: GraphKey) -> tuple[str, str]:
    return key.adapter, key.path


def _sample(keys: Sequence[GraphKey]) -> list[int]:
    """Indices, in order: of every path the first three and the last."""
    of_path = _by_path(keys, range(len(keys)))
    return sorted({i for indices in of_path.values() for i in (*indices[:3], indices[-1])})


def _by_path(keys: Sequence[GraphKey], indices: Iterable[int]) -> dict[tuple[str, str], list[int]]:
    of_path: dict[tuple[str, str], list[int]] = {}
    for index in indices:
        of_path.setdefault(_path(keys[index]), []).append(index)
    return of_path


def _interpolated(keys: Sequence[GraphKey], measured: Mapping[int, int]) -> list[int]:
    """Bytes of every key: measured, or linear in size between its path's measured neighbours.

    The first of a path brings the memory that the others share, and the second may make it grow,
    since its tensors fit what the first left in another way: neither is a neighbour.
    """
    neighbours = {
        path: sorted((keys[i].size, measured[i]) for i in (indices[2:] or indices[1:]))
        for path, indices in _by_path(keys, sorted(measured)).items()
    }
    result = []
    for index, key in enumerate(keys):
        if index in measured:
            result.append(measured[index])
            continue
        known = neighbours.get(_path(key))
        sizes, amounts = zip(*known, strict=True) if known else ((0,), (0,))
        result.append(round(float(np.interp(key.size, sizes, amounts))))
    return result
