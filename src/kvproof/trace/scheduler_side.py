"""The guard beside the scheduler: what it binds, what its pool hands out, what its connector says, what comes back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvproof.trace import native
from kvproof.trace.declare import Declarer, as_blocks, digest
from kvproof.trace.fast import result_in_order, schedule_in_order
from kvproof.trace.guard import ATTRIBUTE, Guard, standing_aside
from kvproof.trace.options import Options
from kvproof.trace.pool import PoolBook
from kvproof.trace.records import (
    LoadTarget,
    Match,
    Metadata,
    PoolChange,
    PoolState,
    Result,
    Schedule,
    Transfers,
)
from kvproof.trace.rules.catalogue import RULES
from kvproof.trace.steady import Beat, counting, digest_of_beat

RECORDS = (Schedule, Match, LoadTarget, Metadata, Transfers, Result, PoolChange, PoolState)
SIDE = tuple(name for name, rule in RULES.items() if rule.record in RECORDS)
"""Rules judged on this side; Metadata is judged on both."""

LOST = 64
"""Results that never came back of which the guard keeps the steps, should they come after all."""

_NONE: frozenset[str] = frozenset()


@dataclass(slots=True)
class Awaited:
    """A scheduled step whose result has not come back; ``schedule`` is None for a steady one.

    ``overtaken``: a later step's result came first. It is said once; its own result may still come.
    """

    step: int
    ids: list[str]
    schedule: Schedule | None = None
    partial: NDArray[np.bool_] | None = None
    overtaken: bool = False

    def scheduled(self) -> dict[str, tuple[int, int, bool]]:
        """id -> (tokens, drafts, ends inside its prompt)."""
        if self.schedule is None or self.partial is None:
            return dict.fromkeys(self.ids, (1, 0, False))
        rows = zip(self.schedule.tokens.tolist(), self.schedule.drafts.tolist(), self.partial.tolist(), strict=True)
        return dict(zip(self.ids, rows, strict=True))

    def as_before(self, reported: list[str], index: Any, sampled: Any, last: tuple[list[Any], ...]) -> bool:
        """Whether a steady step's result has the rows of ``last``, which was judged: no id is looked up."""
        return (
            self.schedule is None
            and reported == last[0]
            and list(index) == last[1]
            and list(index.values()) == last[2]
            and len(sampled) == len(reported) == len(self.ids)
            and max(map(len, sampled)) <= 1
        )

    def as_expected(self, reported: list[str], index: Any, sampled: Any, counts: Any, per_step: int) -> bool:
        """Whether no rule over the result can fire, its order aside."""
        if self.schedule is not None and self.partial is not None:
            return result_in_order(self.schedule, self.partial, reported, index, counts, per_step)
        count = len(self.ids)
        return (
            len(sampled) == len(reported) == count
            and (reported == self.ids or set(reported) == set(self.ids))
            and list(map(index.get, reported)) == counting(count)
            and max(map(len, sampled)) <= per_step
        )


class SchedulerGuard(Guard):
    """Wraps one scheduler, its block pools and its connector, on these objects only."""

    def __init__(self, scheduler: Any, options: Options):
        super().__init__(options, "scheduler", native.engine_id(scheduler.vllm_config), 0)
        self.scheduler = scheduler
        self._sequence = 0
        self._awaited: deque[Awaited] = deque()
        self._last_result: tuple[list[Any], ...] = ([], [], [])
        """req_ids and req_id_to_index of the last result, when it was a steady step's and in order."""
        self._loading: dict[str, list[int]] = {}
        self._sending: dict[str, list[int]] = {}
        self._finished_sending: set[str] = set()
        self._finished_recving: set[str] = set()
        self._matches: dict[str, tuple[int, bool]] = {}
        self.freeing: str | None = None
        self.allocating: str | None = None
        self.in_connector = False

        managers = native.managers_of(scheduler)
        pools = [m.block_pool for m in managers]
        self.managers = managers
        self.groups = native.groups_of(
            scheduler.kv_cache_config, [int(m.block_size) for m in managers] or None, pools or None
        )
        self.declarer = Declarer(self.groups, native.budget_of(scheduler), self._referenced if managers else None)
        self.books = [PoolBook(pool, self) for pool in dict.fromkeys(pools)]
        book_of = {id(book.pool): book for book in self.books}
        self._book_of_group = [book_of[id(pool)] for pool in pools]
        if not managers:
            self._skip(("bind_block_not_referenced", "used_after_release"), "the block managers cannot be seen")
            self._skip([n for n, r in RULES.items() if r.family == "lifecycle"], "the block managers cannot be seen")
        connector = getattr(scheduler, "connector", None)
        if connector is None:
            self._skip(
                [n for n, r in RULES.items() if r.family == "connector" and n != "connector_metadata_mismatch"],
                "no KV connector",
            )
        if not any(getattr(book.pool, "enable_kv_cache_events", False) for book in self.books):
            self._skip(["events_disagree_with_pool"], "KV cache events are off")
        self._attach()
        config = scheduler.vllm_config
        self.start(
            SIDE,
            self.groups,
            native.parallel_of(config),
            scheduler=type(scheduler).__name__,
            connector=None if connector is None else type(connector).__name__,
            async_scheduling=bool(getattr(config.scheduler_config, "async_scheduling", False)),
        )

    def _skip(self, names: Sequence[str], reason: str) -> None:
        for name in names:
            self.skipped.setdefault(name, reason)

    def _attach(self) -> None:
        scheduler = self.scheduler
        self.wrap(scheduler, "schedule", before=self._before_schedule, after=self._after_schedule)
        self.wrap(scheduler, "update_from_output", before=self._before_update, after=self._after_update)
        self.wrap(scheduler, "reset_prefix_cache", after=self._after_reset)
        self.wrap(scheduler, "shutdown", before=self.last_words)
        manager = getattr(scheduler, "kv_cache_manager", None)
        if manager is not None:
            self._name_request(manager, "allocate_slots", "allocating")
            self._name_request(manager, "free", "freeing")
            self._name_request(manager, "pop_blocks_for_free", "freeing")
        connector = getattr(scheduler, "connector", None)
        if connector is not None:
            self._wrap_connector(connector)

    def _name_request(self, owner: Any, name: str, attribute: str) -> None:
        """While ``owner.name(request, …)`` runs, ``self.<attribute>`` is that request's id."""
        call = getattr(owner, name, None)
        if not callable(call):
            return

        def named(request: Any, *args: Any, **kwargs: Any) -> Any:
            outer = getattr(self, attribute)
            setattr(self, attribute, getattr(request, "request_id", None))
            try:
                return call(request, *args, **kwargs)
            finally:
                setattr(self, attribute, outer)

        setattr(owner, name, named)

    # -- schedule ---------------------------------------------------------------------------------------------------

    def _before_schedule(self, *_: Any, **__: Any) -> None:
        self.step = self._sequence + 1

    @standing_aside
    def _after_schedule(self, output: Any, *_: Any, **__: Any) -> None:
        self._sequence += 1
        self.step = self._sequence
        whole = self.due()
        connector = getattr(self.scheduler, "connector", None)
        metadata = getattr(output, "kv_connector_metadata", None)
        metadata_name = None if metadata is None else type(metadata).__name__
        beat = self.declarer.beat(output, self.step)
        if beat is not None and not whole:
            sent = digest_of_beat(beat)
            setattr(output, ATTRIBUTE, (self.engine, self.step, sent, metadata_name, self._take_allocated()))
            self._awaited.append(Awaited(self.step, beat.ids))
            self.judge.fast["Schedule"] += 1
            if self.sink.wants("kv.bind"):
                self.later("kv.bind", self._beat_fields, beat, sent)
        else:
            self._read(output, beat, whole, metadata_name)
        if connector is not None or metadata is not None:
            self.examine(Metadata(connector is not None, metadata_name))

    def _read(self, output: Any, beat: Beat | None, whole: bool, metadata_name: str | None) -> None:
        """The general way, for everything that is not a steady step, and for the full check."""
        assert self.step is not None
        schedule = self.declarer.read(output, self.step) if beat is None else self.declarer.steady.record(beat)
        if self.books:
            self._count_references(schedule, whole)
        sent = digest(schedule)
        setattr(output, ATTRIBUTE, (self.engine, self.step, sent, metadata_name, self._take_allocated()))
        self._awaited.append(Awaited(self.step, schedule.ids, schedule, self._partial(schedule)))
        if self.sink.wants("kv.bind"):
            self.sink.emit(self._bind_event(schedule, output, sent))
        if not whole and schedule_in_order(schedule):
            self.judge.pass_fast(schedule)
            self.declarer.judged_in_order(schedule)
        elif beat is None:
            self.examine(schedule)
        else:
            found = self.judge.judge(schedule)
            if found:
                self.declarer.steady.stop()
            self.report(found)

    def _beat_fields(self, beat: Beat, sent: int) -> dict[str, Any]:
        count = len(beat.ids)
        return {
            "requests": beat.ids, "tokens": [1] * count, "start": beat.starts, "total": count,
            "budget": self.declarer.budget, "new": (), "resumed": (), "finished": (), "preempted": (),
            "blocks": beat.grown, "digest": sent,
        }  # fmt: skip

    def request_ids(self) -> list[str]:
        """Every id the scheduler or the guard's memory knows."""
        return [*self.scheduler.requests, *self.declarer.shadow.row_of]

    def _referenced(self, group: int, block: int) -> bool:
        """Whether both the books and the pool say that somebody holds a block."""
        book = self._book_of_group[group]
        return bool(book.references[block] > 0 and book.pool.blocks[block].ref_cnt > 0)

    def _take_allocated(self) -> list[tuple[int, list[int]]]:
        """Content mode: [(group, block ids)] handed out since the last step; they hold nothing known until written."""
        if not self.options.content:
            return []
        taken = {id(book): book.take_allocated() for book in self.books}
        return [
            (group.index, taken[id(book)])
            for group, book in zip(self.groups, self._book_of_group, strict=True)
            if taken[id(book)]
        ]

    def _count_references(self, schedule: Schedule, whole: bool) -> None:
        """The books' counts for every cell that is written; the pool's own where blocks are new, or on a full check."""
        cells = schedule.write
        held = np.ones(len(cells), np.int64)
        asked = whole or len(schedule.appended) > 0
        references = np.ones(len(cells), np.int64) if asked else None
        for group, book in zip(self.groups, self._book_of_group, strict=True):
            if not group.slotted:
                continue
            mine = cells.group == group.index if len(self.groups) > 1 else slice(None)
            blocks = cells.block[mine]
            inside = (blocks > 0) & (blocks < group.num_blocks)
            safe = np.where(inside, blocks, 0)
            held[mine] = np.where(inside, book.references[safe], 1)
            if references is not None:
                native_blocks = book.pool.blocks
                counts = np.fromiter((native_blocks[b].ref_cnt for b in safe.tolist()), np.int64, len(safe))
                references[mine] = np.where(inside, counts, 1)
        schedule.held, schedule.references = held, references

    @staticmethod
    def _partial(schedule: Schedule) -> Any:
        """Which requests end this step inside their prompt."""
        known = (schedule.rows >= 0) & (schedule.start >= 0)
        return known & (schedule.end < schedule.shadow.target[schedule.rows])

    def _bind_event(self, schedule: Schedule, output: Any, sent: int) -> dict[str, Any]:
        event = self.event(
            "kv.bind",
            requests=schedule.ids,
            tokens=schedule.tokens,
            start=schedule.start,
            total=schedule.total,
            budget=schedule.budget,
            new=schedule.new,
            resumed=schedule.resumed,
            finished=schedule.finished,
            preempted=schedule.preempted,
            blocks=_by_row(schedule),
            digest=sent,
        )
        if schedule.drafts.any():
            event["drafts"] = schedule.drafts
        if len(schedule.zero):
            event["zero"] = schedule.zero
        if len(schedule.copies):
            event["copies"] = schedule.copies
        if self.options.redact == "none" and schedule.new:
            event["prompt_token_ids"] = {n.req_id: list(n.prompt_token_ids or ()) for n in output.scheduled_new_reqs}
        return event

    # -- results ----------------------------------------------------------------------------------------------------

    @standing_aside
    def _before_update(self, output: Any, result: Any, *_: Any, **__: Any) -> None:
        mark = getattr(output, ATTRIBUTE, None)
        self.step = mark[1] if mark else None
        oldest = next((a.step for a in self._awaited if not a.overtaken), None)
        answered = next((a for a in self._awaited if a.step == self.step), None)
        self._note_transfers(getattr(result, "kv_connector_output", None))
        if answered is None:
            return
        self._awaited.remove(answered)
        if oldest != self.step:
            for earlier in self._awaited:
                earlier.overtaken |= earlier.step < answered.step
            while len(self._awaited) > LOST and self._awaited[0].overtaken:
                self._awaited.popleft()
        reported = result.req_ids
        sampled = result.sampled_token_ids or ()
        counts = None
        if getattr(result, "pooler_output", None) is None and (sampled or not answered.ids):
            counts = np.fromiter(map(len, sampled), np.int64, len(sampled)) if answered.schedule else sampled
        if self.sink.wants("boundary") and answered.ids:
            self.later("boundary", self._result_fields, reported, sampled, counts is None)
        per_step = int(getattr(self.scheduler, "num_sampled_tokens_per_step", 1) or 0)
        index = result.req_id_to_index
        if oldest == self.step and per_step == 1 and answered.as_before(reported, index, sampled, self._last_result):
            self.judge.fast["Result"] += 1
            return
        self._last_result = ([], [], [])
        if oldest == self.step and answered.as_expected(reported, index, sampled, counts, per_step):
            self.judge.fast["Result"] += 1
            if answered.schedule is None:
                self._last_result = (reported, list(index), list(index.values()))
            return
        requests = self.scheduler.requests
        self.examine(
            Result(
                step=answered.step,
                awaited=oldest,
                scheduled=answered.scheduled(),
                reported=list(reported),
                index=index,
                counts=None if counts is None else np.fromiter(map(len, sampled), np.int64, len(sampled)),
                known=frozenset(n for n in answered.ids if n in requests and not requests[n].is_finished()),
                sampled_per_step=per_step,
            )
        )

    def _result_fields(self, reported: list[str], sampled: Any, pooled: bool) -> dict[str, Any]:
        fields: dict[str, Any] = {"kind": "result", "requests": reported}
        if not pooled:
            fields["sampled"] = list(map(len, sampled))
            if self.options.redact == "none":
                fields["token_ids"] = sampled
        return fields

    @standing_aside
    def _after_update(self, _: Any, output: Any, result: Any, *__: Any, **___: Any) -> None:
        report = getattr(result, "kv_connector_output", None)
        if report is not None:
            self._judge_transfers(report)
        requests = self.scheduler.requests
        if self.managers and (not requests or self._steps_seen % self.options.full_check_every == 0):
            self._judge_pools(idle=not requests and not self._busy())
        self.step = None

    def _busy(self) -> bool:
        waiting = any(not a.overtaken for a in self._awaited)
        return bool(waiting or self._loading or self._sending or getattr(self.scheduler, "deferred_frees", None))

    def _judge_pools(self, *, idle: bool) -> None:
        requests = self.scheduler.requests
        for book in self.books:
            leftover: dict[str, int] = {}
            for manager in self.managers:
                if manager.block_pool is book.pool:
                    for name, blocks in manager.req_to_blocks.items():
                        held = sum(not block.is_null for block in blocks)
                        if held and name not in requests:
                            leftover[name] = leftover.get(name, 0) + held
            by_events, in_pool, missing = book.cached()
            state = PoolState(
                idle=idle,
                free=int(book.pool.get_num_free_blocks()),
                total=int(book.pool.num_gpu_blocks),
                kept=book.kept(),
                leftover=leftover,
                cached_by_events=by_events,
                cached_in_pool=in_pool,
                missing_in_pool=missing,
            )
            self.examine(state)

    @standing_aside
    def _after_reset(self, result: Any, *_: Any, **__: Any) -> None:
        self.emit("boundary", kind="reset", requests=sorted(self.scheduler.requests))

    # -- connector --------------------------------------------------------------------------------------------------

    def _wrap_connector(self, connector: Any) -> None:
        for name, after in (
            ("get_num_new_matched_tokens", self._matched),
            ("update_state_after_alloc", self._load_target),
            ("request_finished", self._connector_finished),
            ("request_finished_all_groups", self._connector_finished),
            ("build_connector_meta", None),
            ("update_connector_output", None),
            ("has_pending_push_work", None),
        ):
            self.wrap(connector, name, after=after, inside=self._connector_call)

    @contextmanager
    def _connector_call(self, *_: Any, **__: Any) -> Iterator[None]:
        outer, self.in_connector = self.in_connector, True
        try:
            yield
        finally:
            self.in_connector = outer

    @standing_aside
    def _matched(self, answer: Any, request: Any, local: int = 0, *_: Any, **__: Any) -> None:
        matched, is_async = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, None)
        self._matches[request.request_id] = (int(local), bool(is_async))
        self.emit(
            "boundary",
            kind="match",
            request=request.request_id,
            matched=matched,
            is_async=bool(is_async),
            local=local,
            total=request.num_tokens,
        )
        self.examine(Match(request.request_id, matched, is_async, int(local), int(request.num_tokens)))

    @standing_aside
    def _load_target(self, _: Any, request: Any, blocks: Any, external: int = 0, *__: Any, **___: Any) -> None:
        name = request.request_id
        local, is_async = self._matches.pop(name, (0, False))
        if not external:
            return
        targets = [list(ids) for ids in blocks.get_block_ids()]
        if is_async:
            self._loading[name] = [b for ids in targets for b in ids if b]
            self._finished_recving.discard(name)
        self.emit(
            "boundary", kind="load_target", request=name, local=local, external=external, blocks=targets,
            is_async=is_async,
        )  # fmt: skip
        bound = [list(ids) for ids in self.scheduler.kv_cache_manager.get_block_ids(name)]
        self.examine(LoadTarget(name, targets, bound, int(external), local, self.groups))

    @standing_aside
    def _connector_finished(self, answer: Any, request: Any, blocks: Any = (), *_: Any, **__: Any) -> None:
        delayed = bool(answer[0]) if isinstance(answer, tuple) and answer else bool(answer)
        name = request.request_id
        if delayed:
            flat = [b for ids in blocks for b in ids] if blocks and not isinstance(blocks[0], int) else list(blocks)
            self._sending[name] = [b for b in flat if b]
            self._finished_sending.discard(name)
        self.emit("boundary", kind="finished", request=name, delayed=delayed)

    def _note_transfers(self, report: Any) -> None:
        """Close the books of reported transfers before the scheduler acts: it may free their blocks at once."""
        if report is None:
            self._repeated = (_NONE, _NONE)
            return
        sent = frozenset(report.finished_sending or ())
        received = frozenset(report.finished_recving or ())
        self._bound = self._bound_blocks() if getattr(report, "invalid_block_ids", None) else None
        self._repeated = (sent & self._finished_sending, received & self._finished_recving)
        self._known = frozenset(self.scheduler.requests)
        self._finished_sending |= sent
        self._finished_recving |= received
        for name in sent:
            self._sending.pop(name, None)
        for name in received:
            self._loading.pop(name, None)

    def _bound_blocks(self) -> frozenset[int] | None:
        """Every block bound to a request before the scheduler acts on a failed load, which may free them."""
        if not self.managers:
            return None
        return frozenset(b.block_id for m in self.managers for blocks in m.req_to_blocks.values() for b in blocks)

    def _judge_transfers(self, report: Any) -> None:
        sending, recving = report.finished_sending or (), report.finished_recving or ()
        failed = getattr(report, "failed_recving", None) or ()
        invalid = getattr(report, "invalid_block_ids", None) or ()
        if not (sending or recving or failed or invalid):
            return
        requests = self.scheduler.requests
        self.emit(
            "boundary", kind="transfers", finished_sending=sorted(sending), finished_recving=sorted(recving),
            failed_recving=sorted(failed), invalid_blocks=sorted(invalid),
        )  # fmt: skip
        pool_size = min((int(book.pool.num_gpu_blocks) for book in self.books), default=0)
        self.examine(
            Transfers(
                finished_sending=sorted(sending),
                finished_recving=sorted(recving),
                failed_recving=sorted(failed),
                invalid_blocks=as_blocks(sorted(invalid)),
                known=self._known,
                repeated_sending=self._repeated[0],
                repeated_recving=self._repeated[1],
                computed={
                    name: int(requests[name].num_computed_tokens)
                    for name in failed
                    if name in requests and not requests[name].is_finished()
                },
                num_blocks=pool_size,
                bound=self._bound,
            )
        )
        gone = (self._finished_sending | self._finished_recving) - frozenset(requests)
        self._finished_sending -= gone
        self._finished_recving -= gone

    def transfers_open(self, block: int) -> str | None:
        """The request with an open transfer into or out of ``block``."""
        for books in (self._loading, self._sending):
            for name, blocks in books.items():
                if block in blocks:
                    return name
        return None

    @property
    def any_transfer_open(self) -> bool:
        """Whether any transfer is open."""
        return bool(self._loading or self._sending)


def _by_row(schedule: Schedule) -> list[list[Any]]:
    """[[request index, group, first column, [block ids]]] of the step's appended cells."""
    cells = schedule.appended
    if not len(cells):
        return []
    breaks = np.flatnonzero((np.diff(cells.who) != 0) | (np.diff(cells.group) != 0)) + 1
    starts = np.concatenate([[0], breaks])
    return [
        [int(cells.who[a]), int(cells.group[a]), int(cells.column[a]), part.tolist()]
        for a, part in zip(starts.tolist(), np.split(cells.block, breaks), strict=True)
    ]
