"""Static inputs: an arena for bulk data, one for packed host metadata, shared by all graphs."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from graphhal.adapter import BufferSpec, EncoderAdapter, wrong_answer
from graphhal.errors import AdapterError
from graphhal.plan import Capacity

ALIGNMENT = 256
"""Bytes; every static buffer starts on a multiple, as device allocators align their blocks."""

_NUMPY_DTYPES: dict[torch.dtype, type[np.generic]] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.float16: np.float16,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.int16: np.int16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.bool: np.bool_,
}


@dataclass(frozen=True)
class Layout:
    """Where the static inputs of one graph lie in the two arenas.

    Attributes:
        specs: what the adapter wants, by name.
        adapter: its name, for errors.
    """

    specs: Mapping[str, BufferSpec]
    adapter: str = "adapter"

    def __post_init__(self) -> None:
        for name, spec in self.specs.items():
            if spec.packed and spec.dtype not in _NUMPY_DTYPES:
                raise self._error(
                    f"packed buffer {name!r} is {spec.dtype}, which has no NumPy dtype; "
                    f"use one of {', '.join(map(str, _NUMPY_DTYPES))}"
                )
            if spec.packed and not spec.shape:
                raise self._error(
                    f"packed buffer {name!r} has no dimension; give it the shape (1,)"
                )

    def _error(self, problem: str) -> AdapterError:
        return AdapterError(f"{self.adapter}: {problem}")

    @classmethod
    def of(cls, adapter: EncoderAdapter, capacity: Capacity) -> "Layout":
        """The layout of what the adapter wants for a graph of this capacity.

        Raises:
            AdapterError: it named no buffers.
        """
        specs = adapter.buffers(capacity)
        named = isinstance(specs, Mapping)
        if not named or not all(isinstance(spec, BufferSpec) for spec in specs.values()):
            raise wrong_answer(adapter, "buffers", "a BufferSpec for each name", specs)
        return cls(specs, adapter.name)

    @cached_property
    def _bulk(self) -> dict[str, tuple[int, int]]:
        return _place({n: spec for n, spec in self.specs.items() if not spec.packed})

    @cached_property
    def _packed(self) -> dict[str, tuple[int, int]]:
        return _place({n: spec for n, spec in self.specs.items() if spec.packed})

    @cached_property
    def bulk_bytes(self) -> int:
        """Bytes that the unpacked buffers take."""
        return max((_aligned(start + size) for start, size in self._bulk.values()), default=0)

    @cached_property
    def packed_bytes(self) -> int:
        """Bytes that the packed buffers take, and one `HostUpdate.block`."""
        return max((_aligned(start + size) for start, size in self._packed.values()), default=0)

    def bulk_views(self, bulk: torch.Tensor) -> dict[str, torch.Tensor]:
        """The unpacked buffers as views of a uint8 tensor, by name."""
        return self._views(self._bulk, bulk)

    def packed_views(self, packed: torch.Tensor) -> dict[str, torch.Tensor]:
        """The packed buffers as views of a uint8 tensor, by name."""
        return self._views(self._packed, packed)

    def _views(
        self, places: Mapping[str, tuple[int, int]], source: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        return {
            name: source[start : start + size]
            .view(self.specs[name].dtype)
            .view(self.specs[name].shape)
            for name, (start, size) in places.items()
        }

    def pack(
        self, arrays: Mapping[str, npt.NDArray[np.generic]], block: torch.Tensor
    ) -> torch.Tensor:
        """Write host arrays into a uint8 host tensor, padding with zeros.

        Raises:
            AdapterError: an array is missing, unknown, too long, of another width or dtype, or
                holds integers that the dtype cannot.
        """
        host = block.numpy()
        host[:] = 0
        if set(arrays) != set(self._packed):
            raise self._error(
                f"buffers has the packed ones {sorted(self._packed)}, but metadata and boundary "
                f"sets are {sorted(arrays)}; name the same in both"
            )
        for name, array in arrays.items():
            spec = self.specs[name]
            start, size = self._packed[name]
            dtype = _NUMPY_DTYPES[spec.dtype]
            if not isinstance(array, np.ndarray):
                raise self._error(
                    f"metadata {name!r} must be a NumPy array, got {type(array).__name__}"
                )
            target = host[start : start + size].view(dtype).reshape(spec.shape)
            fits = (
                array.ndim > 0
                and array.shape[1:] == spec.shape[1:]
                and len(array) <= spec.shape[0]
                and (array.dtype == dtype or _converts(array, dtype))
            )
            if not fits:
                raise self._error(
                    f"metadata {name!r} is {array.dtype}{list(array.shape)}, which does not fit "
                    f"{spec.dtype}{list(spec.shape)}; return as many rows or fewer, as wide, of "
                    "values that the dtype holds, or make buffers larger"
                )
            target[: len(array)] = array
        return block


def _converts(array: npt.NDArray[np.generic], dtype: type[np.generic]) -> bool:
    """Whether another dtype holds every value; NumPy would wrap integers that it does not hold."""
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        return False
    integers = np.issubdtype(array.dtype, np.integer) and np.issubdtype(dtype, np.integer)
    if not integers or not array.size or np.can_cast(array.dtype, dtype):
        return True
    bounds = np.iinfo(dtype)  # type: ignore[type-var]
    return bool(bounds.min <= array.min() and array.max() <= bounds.max)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _place(specs: Mapping[str, BufferSpec]) -> dict[str, tuple[int, int]]:
    """(start, bytes) of each buffer, one after another, each start aligned."""
    places = {}
    start = 0
    for name, spec in specs.items():
        size = prod(spec.shape) * spec.dtype.itemsize
        places[name] = (start, size)
        start += _aligned(size)
    return places


class Arena:
    """Memory of the static inputs and the static output; allocated once, before capture."""

    def __init__(
        self, device: torch.device, bulk_bytes: int, packed_bytes: int, output: torch.Tensor
    ) -> None:
        self.bulk = torch.zeros(bulk_bytes, dtype=torch.uint8, device=device)
        self.packed = torch.zeros(packed_bytes, dtype=torch.uint8, device=device)
        self.output = output

    @property
    def num_bytes(self) -> int:
        """Device bytes of all arenas."""
        return self.bulk.nbytes + self.packed.nbytes + self.output.nbytes


def host_block(num_bytes: int, device: torch.device) -> torch.Tensor:
    """A uint8 host tensor for one packed copy; pinned where the device is not the host."""
    # Named: a host's default device (`torch.set_default_device`) would take it.
    block = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=device.type != "cpu")
    if num_bytes and not block.data_ptr():  # torch_npu, where no pinned memory can be had
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    return block
