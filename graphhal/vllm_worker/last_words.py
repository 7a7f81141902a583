"""Says what was served when the process is told to end, before it ends.

vLLM's server kills its engine right after SIGTERM where no `--shutdown-timeout` is set (0.31), so
whatever the engine says while it shuts down in order is lost more often than not. Who told vLLM's
engines and workers what to do on a signal is called next, as if nothing stood before it.
"""

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)

_next: dict[int, Callable[[int, FrameType | None], Any]] = {}
_process: int | None = None
_say: Callable[[], None] | None = None


def before_the_end(say: Callable[[], None]) -> None:
    """Let `say` run first where the host handles a signal to end; nothing changes where it does
    not. Hosts set their handlers late, so this is to be called again while serving.

    Args:
        say: runs within a signal handler, between any two steps of the main thread: it may wait
            for a lock no longer than for a moment.
    """
    global _process, _say
    if threading.current_thread() is not threading.main_thread():
        return  # handlers can be set by the main thread alone
    _process, _say = os.getpid(), say
    for number in SIGNALS:
        handler = signal.getsignal(number)
        # Python's own raises KeyboardInterrupt, which need not be the end.
        if callable(handler) and handler not in (_on_signal, signal.default_int_handler):
            _next[number] = handler
            signal.signal(number, _on_signal)


def _on_signal(number: int, frame: FrameType | None) -> None:
    if _say is not None and os.getpid() == _process:  # what was forked since served nothing
        with suppress(Exception):  # as a line that is just being written: the end comes first
            _say()
    _next[number](number, frame)
