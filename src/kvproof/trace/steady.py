"""The step that nearly every step is: the same requests as before, one more token each. Pure.

After a forward pass neither code nor data is in the cache, so every call and every object touched costs. This path
carries along from the last judged step what must hold in the next one, in lists that Python compares in one call; it
enters numpy as little as it can and touches no request id. Whatever is not exactly as expected ends the run, and the
step is read and judged the general way.

Soundness: ``Steady.start`` follows a step that was judged in order. From there every step adds one token per request,
so positions, lengths and slots rise by one; a request that enters a new block is looked at when it does; a block that
is appended must be in range, unused by the books, and referenced. Older cells are left to the full check.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from kvproof.trace.records import Cells, Group, Ints, Schedule
from kvproof.trace.shadow import Shadow


@dataclass(slots=True)
class Beat:
    """One steady step. Its lists are never written again, so that the log may keep them.

    ``starts`` and ``ends`` [R] tokens; ``slots`` [R] per group, None without token slots or on the scheduler's side.
    ``digest`` is that of the ids and their one token each. ``grown`` are (index, group, first column, [block ids])
    appended in this step; ``entered`` are (group, index, column, block) of requests whose token begins a block.
    """

    step: int
    ids: list[str]
    digest: int
    starts: list[int]
    ends: list[int]
    slots: list[list[int] | None]
    grown: list[tuple[int, int, int, list[int]]]
    entered: list[tuple[int, int, int, int]]


class Steady:
    """Follows a run of steady steps. ``referenced`` says whether somebody holds a block (None: the worker's side)."""

    def __init__(
        self,
        groups: Sequence[Group],
        shadow: Shadow,
        budget: int | None,
        referenced: Callable[[int, int], bool] | None = None,
    ):
        self._groups = groups
        self._shadow = shadow
        self._budget = budget
        self._referenced = referenced
        self.running = False
        self._ids: list[str] = []
        self._digest = 0
        self._rows: list[int] = []
        self._ends: list[int] = []
        self._beat = 0
        self._turns: list[dict[int, list[int]]] = []
        self._slots: list[list[int] | None] = []

    def start(self, schedule: Schedule) -> None:
        """Begin after a step that was judged in order, when it can be the first of a run."""
        end = schedule.end
        self.running = bool(
            len(schedule.ids)
            and not schedule.redirected
            and (schedule.tokens == 1).all()
            and not schedule.drafts.any()
            and (schedule.rows >= 0).all()
            and (end >= schedule.shadow.target[schedule.rows]).all()
        )
        if not self.running:
            return
        self._ids, self._rows, self._ends = schedule.ids, schedule.rows.tolist(), end.tolist()
        self._digest = zlib.crc32(schedule.tokens.tobytes(), zlib.crc32("\n".join(schedule.ids).encode()))
        planning = self._referenced is None
        self._beat = 0
        self._turns, self._slots = [], []
        for group in self._groups:
            turns: dict[int, list[int]] = {}
            slots = None
            if group.slotted:
                size = group.block_size
                if planning:
                    blocks = self._shadow.lookup(group.index, schedule.rows, schedule.start // size)
                    slots = (blocks * size + schedule.start % size).tolist()
                for i, left in enumerate((size - schedule.start % size).tolist()):
                    turns.setdefault(left, []).append(i)
            self._slots.append(slots)
            self._turns.append(turns)

    def stop(self) -> None:
        """End the run; the shadow catches up with the tokens that were counted here."""
        if self.running and self._beat:
            rows = np.array(self._rows)
            self._shadow.end[rows] = np.array(self._ends)
            self._shadow.slack[rows] = 0
        self.running = False

    def advance(self, output: Any, step: int) -> Beat | None:
        """The step as a beat, or None: not a steady one (the shadow is then as the last beat left it)."""
        ids = self._ids
        count = len(ids)
        scheduled = output.num_scheduled_tokens
        cached = output.scheduled_cached_reqs
        if (
            output.scheduled_new_reqs
            or output.finished_req_ids
            or getattr(output, "preempted_req_ids", None)
            or output.scheduled_spec_decode_tokens
            or output.kv_cache_block_copies
            or output.total_num_scheduled_tokens != count
            or (self._budget is not None and count > self._budget)
            or cached.resumed_req_ids
            or cached.req_ids != ids
            or list(scheduled) != ids
            or set(scheduled.values()) != {1}
        ):
            return None
        starts = self._ends
        if cached.num_computed_tokens != starts:
            return None
        appended = cached.new_block_ids
        grown: list[tuple[int, int, int, list[int]]] = []
        if appended.count(None) != len(appended):
            taken = self._take(appended)
            if taken is None:
                return None
            grown = taken
        zero = output.new_block_ids_to_zero
        if zero and not set(zero).issubset({block for *_, blocks in grown for block in blocks}):
            self._give_back(grown)
            return None
        entered = self._enter(starts)
        if entered is None:
            self._give_back(grown)
            return None
        self._beat += 1
        self._ends = [start + 1 for start in starts]
        self._slots = [None if line is None else [slot + 1 for slot in line] for line in self._slots]
        for group, i, _, block in entered:
            size = self._groups[group].block_size
            line = self._slots[group]
            if line is not None:
                line[i] = block * size
            self._turns[group].setdefault(self._beat + size, []).append(i)
        for turns in self._turns:
            turns.pop(self._beat, None)
        return Beat(step, ids, self._digest, starts, self._ends, self._slots, grown, entered)

    def _take(self, appended: Sequence[Any]) -> list[tuple[int, int, int, list[int]]] | None:
        """Append the new blocks, each in range and unused; None (and nothing appended) when one is not."""
        shadow, count = self._shadow, len(self._groups)
        found: list[tuple[int, int, int, list[int]]] = []
        for i, per_group in enumerate(appended):
            if per_group is None:
                continue
            if len(per_group) != count:
                self._give_back(found)
                return None
            for group, blocks in enumerate(per_group):
                if not blocks:
                    continue
                uses, row = shadow.uses[group], self._rows[i]
                taken: list[int] = []
                found.append((i, group, int(shadow.counts[group][row]), taken))
                for block in blocks:
                    # A block appended twice in this step is in use the second time.
                    known = isinstance(block, int) and 0 < block < len(uses) and not uses[block]
                    if not known or (self._referenced is not None and not self._referenced(group, block)):
                        self._give_back(found)
                        return None
                    shadow.append_one(group, row, block)
                    taken.append(block)
        return found

    def _give_back(self, grown: list[tuple[int, int, int, list[int]]]) -> None:
        """Take back what this step appended, so that the general way reads the output once."""
        for i, group, _, blocks in reversed(grown):
            if blocks:
                self._shadow.cut(group, self._rows[i], len(blocks))

    def _enter(self, starts: list[int]) -> list[tuple[int, int, int, int]] | None:
        """Requests that enter a block with this token, with that block; None when one has none, or not for itself."""
        shadow, entered = self._shadow, []
        for group, turns in zip(self._groups, self._turns, strict=True):
            for i in turns.get(self._beat + 1, ()):
                row, column = self._rows[i], starts[i] // group.block_size
                if column >= shadow.counts[group.index][row]:
                    return None
                block = int(shadow.tables[group.index][row, column])
                if not 0 < block < group.num_blocks or shadow.uses[group.index][block] != 1:
                    return None
                if self._referenced is not None and not self._referenced(group.index, block):
                    return None
                entered.append((group.index, i, column, block))
        return entered

    def record(self, beat: Beat) -> Schedule:
        """The general record of a beat, for the rules and for a plan that is not as expected."""
        count = len(beat.ids)
        start = np.array(beat.starts, np.int64)
        rows = np.array(self._rows, np.int64)
        self._shadow.end[rows] = start + 1
        cells = [(i, g, first + n, b) for i, g, first, blocks in beat.grown for n, b in enumerate(blocks)]
        columns: list[Ints] = list(np.array(cells, np.int64).T) if cells else [np.empty(0, np.int64)] * 4
        return Schedule(
            step=beat.step,
            ids=beat.ids,
            rows=rows,
            tokens=np.ones(count, np.int64),
            total=count,
            budget=self._budget,
            start=start,
            previous_end=start,
            drafts=np.zeros(count, np.int64),
            declared=beat.ids,
            new=frozenset(),
            resumed=frozenset(),
            finished=frozenset(),
            preempted=frozenset(),
            group_counts=[],
            appended=Cells(*columns),
            groups=tuple(self._groups),
            shadow=self._shadow,
        )


def plan_as_expected(
    beat: Beat,
    order: Sequence[int] | None,
    positions: Ints,
    seq_lens: Ints,
    query_start: Ints,
    groups: Sequence[Group],
    slots: Sequence[Ints | None],
    tables: Sequence[Ints | None],
) -> bool:
    """Whether a worker's plan is the beat's, token by token. ``order`` is the schedule index of each batch row."""
    count = len(beat.ids)
    starts, ends = beat.starts, beat.ends
    if order is not None:
        starts, ends = [starts[j] for j in order], [ends[j] for j in order]
    if (
        positions[:count].tolist() != starts
        or seq_lens.tolist() != ends
        or query_start.tolist() != counting(count + 1)
    ):  # fmt: skip
        return False
    for group in groups:
        mine, table, expected = slots[group.index], tables[group.index], beat.slots[group.index]
        if not group.slotted:
            continue
        if mine is None or table is None or expected is None or len(table) < count:
            return False
        if order is not None:
            expected = [expected[j] for j in order]
        planned = mine.tolist()
        if len(planned) > count:
            if set(planned[count:]) != {-1}:
                return False
            planned = planned[:count]
        if planned != expected:
            return False
    row_of = None if order is None or not beat.entered else {j: i for i, j in enumerate(order)}
    for index, i, column, block in beat.entered:
        table = tables[index]
        row = i if row_of is None else row_of[i]
        if table is None or column >= table.shape[1] or table[row, column] != block:
            return False
    return True


def digest_of_beat(beat: Beat) -> int:
    """The same digest that ``declare.digest`` gives the general record of this beat."""
    value = zlib.crc32(struct.pack(f"{len(beat.starts)}q", *beat.starts), beat.digest)
    if beat.grown:
        cells = [(i, g, first + n, b) for i, g, first, blocks in beat.grown for n, b in enumerate(blocks)]
        for part in zip(*cells, strict=True):
            value = zlib.crc32(struct.pack(f"{len(part)}q", *part), value)
    return value


@cache
def counting(count: int) -> list[int]:
    """0 … count − 1."""
    return list(range(count))
