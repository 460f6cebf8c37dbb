"""The guard beside a model runner: what reached the worker, what it plans to write and read, what it sampled."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvproof.trace import native
from kvproof.trace.content import ContentBook
from kvproof.trace.copies import Copies, Views, on_host
from kvproof.trace.declare import Declarer, digest
from kvproof.trace.fast import plan_in_order, verification_in_order
from kvproof.trace.guard import ATTRIBUTE, Guard, standing_aside
from kvproof.trace.options import Options
from kvproof.trace.records import (
    Content,
    Dummy,
    Group,
    Handover,
    Ints,
    Metadata,
    Parallel,
    Plan,
    Schedule,
    Verification,
)
from kvproof.trace.rules.catalogue import RULES
from kvproof.trace.steady import Beat, digest_of_beat, plan_as_expected
from kvproof.trace.writer import Runs

RECORDS = (Handover, Plan, Dummy, Verification, Metadata, Content)
SIDE = tuple(name for name, rule in RULES.items() if rule.record in RECORDS)
"""Rules judged on this side."""


@dataclass(slots=True)
class Step:
    """The step a worker is in: a steady ``beat``, or a ``schedule``. ``slack`` [R] tokens, in the schedule's order."""

    beat: Beat | None
    schedule: Schedule | None
    slack: Ints | None
    whole: bool
    ids: list[str]
    drafts: Ints | None = None
    partial: Any = None
    planned: bool = False


class WorkerGuard(Guard):
    """Wraps one model runner, on this object only."""

    def __init__(self, runner: Any, vllm_config: Any, rank: int, options: Options):
        super().__init__(options, "worker", native.engine_id(vllm_config), rank)
        self.runner = runner
        self.vllm_config = vllm_config
        self.kind = native.runner_kind(runner)
        self.groups: tuple[Group, ...] = ()
        self.parallel = native.parallel_of(vllm_config)
        self.declarer: Declarer | None = None
        self.content: ContentBook | None = None
        self.views = Views()
        self._batch: list[str] = []
        self._batch_of: list[str] = []
        self._order: list[int] = []
        self._buffers: Any = None
        self._adaptive = False
        self._previous: int | None = None
        self._untraced = False
        self._now: Step | None = None
        self._in_dummy = False
        self._pending: deque[tuple[Copies, Callable[[Copies], None], int | None]] = deque()
        config = vllm_config.scheduler_config
        self._optimistic = bool(getattr(config, "async_scheduling", False)) and (
            vllm_config.speculative_config is not None
        )
        self._say_what_is_missing()
        self._attach()

    def _say_what_is_missing(self) -> None:
        if self.kind is None:
            self.skipped.update(dict.fromkeys(SIDE, "this model runner has no boundary the guard knows"))
            return
        if self.kind == "v1":
            for name, rule in RULES.items():
                if rule.family == "speculation":
                    self.skipped[name] = "model runner V1 does not show counts of rejected drafts"
            for name in ("dummy_block_row_not_null", "dummy_persistent_slot_not_pad"):
                self.skipped[name] = "model runner V1 keeps the rows of live requests during a dummy run"
        if self.vllm_config.kv_transfer_config is None:
            self.skipped["dummy_connector_enabled"] = "no KV connector"
        if not self.options.content:
            self.skipped.update({n: "content mode is off" for n, r in RULES.items() if r.family == "content"})
        if self.parallel.dcp_size == 1:
            for name in ("dcp_local_slot_mismatch", "dcp_local_seq_len_mismatch"):
                self.skipped[name] = "decode context parallelism is off"
        else:
            self.skipped["dcp_local_seq_len_mismatch"] = "vLLM derives local lengths after the plan's boundary"
        if self.parallel.pcp_size == 1:
            self.skipped["pcp_partition_mismatch"] = "prefill context parallelism is off"
        else:
            reason = "under prefill context parallelism block tables are rows of the rank's own part"
            self.skipped.update({name: reason for name, rule in RULES.items() if rule.family == "read"})

    def _attach(self) -> None:
        runner = self.runner
        self.wrap(runner, "initialize_kv_cache", after=self._configured)
        self.wrap(runner, "execute_model", before=self._before_execute, after=self._after_execute)
        self.wrap(runner, "_dummy_run", inside=self._dummy_call)
        if self.kind == "v2":
            self.wrap(runner, "prepare_attn", after=self._after_prepare_attn)
            self.wrap(runner, "prepare_dummy_attn", after=self._after_prepare_dummy_attn)
            self.wrap(runner, "postprocess_sampled", before=self._before_postprocess)
        elif self.kind == "v1":
            self.wrap(runner, "_build_attention_metadata", before=self._before_metadata)
        self.wrap(runner, "sample_tokens", after=self._after_sample)
        self.wrap(runner, "shutdown", before=self.last_words)

    @contextmanager
    def _dummy_call(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """While a dummy run lasts there is no step."""
        outer, now, step = self._in_dummy, self._now, self.step
        self._in_dummy, self._now, self.step = True, None, None
        tokens = args[0] if args else kwargs.get("num_tokens")
        if isinstance(tokens, int):
            self.emit("boundary", kind="dummy", tokens=tokens)
        try:
            yield
        finally:
            self._in_dummy, self._now, self.step = outer, now, step

    @standing_aside
    def _configured(
        self, _: Any, kv_cache_config: Any = None, is_profiling: bool = False, *__: Any, **___: Any
    ) -> None:
        config = kv_cache_config if kv_cache_config is not None else getattr(self.runner, "kv_cache_config", None)
        if is_profiling or config is None:
            return
        self.groups = native.groups_of(config)
        self.parallel = self._ranks(self.parallel)
        if self.parallel.dcp_size > 1:
            sharded = getattr(getattr(self.runner, "block_tables", None), "dcp_sharded", None)
            if sharded is not None:
                flags = sharded.tolist()
                self.groups = tuple(g if flags[g.index] else replace(g, kind="other") for g in self.groups)
        self.groups = tuple(replace(g, width=native.row_capacity(self.runner, g.index)) for g in self.groups)
        self._adaptive = getattr(self.runner, "adaptive_verification", None) is not None
        # The declaration counts in blocks of all DCP ranks together, the plan in this rank's own.
        size = self.parallel.dcp_size
        self.declarer = Declarer([replace(g, block_size=g.block_size * size) for g in self.groups], None)
        per_step = getattr(getattr(self.runner, "model_state", None), "num_new_sampled_tokens_per_step", 1)
        if per_step != 1:
            reason = f"the model samples {per_step} tokens per step, not one"
            self.skipped.update({name: reason for name, rule in RULES.items() if rule.family == "speculation"})
        if self.options.content:
            self.content = ContentBook(self)
        transfer = self.vllm_config.kv_transfer_config
        self.start(
            SIDE,
            self.groups,
            self.parallel,
            runner=f"{type(self.runner).__name__} ({self.kind})",
            connector=None if transfer is None else getattr(transfer, "kv_connector", None),
            async_scheduling=bool(getattr(self.vllm_config.scheduler_config, "async_scheduling", False)),
        )

    def _ranks(self, parallel: Parallel) -> Parallel:
        tables = getattr(self.runner, "block_tables", None)
        rank = getattr(tables, "cp_rank", getattr(self.runner, "dcp_rank", 0))
        manager = getattr(self.runner, "pcp_manager", None)
        return replace(parallel, dcp_rank=int(rank or 0), pcp_rank=int(getattr(manager, "pcp_rank", 0) or 0))

    # -- hand-over --------------------------------------------------------------------------------------------------

    @standing_aside
    def _before_execute(self, output: Any, *_: Any, dummy_run: bool = False, **__: Any) -> None:
        if dummy_run or self._in_dummy:
            return
        self._now, self.step = None, None
        declarer = self.declarer
        mark = getattr(output, ATTRIBUTE, None)
        ids = list(output.num_scheduled_tokens)
        if declarer is None or (mark is None and all(name.startswith("_") for name in ids)):
            return
        if mark is None:
            declarer.read(output, 0)  # its block deltas count all the same
            if self._previous is not None:
                self._previous += 1  # the step exists, it only came without its trace
            elif self._untraced:
                return  # no step was ever traced: the scheduler has no guard, which is said once
            self._untraced = True
            self.examine(Handover(None, self._previous, False, None, None, ids, [], []))
            return
        engine, step, sent, metadata_sent, allocated = mark
        self.engine, self.step = engine, step
        whole = self.due()
        beat = declarer.beat(output, step) if self.content is None else None
        # In a run of steady steps the worker's rows do not change hands; the full check looks again.
        rows = native.state_rows(self.runner, ids) if beat is None or whole else None
        schedule = None
        if beat is None:
            schedule = declarer.read(output, step)
        elif whole:
            schedule = declarer.steady.record(beat)
        if self.content is not None:
            self.content.declare(output, allocated)
        found = digest(schedule) if schedule is not None else digest_of_beat(beat) if beat is not None else None
        overflow = self._overflow(schedule) if schedule is not None else []
        previous, self._previous = self._previous, step
        if (
            not whole
            and found == sent
            and not overflow
            and not declarer.unknown
            and (previous is None or step == previous + 1)
            and (rows is None or _distinct(rows))
        ):
            self.judge.fast["Handover"] += 1
        else:
            held = None if rows is None else np.array(rows, np.int64).reshape(-1)
            self.examine(Handover(step, previous, True, sent, found, ids, list(declarer.unknown), overflow, held))
        received = getattr(output, "kv_connector_metadata", None)
        configured = self.vllm_config.kv_transfer_config is not None
        if configured or received is not None:
            name = None if received is None else type(received).__name__
            self.examine(Metadata(configured, metadata_sent, name, worker=True))
            self.emit("boundary", kind="metadata", sent=metadata_sent, received=name)
        slack = None
        if schedule is not None:
            slack = declarer.slack if self._optimistic and beat is None else np.zeros(len(ids), np.int64)
        self._now = Step(beat, schedule, slack, whole, ids)

    def _overflow(self, schedule: Schedule) -> list[tuple[str, int, int, int]]:
        cells = schedule.appended
        found = []
        if len(cells):
            for group in self.groups:
                if group.width is not None:
                    mine = cells.group == group.index
                    for i in np.flatnonzero(mine & (cells.column >= group.width))[:1]:
                        who = int(cells.who[i])
                        name = schedule.ids[who] if who >= 0 else "?"
                        found.append((name, group.index, int(cells.column[mine].max()) + 1, group.width))
        return found

    @standing_aside
    def _after_execute(self, result: Any, *_: Any, dummy_run: bool = False, **__: Any) -> None:
        if dummy_run or self._in_dummy:
            return
        if result is not None:
            self._settle(result)

    # -- plans ------------------------------------------------------------------------------------------------------

    @standing_aside
    def _after_prepare_attn(self, result: Any, batch: Any, *_: Any, **__: Any) -> None:
        now = self._now
        if now is None or self._in_dummy:
            return
        tables, slots = result
        copies = Copies(self.views)
        gathered = native.gathered_plan(self.runner)
        if gathered is not None:
            # Prefill context parallelism: slots are rank-major copies of the global batch, tables are local rows.
            batch, token_of, written = gathered
            tables = None
            copies.take("token_of", token_of)
            copies.take("written", written)
        count = int(batch.num_reqs)
        copies.take("query_start", batch.query_start_loc)
        copies.take("positions", batch.positions)
        copies.take("seq_lens", batch.seq_lens)
        copies.take("input_ids", batch.input_ids if self.content else None)
        self._take_groups(copies, tables, slots, now)
        ids = list(batch.req_ids)
        prefill = getattr(batch, "prefill_len_np", None)
        redirected = bool(getattr(self.runner.block_tables, "redirect_writes_to_null_block", False))
        self._plan(now, copies, ids[:count], int(batch.num_tokens), prefill, redirected)

    @standing_aside
    def _before_metadata(
        self, num_tokens: int = 0, num_reqs: int = 0, *_: Any, slot_mappings: Any = None, **kwargs: Any
    ) -> None:
        runner = self.runner
        if self._in_dummy:
            self._judge_dummy_v1(num_tokens, slot_mappings)
            return
        now = self._now
        if now is None:
            return
        padded = int(kwargs.get("num_reqs_padded") or num_reqs)
        if now.schedule is None and self._steady_plan_v1(now, num_tokens, num_reqs, padded, slot_mappings or {}):
            return
        copies = Copies(self.views)
        for name, count in (("query_start_loc", padded + 1), ("positions", num_tokens), ("seq_lens", padded)):
            buffer = getattr(runner, name)
            copies.take(name.removesuffix("_loc"), self.views.keep(getattr(buffer, "gpu", buffer)), count)
        if self.content:
            copies.take("input_ids", getattr(runner.input_ids, "gpu", runner.input_ids), num_tokens)
        native_tables = runner.input_batch.block_table
        tables = []
        for group in self.groups:
            table = native_tables[group.index]
            factor = native.kernel_blocks(table)
            tensor = table.block_table.gpu
            tables.append(self.views.keep(tensor) if factor == 1 else tensor[:, ::factor] // factor)
        slots = [(slot_mappings or {}).get(group.index) for group in self.groups]
        self._take_groups(copies, tables, slots, now, padded)
        ids = list(runner.input_batch.req_ids[:num_reqs])
        self._plan(now, copies, ids, int(num_tokens), None, False)

    def _take_groups(self, copies: Copies, tables: Any, slots: Any, now: Step, rows: int | None = None) -> None:
        for group in self.groups:
            index = group.index
            if slots is not None and group.slotted and slots[index] is not None:
                copies.take(f"slots{index}", slots[index])
            if tables is not None and index < len(tables) and tables[index] is not None:
                table = tables[index]
                if not on_host(table):  # on a device, only the columns this step can reach are worth copying
                    reach = int(self._schedule_of(now).end.max(initial=0))
                    table = table[:, : reach // group.block_size + 1]
                copies.take(f"table{index}", table, rows)

    def _plan(
        self, now: Step, copies: Copies, ids: list[str], num_tokens: int, prefill: Any, redirected: bool
    ) -> None:
        if now.schedule is None and not copies.pending and not redirected:
            arrays = [copies.get(name) for name in ("positions", "seq_lens", "query_start")]
            slots = [copies.get(f"slots{g.index}") for g in self.groups]
            tables = [copies.get(f"table{g.index}") for g in self.groups]
            if self._steady_plan(now, ids, num_tokens, arrays, slots, tables):
                return
        schedule = self._schedule_of(now)
        get = schedule.index.get
        if ids == schedule.ids:
            order = np.arange(len(ids))
        else:
            order = np.fromiter((get(name, -1) for name in ids), np.int64, len(ids))
        known = order >= 0
        safe = np.where(known, order, 0) if len(schedule.ids) else np.empty(0, np.int64)
        rows = np.where(known, schedule.rows[safe], -1)
        tokens, start = np.where(known, schedule.tokens[safe], -1), np.where(known, schedule.start[safe], -1)
        drafts = np.where(known, schedule.drafts[safe], 0)
        fresh = np.zeros(len(ids), np.bool_)
        if len(schedule.appended):
            grown = np.zeros(len(schedule.ids) + 1, np.bool_)
            grown[schedule.appended.who] = True  # −1 marks the spare last entry
            fresh = known & grown[safe]
        now.ids, now.drafts, now.planned = ids, drafts, True
        now.partial = None
        if prefill is not None:
            now.partial = (start >= 0) & (start + tokens < np.asarray(prefill)[: len(ids)])
        shadow = schedule.shadow
        plan = Plan(
            step=schedule.step,
            ids=ids,
            declared_ids=schedule.ids,
            rows=rows,
            tokens=tokens,
            start=start,
            slack=now.slack[safe] if now.slack is not None else np.zeros(len(ids), np.int64),
            num_tokens=num_tokens,
            query_start=np.empty(0, np.int64),
            positions=None,
            seq_lens=None,
            slots=[None] * len(self.groups),
            tables=[None] * len(self.groups),
            groups=self.groups,
            shadow=shadow,
            parallel=self.parallel,
            redirected=redirected or schedule.redirected,
            whole=now.whole,
            fresh=fresh,
        )
        if copies.pending:
            # The shadow moves on before the copies arrive; keep the rows this plan is judged against.
            plan.shadow, plan.rows = shadow.excerpt(rows)
            copies.launch()
            self._pending.append((copies, lambda here: self._judge_plan(plan, here, now), self.step))
        else:
            self._judge_plan(plan, copies, now)

    def request_ids(self) -> list[str]:
        """Every id the guard's memory knows, and those of this step."""
        known = list(self.declarer.shadow.row_of) if self.declarer is not None else []
        return [*known, *(self._now.ids if self._now is not None else ())]

    def _schedule_of(self, now: Step) -> Schedule:
        """The general record of a step whose plan is not as a steady one expects."""
        if now.schedule is None:
            assert now.beat is not None
            assert self.declarer is not None
            now.schedule = self.declarer.steady.record(now.beat)
        return now.schedule

    def _steady_plan_v1(self, now: Step, num_tokens: int, num_reqs: int, padded: int, slot_mappings: Any) -> bool:
        """``_steady_plan`` on the host buffers of runner V1, as views that are made once."""
        runner = self.runner
        if self._buffers is None:
            buffers = [getattr(runner, name) for name in ("positions", "seq_lens", "query_start_loc")]
            buffers = [getattr(buffer, "gpu", buffer) for buffer in buffers]
            tables = [runner.input_batch.block_table[g.index] for g in self.groups]
            if not all(on_host(buffer) for buffer in buffers) or any(native.kernel_blocks(t) != 1 for t in tables):
                return False
            self._buffers = (buffers, [buffer.numpy() for buffer in buffers], tables)
        buffers, views, tables = self._buffers
        # A runner that has replaced a buffer since is looked at the general way.
        if runner.positions is not buffers[0] or runner.seq_lens is not buffers[1]:
            self._buffers = None
            return False
        arrays = [views[0][:num_tokens], views[1][:padded], views[2][: padded + 1]]
        slots = [slot_mappings[g.index].numpy() if g.slotted else None for g in self.groups]
        ids = runner.input_batch.req_ids[:num_reqs]
        return self._steady_plan(now, ids, num_tokens, arrays, slots, [table.block_table.np for table in tables])

    def _steady_plan(
        self, now: Step, ids: list[str], num_tokens: int, arrays: Sequence[Ints | None],
        slots: Sequence[Ints | None], tables: Sequence[Ints | None],
    ) -> bool:  # fmt: skip
        """Whether this is a beat whose plan is exactly what follows from the step before."""
        beat = now.beat
        if beat is None or num_tokens != len(beat.ids) or len(ids) != num_tokens:
            return False
        order = None
        if ids != beat.ids:
            if ids != self._batch or self._batch_of is not beat.ids:
                index = {name: i for i, name in enumerate(beat.ids)}
                if len(set(ids)) != len(ids) or not index.keys() >= set(ids):
                    return False
                self._batch, self._batch_of = ids, beat.ids
                self._order = [index[name] for name in ids]
            order = self._order
        positions, seq_lens, query_start = arrays
        if positions is None or seq_lens is None or query_start is None:
            return False
        if not plan_as_expected(beat, order, positions, seq_lens, query_start, self.groups, slots, tables):
            return False
        self.judge.fast["Plan"] += 1
        now.ids, now.planned = ids, True
        if self.sink.wants("kv.write"):
            padded = max((len(s) for s in slots if s is not None), default=num_tokens)
            self.later("kv.write", self._beat_write, beat, order, ids, padded)
            self.later("kv.read", self._beat_read, beat, order, ids, self._grown_rows(beat))
        return True

    def _beat_write(self, beat: Beat, order: list[int] | None, ids: list[str], padded: int) -> dict[str, Any]:
        count = len(ids)
        rows = range(count) if order is None else order
        return {
            "requests": ids, "tokens": [1] * count, "positions": [beat.starts[j] for j in rows],
            "num_tokens": count, "padded": padded,
            "groups": [
                {"group": group.index, "runs": [[i, slots[j], 1] for i, j in enumerate(rows)]}
                for group, slots in zip(self.groups, beat.slots, strict=True) if slots is not None
            ],
        }  # fmt: skip

    def _grown_rows(self, beat: Beat) -> list[tuple[int, int, Ints]]:
        """(index, group, whole row) of every row that got a block in this step, copied: the shadow moves on."""
        if not beat.grown or self.declarer is None:
            return []
        shadow = self.declarer.shadow
        return [(i, g, shadow.blocks(g, shadow.row_of[beat.ids[i]]).copy()) for i, g, _, _ in beat.grown]

    def _beat_read(
        self, beat: Beat, order: list[int] | None, ids: list[str], grown: list[tuple[int, int, Ints]]
    ) -> dict[str, Any]:
        where = None if order is None else {j: i for i, j in enumerate(order)}
        rows: dict[int, list[list[Any]]] = {g.index: [] for g in self.groups}
        for i, group, blocks in grown:
            rows[group].append([i if where is None else where[i], 0, blocks])
        return {
            "requests": ids, "seq_lens": beat.ends if order is None else [beat.ends[j] for j in order],
            "groups": [{"group": group, "blocks": found} for group, found in rows.items()], "whole": False,
        }  # fmt: skip

    @standing_aside
    def _judge_plan(self, plan: Plan, copies: Copies, now: Step) -> None:
        query_start = copies.get("query_start")
        plan.query_start = query_start if query_start is not None else np.zeros(plan.count + 1, np.int64)
        plan.positions, plan.seq_lens = copies.get("positions"), copies.get("seq_lens")
        token_of, written = copies.get("token_of"), copies.get("written")
        if token_of is not None and written is not None:
            plan.pcp_rows = np.where(written.astype(np.bool_), token_of, -1)
            plan.seq_lens = None
        if self._adaptive and now.drafts is not None and len(plan.query_start) > plan.count:
            # Adaptive verification trims drafts after the declaration; how many is the worker's own business.
            length = np.diff(plan.query_start[: plan.count + 1].astype(np.int64))
            plan.tokens = np.clip(length, plan.tokens - now.drafts, plan.tokens)
        for group in self.groups:
            plan.slots[group.index] = copies.get(f"slots{group.index}")
            plan.tables[group.index] = copies.get(f"table{group.index}")
        if self.sink.wants("kv.write"):
            self._plan_events(plan)
        if plan_in_order(plan):
            self.judge.pass_fast(plan)
            if self.declarer is not None and now.beat is None and now.schedule is not None and not copies.was_device:
                self.declarer.judged_in_order(now.schedule)
        else:
            found = self.judge.judge(plan)
            if found and self.declarer is not None:
                self.declarer.steady.stop()
            self.report(found)
        if self.content is not None:
            self.content.before_forward(plan, copies.get("input_ids"))

    def _plan_events(self, plan: Plan) -> None:
        starts = plan.query_start[: plan.count + 1].astype(np.int64)
        total = max(min(plan.num_tokens, len(plan.positions) if plan.positions is not None else 0), 0)
        first = np.clip(starts[:-1], 0, max(total - 1, 0))
        write = self.event(
            "kv.write",
            requests=plan.ids,
            tokens=plan.tokens,
            positions=plan.positions[first] if plan.positions is not None and total else [],
            num_tokens=plan.num_tokens,
            padded=max((len(s) for s in plan.slots if s is not None), default=plan.num_tokens),
            groups=[
                {"group": g.index, "runs": Runs(slots[: plan.num_tokens].astype(np.int64), starts)}
                for g, slots in zip(self.groups, plan.slots, strict=True)
                if slots is not None
            ],
        )
        self.sink.emit(write)
        read = self.event(
            "kv.read",
            requests=plan.ids,
            seq_lens=plan.seq_lens[: plan.count].copy() if plan.seq_lens is not None else [],
            groups=[
                {"group": g.index, "blocks": self._rows_read(plan, g, table)}
                for g, table in zip(self.groups, plan.tables, strict=True)
                if table is not None
            ],
            whole=plan.whole,
        )
        self.sink.emit(read)

    @staticmethod
    def _rows_read(plan: Plan, group: Group, table: Ints) -> list[list[Any]]:
        """Rows that grew, or all of them on a full check, as far as they are declared."""
        grown = plan.fresh if plan.fresh is not None else np.zeros(plan.count, np.bool_)
        chosen = range(plan.count) if plan.whole else np.flatnonzero(grown).tolist()
        counts = plan.shadow.counts[group.index]
        return [
            [int(i), 0, table[i, : int(counts[plan.rows[i]])].copy()]
            for i in chosen
            if 0 <= plan.rows[i] < len(counts) and i < len(table)
        ]

    # -- dummy runs -------------------------------------------------------------------------------------------------

    @standing_aside
    def _after_prepare_dummy_attn(self, result: Any, batch: Any, valid_state_slots: bool = False, *_: Any) -> None:
        tables, slots = result
        copies = Copies(self.views)
        buffer = getattr(self.runner.block_tables, "slot_mappings", None)
        for group in self.groups:
            i = group.index
            copies.take(f"slots{i}", slots[i])
            copies.take(f"table{i}", tables[i])
            copies.take(f"buffer{i}", None if buffer is None else buffer[i])
        connector = getattr(self.runner, "kv_connector", None)
        disabled = getattr(connector, "_disabled", None)

        def judge(here: Copies) -> None:
            self.examine(
                Dummy(
                    slots=[here.get(f"slots{g.index}") for g in self.groups],
                    buffers=[here.get(f"buffer{g.index}") for g in self.groups],
                    tables=[here.get(f"table{g.index}") for g in self.groups],
                    state_rows=bool(valid_state_slots),
                    connector_disabled=disabled,
                )
            )

        self.now_or_later(copies, judge)

    def _judge_dummy_v1(self, num_tokens: int, slot_mappings: Any) -> None:
        copies = Copies(self.views)
        for group in self.groups:
            copies.take(f"slots{group.index}", (slot_mappings or {}).get(group.index))

        def judge(here: Copies) -> None:
            slots = [here.get(f"slots{g.index}") for g in self.groups]
            none: list[Ints | None] = [None] * len(slots)
            self.examine(Dummy(slots=slots, buffers=none, tables=list(none)))

        self.now_or_later(copies, judge)

    def now_or_later(self, copies: Copies, judge: Callable[[Copies], None]) -> None:
        """Judge at once when everything is on the host, else at the result boundary."""
        if copies.pending:
            copies.launch()
            self._pending.append((copies, judge, self.step))
        else:
            judge(copies)

    # -- speculation and results ------------------------------------------------------------------------------------

    @standing_aside
    def _before_postprocess(
        self, idx_mapping: Any, sampled_tokens: Any, num_sampled: Any, num_rejected: Any = None, *_: Any, **__: Any
    ) -> None:
        now = self._now
        if now is None or self._in_dummy or not now.planned:
            return
        copies = Copies(self.views)
        copies.take("indices", idx_mapping)
        copies.take("sampled", num_sampled)
        copies.take("rejected", num_rejected)
        ids = now.ids
        drafts = now.drafts if now.drafts is not None else np.zeros(len(ids), np.int64)
        rows = native.state_rows(self.runner, ids)
        expected = None if rows is None else np.array(rows, np.int64)
        states = int(getattr(getattr(self.runner, "req_states", None), "max_num_reqs", len(ids)))
        partial = now.partial if now.partial is not None else np.zeros(len(ids), np.bool_)
        width = int(sampled_tokens.shape[1]) if sampled_tokens.ndim == 2 else 1

        def judge(here: Copies) -> None:
            indices, sampled = here.get("indices"), here.get("sampled")
            if indices is None or sampled is None or expected is None:
                return
            record = Verification(
                ids=ids,
                count=len(ids),
                indices=indices,
                expected_indices=expected,
                num_sampled=sampled,
                num_rejected=here.get("rejected"),
                drafts=drafts,
                partial=partial,
                width=width,
                states=states,
            )
            if drafts.any():
                rejected = record.num_rejected
                self.emit(
                    "boundary", kind="speculation", requests=ids, sampled=sampled[: len(ids)].copy(),
                    rejected=[] if rejected is None else rejected[: len(ids)].copy(),
                )  # fmt: skip
            if verification_in_order(record):
                self.judge.pass_fast(record)
            else:
                self.examine(record)

        self.now_or_later(copies, judge)

    @standing_aside
    def _after_sample(self, result: Any, *_: Any, **__: Any) -> None:
        if self.content is not None and self._now is not None:
            self.content.after_forward()
        self._settle(result)

    def _settle(self, result: Any) -> None:
        """Judge what was copied, once the engine itself has waited for the step."""
        if not self._pending:
            return
        get_output = getattr(result, "get_output", None)
        if callable(get_output):
            due = list(self._pending)
            self._pending.clear()

            def with_verdict(*args: Any, **kwargs: Any) -> Any:
                output = get_output(*args, **kwargs)
                self._judge_pending(due)
                return output

            result.get_output = with_verdict
        else:
            due = list(self._pending)
            self._pending.clear()
            self._judge_pending(due)

    @standing_aside
    def _judge_pending(self, due: list[tuple[Copies, Callable[[Copies], None], int | None]]) -> None:
        now = self.step
        try:
            for copies, judge, step in due:
                copies.arrive()
                self.step = step
                judge(copies)
        finally:
            self.step = now


def _distinct(rows: list[int]) -> bool:
    """Whether no two requests have the same row (−1: none yet)."""
    held = [row for row in rows if row >= 0]
    return len(set(held)) == len(held)
