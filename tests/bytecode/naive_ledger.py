"""The ledger again, as a person would write it who has all the time in the world.

A dict says what every byte of every storage must be: (storage, byte) -> set of legal values, or None where nothing is
judged. It is computed anew, byte by byte, from the states of the rows; nothing here is shared with the real one but
the byte code of a single row (which has a naive test of its own).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from random_layouts import naive_cells, naive_page

from kvproof.bytecode import ByteCode, Fill
from kvproof.layout import Layout, Resource

Address = tuple[int, int]
POISON = {Fill.TARGET: 255, Fill.UNCOMPUTED: 254, Fill.FREE: 253, Fill.NULL: 252}
STATES = {0: "zero", 255: "poison_target", 254: "poison_uncomputed", 253: "poison_free", 252: "poison_null"}


@dataclass(frozen=True)
class Wrong:
    """One page with wrong bytes: ``resource`` is None for padding and for frames nobody owns."""

    resource: int | None
    block: int
    states: dict[Address, str]


def optional_state(content: int) -> int:
    return -1000 - content


class NaiveLedger:
    """``memories`` are bytearrays, one per storage."""

    def __init__(self, layout: Layout, code: ByteCode) -> None:
        self.layout = layout
        self.code = code
        self.memories = [bytearray(s.nbytes) for s in layout.storages]
        self.owner: dict[int, int | None] = {}
        self.states: dict[tuple[int, int, int], int] = {}
        self.cells = {r.id: list(naive_cells(r)) for r in layout.resources}
        self.planes = self._number_planes()
        self.pages: dict[int, set[Address]] = {}  # block -> bytes it owns
        for block in range(layout.num_blocks):
            self.pages[block] = {(r.storage, b) for r in layout.resources for b in naive_page(r, block)}

    def _number_planes(self) -> dict[int, list[tuple[int, int]]]:
        """resource -> (code number, bytes) of each part of a row whose bytes are adjacent."""
        planes: dict[int, list[tuple[int, int]]] = {}
        number = 0
        for r in self.layout.resources:
            first_row = [inside for row, _, inside in self.cells[r.id] if row == 0]
            adjacent = first_row == list(range(first_row[0], first_row[0] + len(first_row)))
            size = len(first_row) if adjacent else r.cell_axes[-1].count
            planes[r.id] = [(number + i, size) for i in range(len(first_row) // size)]
            number += len(planes[r.id])
        return planes

    def address(self, r: Resource, block: int, inside: int) -> Address:
        return r.storage, r.offset + block * r.block_stride + inside

    def row_code(self, r: Resource, content: int) -> bytes:
        return b"".join(
            self.code.rows(number, np.array([content], np.int32), size).tobytes() for number, size in self.planes[r.id]
        )

    # ------------------------------------------------------------------ changes

    def paint(self) -> None:
        for memory in self.memories:
            memory[:] = bytes([253]) * len(memory)
        for storage, byte in self.pages[0]:
            self.memories[storage][byte] = 252
        for block in range(self.layout.num_blocks):
            self.owner[block] = None

    def allocate(self, group: int, block: int, fill: Fill) -> None:
        self.owner[block] = group
        for storage, byte in self.pages[block]:
            self.memories[storage][byte] = 253
        for r in self.layout.group_resources(group):
            for row, _, inside in self.cells[r.id]:
                storage, byte = self.address(r, block, inside)
                self.memories[storage][byte] = fill.byte
                self.states[r.id, block, row] = int(fill)

    def expect(self, r: Resource, block: int, first_row: int, states: Iterable[int]) -> None:
        for row, state in enumerate(states, first_row):
            self.states[r.id, block, row] = state

    def write(self, r: Resource, block: int, first_row: int, contents: list[int]) -> None:
        self.expect(r, block, first_row, contents)
        codes = {first_row + i: self.row_code(r, c) for i, c in enumerate(contents)}
        for row, number, inside in self.cells[r.id]:
            if row in codes:
                storage, byte = self.address(r, block, inside)
                self.memories[storage][byte] = codes[row][number]

    # ------------------------------------------------------------------ judgement

    def legal(self, r: Resource, state: int, byte: int) -> set[int] | None:
        """Values byte ``byte`` of a row in ``state`` may have; None: any."""
        if state >= 0:
            return {self.row_code(r, state)[byte]}
        if state <= -1000:
            return {255, self.row_code(r, -1000 - state)[byte]}
        if state == Fill.ZEROED_OR_POISON:
            return {0, 254, 255}
        if state in (Fill.ANY, Fill.TAINTED):
            return None
        return {POISON[Fill(state)]}

    def wrong(self, blocks: Iterable[int]) -> list[Wrong]:
        """Every page with a wrong byte: per (block, resource), and per block for what no resource owns."""
        found = []
        for block in blocks:
            group = self.owner[block]
            rest = set(self.pages[block])
            for r in self.layout.resources:
                if r.group == group:
                    rest -= {self.address(r, block, inside) for _, _, inside in self.cells[r.id]}
                    found += self.wrong_rows(r, block, range(r.rows))
            value = 252 if block == 0 else 253
            bad = {a: self.memories[a[0]][a[1]] for a in sorted(rest) if self.memories[a[0]][a[1]] != value}
            if bad:
                found.append(Wrong(None, block, bad))
        return found

    def wrong_rows(self, r: Resource, block: int, rows: range) -> list[Wrong]:
        bad = {}
        codes: dict[int, list[set[int] | None]] = {}
        for row, byte, inside in self.cells[r.id]:
            if row in rows:
                if row not in codes:
                    state = self.states[r.id, block, row]
                    codes[row] = (
                        [self.legal(r, state, b) for b in range(r.row_bytes)]
                        if state < 0
                        else [{v} for v in self.row_code(r, state)]
                    )
                storage, at = self.address(r, block, inside)
                legal = codes[row][byte]
                if legal is not None and self.memories[storage][at] not in legal:
                    bad[storage, at] = self.memories[storage][at]
        return [Wrong(r.id, block, bad)] if bad else []

    def judged_bytes(self, block: int) -> int:
        """Bytes of a block that are compared with anything."""
        free = sum(
            (r.id, block, row) in self.states and self.states[r.id, block, row] in (Fill.ANY, Fill.TAINTED)
            for r in self.layout.resources
            if r.group == self.owner[block]
            for row, _, _ in self.cells[r.id]
        )
        return len(self.pages[block]) - free


def named_states(values: dict[Address, int]) -> dict[Address, str]:
    """What stands at each wrong byte; zeros are only called so where they are at least half of one page's."""
    names = {a: STATES.get(v, "foreign") for a, v in values.items()}
    if 2 * sum(n == "zero" for n in names.values()) < len(names):
        names = {a: "foreign" if n == "zero" else n for a, n in names.items()}
    return names
