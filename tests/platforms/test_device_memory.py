"""Mirrors of a device's memory: what was not pulled is not seen, what was not pushed did not happen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_layouts import layouts, naive_cells

from kvproof.layout import Axis, Field, Resource
from kvproof.layout.frames import FrameFamily
from kvproof.platforms.device_memory import DeviceMemory, Memory, frames, merged, pages, rows

torch = pytest.importorskip("torch")

RESOURCE = Resource(
    0, 0, "l", "uint8", 1, 16, 64, 48, (Axis(4, 8),), (Axis(8, 1),), 1, (Field("K", 0, 4), Field("V", 4, 8))
)


def device(*sizes: int) -> list[torch.Tensor]:
    """Stand-ins for device tensors: nobody but their own storage sees their bytes."""
    return [torch.zeros(size, dtype=torch.uint8) for size in sizes]


def test_a_host_has_nothing_to_move():
    tensors = device(64, 256)
    memory = Memory([t.untyped_storage() for t in tensors])
    memory.arrays[1][7] = 9
    assert tensors[1][7] == 9
    memory.pull()
    memory.push([(0, 0, 64)])
    assert memory.addresses == [t.data_ptr() for t in tensors]


def test_mirrors_are_apart():
    (tensor,) = device(64)
    memory = DeviceMemory([tensor.untyped_storage()])
    memory.arrays[0][3] = 1
    assert tensor[3] == 0
    tensor[4] = 2
    assert memory.arrays[0][4] == 0
    assert memory.addresses == [tensor.data_ptr()]


def test_everything_comes_and_goes():
    tensors = device(64, 32)
    memory = DeviceMemory([t.untyped_storage() for t in tensors])
    tensors[0][:] = 5
    tensors[1][:] = 6
    memory.pull()
    assert [set(a.tolist()) for a in memory.arrays] == [{5}, {6}]
    for array in memory.arrays:
        array[:] = 7
    memory.push()
    assert [set(t.tolist()) for t in tensors] == [{7}, {7}]


def test_views_of_other_types_show_the_bytes_of_their_storage():
    tensor = torch.zeros(8, dtype=torch.float32)[2:]
    memory = DeviceMemory([tensor.untyped_storage()])
    assert memory.arrays[0].nbytes == 32
    tensor[0] = 1.0
    memory.pull()
    assert memory.arrays[0].view(np.float32)[2] == 1.0


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 90), st.integers(1, 10)), max_size=6))
def test_only_the_ranges_asked_for_are_touched(ranges):
    tensors = device(100, 100)
    memory = DeviceMemory([t.untyped_storage() for t in tensors])
    for tensor, array in zip(tensors, memory.arrays, strict=True):
        tensor[:] = 1
        array[:] = 2
    inside = [np.zeros(100, np.bool_), np.zeros(100, np.bool_)]
    for storage, begin, nbytes in ranges:
        inside[storage][begin : begin + nbytes] = True
    memory.push(ranges)
    for tensor, mask in zip(tensors, inside, strict=True):
        assert (tensor.numpy() == np.where(mask, 2, 1)).all()
    for tensor in tensors:
        tensor[:] = 3
    memory.pull(ranges)
    for array, mask in zip(memory.arrays, inside, strict=True):
        assert (array == np.where(mask, 3, 2)).all()


def test_ranges_that_touch_are_one_copy():
    assert merged([(0, 8, 8), (0, 0, 8), (1, 0, 4), (0, 20, 4), (0, 10, 2)]) == [(0, 0, 16), (0, 20, 24), (1, 0, 4)]


def test_ranges_of_blocks():
    assert pages(RESOURCE, [0, 3]) == [(1, 16, 48), (1, 16 + 3 * 64, 48)]
    families = [FrameFamily(0, 4, 32, 28, ()), FrameFamily(1, 0, 64, 64, (RESOURCE,))]
    assert frames(families, iter([2])) == [(0, 4 + 2 * 32, 28), (1, 2 * 64, 64)]


@given(layouts(), st.data())
def test_rows_are_their_cells_and_nothing_else(layout, data):
    """A connector may be loading other rows of the page: what is sent to the device must not touch them."""
    resource = data.draw(st.sampled_from(layout.resources))
    block = data.draw(st.integers(0, layout.num_blocks - 1))
    first = data.draw(st.integers(0, resource.rows))
    count = data.draw(st.integers(0, resource.rows - first))
    page = resource.offset + block * resource.block_stride
    sent = [
        (storage, byte)
        for storage, begin, nbytes in rows(resource, block, first, count)
        for byte in range(begin, begin + nbytes)
    ]
    wanted = [page + at for row, _, at in naive_cells(resource) if first <= row < first + count]
    assert sorted(sent) == sorted((resource.storage, byte) for byte in wanted)
