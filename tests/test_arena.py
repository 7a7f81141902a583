"""Static inputs: layout, packing of host metadata, poison."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphhal.adapter import BufferSpec
from graphhal.arena import ALIGNMENT, Layout, host_block
from graphhal.errors import AdapterError

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.int64, torch.int32, torch.uint8, torch.bool, torch.float16]
specs = st.lists(
    st.builds(
        BufferSpec,
        st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple),
        st.sampled_from(DTYPES),
        st.booleans(),
    ),
    max_size=6,
).map(lambda found: {f"b{n}": spec for n, spec in enumerate(found)})


@settings(max_examples=40)
@given(specs)
def test_buffers_are_aligned_apart_and_of_their_shape(buffers):
    layout = Layout(buffers)
    bulk = torch.zeros(layout.bulk_bytes, dtype=torch.uint8)
    packed = torch.zeros(layout.packed_bytes, dtype=torch.uint8)
    views = layout.bulk_views(bulk) | layout.packed_views(packed)
    assert set(views) == set(buffers)
    for source in (bulk, packed):
        assert source.numel() % ALIGNMENT == 0
    taken: list[tuple[int, int]] = []
    for name, view in views.items():
        spec = buffers[name]
        assert (tuple(view.shape), view.dtype) == (spec.shape, spec.dtype)
        source = packed if spec.packed else bulk
        assert view.is_contiguous()
        if not view.numel():
            continue
        offset = view.data_ptr() - source.data_ptr()
        assert offset % ALIGNMENT == 0
        assert view.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
        start = offset + (10**6 if spec.packed else 0)
        assert all(start >= end or start + view.nbytes <= begin for begin, end in taken)
        taken.append((start, start + view.nbytes))


@settings(max_examples=40)
@given(specs, st.data())
def test_packing_is_what_each_view_reads_zeros_behind(buffers, data):
    packed_specs = {name: spec for name, spec in buffers.items() if spec.packed}
    layout = Layout(buffers)
    block = host_block(layout.packed_bytes, CPU)
    block.fill_(0xFF)
    arrays = {}
    for name, spec in packed_specs.items():
        rows = data.draw(st.integers(0, spec.shape[0]))
        values = np.arange(np.prod((rows, *spec.shape[1:]), dtype=int)) % 2
        dtype = torch.zeros(0, dtype=spec.dtype).numpy().dtype
        arrays[name] = values.reshape((rows, *spec.shape[1:])).astype(dtype)
    views = layout.packed_views(layout.pack(arrays, block))
    for name, spec in packed_specs.items():
        expected = np.zeros(spec.shape, dtype=arrays[name].dtype)
        expected[: len(arrays[name])] = arrays[name]
        np.testing.assert_array_equal(views[name].numpy(), expected)


def pack(array: np.ndarray, dtype: torch.dtype = torch.int32, shape: tuple[int, ...] = (4,)):
    layout = Layout({"a": BufferSpec(shape, dtype, packed=True)}, "toy")
    return layout.pack({"a": array}, host_block(layout.packed_bytes, CPU))


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(5, np.int32),
        np.zeros((4, 1), np.int32),
        np.zeros(4, np.float32),
        np.zeros(4, np.complex64),
        np.array(3, np.int32),
        np.array(["a"] * 4),
        np.array([2**31], np.int64),
        np.array([-(2**31) - 1], np.int64),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_metadata_that_does_not_fit_names_its_buffer(array):
    with pytest.raises(AdapterError, match=r"^toy: metadata 'a' is .* as many rows or fewer"):
        pack(array)


@pytest.mark.parametrize("value", [[1, 2], torch.ones(2, dtype=torch.int32), None])
def test_metadata_that_is_no_array_names_its_buffer(value):
    with pytest.raises(AdapterError, match=r"^toy: metadata 'a' must be a NumPy array, got "):
        pack(value)


def test_wider_integers_of_small_value_fit():
    block = pack(np.array([1, -2], np.int64))
    assert block.view(torch.int32)[:4].tolist() == [1, -2, 0, 0]


def test_whole_numbers_fit_floating_point():
    block = pack(np.array([1, 2], np.int64), torch.float32)
    assert block.view(torch.float32)[:2].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("names", [(), ("a", "b", "c"), ("a", "c")])
def test_missing_and_unknown_metadata_are_refused(names):
    layout = Layout({n: BufferSpec((2,), torch.int32, packed=True) for n in ("a", "b")}, "toy")
    arrays = {name: np.zeros(2, np.int32) for name in names}
    said = r"^toy: buffers has the packed ones \['a', 'b'\], but .* the same in both$"
    with pytest.raises(AdapterError, match=said):
        layout.pack(arrays, host_block(layout.packed_bytes, CPU))


def test_a_packed_buffer_needs_a_dtype_of_the_host():
    with pytest.raises(AdapterError, match=r"^toy: packed buffer 'a' is torch\.bfloat16"):
        Layout({"a": BufferSpec((2,), torch.bfloat16, packed=True)}, "toy")
    assert Layout({"a": BufferSpec((2,), torch.bfloat16)}).bulk_bytes == ALIGNMENT


def test_a_packed_buffer_needs_a_dimension():
    with pytest.raises(AdapterError, match=r"^toy: packed buffer 'a' has no dimension; give it"):
        Layout({"a": BufferSpec((), torch.int32, packed=True)}, "toy")
    assert Layout({"a": BufferSpec((), torch.float32)}).bulk_bytes == ALIGNMENT


def test_a_shape_may_be_a_list():
    assert pack(np.ones((2, 3), np.int32), shape=[4, 3]).view(torch.int32)[:12].sum() == 6
