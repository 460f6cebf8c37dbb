"""The fast checks are sound (when they say True, no rule can fire) and not empty (clean records pass them)."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper import BUDGET, FULL, SLIDING, STATE, Scheduler, declarer, findings, new, output, plan

from kvproof.trace.fast import plan_in_order, result_in_order, schedule_in_order, verification_in_order
from kvproof.trace.records import Group, Plan, Result, Schedule, Verification

WORLDS: dict[str, tuple[Group, ...]] = {"full": (FULL,), "window": (FULL, SLIDING), "hybrid": (FULL, SLIDING, STATE)}
SEEDS = st.integers(0, 2**32)
FEW = settings(max_examples=40)
STRANGE = (-(2**40), -2, -1, 0, 1, 2, 3, 5, 8, 63, 64, 65, 2**31, 2**40, 2**62)

Change = Callable[[random.Random, Any], None]


def counted(record: Schedule) -> Schedule:
    """The record with the counts a sound pool gives."""
    record.held = np.ones(len(record.write), np.int64)
    record.references = np.ones(len(record.write), np.int64)
    return record


# -- schedule ---------------------------------------------------------------------------------------------------------


def _tokens(r: random.Random, out: Any) -> None:
    name = r.choice(list(out.num_scheduled_tokens))
    out.num_scheduled_tokens[name] = r.choice((*STRANGE, out.num_scheduled_tokens[name] + r.choice((-1, 1))))
    if r.random() < 0.5:
        out.total_num_scheduled_tokens = sum(out.num_scheduled_tokens.values())


def _total(r: random.Random, out: Any) -> None:
    out.total_num_scheduled_tokens += r.choice((-1, 1, BUDGET))


def _ids(r: random.Random, out: Any) -> None:
    scheduled = out.num_scheduled_tokens
    name = r.choice(list(scheduled))
    kind = r.randrange(3)
    if kind == 0:
        scheduled["ghost"] = scheduled.pop(name)
    elif kind == 1:
        scheduled["ghost"] = 1
        out.total_num_scheduled_tokens += 1
    else:
        out.total_num_scheduled_tokens -= scheduled.pop(name)


def _start(r: random.Random, out: Any) -> None:
    cached = out.scheduled_cached_reqs.num_computed_tokens
    where = r.randrange(len(cached) + len(out.scheduled_new_reqs))
    if where < len(cached):
        cached[where] = r.choice((*STRANGE, cached[where] + r.choice((-5, -1, 1, 5))))
    else:
        fresh = out.scheduled_new_reqs[where - len(cached)]
        fresh.num_computed_tokens = r.choice((*STRANGE, fresh.num_computed_tokens + r.choice((-1, 1, 5))))


def _blocks(r: random.Random, out: Any) -> None:
    lists = [ids for fresh in out.scheduled_new_reqs for ids in fresh.block_ids]
    lists += [ids for blocks in out.scheduled_cached_reqs.new_block_ids if blocks for ids in blocks]
    if not lists:
        return
    ids = r.choice(lists)
    others = [block for one in lists for block in one]
    value = r.choice((*STRANGE, *others, *range(1, 20)))
    kind = r.randrange(3)
    if kind == 0 and ids:
        ids[r.randrange(len(ids))] = value
    elif kind == 1 and ids:
        del ids[r.randrange(len(ids))]
    else:
        ids.insert(r.randrange(len(ids) + 1), value)


def _groups(r: random.Random, out: Any) -> None:
    for fresh in out.scheduled_new_reqs:
        fresh.block_ids = r.choice((fresh.block_ids[:-1], (*fresh.block_ids, [7])))
        return


def _delta(r: random.Random, out: Any) -> None:
    deltas = out.scheduled_cached_reqs.new_block_ids
    if deltas:
        where = r.randrange(len(deltas))
        deltas[where] = None if deltas[where] is not None else ([r.randrange(70)],)


def _declared(r: random.Random, out: Any) -> None:
    cached = out.scheduled_cached_reqs
    kind = r.randrange(3)
    if kind == 0 and cached.req_ids:
        where = r.randrange(len(cached.req_ids))
        for values in (cached.req_ids, cached.new_block_ids, cached.num_computed_tokens):
            values.append(values[where])
    elif kind == 1 and cached.req_ids:
        cached.req_ids[r.randrange(len(cached.req_ids))] = r.choice((*out.num_scheduled_tokens, "ghost"))
    elif out.scheduled_new_reqs:
        out.scheduled_new_reqs.append(copy.deepcopy(r.choice(out.scheduled_new_reqs)))


def _sets(r: random.Random, out: Any) -> None:
    name = r.choice((*out.num_scheduled_tokens, "ghost"))
    where = r.randrange(3)
    (out.finished_req_ids, out.preempted_req_ids, out.scheduled_cached_reqs.resumed_req_ids)[where].add(name)


def _drafts(r: random.Random, out: Any) -> None:
    name = r.choice((*out.num_scheduled_tokens, "ghost"))
    out.scheduled_spec_decode_tokens[name] = [1] * r.randrange(12)


def _zero(r: random.Random, out: Any) -> None:
    out.new_block_ids_to_zero = [r.choice(STRANGE)]


def _copies(r: random.Random, out: Any) -> None:
    out.kv_cache_block_copies = [SimpleNamespace(src_block_id=r.choice(STRANGE), dst_block_id=r.choice(STRANGE))]


OUTPUT_CHANGES: tuple[Change, ...] = (
    _tokens, _total, _ids, _start, _blocks, _groups, _delta, _declared, _sets, _drafts, _zero, _copies,
)  # fmt: skip


@pytest.mark.parametrize("world", WORLDS)
@FEW
@given(SEEDS)
def test_legal_steps_break_no_rule_and_plain_ones_pass_fast(world: str, seed: int) -> None:
    scheduler, reader = Scheduler(seed, WORLDS[world], speculate=seed % 2 == 0), declarer(WORLDS[world])
    for number in range(12):
        record = counted(reader.read(scheduler.step(), number))
        assert findings(record) == []
        if scheduler.plain:
            assert schedule_in_order(record)


@pytest.mark.parametrize("world", WORLDS)
@FEW
@given(SEEDS)
def test_a_schedule_that_passes_fast_breaks_no_rule(world: str, seed: int) -> None:
    r = random.Random(seed)
    scheduler, reader = Scheduler(seed, WORLDS[world], speculate=seed % 2 == 0), declarer(WORLDS[world])
    for number in range(r.randrange(1, 10)):
        reader.read(scheduler.step(), number)
    out = scheduler.step()
    if not out.num_scheduled_tokens:
        return
    r.choice(OUTPUT_CHANGES)(r, out)
    record = counted(reader.read(out, 99))
    if r.random() < 0.2 and len(record.write):
        counts = r.choice((record.held, record.references))
        counts[r.randrange(len(counts))] = r.choice((-1, 0))
    if schedule_in_order(record):
        assert findings(record) == []


@pytest.mark.parametrize("start", [1 << 26, 1 << 40])
def test_a_start_beyond_every_context_is_looked_at(start: int) -> None:
    """Write cells are not made of such numbers, so nothing else would see that the blocks do not reach."""
    record = counted(declarer().read(output({"a": 1}, [new("a", start, [1])]), 1))
    assert not schedule_in_order(record)
    assert [v.rule for v in findings(record)] == ["bind_insufficient_blocks"]


# -- plan -------------------------------------------------------------------------------------------------------------


def _number(r: random.Random, value: Any) -> int:
    return int(r.choice((*(s for s in STRANGE if abs(s) < 2**31), int(value) + r.choice((-4, -1, 1, 4)))))


def _array(r: random.Random, array: Any) -> Any:
    """The array with one entry changed, two exchanged, one dropped or one added."""
    array = array.copy()
    if array.ndim != 1 or not array.size:
        if array.size:
            array.flat[r.randrange(array.size)] = _number(r, array.flat[0])
        return array
    kind = r.randrange(4)
    i = r.randrange(len(array))
    if kind == 0:
        array[i] = _number(r, array[i])
    elif kind == 1:
        j = r.randrange(len(array))
        array[[i, j]] = array[[j, i]]
    elif kind == 2:
        array = np.delete(array, i)
    else:
        array = np.insert(array, i, _number(r, array[i]))
    return array


def change_plan(r: random.Random, p: Plan) -> None:
    """One change to what a worker may plan wrongly."""
    kind = r.randrange(9)
    if kind == 0:
        p.num_tokens = _number(r, p.num_tokens)
    elif kind == 1:
        p.query_start = _array(r, p.query_start)
    elif kind == 2:
        p.positions = _array(r, p.positions)
    elif kind == 3:
        p.seq_lens = _array(r, p.seq_lens)
    elif kind == 4:
        where = r.choice([i for i, slots in enumerate(p.slots) if slots is not None])
        p.slots[where] = _array(r, p.slots[where])
    elif kind == 5:
        where = r.randrange(len(p.tables))
        table = p.tables[where].copy()
        if r.random() < 0.2:
            table = table[:-1] if r.random() < 0.5 else table[:, : r.randrange(table.shape[1])]
        else:
            row, column = r.randrange(len(table)), r.randrange(table.shape[1])
            table[row, column] = _number(r, table[row, column])
        p.tables[where] = table
    elif kind == 6 and p.ids:
        p.ids = p.ids.copy()
        p.ids[r.randrange(len(p.ids))] = r.choice((*p.ids, "ghost"))
    elif kind == 7:
        p.ids = r.choice((p.ids[:-1], [*p.ids, "ghost"]))
    else:
        order = list(range(len(p.tables[0])))
        r.shuffle(order)
        p.tables = [table[order] for table in p.tables]


@pytest.mark.parametrize("slack", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("world", WORLDS)
@FEW
@given(SEEDS)
def test_a_flawless_plan_passes_fast_unless_blocks_are_shared(world: str, slack: bool, seed: int) -> None:
    scheduler, reader = Scheduler(seed, WORLDS[world]), declarer(WORLDS[world])
    for number in range(10):
        record = reader.read(scheduler.step(), number)
        if record.ids:
            p = plan(record, seed + number, slack and world == "full")
            assert findings(p) == []
            if scheduler.plain and not p.slack.any():
                assert plan_in_order(p)


@given(SEEDS)
def test_plans_below_an_optimistic_declaration_pass_fast(seed: int) -> None:
    scheduler, reader = Scheduler(seed), declarer()
    record = reader.read(scheduler.step(), 0)
    while not record.ids or not scheduler.plain:
        record = reader.read(scheduler.step(), 0)
    assert plan_in_order(plan(record, seed, slack=True))


@pytest.mark.parametrize("world", WORLDS)
@FEW
@given(SEEDS)
def test_a_plan_that_passes_fast_breaks_no_rule(world: str, seed: int) -> None:
    r = random.Random(seed)
    scheduler, reader = Scheduler(seed, WORLDS[world]), declarer(WORLDS[world])
    record = reader.read(scheduler.step(), 0)
    for number in range(r.randrange(1, 8)):
        record = reader.read(scheduler.step(), number)
    if not record.ids:
        return
    p = plan(record, seed, slack=world == "full" and seed % 3 == 0)
    change_plan(r, p)
    # What the guard itself looks up for a row follows from its id.
    where = [record.index.get(name, -1) for name in p.ids]
    for name in ("rows", "tokens", "start"):
        source = getattr(record, name)
        setattr(p, name, np.array([source[i] if i >= 0 else -1 for i in where], np.int64))
    p.slack = np.resize(p.slack, len(p.ids)) if len(p.slack) else np.zeros(len(p.ids), np.int64)
    p.fresh = np.resize(p.fresh, len(p.ids)) if p.fresh is not None and len(p.fresh) else None
    if plan_in_order(p):
        assert findings(p) == []


# -- result -----------------------------------------------------------------------------------------------------------


def result_of(record: Schedule, r: random.Random) -> tuple[np.ndarray, list[str], dict[str, int], np.ndarray | None]:
    """(partial, reported ids, index, counts) as a sound runner gives them."""
    partial = np.array([r.random() < 0.3 and not d for d in record.drafts], np.bool_)
    reported = record.ids.copy()
    r.shuffle(reported)
    index = {name: i for i, name in enumerate(reported)}
    at = record.index
    counts = [0 if partial[at[n]] else r.randint(0, int(record.drafts[at[n]]) + 1) for n in reported]
    return partial, reported, index, np.array(counts, np.int64) if r.random() < 0.9 else None


def as_result(
    record: Schedule, partial: Any, reported: list[str], index: dict[str, int], counts: Any, known: set[str]
) -> Result:
    """The record the guard judges."""
    rows = zip(record.ids, record.tokens.tolist(), record.drafts.tolist(), partial.tolist(), strict=True)
    scheduled = {name: (tokens, drafts, part) for name, tokens, drafts, part in rows}
    return Result(record.step, record.step, scheduled, reported, index, counts, frozenset(known))


@given(SEEDS)
def test_a_sound_result_passes_fast(seed: int) -> None:
    r = random.Random(seed)
    scheduler, reader = Scheduler(seed, speculate=True), declarer()
    for number in range(6):
        record = reader.read(scheduler.step(), number)
        partial, reported, index, counts = result_of(record, r)
        assert result_in_order(record, partial, reported, index, counts, 1)
        assert findings(as_result(record, partial, reported, index, counts, set(record.ids))) == []


@given(SEEDS)
def test_a_result_that_passes_fast_breaks_no_rule(seed: int) -> None:
    r = random.Random(seed)
    scheduler, reader = Scheduler(seed, speculate=True), declarer()
    for number in range(r.randrange(1, 6)):
        record = reader.read(scheduler.step(), number)
    if not record.ids:
        return
    partial, reported, index, counts = result_of(record, r)
    kind = r.randrange(6)
    if kind == 0:
        reported[r.randrange(len(reported))] = r.choice((*reported, "ghost"))
    elif kind == 1:
        reported = r.choice((reported[:-1], [*reported, "ghost"], [*reported, reported[0]]))
    elif kind == 2:
        index[r.choice(reported)] = r.randrange(-2, len(reported) + 2)
    elif kind == 3:
        del index[r.choice(reported)]
    elif kind == 4 and counts is not None:
        counts = _array(r, counts)
    else:
        index["ghost"] = r.randrange(len(reported) + 1)
    if result_in_order(record, partial, reported, index, counts, 1):
        known = {name for name in record.ids if r.random() < 0.9}
        assert findings(as_result(record, partial, reported, index, counts, known)) == []


# -- verification -----------------------------------------------------------------------------------------------------


def verification(r: random.Random) -> Verification:
    """What a sound sampler reports for up to six requests, with a tail of a captured graph now and then."""
    count = r.randint(1, 6)
    drafts = np.array([r.randint(0, 3) for _ in range(count)], np.int64)
    partial = np.array([d == 0 and r.random() < 0.3 for d in drafts], np.bool_)
    sampled = np.array([0 if p else r.randint(1, int(d) + 1) for p, d in zip(partial, drafts, strict=True)], np.int64)
    rejected = np.where(partial, 0, drafts + 1 - sampled)
    rows = np.array(r.sample(range(8), count), np.int64)
    tail = np.full(r.choice((0, 2)), 5, np.int64)
    return Verification(
        ids=[f"r{i}" for i in range(count)],
        count=count,
        indices=np.concatenate([rows, tail]),
        expected_indices=rows.copy(),
        num_sampled=np.concatenate([sampled, tail]).astype(np.int32),
        num_rejected=np.concatenate([rejected, tail]).astype(np.int32),
        drafts=drafts,
        partial=partial,
        width=4,
        states=8,
    )


@given(SEEDS)
def test_a_sound_verification_passes_fast(seed: int) -> None:
    v = verification(random.Random(seed))
    assert verification_in_order(v)
    assert findings(v) == []


def test_a_roll_back_inside_a_prompt_is_looked_at() -> None:
    row = np.array([0], np.int64)
    v = Verification(["a"], 1, row, row, row, row + 1, row + 2, np.array([True]), 4, 8)
    assert not verification_in_order(v)
    assert [one.rule for one in findings(v)] == ["spec_reject_out_of_range"]


@given(SEEDS)
def test_a_verification_that_passes_fast_breaks_no_rule(seed: int) -> None:
    r = random.Random(seed)
    v = verification(r)
    kind = r.randrange(6)
    if kind == 0:
        v.indices = _array(r, v.indices)
    elif kind == 1:
        v.num_sampled = _array(r, v.num_sampled)
    elif kind == 2:
        v.num_rejected = None if r.random() < 0.1 else _array(r, v.num_rejected)
    elif kind == 3:
        v.width = r.randint(1, 4)
    elif kind == 4:
        v.states = r.randint(1, 8)
    else:
        v.partial = ~v.partial if r.random() < 0.3 else np.roll(v.partial, 1)
    if verification_in_order(v):
        assert findings(v) == []
