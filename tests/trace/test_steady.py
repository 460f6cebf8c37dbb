"""A run of steady steps gives the same digests, records and shadow as reading every step the general way."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvproof.trace.declare import Declarer, digest
from kvproof.trace.fast import schedule_in_order
from kvproof.trace.records import FULL, STATE, Group
from kvproof.trace.steady import digest_of_beat, plan_as_expected

BLOCK = 4  # tokens


def groups(count: int = 1) -> tuple[Group, ...]:
    """``count`` full groups and one group of states."""
    full = [Group(i, FULL, BLOCK * (i + 1), 1000, None, 64) for i in range(count)]
    return (*full, Group(count, STATE, BLOCK, 1000, None, 64))


class Engine:
    """Makes SchedulerOutputs of a decoding batch; every request's blocks are fresh ids."""

    def __init__(self, requests: int, groups: tuple[Group, ...], rng: random.Random):
        self.groups = groups
        self.ids = [f"r{n}" for n in range(requests)]
        self.start = [rng.randrange(1, 40) for _ in self.ids]
        self.blocks = [[self._cover(g, 0, start) for g in groups] for start in self.start]
        self.next = [1] * len(groups)
        self.seen = False

    def _cover(self, group: Group, held: int, end: int) -> int:
        return max(0, -(-end // group.block_size) - held)

    def _take(self, group: Group, count: int) -> list[int]:
        first = self.next[group.index]
        self.next[group.index] += count
        return list(range(first, first + count))

    def output(self) -> Any:
        """The next step: the prefill of all requests first, then one token each."""
        new, cached_blocks = [], []
        tokens = 1 if self.seen else None
        scheduled, starts = {}, []
        for i, name in enumerate(self.ids):
            if tokens is None:
                per_group = tuple(self._take(g, self.blocks[i][g.index]) for g in self.groups)
                new.append(
                    SimpleNamespace(
                        req_id=name, num_computed_tokens=0, block_ids=per_group, prompt_token_ids=[0] * self.start[i]
                    )
                )
                scheduled[name] = self.start[i]
            else:
                grown = tuple(
                    self._take(g, self._cover(g, self.blocks[i][g.index], self.start[i] + 1)) for g in self.groups
                )
                for g in self.groups:
                    self.blocks[i][g.index] += len(grown[g.index])
                cached_blocks.append(grown if any(grown) else None)
                scheduled[name] = 1
                starts.append(self.start[i])
                self.start[i] += 1
        cached = SimpleNamespace(
            req_ids=list(self.ids) if self.seen else [],
            resumed_req_ids=set(),
            all_token_ids={},
            new_block_ids=cached_blocks,
            num_computed_tokens=starts,
            num_output_tokens=[],
        )
        self.seen = True
        return SimpleNamespace(
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            finished_req_ids=set(),
            preempted_req_ids=set(),
            scheduled_spec_decode_tokens={},
            new_block_ids_to_zero=None,
            kv_cache_block_copies=None,
        )


def running(seed: int, requests: int = 5, full_groups: int = 2) -> tuple[Engine, Declarer, Declarer]:
    """An engine, a declarer in a run of steady steps and one that reads everything."""
    rng = random.Random(seed)
    engine = Engine(requests, groups(full_groups), rng)
    steady, plain = (Declarer(engine.groups, 10_000) for _ in range(2))
    for step in range(1, 4):
        output = engine.output()
        schedules = [declarer.read(output, step) for declarer in (steady, plain)]
        assert all(map(schedule_in_order, schedules))
        steady.judged_in_order(schedules[0])
    return engine, steady, plain


@pytest.mark.parametrize("seed", range(10))
def test_steady_steps_are_the_general_ones(seed: int) -> None:
    engine, steady, plain = running(seed)
    assert steady.steady.running
    for step in range(4, 60):
        output = engine.output()
        beat = steady.beat(output, step)
        assert beat is not None, f"step {step} ended the run"
        general = plain.read(output, step)
        assert digest_of_beat(beat) == digest(general)
        record = steady.steady.record(beat)
        for name in ("rows", "tokens", "start", "previous_end", "drafts"):
            assert np.array_equal(getattr(record, name), getattr(general, name)), name
        assert np.array_equal(record.appended.block, general.appended.block)
        for group in engine.groups:
            if group.slotted:
                column = general.start // group.block_size
                block = plain.shadow.lookup(group.index, general.rows, column)
                assert beat.slots[group.index] == (block * group.block_size + general.start % group.block_size).tolist()
    steady.steady.stop()
    for ours, theirs in (
        (steady.shadow.end, plain.shadow.end),
        *zip(steady.shadow.uses, plain.shadow.uses, strict=True),
        *zip(steady.shadow.counts, plain.shadow.counts, strict=True),
    ):
        assert np.array_equal(ours, theirs)


def corrupt(output: Any, kind: str) -> None:
    """One deviation from a steady step."""
    cached = output.scheduled_cached_reqs
    if kind == "start":
        cached.num_computed_tokens[2] += 1
    elif kind == "tokens":
        output.num_scheduled_tokens["r1"] = 2
    elif kind == "total":
        output.total_num_scheduled_tokens += 1
    elif kind == "finished":
        output.finished_req_ids = {"r0"}
    elif kind == "order":
        cached.req_ids.reverse()
    elif kind == "drafts":
        output.scheduled_spec_decode_tokens = {"r0": [-1]}
    elif kind == "copies":
        output.kv_cache_block_copies = [(1, 2)]
    elif kind == "zero":
        output.new_block_ids_to_zero = [999]
    else:
        blocks = {"used": 1, "null": 0, "beyond": 1000, "text": "x"}[kind]
        cached.new_block_ids[0] = ([blocks], [], [])


@pytest.mark.parametrize(
    "kind",
    ["start", "tokens", "total", "finished", "order", "drafts", "copies", "zero", "used", "null", "beyond", "text"],
)
def test_any_deviation_ends_the_run_and_leaves_the_shadow_for_the_general_way(kind: str) -> None:
    engine, steady, plain = running(3)
    for step in range(4, 9):
        output = engine.output()
        assert steady.beat(output, step) is not None
        plain.read(output, step)
    output = engine.output()
    corrupt(output, kind)
    assert steady.beat(output, 9) is None
    assert not steady.steady.running
    for ours, theirs in (
        *zip(steady.shadow.uses, plain.shadow.uses, strict=True),
        *zip(steady.shadow.counts, plain.shadow.counts, strict=True),
    ):
        assert np.array_equal(ours, theirs)
    assert np.array_equal(steady.shadow.end, plain.shadow.end)


def test_a_request_without_its_next_block_ends_the_run() -> None:
    engine, steady, _ = running(5)
    for step in range(4, 60):
        output = engine.output()
        if any(blocks is not None for blocks in output.scheduled_cached_reqs.new_block_ids):
            output.scheduled_cached_reqs.new_block_ids = [None] * len(engine.ids)
            if steady.beat(output, step) is None:
                return
        else:
            assert steady.beat(output, step) is not None
    pytest.fail("no request ever needed a block")


def test_nobody_holding_the_block_ends_the_run() -> None:
    rng = random.Random(1)
    engine = Engine(3, groups(1), rng)
    held = True
    declarer = Declarer(engine.groups, None, lambda group, block: held)
    for step in range(1, 4):
        declarer.judged_in_order(declarer.read(engine.output(), step))
    assert declarer.steady.running
    held = False
    for step in range(4, 4 + BLOCK):
        if declarer.beat(engine.output(), step) is None:
            return
    pytest.fail("a block nobody holds was accepted")


@pytest.mark.parametrize("what", ["nothing", "position", "length", "query", "slot", "pad", "cell"])
@pytest.mark.parametrize("permuted", [False, True])
def test_plan_is_compared_token_by_token(what: str, permuted: bool) -> None:
    engine, steady, _ = running(7)
    beat = None
    for step in range(4, 40):
        beat = steady.beat(engine.output(), step)
        assert beat is not None
        if any(group == 0 for group, *_ in beat.entered):
            break
    assert beat is not None
    count = len(beat.ids)
    order = list(reversed(range(count))) if permuted else None
    where = order or list(range(count))
    positions = np.array([beat.starts[j] for j in where], np.int64)
    lengths = np.array([beat.ends[j] for j in where], np.int32)
    query = np.arange(count + 1, dtype=np.int32)
    rows = np.array([steady.shadow.row_of[beat.ids[j]] for j in where])
    slots = [np.array([*(line[j] for j in where), -1], np.int64) if line else None for line in beat.slots]
    tables = [steady.shadow.tables[g.index][rows].copy() for g in engine.groups]
    first = slots[0]
    assert first is not None
    if what == "position":
        positions[1] += 1
    elif what == "length":
        lengths[-1] -= 1
    elif what == "query":
        query[2] = 1
    elif what == "slot":
        first[3] += BLOCK
    elif what == "pad":
        first[-1] = 5
    elif what == "cell":
        _, i, column, _ = next(one for one in beat.entered if one[0] == 0)
        tables[0][where.index(i), column] += 1
    expected = plan_as_expected(beat, order, positions, lengths, query, engine.groups, slots, tables)
    assert expected == (what == "nothing")
