"""Rules 9–17: the blocks the scheduler binds to its requests can be written by them, and by nobody else.

Most rules look at the cells this step's tokens fall into (``Schedule.write``) or at the cells declared in this step.
Whole rows are never judged: what lies below the attention window is stale by design, and recurrent-state rows start
with null blocks and move their blocks about.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvproof.trace.records import NULL_BLOCK, Cells, Group, Ints, Schedule
from kvproof.trace.rules.model import Violation, rule

FAR = 1 << 40
"""Tokens. Starts and lengths beyond it are nonsense; sums below it cannot overflow."""

MOST_CELLS = 1 << 22
"""Write cells of one step. More can only come from a nonsensical token count and would exhaust the memory."""

Mask = NDArray[np.bool_]


@rule(
    Schedule,
    family="binding",
    boundary="bind",
    predicate="block ids are declared for every KV-cache group",
    fields=("scheduled_new_reqs.block_ids", "scheduled_cached_reqs.new_block_ids", "kv_cache_groups"),
    skips="requests without new block ids",
    meaning="A request's block ids do not line up with the KV-cache groups, so groups get each other's blocks or none.",
)
def bind_group_count_mismatch(s: Schedule) -> Iterator[Violation]:
    """Judge the number of groups in each declaration."""
    for name, count in s.group_counts:
        if count != len(s.groups):
            yield Violation(
                "bind_group_count_mismatch",
                f"block ids for {len(s.groups)} groups",
                f"block ids for {count} groups",
                request=name,
            )


@rule(
    Schedule,
    family="binding",
    boundary="bind",
    predicate="every declared block id lies in its group's pool",
    fields=("scheduled_new_reqs.block_ids", "scheduled_cached_reqs.new_block_ids", "kv_cache_config.num_blocks"),
    meaning="The scheduler declares a block that does not exist: its slots lie outside the cache.",
)
def bind_block_out_of_range(s: Schedule) -> Iterator[Violation]:
    """Judge the cells declared in this step, those of recurrent state too."""
    cells = s.appended
    for group in s.groups:
        outside = (cells.group == group.index) & ((cells.block < 0) | (cells.block >= group.num_blocks))
        for i in np.flatnonzero(outside):
            yield Violation(
                "bind_block_out_of_range",
                f"a block from 0 to {group.num_blocks - 1}",
                f"block {cells.block[i]}",
                request=_name(s, int(cells.who[i])),
                group=group.index,
                block=int(cells.block[i]),
                position=int(cells.column[i]) * group.block_size if group.slotted else None,
            )


@rule(
    Schedule,
    family="binding",
    boundary="bind",
    predicate="no token of the step falls into the null block",
    fields=("block_ids", "new_block_ids", "num_computed_tokens", "num_scheduled_tokens"),
    skips="recurrent-state groups, and engines that redirect writes to the null block on purpose",
    meaning="A request is to write its KV into the null block, where it is lost or read by others.",
)
def bind_null_block_in_write_range(s: Schedule) -> Iterator[Violation]:
    """Judge the write cells only: leading null blocks of a sliding-window row are never written."""
    if s.redirected:
        return
    cells = _write(s)
    for i in np.flatnonzero(cells.block == NULL_BLOCK):
        yield _at(s, cells, int(i), "bind_null_block_in_write_range", "a block that can be written", "block 0 (null)")


@rule(
    Schedule,
    family="binding",
    boundary="bind",
    predicate="a block stands at most once in the live part of a request's row",
    fields=("block_ids", "new_block_ids"),
    skips="null blocks, columns below the attention window, recurrent-state groups (they move blocks) and ring buffers",
    meaning="Two parts of one request share a block, so its later tokens overwrite its earlier ones.",
)
def bind_duplicate_block_in_request(s: Schedule) -> Iterator[Violation]:
    """Judge the rows that grew, and of them only those with a block that is used more than once somewhere."""
    cells = s.appended
    if not len(cells):
        return
    real = _known(s, cells) & (cells.block > NULL_BLOCK)
    for group in s.groups:
        if not group.slotted:
            continue
        uses = s.shadow.uses[group.index]
        often = np.flatnonzero(real & (cells.group == group.index) & (cells.block < len(uses)))
        often = often[uses[cells.block[often]] > 1]
        rows = np.unique(s.rows[cells.who[often]])
        rows = rows[(rows >= 0) & (rows < len(s.shadow.counts[group.index]))]
        if len(rows):
            yield from _repeats(s, group, rows)


@rule(
    Schedule,
    family="binding",
    boundary="bind",
    predicate="every token of the step falls into a declared block",
    fields=("block_ids", "new_block_ids", "num_computed_tokens", "num_scheduled_tokens"),
    skips="groups whose slots do not follow from the position",
    meaning="A request was given more tokens than blocks: the tokens behind its last block have no place of their own.",
)
def bind_insufficient_blocks(s: Schedule) -> Iterator[Violation]:
    """Judge the last column a request needs; one finding per request and group, at the first missing column."""
    for group in s.groups:
        if not group.slotted:
            continue
        counts = s.shadow.counts[group.index]
        ok = (s.start >= 0) & (s.tokens > 0) & (s.rows >= 0) & (s.rows < len(counts))
        have = counts[np.where(ok, s.rows, 0)].astype(np.int64)
        first = np.minimum(s.start, FAR)
        need = (first + np.minimum(s.tokens, FAR) - 1) // group.block_size + 1
        for i in np.flatnonzero(ok & (need > have)):
            yield Violation(
                "bind_insufficient_blocks",
                f"at least {need[i]} blocks for {int(s.start[i]) + int(s.tokens[i])} tokens",
                f"{have[i]} blocks",
                request=s.ids[i],
                group=group.index,
                position=max(int(s.start[i]), int(have[i]) * group.block_size),
            )


@rule(
    Schedule,
    family="binding",
    boundary="bind",
    predicate="a block that is written in this step is in no other live request's row",
    fields=("block_ids", "new_block_ids", "num_computed_tokens", "num_scheduled_tokens"),
    skips="a full-block prefix hit of the same step (the other request only reads the block, which this step fills), "
    "null blocks, and engines that redirect the writes of replayed tokens",
    meaning="A request is to overwrite KV that another request holds in the same block.",
)
def bind_write_block_shared(s: Schedule) -> Iterator[Violation]:
    """Judge write cells whose block is used more than once against all rows that hold it."""
    if s.redirected:
        return
    cells = _write(s)
    for group in s.groups:
        if not group.slotted:
            continue
        uses = s.shadow.uses[group.index]
        mine = np.flatnonzero((cells.group == group.index) & (cells.block > NULL_BLOCK) & (cells.block < len(uses)))
        mine = mine[uses[cells.block[mine]] > 1]
        if len(mine):
            yield from _shared(s, group, cells, mine)


@rule(
    Schedule,
    family="lifecycle",
    boundary="bind",
    predicate="a block that is written in this step has not been given back to the pool",
    fields=("block_ids", "new_block_ids", "BlockPool.free_blocks"),
    needs=("held",),
    skips="null blocks and blocks out of range, which other rules report",
    meaning="A request is to write a block that was released: the pool may hand it to another request at any time.",
)
def used_after_release(s: Schedule) -> Iterator[Violation]:
    """Judge the write cells against the guard's own books of the pool's calls."""
    for i, count in _without_user(s, s.held):
        yield _at(
            s, _write(s), i, "used_after_release", "at least 1 reference by the pool's calls", f"{count} references"
        )


@rule(
    Schedule,
    family="binding",
    boundary="bind",
    predicate="a block that is written in this step has a user in the block pool",
    fields=("block_ids", "new_block_ids", "KVCacheBlock.ref_cnt"),
    needs=("references",),
    skips="null blocks and blocks out of range, which other rules report",
    yields_to=("used_after_release",),
    meaning="The pool counts a block as free that a request is to write, so it may hand it out at any time.",
)
def bind_block_not_referenced(s: Schedule) -> Iterator[Violation]:
    """Judge the write cells against the pool's own counts."""
    for i, count in _without_user(s, s.references):
        yield _at(
            s, _write(s), i, "bind_block_not_referenced", "at least 1 reference in the pool", f"{count} references"
        )


@rule(
    Schedule,
    family="binding",
    boundary="bind",
    predicate="only blocks that exist and are not the null block are to be zeroed",
    fields=("new_block_ids_to_zero", "kv_cache_config.num_blocks"),
    meaning="The step zeroes memory that is no request's block.",
)
def zero_block_invalid(s: Schedule) -> Iterator[Violation]:
    """Judge the ids; the list names no group, so the largest pool is the limit."""
    limit = _largest_pool(s)
    for block in s.zero[(s.zero <= NULL_BLOCK) | (s.zero >= limit)]:
        yield Violation(
            "zero_block_invalid", f"a block from 1 to {limit - 1}", _block_in_words(int(block)), block=int(block)
        )


@rule(
    Schedule,
    family="binding",
    boundary="bind",
    predicate="a copy-on-write copy goes from an existing block to another existing block that is not the null block",
    fields=("kv_cache_block_copies", "kv_cache_config.num_blocks"),
    meaning="The step copies a block from or to a place that is no request's block.",
)
def copy_block_invalid(s: Schedule) -> Iterator[Violation]:
    """Judge both ends; the list names no group, so the largest pool is the limit."""
    if s.copies.ndim != 2 or s.copies.shape[1] != 2:
        return
    limit = _largest_pool(s)
    source, target = s.copies[:, 0], s.copies[:, 1]
    lost = (source < 0) | (source >= limit)
    for i in np.flatnonzero(lost | (target <= NULL_BLOCK) | (target >= limit) | (source == target)):
        yield Violation(
            "copy_block_invalid",
            f"a source from 0 to {limit - 1} and another block from 1 to {limit - 1} as its target",
            f"a copy from {_block_in_words(int(source[i]))} to {_block_in_words(int(target[i]))}",
            block=int(source[i] if lost[i] else target[i]),
        )


def _repeats(s: Schedule, group: Group, rows: Ints) -> Iterator[Violation]:
    """Blocks that stand twice in the live part of these rows; the later column is the place."""
    g = group.index
    counts, dropped = s.shadow.counts[g][rows], s.shadow.dropped[g][rows]
    table = s.shadow.tables[g][rows, : int(counts.max())]
    column = np.arange(table.shape[1])
    live = (column >= dropped[:, None]) & (column < counts[:, None]) & (table > NULL_BLOCK) & (table < group.num_blocks)
    blocks = np.where(live, table, -1)
    ordered = np.sort(blocks, axis=1)
    suspects = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] > NULL_BLOCK)).any(axis=1)
    for k in np.flatnonzero(suspects):
        order = np.argsort(blocks[k], kind="stable")
        row = blocks[k][order]
        for j in np.flatnonzero((row[1:] == row[:-1]) & (row[1:] > NULL_BLOCK)):
            block, earlier, later = int(row[j]), int(order[j]), int(order[j + 1])
            yield Violation(
                "bind_duplicate_block_in_request",
                "each block once in the live part of a request's row",
                f"block {block} at column {earlier} and at column {later}",
                request=s.shadow.name_of[int(rows[k])],
                group=g,
                block=block,
                position=later * group.block_size,
            )


def _shared(s: Schedule, group: Group, cells: Cells, mine: Ints) -> Iterator[Violation]:
    """Write cells ``mine`` whose block another live row holds, the legal prefix hit of the same step excepted.

    The exception: the other request holds the block at the same column, it starts behind the block in this step, and
    the writer fills the block in this step. Besides, one of the two must have come to the block in the way a prefix
    hit brings about: either the other request was admitted in this step (the hit), or the writer had the block before
    and writes it once more (a failed load is recomputed). A running request whose full block is handed to a newcomer
    looks the same but for that, and is the damage this rule is for.
    """
    g, size, shadow = group.index, group.block_size, s.shadow
    pair, row, column = _holders(s, g, cells.block[mine])
    cell = mine[pair]
    writer = cells.who[cell]

    scheduled = _inside(s.rows, len(shadow.end))
    index = np.full(len(shadow.end), -1, np.int64)
    index[s.rows[scheduled]] = np.flatnonzero(scheduled)
    other = index[row]
    start = np.where(other >= 0, s.start[other], -1)
    end = np.where(other >= 0, s.end[other], shadow.end[row])

    behind = (column + 1) * size
    admitted = _marked(s, [*s.new, *s.resumed])
    gone = _marked(s, [*s.finished, *s.preempted])
    gone[s.rows[scheduled]] = False

    first = np.full(len(s.ids), np.iinfo(np.int64).max)
    grew = np.flatnonzero((s.appended.group == g) & _known(s, s.appended))
    np.minimum.at(first, s.appended.who[grew], s.appended.column[grew])
    old = cells.column[cell] < first[writer]

    hit = (column == cells.column[cell]) & (start >= behind) & (s.end[writer] >= behind) & (admitted[row] | old)
    bad = np.flatnonzero((row != s.rows[writer]) & (end > column * size) & ~gone[row] & ~hit)
    for k in bad[np.unique(cell[bad], return_index=True)[1]]:
        name = shadow.name_of[int(row[k])] or "?"
        yield _at(
            s,
            cells,
            int(cell[k]),
            "bind_write_block_shared",
            "a block that no other live request holds",
            f"a block of request {name} as well, at its column {column[k]}, with {end[k]} tokens",
        )


def _holders(s: Schedule, g: int, blocks: Ints) -> tuple[Ints, Ints, Ints]:
    """(index into ``blocks``, row, column) of every live use of one of ``blocks``, in one pass over the live rows."""
    shadow = s.shadow
    rows = np.sort(np.fromiter(shadow.row_of.values(), np.int64, len(shadow.row_of)))
    counts = shadow.counts[g][rows]
    table = shadow.tables[g][rows, : int(counts.max(initial=0))]
    wanted = np.zeros(len(shadow.uses[g]), np.bool_)
    wanted[blocks] = True
    column = np.arange(table.shape[1])
    live = (column >= shadow.dropped[g][rows][:, None]) & (column < counts[:, None])
    at, columns = np.nonzero(live & wanted[np.where(_inside(table, len(wanted)), table, NULL_BLOCK)])
    held = table[at, columns]
    order = np.argsort(blocks, kind="stable")
    left = np.searchsorted(blocks[order], held, "left")
    times = np.searchsorted(blocks[order], held, "right") - left
    use = np.repeat(np.arange(len(held)), times)
    nth = np.arange(len(use)) - np.repeat(np.cumsum(times) - times, times)
    return order[left[use] + nth], rows[at[use]], columns[use].astype(np.int64)


def _without_user(s: Schedule, counts: Ints | None) -> Iterator[tuple[int, int]]:
    """(index of the write cell, count) where the count of a block that could be written is not positive."""
    cells = _write(s)
    if counts is None or len(counts) != len(cells):
        return
    low = np.flatnonzero(counts <= 0)
    if not len(low):
        return
    block, inside = cells.block[low], np.zeros(len(low), np.bool_)
    for group in s.groups:
        inside |= (cells.group[low] == group.index) & (block > NULL_BLOCK) & (block < group.num_blocks)
    for i in low[inside]:
        yield int(i), int(counts[i])


def _write(s: Schedule) -> Cells:
    """The write cells, none when the declared numbers are nonsense (other rules report those)."""
    if "write" in vars(s):  # made before, hence small enough
        return s.write
    busy = (s.start >= 0) & (s.tokens > 0) & (s.rows >= 0)
    start, tokens = s.start[busy], s.tokens[busy]
    if not ((start > FAR) | (tokens > FAR)).any():
        cells = sum(int((tokens // g.block_size + 2).sum()) for g in s.groups if g.slotted)
        if cells <= MOST_CELLS:
            return s.write
    empty = np.empty(0, np.int64)
    return Cells(empty, empty, empty, empty)


def _at(s: Schedule, cells: Cells, i: int, name: str, expected: str, found: str) -> Violation:
    """A violation at a write cell; its position is the first token that this step writes there."""
    who, group, column = int(cells.who[i]), int(cells.group[i]), int(cells.column[i])
    size = next((g.block_size for g in s.groups if g.index == group), 0)
    return Violation(
        name,
        expected,
        found,
        request=s.ids[who],
        group=group,
        block=int(cells.block[i]),
        position=max(int(s.start[who]), column * size),
    )


def _marked(s: Schedule, names: list[str]) -> Mask:
    """Per shadow row whether it belongs to one of ``names``."""
    marked = np.zeros(len(s.shadow.end), np.bool_)
    rows = s.shadow.rows(names)
    marked[rows[rows >= 0]] = True
    return marked


def _known(s: Schedule, cells: Cells) -> Mask:
    """Cells whose ``who`` is a request of the record."""
    return _inside(cells.who, len(s.ids))


def _inside(values: Ints, size: int) -> Mask:
    return (values >= 0) & (values < size)


def _name(s: Schedule, who: int) -> str | None:
    return s.ids[who] if 0 <= who < len(s.ids) else None


def _largest_pool(s: Schedule) -> int:
    return max((group.num_blocks for group in s.groups), default=0)


def _block_in_words(block: int) -> str:
    return "block 0 (null)" if block == NULL_BLOCK else f"block {block}"
