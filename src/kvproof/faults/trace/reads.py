"""Faults of the read plan: attention looks at blocks, or at a length, that nobody declared."""

from __future__ import annotations

from kvproof.faults.trace.model import V1, V2, Place, TraceFault
from kvproof.faults.trace.plan import NativePlan


class ContextTooLong(TraceFault):
    """A decoding request's context is one token longer than it has tokens."""

    rule = "plan_seq_len_mismatch"
    engines = (V2, V1)

    def planned(self, plan: NativePlan) -> None:
        row = len(plan.ids) - 1
        end = plan.position(plan.last(row)) + 1
        if end % self.stage.block_size:  # else the token in excess also needs a block
            plan.put(plan.seq_lens, row, end + 1)
            self.expected = Place(request=plan.ids[row], position=end)


class _OneCell(TraceFault):
    """Base of the faults that change one cell of the block table: the last column the last request reads.

    It is compared in every step; the others only where a row has grown, or on a full check.
    """

    engines = (V2, V1)

    def wrong(self) -> int:
        """The block to read instead."""
        raise NotImplementedError

    def planned(self, plan: NativePlan) -> None:
        row, size = len(plan.ids) - 1, self.stage.block_size
        if plan.first(row) < plan.last(row):
            return  # a decode step: no row has grown
        column = plan.position(plan.last(row)) // size
        plan.put(plan.table, (row, column), self.wrong())
        self.expected = Place(plan.ids[row], 0, self.wrong(), position=column * size)


class TableBehindCache(_OneCell):
    """A cell of the block table names a block behind the end of the cache."""

    rule = "read_outside_cache"

    def wrong(self) -> int:
        return len(self.stage.pool.blocks)


class TableNamesNullBlock(_OneCell):
    """A cell of the block table names the null block."""

    rule = "read_null_block"

    def wrong(self) -> int:
        return 0


class TableNamesFreeBlock(_OneCell):
    """A cell of the block table names a block that belongs to nobody, as after a release it did not hear of."""

    rule = "read_block_table_mismatch"

    def wrong(self) -> int:
        return self.stage.free_block()


class FirstColumnStale(TraceFault):
    """The first column of a row that has just been filled names a free block."""

    rule = "read_block_table_mismatch"
    engines = (V2, V1)

    def planned(self, plan: NativePlan) -> None:
        block = self.stage.free_block()
        if plan.first(0) < plan.last(0):
            plan.put(plan.table, (0, 0), block)
            self.expected = Place(plan.ids[0], 0, block, position=0)


class ContextBehindBlocks(TraceFault):
    """A request's context reaches one token past its last block."""

    rule = "read_len_exceeds_binding"
    engines = (V2, V1)

    def planned(self, plan: NativePlan) -> None:
        row = len(plan.ids) - 1
        end = len(self.stage.blocks(plan.ids[row])) * self.stage.block_size
        plan.put(plan.seq_lens, row, end + 1)
        self.expected = Place(request=plan.ids[row], group=0, position=end)


class PaddingRowReads(TraceFault):
    """The batch is padded by one row, and that row has a context."""

    rule = "pad_seq_len_nonzero"
    engines = (V2, V1)

    def planned(self, plan: NativePlan) -> None:
        plan.pad_rows(9)
        self.expected = Place()


class TableTooNarrow(TraceFault):
    """The block table has one column less than the longest request reads."""

    rule = "read_table_overrun"
    engines = (V2, V1)

    def planned(self, plan: NativePlan) -> None:
        size = self.stage.block_size
        needed = [plan.position(plan.last(row)) // size + 1 for row in range(len(plan.ids))]
        columns = max(needed) - 1
        if columns and sum(n > columns for n in needed) == 1:
            plan.narrow_table(columns)
            self.expected = Place(request=plan.ids[needed.index(columns + 1)], group=0, position=columns * size)


FAULTS: tuple[type[TraceFault], ...] = (
    ContextTooLong, TableBehindCache, TableNamesNullBlock, TableNamesFreeBlock, FirstColumnStale, ContextBehindBlocks,
    PaddingRowReads, TableTooNarrow,
)  # fmt: skip
