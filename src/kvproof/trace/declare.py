"""Turns a SchedulerOutput into a Schedule record and keeps the shadow in step with it. Pure: reads attributes only.

Scheduler and worker each run this on their own copy, so the two shadows must agree; the digest proves that they do.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from kvproof.trace.records import CHUNKED, SLIDING, Cells, Group, Ints, Schedule
from kvproof.trace.shadow import Shadow
from kvproof.trace.steady import Beat, Steady

_EMPTY = np.empty(0, np.int64)
_NO_COPIES = np.empty((0, 2), np.int64)
_NO_CELLS = Cells(_EMPTY, _EMPTY, _EMPTY, _EMPTY)
_NONE: frozenset[str] = frozenset()


def as_blocks(values: Any) -> Ints:
    """Block ids as int64; whatever is not an integer becomes −1, which every range check reports."""
    try:
        return np.asarray(values, np.int64).reshape(-1)
    except (TypeError, ValueError, OverflowError):
        return np.array([v if isinstance(v, int) and abs(v) < 2**62 else -1 for v in values], np.int64)


class Declarer:
    """Reads one scheduler's outputs in order. ``unknown`` are cached ids of the last step that were never declared."""

    def __init__(
        self,
        groups: Sequence[Group],
        budget: int | None,
        referenced: Callable[[int, int], bool] | None = None,
    ):
        self.groups = tuple(groups)
        self.budget = budget
        self.shadow = Shadow([group.num_blocks for group in groups])
        self.unknown: list[str] = []
        self.replays = False
        """Whether a request replays the tail of its hit (bounded sliding-window replay): its writes are masked below
        the boundary, which the declaration does not show, so rules on written blocks stay silent from then on."""
        self.slack: Ints = _EMPTY
        """Drafts of each scheduled request's step before this one, in the order of the record's ids."""
        self.steady = Steady(self.groups, self.shadow, budget, referenced)
        self._stable: list[str] | None = None
        self._windowed = [g for g in groups if g.kind in (SLIDING, CHUNKED)]

    def beat(self, output: Any, step: int) -> Beat | None:
        """Take one SchedulerOutput as a steady step; None, with nothing taken, when it is not one."""
        if not self.steady.running:
            return None
        beat = self.steady.advance(output, step)
        if beat is None:
            self.steady.stop()
        return beat

    def judged_in_order(self, schedule: Schedule) -> None:
        """The step just read holds no surprise: from its second like a run of steady steps may begin."""
        if schedule.ids == self._stable:
            self.steady.start(schedule)
        self._stable = schedule.ids if schedule.total == len(schedule.ids) else None

    def read(self, output: Any, step: int) -> Schedule:
        """Take one SchedulerOutput into the shadow and return its record."""
        self.steady.stop()
        shadow = self.shadow
        scheduled = output.num_scheduled_tokens
        ids = list(scheduled)
        count = len(ids)
        tokens = np.fromiter(scheduled.values(), np.int64, count)
        cached = output.scheduled_cached_reqs
        resumed = cached.resumed_req_ids or _NONE
        finished = output.finished_req_ids or _NONE
        preempted = getattr(output, "preempted_req_ids", None) or _NONE
        for name in chain(finished, preempted):
            shadow.forget(name)

        self.unknown = []
        deltas: list[tuple[str, int, int, int, Ints]] = []
        group_counts: list[tuple[str, int]] = []
        new_names: list[str] = []
        new_starts: list[int] = []
        for new in output.scheduled_new_reqs:
            new_names.append(new.req_id)
            new_starts.append(new.num_computed_tokens)
            self.replays |= bool(getattr(new, "replay_start", 0))
            row = shadow.add(new.req_id)
            tokens_known = getattr(new, "prefill_token_ids", None) or new.prompt_token_ids
            shadow.target[row] = len(tokens_known) if tokens_known is not None else -1
            self._append(new.req_id, row, new.block_ids, deltas, group_counts)
        names = cached.req_ids
        appended = [i for i, blocks in enumerate(cached.new_block_ids) if blocks is not None]
        for i in appended:
            name = names[i]
            if name in resumed:
                row = shadow.add(name)
                shadow.target[row] = len(cached.all_token_ids.get(name, ())) or -1
            else:
                row = shadow.row_of.get(name, -1)
                if row < 0:
                    self.unknown.append(name)
                    continue
            self._append(name, row, cached.new_block_ids[i], deltas, group_counts)

        declared = [*names, *new_names]
        rows = shadow.rows(ids)
        if not self.unknown and (rows < 0).any():
            self.unknown = [name for name in names if name not in shadow.row_of]
        if declared == ids:
            start = np.fromiter(chain(cached.num_computed_tokens, new_starts), np.int64, count)
        else:
            starts = dict(zip(declared, chain(cached.num_computed_tokens, new_starts), strict=False))
            start = np.fromiter((starts.get(name, -1) for name in ids), np.int64, count)
        known = rows >= 0
        previous = np.where(known, shadow.end[rows], -1)
        drafts = self._drafts(output, ids)
        self.slack = np.where(known, shadow.slack[rows], 0)
        if known.all():
            shadow.end[rows] = start + tokens
            shadow.slack[rows] = drafts
        else:
            shadow.end[rows[known]] = (start + tokens)[known]
            shadow.slack[rows[known]] = drafts[known]
        if count:
            for group in self._windowed:
                live = known & (start >= 0)
                shadow.drop_before(group.index, rows[live], group.first_live_column(start[live]))
        zero = output.new_block_ids_to_zero
        copies = output.kv_cache_block_copies
        return Schedule(
            step=step,
            ids=ids,
            rows=rows,
            tokens=tokens,
            total=int(output.total_num_scheduled_tokens),
            budget=self.budget,
            start=start,
            previous_end=previous,
            drafts=drafts,
            declared=declared,
            new=frozenset(new_names) if new_names else _NONE,
            resumed=frozenset(resumed) if resumed else _NONE,
            finished=frozenset(finished) if finished else _NONE,
            preempted=frozenset(preempted) if preempted else _NONE,
            group_counts=group_counts,
            appended=self._cells(deltas, ids),
            groups=self.groups,
            shadow=shadow,
            zero=as_blocks(zero) if zero else _EMPTY,
            copies=_copies(copies) if copies else _NO_COPIES,
            redirected=self.replays,
        )

    def _append(
        self,
        name: str,
        row: int,
        blocks: Sequence[Sequence[int]],
        deltas: list[tuple[str, int, int, int, Ints]],
        group_counts: list[tuple[str, int]],
    ) -> None:
        group_counts.append((name, len(blocks)))
        for group, ids in enumerate(blocks[: len(self.groups)]):
            if ids:
                array = as_blocks(ids)
                deltas.append((name, row, group, self.shadow.append(group, row, array), array))

    @staticmethod
    def _drafts(output: Any, ids: list[str]) -> Ints:
        drafts = output.scheduled_spec_decode_tokens
        if not drafts:
            return np.zeros(len(ids), np.int64)
        return np.fromiter((len(drafts.get(name, ())) for name in ids), np.int64, len(ids))

    @staticmethod
    def _cells(deltas: list[tuple[str, int, int, int, Ints]], ids: list[str]) -> Cells:
        if not deltas:
            return _NO_CELLS
        index = {name: i for i, name in enumerate(ids)}
        sizes = [len(blocks) for *_, blocks in deltas]
        return Cells(
            np.repeat([index.get(name, -1) for name, *_ in deltas], sizes),
            np.repeat([group for _, _, group, _, _ in deltas], sizes),
            np.concatenate([np.arange(delta[3], delta[3] + size) for delta, size in zip(deltas, sizes, strict=True)]),
            np.concatenate([blocks for *_, blocks in deltas]),
        )


def _copies(copies: Sequence[Any]) -> Ints:
    """[C, 2] (from, to) of KVCacheBlockCopy objects or pairs."""
    pairs = [
        (getattr(c, "src_block_id", None), getattr(c, "dst_block_id", None))
        if hasattr(c, "src_block_id")
        else tuple(c)[:2]
        for c in copies
    ]
    return np.stack([as_blocks([pair[0] for pair in pairs]), as_blocks([pair[1] for pair in pairs])], axis=1)


def digest(schedule: Schedule) -> int:
    """CRC-32 of the step's ids, token counts, starts and block deltas."""
    value = zlib.crc32("\n".join(schedule.ids).encode())
    value = zlib.crc32(schedule.tokens.tobytes(), value)
    value = zlib.crc32(schedule.start.tobytes(), value)
    if len(schedule.appended):
        cells = schedule.appended
        value = zlib.crc32(np.stack([cells.who, cells.group, cells.column, cells.block]).tobytes(), value)
    return value
