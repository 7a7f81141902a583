"""Refuses what a device would where the dispatcher cannot see it, in PyTorch's functions."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from graphhal.cpu.memory import tensors_in
from graphhal.cpu.refusal import Origin, host_data, host_read, raw_memory, rebinding
from graphhal.cpu.tape import Tape
from graphhal.errors import CaptureError

_Tensor = torch.Tensor

# Readers that are no operators, or that reach one only after `__torch_function__` is off.
_READERS = {
    _Tensor.tolist: ".tolist()",
    _Tensor.numpy: ".numpy()",
    _Tensor.__array__: "numpy.asarray()",
    _Tensor.__dlpack__: "__dlpack__()",
    _Tensor.__repr__: "repr() or print()",
    _Tensor.__format__: "format() or an f-string",
    _Tensor.cpu: ".cpu()",
    torch.tensor_split: "tensor_split() by a tensor",
    _Tensor.tensor_split: "tensor_split() by a tensor",
    torch.functional.tensordot: "tensordot() with dims in a tensor",
}
_RAW_MEMORY = {
    _Tensor.data_ptr: ".data_ptr()",
    _Tensor.untyped_storage: ".untyped_storage()",
    _Tensor.storage: ".storage()",
}
_MAKERS = {
    torch.tensor: "torch.tensor()",
    torch.as_tensor: "torch.as_tensor()",
    torch.asarray: "torch.asarray()",
    _Tensor.new_tensor: ".new_tensor()",
}
# Position of the first argument that is read; the tensors before it are not.
_READ_ARGUMENTS = {torch.tensor_split: 1, _Tensor.tensor_split: 1, torch.functional.tensordot: 2}
_OPERANDS = frozenset(("input", "a", "b", "out"))
_one_hot = torch.nn.functional.one_hot
_SET_DATA = _Tensor.data.__set__  # type: ignore[attr-defined]


class Refusals(TorchFunctionMode):
    """Refuses what a device would, where the dispatcher cannot see it.

    Out of its reach: `.tolist()` inside TorchScript, and code that switches such modes off. There
    the self-check is what finds a frozen value.
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs, tape = kwargs or {}, self._tape
        if tape.running:
            return func(*args, **kwargs)
        if error := self._check(func, args, kwargs):
            tape.refuse(error)
        before = tape.on_device, tape.only_checks
        tape.on_device = kwargs.get("device") is not None or self._on_device([args, kwargs])
        tape.only_checks = func is _one_hot and max((*args[1:], *kwargs.values()), default=-1) > 0
        try:
            return func(*args, **kwargs)
        finally:
            tape.on_device, tape.only_checks = before

    def _check(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> CaptureError | None:
        if func == _SET_DATA:
            return rebinding("assigning to .data")
        if func in _READERS:
            first = _READ_ARGUMENTS.get(func)
            named = [value for name, value in kwargs.items() if name not in _OPERANDS]
            read = args[:1] if first is None else [args[first:], named]
            return host_read(_READERS[func]) if self._on_device(read) else None
        if func in _RAW_MEMORY:
            return raw_memory(_RAW_MEMORY[func]) if self._on_device(args[:1]) else None
        if func in _MAKERS:
            of_device = func is _Tensor.new_tensor and self._on_device(args[:1])
            data = [*args, *kwargs.values()][1 if func is _Tensor.new_tensor else 0]
            if isinstance(data, _Tensor):
                return None
            if self._on_device(data):
                return host_read(f"{_MAKERS[func]} of device tensors")
            onto = of_device or kwargs.get("device") is not None
            return host_data(f"{_MAKERS[func]} on the device") if onto else None
        return (
            self._check_move(args[0], [*args[1:], *kwargs.values()]) if func is _Tensor.to else None
        )

    def _check_move(self, tensor: torch.Tensor, targets: Sequence[Any]) -> CaptureError | None:
        if self._on_device([tensor]):
            # Only the literal surely names the host: `torch.device("cpu")` is the tower's own.
            named = any(isinstance(target, str) and target == "cpu" for target in targets)
            return host_read('.to("cpu")') if named else None
        onto = any(isinstance(target, torch.device) for target in targets)
        return host_data(".to(device)") if onto or self._on_device(targets) else None

    def _on_device(self, values: Any) -> bool:
        return any(self._tape.origin_of(tensor) is Origin.DEVICE for tensor in tensors_in(values))
