"""From SchedulerOutputs to records: what is new, kept, resumed, gone, and that both sides agree on it."""

from __future__ import annotations

import copy
import pickle
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper import BUDGET, FULL, SLIDING, STATE, Scheduler, declarer, new, output
from test_fast import OUTPUT_CHANGES

from kvproof.trace.declare import Declarer, as_blocks, digest
from kvproof.trace.records import Schedule


def cells(record: Schedule) -> list[tuple[str, int, int, int]]:
    """(request or "?", group, column, block) of the cells declared in the step."""
    a = record.appended
    names = [record.ids[i] if i >= 0 else "?" for i in a.who.tolist()]
    return list(zip(names, a.group.tolist(), a.column.tolist(), a.block.tolist(), strict=True))


def row(reader: Declarer, name: str, group: int = 0) -> list[int]:
    """The declared blocks of a request."""
    return reader.shadow.blocks(group, reader.shadow.row_of[name]).tolist()


def started() -> Declarer:
    """After one step: a with 6 tokens in blocks 1 2, b with 4 in block 3."""
    reader = declarer()
    reader.read(output({"a": 6, "b": 4}, [new("a", 0, [1, 2]), new("b", 0, [3])]), 1)
    return reader


def test_new_requests() -> None:
    reader = declarer()
    record = reader.read(output({"a": 2, "b": 5}, [new("b", 8, [4, 5, 6, 7], prompt=13), new("a", 0, [1])]), 7)
    assert (record.step, record.ids, record.declared) == (7, ["a", "b"], ["b", "a"])
    assert record.tokens.tolist() == [2, 5]
    assert record.start.tolist() == [0, 8]
    assert record.end.tolist() == [2, 13]
    assert record.previous_end.tolist() == [-1, -1]
    assert (record.total, record.budget) == (7, BUDGET)
    assert record.new == {"a", "b"}
    assert not record.resumed | record.finished | record.preempted
    assert cells(record) == [("b", 0, 0, 4), ("b", 0, 1, 5), ("b", 0, 2, 6), ("b", 0, 3, 7), ("a", 0, 0, 1)]
    assert record.group_counts == [("b", 1), ("a", 1)]
    # b's tokens 8 to 12 fall into its columns 2 and 3.
    write = record.write
    assert list(zip(write.who.tolist(), write.column.tolist(), write.block.tolist(), strict=True)) == [
        (0, 0, 1), (1, 2, 6), (1, 3, 7)
    ]  # fmt: skip


def test_kept_requests_grow_or_not() -> None:
    reader = started()
    record = reader.read(output({"b": 1, "a": 1}, cached={"a": (6, None), "b": (4, [[9]])}), 2)
    assert record.ids == ["b", "a"]
    assert record.declared == ["a", "b"]
    assert record.start.tolist() == [4, 6]
    assert record.previous_end.tolist() == [4, 6]
    assert cells(record) == [("b", 0, 1, 9)]
    assert row(reader, "b") == [3, 9]
    assert record.new == frozenset()


def test_empty_deltas_declare_nothing() -> None:
    reader = started()
    assert cells(reader.read(output({"a": 1}, cached={"a": (6, [[]])}), 2)) == []


def test_a_request_with_blocks_that_has_no_token_in_this_step() -> None:
    reader = started()
    record = reader.read(output({"a": 1}, cached={"a": (6, None), "b": (4, [[8]])}), 2)
    assert cells(record) == [("?", 0, 1, 8)]
    assert row(reader, "b") == [3, 8]


def test_a_resumed_request_gets_a_whole_row_in_either_way() -> None:
    for out in (
        output({"a": 7}, cached={"a": (0, [[11, 12]])}, resumed=["a"], lengths={"a": 7}),  # V1
        output({"a": 7}, [new("a", 0, [11, 12])]),  # V2
    ):
        reader = started()
        reader.read(output({}, preempted=["a"]), 2)
        assert "a" not in reader.shadow.row_of
        record = reader.read(copy.deepcopy(out), 3)
        assert row(reader, "a") == [11, 12]
        assert record.previous_end.tolist() == [-1]
        assert reader.shadow.uses[0][[1, 2, 11, 12]].tolist() == [0, 0, 1, 1]


def test_preempted_and_resumed_in_one_step() -> None:
    """reset_prefix_cache with running requests."""
    reader = started()
    record = reader.read(output({"a": 7}, cached={"a": (0, [[5, 6]])}, resumed=["a"], preempted=["a", "b"]), 2)
    assert row(reader, "a") == [5, 6]
    assert record.preempted == {"a", "b"}
    assert record.resumed == {"a"}
    assert list(reader.shadow.row_of) == ["a"]
    assert reader.unknown == []


def test_a_finished_request_is_forgotten_and_may_come_again_at_once() -> None:
    reader = started()
    record = reader.read(output({"a": 3}, [new("a", 0, [7])], finished=["a", "never-seen"]), 2)
    assert row(reader, "a") == [7]
    assert record.finished == {"a", "never-seen"}
    assert record.previous_end.tolist() == [-1]
    reader.read(output({}, finished=["a", "b"]), 3)
    assert len(reader.shadow) == 0
    assert not reader.shadow.uses[0].any()


def test_cached_ids_that_were_never_declared() -> None:
    reader = started()
    out = output({"x": 1, "a": 1, "y": 1}, cached={"x": (5, [[40]]), "a": (6, None), "y": (1, None)})
    record = reader.read(out, 2)
    assert reader.unknown == ["x"] or reader.unknown == ["x", "y"]
    assert record.rows[0] == record.rows[2] == -1
    assert record.start.tolist() == [5, 6, 1]
    assert record.previous_end.tolist() == [-1, 6, -1]
    assert "x" not in reader.shadow.row_of
    reader.read(output({"a": 1}, cached={"a": (7, None)}), 3)
    assert reader.unknown == []


def test_a_scheduled_id_without_any_declaration() -> None:
    reader = started()
    record = reader.read(output({"a": 1, "ghost": 2}, cached={"a": (6, None)}), 2)
    assert record.start.tolist() == [6, -1]
    assert record.rows[1] == -1
    assert reader.unknown == []
    assert len(record.write) == 1


def test_slack_is_the_drafts_of_the_step_before() -> None:
    reader = started()
    record = reader.read(output({"a": 4, "b": 1}, cached={"a": (6, [[5]]), "b": (4, [[6]])}, drafts={"a": 3}), 2)
    assert record.drafts.tolist() == [3, 0]
    assert reader.slack.tolist() == [0, 0]
    record = reader.read(output({"b": 1, "a": 1}, cached={"b": (5, None), "a": (8, None)}), 3)
    assert record.previous_end.tolist() == [5, 10]  # rejected drafts may take a back to 7
    assert reader.slack.tolist() == [0, 3]
    reader.read(output({"b": 1, "a": 1}, cached={"b": (6, None), "a": (9, None)}), 4)
    assert reader.slack.tolist() == [0, 0]


def test_columns_that_left_the_window_are_counted_no_more() -> None:
    reader = declarer((FULL, SLIDING))
    reader.read(output({"a": 12}, [new("a", 0, [1, 2, 3], [1, 2, 3])]), 1)
    assert reader.shadow.uses[1][1:4].tolist() == [1, 1, 1]
    reader.read(output({"a": 1}, cached={"a": (12, [[4], [4]])}), 2)
    assert reader.shadow.uses[1][1:5].tolist() == [0, 1, 1, 1]
    assert reader.shadow.uses[0][1:5].tolist() == [1, 1, 1, 1]
    assert reader.shadow.holders(1, 1, -1) == []


def test_zeroed_and_copied_blocks() -> None:
    record = started().read(
        output(
            {"a": 1}, cached={"a": (6, None)}, new_block_ids_to_zero=[4, 5],
            kv_cache_block_copies=[SimpleNamespace(src_block_id=1, dst_block_id=4), (2, 5)],
        ),
        2,
    )  # fmt: skip
    assert record.zero.tolist() == [4, 5]
    assert record.copies.tolist() == [[1, 4], [2, 5]]


def test_fields_a_version_does_not_have() -> None:
    out = output({"a": 2}, [new("a", 0, [1])])
    del out.preempted_req_ids
    assert declarer().read(out, 1).preempted == frozenset()


@pytest.mark.parametrize(
    ("values", "blocks"),
    [([], []), ([1, 2], [1, 2]), ([1, 2**70], [1, -1]), ([1, "x"], [1, -1]), ([1, None, 3], [1, -1, 3])],
)
def test_block_ids_that_are_no_integers_become_minus_one(values: list[Any], blocks: list[int]) -> None:
    assert as_blocks(values).tolist() == blocks


WORLDS = {"full": (FULL,), "hybrid": (FULL, SLIDING, STATE)}


@pytest.mark.parametrize("world", WORLDS)
@settings(max_examples=30)
@given(st.integers(0, 2**32))
def test_scheduler_and_worker_agree_on_every_step(world: str, seed: int) -> None:
    """The worker reads a pickled copy; its order of requests and sets may differ, its digest may not."""
    scheduler = Scheduler(seed, WORLDS[world], speculate=True)
    here, there = declarer(WORLDS[world]), Declarer(WORLDS[world], None)
    for number in range(15):
        out = scheduler.step()
        sent = digest(here.read(out, number))
        assert digest(there.read(pickle.loads(pickle.dumps(out)), number)) == sent
    alive = {*scheduler.requests, *scheduler.gone, *scheduler.lost}
    assert set(here.shadow.row_of) == set(there.shadow.row_of) == alive


@settings(max_examples=200)
@given(st.integers(0, 2**32))
def test_a_changed_token_count_start_or_block_changes_the_digest(seed: int) -> None:
    r = random.Random(seed)
    scheduler = Scheduler(seed, (FULL, SLIDING), speculate=True)
    here, there = declarer((FULL, SLIDING)), declarer((FULL, SLIDING))
    for number in range(r.randrange(8)):
        out = scheduler.step()
        here.read(out, number)
        there.read(out, number)
    out = scheduler.step()
    if not out.num_scheduled_tokens:
        return
    changed = copy.deepcopy(out)
    r.choice(OUTPUT_CHANGES)(r, changed)
    sent, found = here.read(out, 99), there.read(changed, 99)
    same = (
        sent.ids == found.ids
        and sent.tokens.tolist() == found.tokens.tolist()
        and sent.start.tolist() == found.start.tolist()
        and cells(sent) == cells(found)
    )
    assert (digest(sent) == digest(found)) == same


def test_the_order_of_requests_is_part_of_the_digest() -> None:
    fresh = [new("a", 0, [1]), new("b", 0, [2])]
    one = declarer().read(output({"a": 2, "b": 2}, fresh), 1)
    other = declarer().read(output({"b": 2, "a": 2}, fresh), 1)
    assert digest(one) != digest(other)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_many_requests_and_long_rows(count: int) -> None:
    names = [f"r{i}" for i in range(count)]
    reader = Declarer((FULL,), None)
    fresh = [new(name, 0, [(i + n) % 63 + 1 for n in range(count)]) for i, name in enumerate(names)]
    record = reader.read(output(dict.fromkeys(names, 1), fresh), 1)
    assert len(record.appended) == count * count
    assert np.unique(record.rows).size == count
    assert row(reader, names[-1]) == [(count - 1 + n) % 63 + 1 for n in range(count)]
