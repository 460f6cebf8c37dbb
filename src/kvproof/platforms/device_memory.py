"""KV memory as the harness sees it: bytes on the host, fetched from the device and sent back where they lie elsewhere.

The harness paints, writes and judges numpy arrays. On a host platform these are the tensors' own bytes and there is
nothing to move. On a real device they are *mirrors*: whoever reads one calls :meth:`Memory.pull` first, whoever wrote
one calls :meth:`Memory.push` afterwards, each with the byte ranges concerned. Bytes outside the ranges are never
touched: a connector may be writing there, even into other rows of the same page.

Nothing waits for the device: copies stand in its current stream, where the kernel they stand for would. A connector
that forgets to make that stream wait for its load is therefore seen.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvproof.layout import Resource
from kvproof.layout.frames import FrameFamily

if TYPE_CHECKING:
    import torch

ByteArray = npt.NDArray[np.uint8]
Range = tuple[int, int, int]
"""(storage, first byte in it, bytes)."""


class Memory:
    """The storages of a host platform: ``arrays`` are their bytes, uint8, writable. Nothing has to be moved."""

    def __init__(self, storages: Sequence[torch.UntypedStorage]) -> None:
        self.addresses = [storage.data_ptr() for storage in storages]
        self.arrays = self._arrays(storages)

    def _arrays(self, storages: Sequence[torch.UntypedStorage]) -> list[ByteArray]:
        return [
            np.ctypeslib.as_array((ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr()))
            for storage in storages
        ]

    def pull(self, ranges: Iterable[Range] | None = None) -> None:
        """Make ``arrays`` show what stands in memory, in these ranges or everywhere."""

    def push(self, ranges: Iterable[Range] | None = None) -> None:
        """Make memory hold what ``arrays`` show, in these ranges or everywhere."""


class DeviceMemory(Memory):
    """The storages of a real device: ``arrays`` are mirrors of them. ``addresses`` are the device's own."""

    def _arrays(self, storages: Sequence[torch.UntypedStorage]) -> list[ByteArray]:
        import torch

        self._device = [torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage) for storage in storages]
        mirrors = [np.zeros(storage.nbytes(), np.uint8) for storage in storages]
        self._mirrors = [torch.from_numpy(mirror) for mirror in mirrors]
        return mirrors

    def pull(self, ranges: Iterable[Range] | None = None) -> None:
        for storage, part in self._parts(ranges):
            self._mirrors[storage][part].copy_(self._device[storage][part])

    def push(self, ranges: Iterable[Range] | None = None) -> None:
        for storage, part in self._parts(ranges):
            self._device[storage][part].copy_(self._mirrors[storage][part])

    def _parts(self, ranges: Iterable[Range] | None) -> list[tuple[int, slice]]:
        if ranges is None:
            return [(storage, slice(None)) for storage in range(len(self.arrays))]
        return [(storage, slice(begin, end)) for storage, begin, end in merged(ranges)]


def merged(ranges: Iterable[Range]) -> list[tuple[int, int, int]]:
    """(storage, first byte, byte after the last); ranges that touch or overlap are joined, for a copy has its price."""
    joined: list[tuple[int, int, int]] = []
    for storage, begin, nbytes in sorted(ranges):
        if joined and joined[-1][0] == storage and begin <= joined[-1][2]:
            joined[-1] = (storage, joined[-1][1], max(joined[-1][2], begin + nbytes))
        else:
            joined.append((storage, begin, begin + nbytes))
    return joined


def pages(resource: Resource, blocks: Iterable[int]) -> list[Range]:
    """The pages of some blocks of one resource, padding included."""
    begin, stride = resource.offset, resource.block_stride
    return [(resource.storage, begin + block * stride, resource.page_bytes) for block in blocks]


def rows(resource: Resource, block: int, first: int, count: int) -> Iterator[Range]:
    """The cells of ``count`` rows of one block from row ``first`` on, without padding; computed when asked for."""
    starts = np.zeros(1, np.int64)
    for axis in (*resource.row_axes, *resource.cell_axes[:-1]):
        starts = (starts[:, None] + np.arange(axis.count, dtype=np.int64) * axis.stride).reshape(-1)
    page, cells = resource.offset + block * resource.block_stride, len(starts) // resource.rows
    for start in starts[first * cells : (first + count) * cells].tolist():
        yield resource.storage, page + start, resource.cell_axes[-1].count


def frames(families: Iterable[FrameFamily], blocks: Iterable[int]) -> list[Range]:
    """Everything some block ids own."""
    wanted = list(blocks)
    return [(f.storage, f.offset + block * f.block_stride, f.nbytes) for f in families for block in wanted]
