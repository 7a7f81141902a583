"""What a hook must leave as it found it: modes, streams and defaults of the calling thread."""

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.overrides import _get_current_function_mode_stack as _function_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode

from graphhal.testing.check_failure import CheckFailure


@contextmanager
def young_garbage() -> Iterator[None]:
    """Let `still_alive` look at objects made inside only: a whole PyTorch takes it a second."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def still_alive(buffers: Sequence["weakref.ref[torch.Tensor]"]) -> int:
    """How many of these tensors somebody holds, cycles collected."""
    gc.collect()
    return sum(ref() is not None for ref in buffers)


class CallerState:
    """A snapshot of the calling thread's PyTorch state."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = _snapshot(device)

    def expect_unchanged(self, when: str) -> None:
        """Compare with now.

        Raises:
            CheckFailure: names what changed.
        """
        after = _snapshot(self._device)
        changed = [name for name, value in self._before.items() if after[name] != value]
        if changed:
            shown = "; ".join(f"{n} is {after[n]}, was {self._before[n]}" for n in changed)
            raise CheckFailure(f"{when}, {shown}", "the caller's state as it was")


@contextmanager
def modes_put_back() -> Iterator[None]:
    """Undo what a faulty hook left on, so that one fault does not spill into the next check."""
    grad, threads = torch.is_grad_enabled(), torch.get_num_threads()
    dispatch = len(_get_current_dispatch_mode_stack())
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            while len(_get_current_dispatch_mode_stack()) > dispatch:
                _pop_mode()
            torch.set_grad_enabled(grad)
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)


def _snapshot(device: torch.device) -> dict[str, object]:
    state: dict[str, object] = {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "dispatch modes": [type(m).__name__ for m in _get_current_dispatch_mode_stack()],
        "function modes": [type(m).__name__ for m in _function_modes()],  # type: ignore[no-untyped-call]
        "default dtype": torch.get_default_dtype(),
        "autocast": torch.is_autocast_enabled(device.type),
        "seed": torch.initial_seed(),
        "threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }
    if device.type != "cpu":
        state["current stream"] = torch.accelerator.current_stream(device)
        state["current device"] = torch.accelerator.current_device_index()
    return state
