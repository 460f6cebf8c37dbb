"""The guard's memory of what the scheduler declared: one dense int32 table per group. Pure numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer[Any]]


class Shadow:
    """Block tables as declared, by request row. Rows and columns grow; rows are reused after ``forget``.

    ``tables[g]`` int32 [rows, columns] block ids, ``counts[g]`` int32 [rows] declared columns, ``uses[g]`` int32
    [num_blocks] in how many live rows (from their first live column on) a block stands. Ids outside [0, num_blocks)
    are kept in the table as they came, and counted nowhere.
    """

    def __init__(self, num_blocks: Sequence[int], rows: int = 64, columns: int = 64):
        self.row_of: dict[str, int] = {}
        self.name_of: list[str | None] = [None] * rows
        self._free = list(range(rows - 1, -1, -1))
        self.tables = [np.zeros((rows, columns), np.int32) for _ in num_blocks]
        self.counts = [np.zeros(rows, np.int32) for _ in num_blocks]
        self.dropped = [np.zeros(rows, np.int32) for _ in num_blocks]
        self.uses = [np.zeros(n, np.int32) for n in num_blocks]
        self.end = np.full(rows, -1, np.int64)
        """Tokens declared so far (start + scheduled of the last step), −1 before the first."""
        self.target = np.full(rows, -1, np.int64)
        """Tokens the request had when it was declared: a step that ends below samples nothing; −1 unknown."""
        self.slack = np.zeros(rows, np.int64)
        """Drafts of the last step: how far the real end may lie below ``end``."""

    def __len__(self) -> int:
        return len(self.row_of)

    def rows(self, ids: Sequence[str]) -> NDArray[np.int64]:
        """Row of each id, −1 for an unknown one."""
        get = self.row_of.get
        return np.fromiter([get(name, -1) for name in ids], np.int64, len(ids))

    def lookup(self, group: int, rows: Ints, columns: Ints) -> NDArray[np.int64]:
        """Declared block of each (row, column) pair, −1 where nothing is declared."""
        table, counts = self.tables[group], self.counts[group]
        ok = (rows >= 0) & (rows < len(counts)) & (columns >= 0)
        if not ok.all():
            rows, columns = np.where(ok, rows, 0), np.where(ok, columns, 0)
            ok &= columns < counts[rows]
        else:
            ok = columns < counts[rows]
        if ok.all():
            return table[rows, columns].astype(np.int64)
        return np.where(ok, table[rows, np.where(ok, columns, 0)], -1).astype(np.int64)

    def blocks(self, group: int, row: int) -> NDArray[np.int32]:
        """Declared blocks of one row (view)."""
        return self.tables[group][row, : self.counts[group][row]]

    def add(self, name: str) -> int:
        """Row for a request, emptied when it had one."""
        row = self.row_of.get(name)
        if row is None:
            if not self._free:
                self._grow_rows()
            row = self._free.pop()
            self.row_of[name] = row
            self.name_of[row] = name
        self.clear(row)
        return row

    def clear(self, row: int) -> None:
        """Forget the blocks of a row, keep the row."""
        for group in range(len(self.tables)):
            self._count(group, self.tables[group][row, self.dropped[group][row] : self.counts[group][row]], -1)
            self.counts[group][row] = 0
            self.dropped[group][row] = 0
        self.end[row] = self.target[row] = -1
        self.slack[row] = 0

    def append(self, group: int, row: int, blocks: Ints) -> int:
        """Append block ids to a row; returns the first new column."""
        start = int(self.counts[group][row])
        stop = start + len(blocks)
        if stop > self.tables[group].shape[1]:
            self._grow_columns(group, stop)
        self.tables[group][row, start:stop] = np.clip(blocks, -(2**31), 2**31 - 1)
        self.counts[group][row] = stop
        self._count(group, blocks, 1)
        return start

    def append_one(self, group: int, row: int, block: int) -> int:
        """``append`` of one block that is known to be in range, without numpy's machinery."""
        counts, table = self.counts[group], self.tables[group]
        column = int(counts[row])
        if column >= table.shape[1]:
            self._grow_columns(group, column + 1)
            table = self.tables[group]
        table[row, column] = block
        counts[row] = column + 1
        self.uses[group][block] += 1
        return column

    def cut(self, group: int, row: int, count: int) -> None:
        """Undo the last ``append`` of ``count`` blocks."""
        stop = int(self.counts[group][row])
        self._count(group, self.tables[group][row, stop - count : stop], -1)
        self.counts[group][row] = stop - count

    def forget(self, name: str) -> bool:
        """Drop a request. False when it was not known."""
        row = self.row_of.pop(name, None)
        if row is None:
            return False
        self.clear(row)
        self.name_of[row] = None
        self._free.append(row)
        return True

    def drop_before(self, group: int, rows: Ints, columns: Ints) -> None:
        """Stop counting the uses of columns below ``columns`` (they left the attention window)."""
        dropped = self.dropped[group]
        moved = np.flatnonzero(columns > dropped[rows])
        for i in moved:
            row = int(rows[i])
            stop = min(int(columns[i]), int(self.counts[group][row]))
            self._count(group, self.tables[group][row, dropped[row] : stop], -1)
            dropped[row] = max(stop, dropped[row])

    def holders(self, group: int, block: int, beside: int) -> list[tuple[str, int]]:
        """(request, column) of every live use of ``block`` in other rows than ``beside``."""
        rows, columns = np.nonzero(self.tables[group] == block)
        keep = (columns < self.counts[group][rows]) & (columns >= self.dropped[group][rows]) & (rows != beside)
        return [(self.name_of[r] or "?", int(c)) for r, c in zip(rows[keep], columns[keep], strict=True)]

    def excerpt(self, rows: Ints) -> tuple[Shadow, NDArray[np.int64]]:
        """A copy that holds only ``rows`` (in this order) and the new row of each; −1 stays −1."""
        known = np.flatnonzero(rows >= 0)
        chosen = rows[known]
        copy = Shadow.__new__(Shadow)
        copy.name_of = [self.name_of[row] for row in chosen]
        copy.row_of = {name: i for i, name in enumerate(copy.name_of) if name is not None}
        copy._free = []
        copy.counts = [counts[chosen] for counts in self.counts]
        copy.dropped = [dropped[chosen] for dropped in self.dropped]
        copy.tables = [
            table[chosen, : int(counts.max(initial=1))]
            for table, counts in zip(self.tables, copy.counts, strict=True)
        ]
        copy.uses = [uses.copy() for uses in self.uses]
        copy.end, copy.slack, copy.target = self.end[chosen], self.slack[chosen], self.target[chosen]
        renumbered = np.full(len(rows), -1, np.int64)
        renumbered[known] = np.arange(len(known))
        return copy, renumbered

    def _count(self, group: int, blocks: Ints, step: int) -> None:
        uses = self.uses[group]
        inside = blocks[(blocks >= 0) & (blocks < len(uses))]
        np.add.at(uses, inside, step)

    def _grow_rows(self) -> None:
        rows = len(self.name_of)
        self.name_of += [None] * rows
        self._free.extend(range(2 * rows - 1, rows - 1, -1))
        self.tables = [np.concatenate([t, np.zeros_like(t)]) for t in self.tables]
        self.counts = [np.concatenate([c, np.zeros_like(c)]) for c in self.counts]
        self.dropped = [np.concatenate([d, np.zeros_like(d)]) for d in self.dropped]
        self.end = np.concatenate([self.end, np.full(rows, -1, np.int64)])
        self.target = np.concatenate([self.target, np.full(rows, -1, np.int64)])
        self.slack = np.concatenate([self.slack, np.zeros(rows, np.int64)])

    def _grow_columns(self, group: int, needed: int) -> None:
        table = self.tables[group]
        columns = max(needed, 2 * table.shape[1])
        wider = np.zeros((table.shape[0], columns), np.int32)
        wider[:, : table.shape[1]] = table
        self.tables[group] = wider
