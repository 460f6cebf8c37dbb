"""The read plan: each rule where it holds, where it breaks, and the legal rows that look broken."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from builders_b import (
    FULL,
    MINE,
    SIZE,
    STALE,
    Seat,
    ints,
    judge,
    naive_local_length,
    names,
    plan,
    two,
    with_cell,
)
from hypothesis import given
from hypothesis import strategies as st

from kvproof.trace.records import Group, Parallel, Plan
from kvproof.trace.rules import reads
from kvproof.trace.rules.reads import local_length

SLIDING = Group(0, "sliding", SIZE, 64, window=6)
CHUNKED = Group(0, "chunked", SIZE, 64, window=8)
STATE = Group(1, "state", SIZE, 16)
OTHER = Group(1, "other", SIZE, 16)


def test_the_rules_of_the_module() -> None:
    assert [r.name for r in MINE if r.check.__module__ == reads.__name__] == [
        "plan_seq_len_mismatch",
        "read_outside_cache",
        "read_null_block",
        "read_block_table_mismatch",
        "read_len_exceeds_binding",
        "pad_seq_len_nonzero",
        "read_table_overrun",
        "dcp_local_seq_len_mismatch",
    ]


def test_seq_len() -> None:
    record = two()
    assert record.seq_lens is not None
    (found,) = judge(replace(record, seq_lens=record.seq_lens - ints([1, 0, 0])))
    assert (found.rule, found.request, found.position) == ("plan_seq_len_mismatch", "a", 10)
    assert (found.expected, found.found) == ("10 tokens of context", "9 tokens of context")


def test_seq_lens_too_short() -> None:
    (found,) = judge(two(seq_lens=ints([10])))
    assert (found.rule, found.expected, found.found) == ("plan_seq_len_mismatch", "2 context lengths", "1")


@pytest.mark.parametrize(("length", "fires"), [(11, False), (9, False), (8, True), (12, True)])
def test_seq_len_without_positions_may_lie_lower_by_the_drafts_of_the_last_step(length: int, fires: bool) -> None:
    """Async speculation: the declared end is optimistic."""
    record = plan({"a": Seat(9, 2, [[1, 2, 3]], slack=2)}, positions=None, seq_lens=ints([length]))
    assert names(record) == (["plan_seq_len_mismatch"] if fires else [])
    if fires:
        assert judge(record)[0].expected == "9 to 11 tokens of context"


@pytest.mark.parametrize("start", [2, 9])
def test_seq_len_follows_the_workers_own_positions(start: int) -> None:
    record = plan({"a": Seat(start, 2, [[1, 2, 3]], slack=2, real=start - 2)})
    assert judge(record) == []
    assert names(replace(record, seq_lens=ints([start + 2]))) == ["plan_seq_len_mismatch"]


@pytest.mark.parametrize("whole", [True, False])
def test_block_table_mismatch(whole: bool) -> None:
    record = with_cell(two(whole=whole), 0, 2, 9)
    (found,) = judge(record)
    assert (found.rule, found.request, found.group, found.block, found.position) == (
        "read_block_table_mismatch",
        "a",
        0,
        9,
        8,
    )
    assert (found.expected, found.found) == ("block 3 in column 2", "block 9 in column 2")


def test_earlier_columns_are_compared_where_the_row_grew_or_all_rows_are_asked_for() -> None:
    assert names(with_cell(two(whole=False), 0, 0, 9)) == []
    assert names(with_cell(two(whole=False, fresh=np.array([False, True])), 0, 0, 9)) == []
    assert names(with_cell(two(whole=False, fresh=np.array([True, False])), 0, 0, 9)) == ["read_block_table_mismatch"]
    assert names(with_cell(two(), 0, 0, 9)) == ["read_block_table_mismatch"]


def test_a_shifted_row_is_one_finding() -> None:
    record = two()
    for column, block in enumerate([2, 3, 1]):
        record = with_cell(record, 0, column, block)
    (found,) = judge(record)
    assert found.found == "block 2 in column 0, and 2 more columns of this request"


def test_stale_ids_behind_the_declared_blocks_are_legal() -> None:
    """V2 keeps the tail of earlier batches: builders fill it with an id that is nobody's."""
    record = two()
    table = record.tables[0]
    assert table is not None
    assert (table[:2, 3:] == STALE).all()
    assert judge(record) == []
    assert judge(with_cell(record, 0, 3, 2**31 - 1)) == []


def test_look_ahead_blocks_behind_the_context_are_not_read() -> None:
    record = plan({"a": Seat(2, 1, [[1, 2, 3]])})
    assert judge(with_cell(with_cell(record, 0, 1, 9), 0, 2, 0)) == []


def test_a_shorter_request_beside_a_longer_one_is_read_only_as_far_as_its_own_context() -> None:
    record = plan({"a": Seat(3, 1, [[1, 2, 3]]), "b": Seat(9, 1, [[4, 5, 6]])})
    assert judge(with_cell(record, 0, 1, 9)) == []
    assert names(with_cell(record, 0, 0, 9)) == ["read_block_table_mismatch"]


def test_tables_are_judged_without_the_workers_context_lengths_too() -> None:
    record = with_cell(two(seq_lens=None), 0, 1, 9)
    assert names(record) == ["read_block_table_mismatch"]
    assert judge(with_cell(two(seq_lens=None), 0, 3, 9)) == []


def test_the_window_reaches_back_from_the_lowest_possible_start() -> None:
    """Without positions the drafts of the last step may all have been rejected."""
    seats = {"a": Seat(13, 1, [[5, 6, 7, 8]], slack=2)}
    record = with_cell(plan(seats, groups=(SLIDING,), positions=None), 0, 1, 50)
    assert names(record) == ["read_block_table_mismatch"]
    seats = {"a": Seat(13, 1, [[5, 6, 7, 8]])}
    assert names(with_cell(plan(seats, groups=(SLIDING,), positions=None), 0, 1, 50)) == []


@pytest.mark.parametrize("whole", [True, False])
def test_a_request_without_any_context_reads_nothing(whole: bool) -> None:
    record = plan({"a": Seat(0, 0, [[1]]), "b": Seat(0, 1, [[2]])}, whole=whole)
    assert judge(with_cell(record, 0, 0, 9)) == []


def test_a_block_where_none_is_declared_to_be() -> None:
    """The declaration holds the null block in a live column, the worker another one: the two still differ."""
    record = with_cell(plan({"a": Seat(9, 1, [[1, 0, 3]])}), 0, 1, 9)
    (found,) = judge(record)
    assert (found.rule, found.block, found.expected) == ("read_block_table_mismatch", 9, "block 0 in column 1")


def test_a_block_that_is_declared_outside_the_cache_is_read_there() -> None:
    found = judge(plan({"a": Seat(9, 1, [[1, 64, 3]])}))
    assert [(v.rule, v.block) for v in found] == [("read_outside_cache", 64)]


def test_context_far_beyond_everything_declared() -> None:
    table = np.full((1, 20), STALE, np.int32)
    table[0, :3] = [1, 2, 3]
    found = judge(plan({"a": Seat(9, 1, [[1, 2, 3]])}, tables=[table], seq_lens=ints([60])))
    assert [v.rule for v in found] == ["plan_seq_len_mismatch", "read_len_exceeds_binding"]
    assert found[1].found == "60 tokens of context (15 blocks)"


def test_places_with_decode_context_parallelism_are_in_tokens_of_the_request() -> None:
    parallel = Parallel(dcp_size=2, dcp_rank=0, interleave=2)
    record = plan({"a": Seat(9, 1, [[1, 2]])}, parallel=parallel)
    (found,) = judge(with_cell(record, 0, 1, 9))
    assert (found.rule, found.position) == ("read_block_table_mismatch", 8)
    table = record.tables[0]
    assert table is not None
    (found,) = judge(replace(record, tables=[table[:, :1]]))
    assert (found.rule, found.position) == ("read_table_overrun", 8)
    found = judge(plan({"a": Seat(15, 1, [[1]])}, parallel=parallel))[-1]
    assert (found.rule, found.position) == ("read_len_exceeds_binding", 8)
    assert found.expected == "at most 8 tokens of context (1 blocks)"


@pytest.mark.parametrize("block", [-1, 64, 2**31 - 1])
def test_read_outside_cache(block: int) -> None:
    (found,) = judge(with_cell(two(), 1, 1, block))
    assert (found.rule, found.request, found.group, found.block, found.position) == (
        "read_outside_cache",
        "b",
        0,
        block,
        4,
    )
    assert found.expected == "block 0 to 63"


def test_read_null_block() -> None:
    (found,) = judge(with_cell(two(), 0, 1, 0))
    assert (found.rule, found.request, found.group, found.block, found.position) == ("read_null_block", "a", 0, 0, 4)
    assert found.expected == "block 2 in column 1"


def test_a_null_block_that_is_declared_is_still_read() -> None:
    (found,) = judge(plan({"a": Seat(9, 1, [[1, 0, 3]])}))
    assert (found.rule, found.expected) == ("read_null_block", "block 0 in column 1")


@pytest.mark.parametrize(
    ("group", "start", "live"), [(SLIDING, 13, 2), (SLIDING, 12, 1), (CHUNKED, 13, 2), (CHUNKED, 7, 0)]
)
def test_columns_below_the_window_are_not_read(group: Group, start: int, live: int) -> None:
    """The rows lead with null blocks there, or with blocks that are another request's by now."""
    blocks = [5, 6, 7, 8]
    record = plan({"a": Seat(start, 1, [blocks])}, groups=(group,))
    for column in range(4):
        changed = with_cell(record, 0, column, 0)
        read = live <= column <= start // SIZE
        assert names(changed) == (["read_null_block"] if read else []), column
        changed = with_cell(record, 0, column, 50)
        assert names(changed) == (["read_block_table_mismatch"] if read else []), column


def test_a_wrong_first_position_does_not_move_the_window() -> None:
    record = plan({"a": Seat(13, 1, [[0, 0, 6, 7]], real=3)}, groups=(SLIDING,))
    assert "read_null_block" not in names(record)
    assert "plan_position_start_mismatch" in names(record)


@pytest.mark.parametrize("group", [STATE, OTHER])
def test_state_and_cross_attention_rows_may_hold_null_blocks_but_nothing_outside(group: Group) -> None:
    record = plan({"a": Seat(9, 1, [[1, 2, 3], [0, 0, 5]])}, groups=(FULL, group))
    assert judge(record) == []
    assert judge(with_cell(record, 0, 2, 7, group=1)) == []
    (found,) = judge(with_cell(record, 0, 1, 16, group=1))
    assert (found.rule, found.group, found.block, found.position) == ("read_outside_cache", 1, 16, None)
    assert judge(with_cell(record, 0, 3, 16, group=1)) == [], "behind the declared blocks"


def test_read_len_exceeds_binding() -> None:
    record = plan({"a": Seat(7, 2, [[1, 2]])})
    found = {v.rule: v for v in judge(record)}
    assert set(found) == {"read_len_exceeds_binding", "write_target_mismatch"}
    violation = found["read_len_exceeds_binding"]
    assert (violation.request, violation.group, violation.position) == ("a", 0, 8)
    assert violation.expected == "at most 8 tokens of context (2 blocks)"
    assert violation.found == "9 tokens of context (3 blocks)"


def test_pad_seq_len() -> None:
    (found,) = judge(two(seq_lens=ints([10, 6, 0, 3, 1])))
    assert (found.rule, found.request, found.expected) == (
        "pad_seq_len_nonzero",
        None,
        "0 tokens of context in all 3 padding rows",
    )
    assert found.found == "3 tokens in row 3, and 1 more rows"


def test_table_overrun() -> None:
    record = two()
    table = record.tables[0]
    assert table is not None
    (found,) = judge(replace(record, tables=[table[:, :2]]))
    assert (found.rule, found.request, found.group, found.position) == ("read_table_overrun", "a", 0, 8)
    assert (found.expected, found.found) == ("at most 2 columns", "3 columns to be read")
    (found,) = judge(replace(record, tables=[table[:1]]))
    assert (found.rule, found.request, found.found) == ("read_table_overrun", None, "1 rows")


def test_redirected_tables_may_hold_the_null_block() -> None:
    record = two(redirected=True)
    assert judge(with_cell(record, 0, 0, 0)) == []
    assert names(with_cell(record, 0, 0, -3)) == ["read_outside_cache"]


def test_a_table_that_is_not_shown_is_not_judged() -> None:
    assert judge(two(tables=[None])) == []


def test_a_resumed_request_with_other_blocks_is_judged_by_its_new_ones() -> None:
    """The shadow replaced the row; the worker's old row is stale."""
    record = two()
    shadow = record.shadow
    row = shadow.add("a")
    shadow.append(0, row, ints([11, 12, 13]))
    found, *_ = judge(record)
    assert (found.rule, found.request) == ("write_target_mismatch", "a")
    for column, block in enumerate([11, 12, 13]):
        record = with_cell(record, 0, column, block)
    assert "read_block_table_mismatch" not in names(record)


def dcp(slack: int = 0) -> Plan:
    """Rank 1 of 2 with 10 tokens of context in runs of 2: it holds 2 3 6 7."""
    return plan({"a": Seat(9, 1, [[1, 2]], slack=slack)}, parallel=Parallel(dcp_size=2, dcp_rank=1, interleave=2))


def test_dcp_local_seq_len() -> None:
    record = dcp()
    assert record.local_seq_lens is not None
    assert record.local_seq_lens.tolist() == [4]
    assert judge(record) == []
    (found,) = judge(replace(record, local_seq_lens=ints([5])))
    assert (found.rule, found.request, found.position) == ("dcp_local_seq_len_mismatch", "a", 10)
    assert (found.expected, found.found) == ("4 local tokens", "5 local tokens")
    (found,) = judge(replace(record, local_seq_lens=ints([])))
    assert (found.rule, found.expected, found.found) == ("dcp_local_seq_len_mismatch", "1 local lengths", "0")


def test_dcp_local_seq_len_may_be_optimistic() -> None:
    """V1 takes it from the context it had without rejected drafts."""
    assert judge(replace(dcp(slack=2), local_seq_lens=ints([6]))) == []
    assert names(replace(dcp(slack=2), local_seq_lens=ints([7]))) == ["dcp_local_seq_len_mismatch"]


def test_local_lengths_mean_nothing_without_decode_context_parallelism() -> None:
    assert judge(two(local_seq_lens=ints([3, 3, 3]))) == []


@given(tokens=st.integers(0, 80), ranks=st.integers(1, 5), run=st.integers(1, 5), data=st.data())
def test_local_length_against_counting(tokens: int, ranks: int, run: int, data: st.DataObject) -> None:
    parallel = Parallel(dcp_size=ranks, dcp_rank=data.draw(st.integers(0, ranks - 1)), interleave=run)
    assert local_length(ints([tokens]), parallel).tolist() == [naive_local_length(tokens, parallel)]


@given(
    kind=st.sampled_from(["full", "sliding", "chunked"]),
    ranks=st.integers(1, 3),
    start=st.integers(0, 40),
    tokens=st.integers(1, 9),
    window=st.integers(1, 12),
)
def test_live_columns_against_every_token_that_attention_sees(
    kind: str, ranks: int, start: int, tokens: int, window: int
) -> None:
    """A column is read when some query token of the step attends to one of its tokens."""
    group = Group(0, kind, SIZE, 64, window=None if kind == "full" else window)
    span = SIZE * ranks
    seen = set()
    for query in range(start, start + tokens):
        low = {"full": 0, "sliding": query - window + 1, "chunked": query // window * window}[kind]
        seen |= {key // span for key in range(max(low, 0), query + 1)}
    blocks = list(range(1, 1 - (-(start + tokens) // span)))
    record = plan({"a": Seat(start, tokens, [blocks])}, groups=(group,), parallel=Parallel(dcp_size=ranks))
    for column in range(len(blocks)):
        changed = with_cell(record, 0, column, 60)
        assert ("read_block_table_mismatch" in names(changed)) == (column in seen), column
