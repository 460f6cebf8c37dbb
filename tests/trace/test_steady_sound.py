"""The steady path under random traffic and random mistakes: what it passes, no rule would report."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper import BUDGET, FULL, SLIDING, STATE, Scheduler, declarer, findings, plan
from test_fast import OUTPUT_CHANGES, change_plan, counted

from kvproof.trace.declare import Declarer, digest
from kvproof.trace.fast import schedule_in_order
from kvproof.trace.records import Group, Plan, Schedule
from kvproof.trace.rules.model import Violation
from kvproof.trace.steady import Beat, digest_of_beat, plan_as_expected

WORLDS: dict[str, tuple[Group, ...]] = {"full": (FULL,), "window": (FULL, SLIDING), "hybrid": (FULL, SLIDING, STATE)}
SEEDS = st.integers(0, 2**32)
CALM = 0.9
FEW = settings(max_examples=40)


def take(reader: Declarer, out: object, number: int) -> Beat | None:
    """One output as the guard takes it: as a beat, or read, judged, and perhaps the first of a run."""
    beat = reader.beat(out, number)
    if beat is None:
        record = counted(reader.read(out, number))
        if schedule_in_order(record):
            reader.judged_in_order(record)
    return beat


def same(one: Schedule, other: Schedule) -> bool:
    """Whether two records declare the same."""
    cells = all(
        np.array_equal(getattr(one.appended, name), getattr(other.appended, name))
        for name in ("who", "group", "column", "block")
    )
    return cells and one.ids == other.ids and one.total == other.total and all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in ("rows", "tokens", "start", "drafts")
    )


def as_expected(beat: Beat, p: Plan) -> bool:
    """What the worker's guard asks of a plan in a steady step."""
    index = {name: i for i, name in enumerate(beat.ids)}
    if p.num_tokens != len(beat.ids) or len(p.ids) != p.num_tokens or len(set(p.ids)) != len(p.ids):
        return False
    if not index.keys() >= set(p.ids) or p.positions is None or p.seq_lens is None:
        return False
    order = None if p.ids == beat.ids else [index[name] for name in p.ids]
    return plan_as_expected(beat, order, p.positions, p.seq_lens, p.query_start, p.groups, p.slots, p.tables)


def left_to_the_full_check(beat: Beat, violation: Violation) -> bool:
    """A steady step looks at a block-table cell only when its request enters that block, and at no state block."""
    entered = {(g, beat.ids[i], column) for g, i, column, _ in beat.entered}
    if not violation.rule.startswith("read_") or violation.group is None:
        return False
    position = violation.position if violation.position is not None else -1
    return (violation.group, violation.request, position // FULL.block_size) not in entered


@pytest.mark.parametrize("world", WORLDS)
@FEW
@given(SEEDS)
def test_a_beat_declares_what_the_general_record_declares(world: str, seed: int) -> None:
    scheduler = Scheduler(seed, WORLDS[world], calm=CALM)
    quick, general = declarer(WORLDS[world]), declarer(WORLDS[world])
    for number in range(25):
        out = scheduler.step()
        beat, record = take(quick, out, number), general.read(out, number)
        if beat is not None:
            assert same(quick.steady.record(beat), record)
            assert digest_of_beat(beat) == digest(record)
    quick.steady.stop()
    assert np.array_equal(quick.shadow.end, general.shadow.end)
    assert quick.shadow.row_of == general.shadow.row_of
    for g in range(len(WORLDS[world])):
        assert np.array_equal(quick.shadow.counts[g], general.shadow.counts[g])
        for row in general.shadow.row_of.values():
            assert np.array_equal(quick.shadow.blocks(g, row), general.shadow.blocks(g, row))


def test_most_steps_of_a_calm_engine_are_beats() -> None:
    beats = steps = grown = entered = 0
    for seed in range(20):
        scheduler, quick = Scheduler(seed, calm=0.95), declarer()
        for number in range(40):
            out = scheduler.step()
            steps += bool(out.num_scheduled_tokens)
            beat = take(quick, out, number)
            beats += beat is not None
            grown += bool(beat and beat.grown)
            entered += bool(beat and beat.entered)
    assert beats > steps / 3
    assert grown > 10
    assert entered > 10


@pytest.mark.parametrize("world", WORLDS)
@FEW
@given(SEEDS)
def test_a_beat_of_a_changed_output_breaks_no_rule(world: str, seed: int) -> None:
    r = random.Random(seed)
    scheduler = Scheduler(seed, WORLDS[world], calm=CALM)
    quick, general = declarer(WORLDS[world]), declarer(WORLDS[world])
    for number in range(40):
        out = scheduler.step()
        if quick.steady.running and out.num_scheduled_tokens:
            changed = copy.deepcopy(out)
            r.choice(OUTPUT_CHANGES)(r, changed)
            if copy.deepcopy(quick).beat(changed, number) is not None:
                assert findings(counted(copy.deepcopy(general).read(changed, number))) == []
        take(quick, out, number)
        general.read(out, number)


@FEW
@given(SEEDS)
def test_a_block_that_nobody_holds_ends_the_run(seed: int) -> None:
    scheduler = Scheduler(seed, calm=0.97)
    lost: set[int] = set()
    quick = Declarer((FULL,), BUDGET, lambda group, block: block not in lost)
    for number in range(40):
        out = scheduler.step()
        beat = copy.deepcopy(quick).beat(out, number) if quick.steady.running else None
        if beat is not None and (beat.grown or beat.entered):
            lost |= {beat.grown[0][3][0]} if beat.grown else {beat.entered[0][3]}
            assert Declarer.beat(quick, out, number) is None
            return
        take(quick, out, number)


@pytest.mark.parametrize("world", WORLDS)
@FEW
@given(SEEDS)
def test_a_plan_as_expected_breaks_no_rule(world: str, seed: int) -> None:
    r = random.Random(seed)
    scheduler = Scheduler(seed, WORLDS[world], calm=CALM)
    quick, general = declarer(WORLDS[world]), declarer(WORLDS[world])
    for number in range(25):
        out = scheduler.step()
        beat, record = take(quick, out, number), general.read(out, number)
        if beat is None:
            continue
        p = plan(record, seed + number)
        if p.seq_lens is not None and len(p.seq_lens) == p.count:  # without padding
            assert as_expected(beat, p)
        change_plan(r, p)
        p.whole = False
        if as_expected(beat, p):
            where = [record.index[name] for name in p.ids]
            for name in ("rows", "tokens", "start"):
                setattr(p, name, getattr(record, name)[where])
            p.slack = np.zeros(len(where), np.int64)
            p.fresh = np.zeros(len(where), np.bool_)
            assert [v for v in findings(p) if not left_to_the_full_check(beat, v)] == []
