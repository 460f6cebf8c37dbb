"""KV memory as pages: where one stands, who owns a byte, and the bytes at an address.

Independent of the ledger: it knows the layout and nothing of what memory ought to hold.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvproof.findings.model import Location
from kvproof.layout import Layout, Resource
from kvproof.layout.frames import FrameFamily, frame_families

ByteArray = npt.NDArray[np.uint8]
NULL_BLOCK = 0


@dataclass(frozen=True)
class Place:
    """One byte of KV memory. ``byte`` counts from the start of the resource's page; ``resource`` is a field name."""

    group: int
    layer: str
    resource: str
    block: int
    byte: int

    def __str__(self) -> str:
        return f"group {self.group} {self.layer} {self.resource} block {self.block} byte {self.byte}"

    def is_at(self, location: Location | None) -> bool:
        """Whether ``location`` names exactly this byte."""
        return location is not None and (
            self.group, self.layer, self.resource, self.block, self.byte
        ) == (location.group, location.layer, location.resource, location.block, location.byte)  # fmt: skip


@dataclass(frozen=True)
class Spot:
    """An address resolved: byte ``byte`` of the frame of ``block`` in frame family ``family``."""

    family: int
    block: int
    byte: int


def bytes_at(address: int, nbytes: int) -> ByteArray:
    """Writable view of ``nbytes`` bytes of this process."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


class Pages:
    """The pages of one worker's KV memory; ``addresses[i]`` is the base of storage ``i``."""

    def __init__(self, layout: Layout, storages: Sequence[ByteArray], addresses: Sequence[int]) -> None:
        self.layout = layout
        self.storages = list(storages)
        self.addresses = list(addresses)
        self.families: tuple[FrameFamily, ...] = frame_families(layout)

    @property
    def layers(self) -> list[str]:
        """Layer names in the order of the layout, each once."""
        return list(dict.fromkeys(r.layer for r in self.layout.resources))

    def find(self, address: int) -> Spot | None:
        """Where ``address`` lies, or None outside of all frames."""
        for index, family in enumerate(self.families):
            relative = address - self.addresses[family.storage] - family.offset
            block, byte = divmod(relative, family.block_stride)
            if 0 <= block < self.layout.num_blocks and byte < family.nbytes:
                return Spot(index, block, byte)
        return None

    def covered(self, address: int, nbytes: int) -> set[tuple[int, int]]:
        """(family, block) of every frame with a byte in the range: K and V of a block may be two frames."""
        spot = self.find(address)
        if spot is None:
            return set()
        storage = self.families[spot.family].storage
        start = address - self.addresses[storage]
        found = set()
        for index, f in enumerate(self.families):
            if f.storage == storage:
                first = max(0, -((f.offset + f.nbytes - 1 - start) // f.block_stride))
                last = min(self.layout.num_blocks - 1, (start + nbytes - 1 - f.offset) // f.block_stride)
                found |= {(index, block) for block in range(first, last + 1)}
        return found

    def address(self, family: int, block: int) -> int:
        """First byte of the frame of ``block``."""
        f = self.families[family]
        return self.addresses[f.storage] + f.offset + block * f.block_stride

    def group_resources(self, family: int, group: int | None) -> tuple[Resource, ...]:
        """Resources of ``group`` in a frame; of the first resource's group where nobody owns the block.

        A frame in which a group has none belongs to the block id all the same (vllm-ascend lays each group's layers in
        allocations of their own): it then stands for the first resource's group, too.
        """
        f = self.families[family]
        mine = () if group is None else f.of_group(group)
        return mine or f.of_group(f.resources[0].group)

    def cells(self, family: int, group: int | None, page: ByteArray) -> ByteArray:
        """Writable ``[*row axes, *cell axes]`` view of the first resource in ``page``, a frame's bytes."""
        r = self.group_resources(family, group)[0]
        cells: ByteArray = r.view(page, 1, offset=r.offset - self.families[family].offset)[0]
        return cells

    def padding(self, family: int, group: int) -> npt.NDArray[np.int64]:
        """Bytes of the frame that no resource of ``group`` uses, in order."""
        used = np.zeros(self.families[family].nbytes, np.bool_)
        for r in self.families[family].of_group(group):
            used[self._frame_bytes(family, r)] = True
        return np.flatnonzero(~used)

    def place(self, spot: Spot, group: int | None) -> Place:
        """Name of one byte; ``group`` is the owner of its block, None where nobody owns it."""
        return self.first_places(spot.family, spot.block, group, np.array([spot.byte]))[0]

    def first_places(
        self, family: int, block: int, group: int | None, wrong: npt.NDArray[np.int64]
    ) -> list[Place]:
        """First of the ``wrong`` frame bytes (sorted) of each resource of the block, then of its padding."""
        f = self.families[family]
        places = []
        rest = wrong
        for r in f.of_group(f.resources[0].group if group is None else group):
            mine = self._frame_bytes(family, r)
            hit = rest[np.isin(rest, mine)]
            if hit.size:
                page_byte = int(hit[0]) + f.offset - r.offset
                located = r.locate(page_byte)
                name = "padding" if located is None else r.field_at(located[1])
                places.append(Place(r.group, r.layer, name, block, page_byte))
            rest = rest[~np.isin(rest, mine)]
        if rest.size:
            named = self.group_resources(family, group)[0]
            places.append(Place(named.group, named.layer, "padding", block, int(rest[0])))
        return places

    def _frame_bytes(self, family: int, r: Resource) -> npt.NDArray[np.int64]:
        return r.page_offsets() + (r.offset - self.families[family].offset)

    def snapshot(self) -> list[ByteArray]:
        """Copy of all KV memory."""
        return [memory.copy() for memory in self.storages]

    def restore(self, snapshot: Sequence[ByteArray]) -> None:
        """Put a snapshot back."""
        for memory, copy in zip(self.storages, snapshot, strict=True):
            memory[:] = copy
