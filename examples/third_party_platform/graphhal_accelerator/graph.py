"""Capture, replay, steps and release over `torch.accelerator.Graph`.

One stream captures, so that all graphs of a pool reuse its blocks. A graph may be launched on any
stream; since graphs of a pool share memory, each step waits, on the device, for the one before it.
"""

import gc
from contextlib import contextmanager, nullcontext
from threading import RLock

import torch

from graphhal.errors import CaptureError, GraphhalError, ReplayError, ResourceExhaustedError
from graphhal.platform import CapturedGraph
from graphhal_accelerator.memory import reserved_bytes

_lock = RLock()


class _Device:
    """The capture stream, and the last use of graph memory."""

    stream = None
    last_use = None
    capturing = False


def capture(request):
    """Warm up and record `request.forward`.

    Raises:
        CaptureError: with its cause; the caller's stream is current again.
    """
    with _lock:
        if _capture_runs(request.device):
            raise CaptureError(f"{request.key}: another capture is running on this stream")
        if _Device.stream is None:
            _Device.stream = torch.Stream(request.device)
        caller = torch.accelerator.current_stream(request.device)
        _Device.stream.wait_stream(caller)
        try:
            with _Device.stream, torch.no_grad():
                for _ in range(request.warmups):
                    request.forward()
                before = reserved_bytes(request.device)
                graph = _record(request)
                added = max(0, reserved_bytes(request.device) - before)
        except GraphhalError:
            raise
        except torch.OutOfMemoryError as error:
            raise ResourceExhaustedError(f"{request.key}: {error}") from error
        except Exception as error:  # a forward may raise anything; its inputs then run eagerly
            raise CaptureError(f"{request.key}: {type(error).__name__}: {error}") from error
        finally:
            caller.wait_stream(_Device.stream)
        return CapturedGraph(request=request, handle=graph, pool=graph.pool(), num_bytes=added)


def _record(request):
    graph = torch.accelerator.Graph(pool=request.pool, capture_error_mode="thread_local")
    collecting = gc.isenabled()
    gc.disable()  # a collected graph or event would end the capture
    failure = None
    try:
        graph.capture_begin()
        _Device.capturing = True
        try:
            request.forward()
        except Exception as error:  # noqa: BLE001  (the capture has to be ended first)
            failure = error
        finally:
            _Device.capturing = False
        try:
            graph.capture_end()
        except RuntimeError as error:
            failure = failure or error
    finally:
        if collecting:
            gc.enable()
    if failure is not None:
        graph.reset()
        raise failure
    return graph


def replay(graph):
    """Launch; never waits.

    Raises:
        ReplayError: the graph was released, or the device refuses it.
    """
    if graph.handle is None:
        raise ReplayError(f"{graph.key} was released")
    try:
        graph.handle.replay()
    except RuntimeError as error:
        raise ReplayError(f"{graph.key}: {error}") from error


def step(kind, graph):
    """The scope of one replay or eager call; None while a capture runs.

    Eager calls use memory of their own here, never the graphs', so that they need no turn.
    """
    device = torch.accelerator.current_accelerator() if graph is None else graph.request.device
    if _capture_runs(device):
        return None
    scope = _Scope(device)
    return _in_turn(scope) if kind == "replay" else nullcontext(scope)


@contextmanager
def _in_turn(scope):
    stream = torch.accelerator.current_stream(scope.device)
    with _lock:
        if _Device.last_use is not None:
            stream.wait_event(_Device.last_use)
        try:
            yield scope
        finally:
            _Device.last_use = stream.record_event()


class _Scope:
    """Memory that the caller owns: ordinary, outside any graph's pool."""

    def __init__(self, device):
        self.device = device

    def empty(self, shape, dtype):
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)


def release(graphs):
    """Destroy graphs. Safe twice, and after the device is gone."""
    for graph in graphs:
        handle, graph.handle = graph.handle, None
        if handle is None:
            continue
        try:
            torch.accelerator.synchronize()
            handle.reset()
        except RuntimeError:  # the device is gone, and its memory with it
            continue


def _capture_runs(device):
    if _Device.capturing:
        return True
    asked = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return asked is not None and asked()
