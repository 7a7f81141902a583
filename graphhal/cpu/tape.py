"""The tape: every operator that a forward calls, noted once, with its host arguments frozen."""

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from graphhal.cpu.memory import Snapshot, storage_of, tensors_in
from graphhal.cpu.recording import PART, Notes, Recording, function_of
from graphhal.cpu.refusal import Origin, check_operator, foreign_memory, rebinding, written
from graphhal.errors import CaptureError

_aten = torch.ops.aten
_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl
_CPU = torch._C.DispatchKey.CPU


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the tape keeps a tensor; `storage` numbers its intermediate memory, None is static."""

    register: int
    origin: Origin
    storage: int | None


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operators while entered.

    Args:
        known: `storage_of` all that lived after a rehearsal; static memory that is not among it
            was made by the forward out of the dispatcher's sight.

    Attributes:
        running: an operator runs now; its kernel may do what it likes.
        on_device: the PyTorch function that runs now was given a device, or a tensor that lies
            there: so does what it makes.
        only_checks: it reads values to check them, which a device does not.
    """

    supports_higher_order_operators = True  # they decompose not, and are refused by name
    # Else the first operator imports a compiler, for seconds, to keep it out of here.
    _should_skip_dynamo = classmethod(lambda cls: False)

    def __init__(self, known: frozenset[int] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.running = self.on_device = self.only_checks = False
        self._drew_random, self._seed = False, torch.initial_seed()
        self._snapshot, self._snapshot_bytes = Snapshot(), 0
        self._known = known
        self._failure: CaptureError | None = None
        self._notes = Notes()
        self._places: MutableMapping[torch.Tensor, _Place] = WeakTensorKeyDictionary()

    def record(self, forward: Callable[[], None], undo: bool) -> None:
        """Run the forward and note its operators.

        Args:
            forward: what to run.
            undo: put back what it wrote and drew, as it is always done after an error.

        Raises:
            CaptureError: the forward did what a device graph cannot hold, also where it swallowed
                the exception that said so.
        """
        generator, undo_now = torch.get_rng_state(), True
        try:
            self._run(forward)
            undo_now = undo
        finally:
            self._snapshot_bytes = self._snapshot.num_bytes
            if undo_now:
                self._snapshot.restore()
                if self._drew_random:
                    torch.set_rng_state(generator)

    def _run(self, forward: Callable[[], None]) -> None:
        try:
            with self:
                forward()
        except Exception as error:
            if self._failure is None or error is self._failure:
                raise
            raise self._failure from error  # TorchScript, for one, raises its own in its place.
        if self._failure is not None:
            raise self._failure

    def refuse(self, error: CaptureError) -> None:
        """Raise the error, and once more at the end of the capture, as a device would."""
        self._failure = self._failure or error
        raise error

    def origin_of(self, tensor: torch.Tensor) -> Origin:
        """Origin of any tensor; what the tape has not met is static memory."""
        place = self._places.get(tensor)
        return Origin.DEVICE if place is None else place.origin

    def living(self) -> list[torch.Tensor]:
        """Every tensor met so far that something still refers to, static ones included."""
        return [*self._places.keys(), *tensors_in(self._notes.registers)]

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # `Parameter.data` names its class here, though it has no dispatch of its own.
        if any(each.__torch_dispatch__ is not _NO_DISPATCH for each in types):
            return NotImplemented  # Tensor subclasses unwrap themselves; their operators come next.
        if getattr(op, "_can_decompose", bool)() and not op.has_kernel_for_dispatch_key(_CPU):
            with self:
                return op.decompose(*args, **kwargs)
        self.running = True
        try:
            if op is _aten.lift_fresh.default and args[0] not in self._places:
                return self._host_constant(op(*args))
            return self._take(op, args, kwargs)
        finally:
            self.running = False

    def _take(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operands = [(tensor, self._place(tensor)) for tensor in tensors_in([args, kwargs])]
        origins = [(tensor, place.origin) for tensor, place in operands]
        error = None if self.only_checks else check_operator(op, origins, args, kwargs, self._seed)
        if error:
            self.refuse(error)
        static = [t for t in written(op, args, kwargs) if self._place(t).storage is None]
        reshapes, function = torch.Tag.inplace_view in op.tags, function_of(op)
        for tensor in static if not reshapes else ():
            self._snapshot.save(tensor)
        memory = [(t.shape, storage_of(t)) for t in static]
        result = function(*args, **kwargs)
        if reshapes and static:
            self._places[args[0]] = self._static(args[0])
            return result
        if memory != [(t.shape, storage_of(t)) for t in static]:
            self.refuse(rebinding(f"{op}, writing a result of another shape,"))
        made = list(tensors_in(result))
        if not made and op._schema.returns and not static:
            return result  # A host value that depends on shapes alone.
        if op.is_view and operands and all(place.storage is None for _, place in operands):
            for tensor in made:
                self._places[tensor] = self._static(tensor)
            return result
        if made and not operands and any(a.name == "dtype" for a in op._schema.arguments):
            kwargs = {**kwargs, "dtype": made[0].dtype}  # The default dtype is a host value, too.
        self._drew_random |= torch.Tag.nondeterministic_seeded in op.tags
        register = self._notes.call(
            function, str(op), args, kwargs, lambda tensor: self._place(tensor).register
        )
        origin = max((place.origin for _, place in operands), default=Origin.EITHER)
        if not operands and self.on_device:
            origin = Origin.DEVICE
        self._bind(result, register, origin, {storage_of(t): p.storage for t, p in operands})
        return result

    def finish(self) -> Recording:
        """The recording; call it after the forward's own references are gone."""
        escaped: MutableMapping[torch.Tensor, None] = WeakTensorKeyDictionary()
        for tensor, place in self._places.items():
            if place.storage is not None and place.origin is Origin.DEVICE:
                escaped[tensor] = None
        return self._notes.finish(self._snapshot_bytes, escaped)

    def _static(self, tensor: torch.Tensor) -> _Place:
        return _Place(self._notes.register(tensor.detach()), Origin.DEVICE, None)

    def _place(self, tensor: torch.Tensor) -> _Place:
        place = self._places.get(tensor)
        if place is None:
            if self._known is not None and storage_of(tensor) not in self._known:
                self.refuse(foreign_memory(tuple(tensor.shape)))
            place = self._places[tensor] = self._static(tensor)
        return place

    def _host_constant(self, tensor: torch.Tensor) -> torch.Tensor:
        constant = self._notes.register(tensor.clone())
        register = self._notes.note(_aten.clone.default, "aten.lift_fresh", [constant])
        self._bind(tensor, register, Origin.HOST, {})
        return tensor

    def _bind(
        self, result: Any, register: int, origin: Origin, storages: Mapping[int, int | None]
    ) -> None:
        """Give every new tensor of a result its place; an operand handed back keeps its own."""
        if isinstance(result, torch.Tensor):
            if result not in self._places:
                key = storage_of(result)
                storage = storages[key] if key in storages else self._notes.new_storage(result)
                if storage is not None:
                    self._notes.storage_of[register] = storage
                self._places[result] = _Place(register, origin, storage)
        elif isinstance(result, list | tuple):
            for index, item in enumerate(result):
                if any(tensor not in self._places for tensor in tensors_in(item)):
                    part = self._notes.note(itemgetter(index), PART, [register])
                    self._bind(item, part, origin, storages)
