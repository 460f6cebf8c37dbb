"""Whether a record is plainly in order, so that no rule needs to look. Sound, not complete: False only means "look".

The property tests hold this to its word: whenever a function here says True, every rule over the record is silent.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from kvproof.trace.records import CONTEXT, NULL_BLOCK, PAD_SLOT, Ints, Plan, Schedule, Verification


def schedule_in_order(s: Schedule) -> bool:
    """Whether no rule over ``s`` can fire."""
    count = len(s.ids)
    if s.total != s.tokens.sum() or (s.budget is not None and s.total > s.budget) or len(s.declared) != count:
        return False
    if s.redirected or len(s.zero) or len(s.copies) or not s.finished.isdisjoint(s.ids):
        return False
    if count == 0:
        return not len(s.appended)
    bad = (s.start > s.previous_end) & (s.previous_end >= 0)
    bad |= s.drafts >= s.tokens
    # Beyond CONTEXT there are no write cells that could be looked at.
    bad |= (s.tokens <= 0) | (s.start < 0) | (s.rows < 0) | (s.end >= CONTEXT)
    if bad.any():
        return False
    if s.group_counts and any(groups != len(s.groups) for _, groups in s.group_counts):
        return False
    if (s.references is not None and s.references.min(initial=1) < 1) or (
        s.held is not None and s.held.min(initial=1) < 1
    ):
        return False
    write, appended = s.write, s.appended
    for group in s.groups:
        uses = s.shadow.uses[group.index]
        if group.slotted:
            blocks = write.block if len(s.groups) == 1 else write.block[write.group == group.index]
            wrong = (blocks <= NULL_BLOCK) | (blocks >= len(uses))
            wrong |= uses.take(blocks, mode="clip") > 1
            if wrong.any():
                return False
        if len(appended):
            fresh = appended.block if len(s.groups) == 1 else appended.block[appended.group == group.index]
            if len(fresh):
                if fresh.min() < 0 or fresh.max() >= len(uses):
                    return False
                held = fresh[fresh != NULL_BLOCK]
                if len(held) and uses[held].max() > 1:
                    return False
    return True


def plan_in_order(p: Plan) -> bool:
    """Whether no rule over ``p`` can fire."""
    count, total = p.count, p.num_tokens
    if count != len(p.declared_ids) or p.parallel.dcp_size != 1 or p.parallel.pcp_size != 1 or p.redirected:
        return False
    if count == 0 or len(set(p.ids)) != count:
        return False
    if total == count and not p.whole:
        verdict = _decode_in_order(p)
        if verdict is not None:
            return verdict
    if not p.sound or p.positions is None or p.tokens.min() <= 0:
        return False
    query_start = p.query_start[: count + 1]
    if query_start[0] != 0 or not np.array_equal(np.diff(query_start), p.tokens) or total != p.tokens.sum():
        return False
    start = p.start
    first = p.positions[query_start[:-1]]
    if p.slack.any():
        if ((first > start) | (first < start - p.slack)).any():
            return False
        start = first
    if total == count:
        if not np.array_equal(p.positions[:total], start):
            return False
    elif not np.array_equal(p.positions[:total], (start - query_start[:-1])[p.owner] + np.arange(total)):
        return False
    if p.seq_lens is not None:
        if len(p.seq_lens) < count or not np.array_equal(p.seq_lens[:count], start + p.tokens):
            return False
        if len(p.seq_lens) > count and p.seq_lens[count:].any():
            return False
    return all(
        _slots_in_order(p, index) and _table_in_order(p, index, start) for index in range(len(p.groups))
    )


def _decode_in_order(p: Plan) -> bool | None:
    """The common step, one token each: a handful of comparisons, one reduction. None: not such a step."""
    count, start = p.count, p.start
    if p.fresh is None or p.fresh.any() or p.slack.any() or p.positions is None or p.seq_lens is None:
        return None
    if len(p.seq_lens) != count or len(p.query_start) != count + 1 or len(p.positions) < count:
        return None
    one = np.arange(count + 1)
    bad = p.positions[:count] != start
    bad |= p.seq_lens != start + 1
    bad |= p.tokens != 1
    bad |= p.query_start[:-1] != one[:-1]
    bad |= (start < 0) | (p.rows < 0)
    if p.query_start[-1] != count or bad.any():
        return False
    for index, group in enumerate(p.groups):
        slots, table, shadow = p.slots[index], p.tables[index], p.shadow
        if slots is None or table is None or not group.slotted or len(slots) != count or len(table) != count:
            return None
        column = start // group.block_size
        if column.max() >= min(table.shape[1], shadow.tables[index].shape[1]):
            return False
        block = shadow.tables[index][p.rows, column]
        bad |= shadow.counts[index][p.rows] <= column
        bad |= slots != block.astype(np.int64) * group.block_size + (start - column * group.block_size)
        bad |= table[one[:-1], column] != block
        bad |= (block <= NULL_BLOCK) | (block >= group.num_blocks)
        bad |= shadow.uses[index].take(block, mode="clip") > 1
    return not bad.any()


def _slots_in_order(p: Plan, index: int) -> bool:
    slots, group = p.slots[index], p.groups[index]
    if slots is None or not group.slotted:
        return True
    expected = p.expected_slots(group)
    if expected is None or len(slots) < p.num_tokens or not np.array_equal(slots[: p.num_tokens], expected):
        return False
    if expected.min() < group.block_size or expected.max() >= group.num_blocks * group.block_size:
        return False
    if len(slots) > p.num_tokens and (slots[p.num_tokens :] != PAD_SLOT).any():
        return False
    # A block in one live row only is written by one request, whose contiguous positions give distinct slots.
    return bool(p.shadow.uses[index][expected // group.block_size].max() <= 1)


def _table_in_order(p: Plan, index: int, start: Ints) -> bool:
    table, group = p.tables[index], p.groups[index]
    if table is None:
        return True
    if len(table) < p.count:
        return False
    if not group.slotted:
        used = table[: p.count, : int(p.shadow.counts[index][p.rows].max(initial=0))]
        return not used.size or bool(used.min() >= 0 and used.max() < group.num_blocks)
    last = (start + p.tokens - 1) // group.block_size
    if last.max() >= min(table.shape[1], p.shadow.tables[index].shape[1]):
        return False
    if (last >= p.shadow.counts[index][p.rows]).any():
        return False
    if p.whole:
        chosen = np.arange(p.count)
    else:
        planned = table[np.arange(p.count), last]
        if not np.array_equal(planned, p.shadow.tables[index][p.rows, last]):
            return False
        if planned.min() <= NULL_BLOCK or planned.max() >= group.num_blocks:
            return False
        chosen = np.flatnonzero(p.fresh) if p.fresh is not None else np.empty(0, np.int64)
    if not len(chosen):
        return True
    columns = int(last[chosen].max()) + 1
    grid = np.arange(columns)
    live = (grid <= last[chosen, None]) & (grid >= group.first_live_column(start[chosen])[:, None])
    planned = np.where(live, table[chosen, :columns], 1)
    declared = np.where(live, p.shadow.tables[index][p.rows[chosen], :columns], 1)
    return np.array_equal(planned, declared) and bool(
        planned.min() > NULL_BLOCK and planned.max() < max(group.num_blocks, 2)
    )


def result_in_order(
    schedule: Schedule,
    partial: NDArray[np.bool_],
    reported: list[str],
    index: Mapping[str, int],
    counts: Ints | None,
    sampled_per_step: int,
) -> bool:
    """Whether no rule over the Result record of this step can fire (its order aside)."""
    rows = len(reported)
    if rows != len(schedule.ids) or len(index) < rows:
        return False
    if list(map(index.get, reported)) != list(range(rows)):
        return False
    drafts = schedule.drafts
    if reported != schedule.ids:
        order = list(map(schedule.index.get, reported))
        if None in order or len(set(order)) != rows:
            return False
        where = np.array(order)
        drafts, partial = drafts[where], partial[where]
    if counts is None:
        return True
    return len(counts) == rows and not (counts > drafts + sampled_per_step).any() and not counts[partial].any()


def verification_in_order(v: Verification) -> bool:
    """Whether no rule over ``v`` can fire."""
    count = v.count
    if v.num_rejected is None or min(len(v.indices), len(v.num_sampled), len(v.num_rejected), len(v.drafts)) < count:
        return False
    sampled, rejected = v.num_sampled[:count], v.num_rejected[:count]
    if not np.array_equal(v.indices[:count], v.expected_indices) or (v.expected_indices < 0).any():
        return False
    if (v.expected_indices >= v.states).any() or (sampled < 0).any() or (rejected < 0).any():
        return False
    plain = ~v.partial & (sampled > 0)
    drafts = v.drafts[:count]
    room = np.where(v.partial, 0, drafts)
    return not ((sampled + rejected != drafts + 1) & plain).any() and not (
        (sampled > drafts + 1) | (rejected > room) | (sampled > v.width) | (v.partial & (sampled > 0))
    ).any()
