"""The write plan: each rule where it holds, where it breaks, and the legal plans that look broken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders_b import (
    FULL,
    MINE,
    NUMBERS,
    SIZE,
    Seat,
    arrays,
    ints,
    judge,
    naive_slot,
    names,
    never_raises,
    plan,
    two,
    with_slot,
)
from hypothesis import given
from hypothesis import strategies as st

from kvproof.trace.records import Group, Parallel, Plan
from kvproof.trace.rules import writes

SLIDING = Group(0, "sliding", SIZE, 64, window=6)
STATE = Group(1, "state", SIZE, 64)
DCP = [Parallel(dcp_size=2, dcp_rank=rank, interleave=run) for rank in (0, 1) for run in (1, 2, 4)]


def test_the_rules_of_the_module() -> None:
    assert [r.name for r in MINE if r.check.__module__ == writes.__name__] == [
        "plan_request_set_mismatch",
        "plan_query_len_mismatch",
        "plan_token_count_mismatch",
        "plan_position_not_contiguous",
        "plan_position_start_mismatch",
        "write_outside_cache",
        "null_block_write",
        "write_slot_pad_on_real_token",
        "write_slot_collision",
        "write_target_mismatch",
        "pad_slot_not_masked",
        "write_block_read_by_other",
        "dcp_local_slot_mismatch",
        "pcp_partition_mismatch",
    ]


def test_every_rule_says_what_it_means_and_yields_to_earlier_rules() -> None:
    for rule in MINE:
        assert rule.predicate
        assert rule.fields
        assert rule.meaning.endswith(".")
        judged = [other.name for other in MINE if other.record is rule.record]
        assert all(judged.index(other) < judged.index(rule.name) for other in rule.yields_to)


def test_a_sound_plan_breaks_nothing() -> None:
    assert judge(two()) == []
    assert judge(two(whole=False)) == []
    assert judge(two(whole=False, fresh=np.array([False, True]))) == []


def test_an_empty_plan_breaks_nothing() -> None:
    assert judge(plan({})) == []
    assert judge(plan({}, pad_tokens=4, pad_rows=2)) == []


def test_a_plan_without_positions_and_padding_breaks_nothing() -> None:
    record = plan({"a": Seat(9, 1, [[1, 2, 3]])}, positions=None, seq_lens=None)
    assert judge(record) == []


@pytest.mark.parametrize("parallel", DCP)
def test_a_sound_plan_with_decode_context_parallelism_breaks_nothing(parallel: Parallel) -> None:
    seats = {"a": Seat(17, 3, [[1, 2, 3]]), "b": Seat(0, 11, [[4, 5]])}
    assert judge(plan(seats, parallel=parallel, pad_tokens=2, pad_rows=1)) == []


def test_request_set() -> None:
    (found,) = judge(two(declared_ids=["a", "b", "c"]))
    assert (found.rule, found.request, found.found) == ("plan_request_set_mismatch", "c", "0 rows")
    found, *_ = judge(two(declared_ids=["a"], rows=ints([0, -1]), tokens=ints([1, -1]), start=ints([9, -1])))
    assert (found.rule, found.request, found.found) == ("plan_request_set_mismatch", "b", "a row in the batch")


def test_an_undeclared_request_is_the_only_reason_given() -> None:
    record = two(declared_ids=["a"], rows=ints([0, -1]), tokens=ints([1, -1]), start=ints([9, -1]))
    assert names(record) == ["plan_request_set_mismatch"]


def test_request_twice_in_the_batch() -> None:
    record = two()
    found, *_ = judge(replace(record, ids=["a", "a"], declared_ids=["a"]))
    assert (found.rule, found.request, found.found) == ("plan_request_set_mismatch", "a", "2 rows")


def test_query_len() -> None:
    found = judge(two(query_start=ints([0, 2, 7, 7])))
    assert [(v.rule, v.request, v.expected, v.found) for v in found[:2]] == [
        ("plan_query_len_mismatch", "a", "1 query tokens", "2 query tokens"),
        ("plan_query_len_mismatch", "b", "6 query tokens", "5 query tokens"),
    ]
    assert not {"plan_token_count_mismatch", "plan_position_start_mismatch", "plan_seq_len_mismatch"} & {
        v.rule for v in found
    }


def test_query_start_too_short() -> None:
    found, *_ = judge(two(query_start=ints([0, 1])))
    assert (found.rule, found.request, found.found) == ("plan_query_len_mismatch", "b", "no end in query_start")


def test_token_count() -> None:
    found, *_ = judge(two(num_tokens=8))
    assert (found.rule, found.expected, found.found) == ("plan_token_count_mismatch", "7 tokens", "8 tokens")
    found, *_ = judge(two(query_start=ints([1, 2, 8, 8])))
    assert (found.rule, found.found) == ("plan_token_count_mismatch", "an end at 8 tokens")


def test_slots_too_short() -> None:
    record = two()
    assert record.slots[0] is not None
    found = judge(replace(record, slots=[record.slots[0][:5]]))
    assert [(v.rule, v.group, v.expected, v.found) for v in found] == [
        ("plan_token_count_mismatch", 0, "slots for 7 tokens", "5 slots")
    ]


def test_positions_not_contiguous() -> None:
    record = two()
    assert record.positions is not None
    positions = record.positions.copy()
    positions[4] = 9
    found, *_ = judge(replace(record, positions=positions))
    assert (found.rule, found.request, found.position) == ("plan_position_not_contiguous", "b", 9)
    assert (found.expected, found.found) == (
        "position 3 after position 2",
        "position 9, and 1 more breaks in this request",
    )


def test_positions_too_short() -> None:
    found, *_ = judge(two(positions=ints([9, 0, 1])))
    assert (found.rule, found.expected, found.found) == ("plan_position_not_contiguous", "7 positions", "3 positions")


@pytest.mark.parametrize(("slack", "real", "fires"), [(0, 8, True), (2, 8, False), (2, 7, False), (2, 6, True)])
def test_position_start_may_lie_lower_by_the_drafts_of_the_last_step(slack: int, real: int, fires: bool) -> None:
    """Async speculation: the declared start is optimistic."""
    found = judge(plan({"a": Seat(9, 2, [[1, 2, 3]], slack=slack, real=real)}))
    assert [v.rule for v in found] == (["plan_position_start_mismatch"] if fires else [])
    if fires:
        (violation,) = found
        assert (violation.request, violation.position, violation.found) == ("a", real, f"first position {real}")
        assert violation.expected == ("first position 7 to 9" if slack else "first position 9")


def test_position_start_never_lies_higher() -> None:
    (found,) = judge(plan({"a": Seat(9, 2, [[1, 2, 3]], slack=2, real=10)}))
    assert (found.rule, found.position) == ("plan_position_start_mismatch", 10)


def test_negative_first_position() -> None:
    positions = ints([-1, 0, 1, 2, 3, 4, 5])
    found = judge(two(positions=positions))
    assert ("plan_position_start_mismatch", "a", -1) in [(v.rule, v.request, v.position) for v in found]


@pytest.mark.parametrize("slot", [-2, 64 * SIZE, 2**40])
def test_write_outside_cache(slot: int) -> None:
    (found,) = judge(with_slot(two(), 2, slot))
    assert (found.rule, found.request, found.group) == ("write_outside_cache", "b", 0)
    assert (found.slot, found.position, found.expected) == (slot, 1, "slot 0 to 255, or -1")


def test_last_slot_of_the_cache_is_inside() -> None:
    assert judge(plan({"a": Seat(3, 1, [[63]])})) == []


def test_null_block_write() -> None:
    (found,) = judge(with_slot(two(), 0, 1))
    assert (found.rule, found.request, found.group, found.block, found.slot, found.position) == (
        "null_block_write",
        "a",
        0,
        0,
        1,
        9,
    )
    assert (found.expected, found.found) == ("slot 13 (block 3, offset 1)", "slot 1 (block 0, offset 1)")
    (found,) = judge(with_slot(two(), 0, 0))
    assert (found.block, found.slot, found.found) == (0, 0, "slot 0 (block 0, offset 0)")
    assert names(with_slot(two(), 0, SIZE)) == ["write_target_mismatch"]


def test_redirected_writes_may_all_go_to_the_null_block() -> None:
    """vLLM can send a warm-up's writes to the null block on purpose; the worker's tables then hold it too."""
    record = two()
    slots, table = record.slots[0], record.tables[0]
    assert slots is not None
    assert table is not None
    record = replace(
        record, redirected=True, slots=[np.where(slots >= 0, slots % SIZE, -1)], tables=[np.zeros_like(table)]
    )
    assert judge(record) == []


def test_pad_on_a_real_token() -> None:
    (found,) = judge(with_slot(two(), 3, -1))
    assert (found.rule, found.request, found.slot, found.position) == ("write_slot_pad_on_real_token", "b", -1, 2)
    assert (found.expected, found.found) == ("slot 18 (block 4, offset 2)", "slot -1 (writes nothing)")


def test_slot_collision_names_the_token_in_the_wrong_place() -> None:
    (found,) = judge(with_slot(two(), 0, 17))
    assert (found.rule, found.request, found.group, found.block, found.slot, found.position) == (
        "write_slot_collision",
        "a",
        0,
        4,
        17,
        9,
    )
    assert found.expected == "slot 13 (block 3, offset 1)"
    assert found.found == "slot 17 (block 4, offset 1), which position 1 of request b is written to as well"


def test_slot_collision_of_a_block_bound_twice() -> None:
    found = judge(plan({"a": Seat(1, 1, [[4]]), "b": Seat(1, 1, [[4]])}))
    assert [(v.rule, v.request) for v in found] == [
        ("write_slot_collision", "b"),
        ("write_block_read_by_other", "a"),
        ("write_block_read_by_other", "b"),
    ]


def test_slot_collision_without_positions() -> None:
    record = plan({"a": Seat(1, 1, [[4]]), "b": Seat(1, 1, [[5]])}, positions=None)
    (found,) = judge(with_slot(record, 1, 17))
    assert (found.rule, found.request, found.expected) == ("write_slot_collision", "b", "a slot of its own")
    assert found.position is None


def test_target_mismatch_is_one_finding_per_request_at_the_first_token() -> None:
    record = two()
    for token in range(1, 5):
        record = with_slot(record, token, 40 + token)
    (found,) = judge(record)
    assert (found.rule, found.request, found.group, found.block, found.slot, found.position) == (
        "write_target_mismatch",
        "b",
        0,
        10,
        41,
        0,
    )
    assert found.expected == "slot 16 (block 4, offset 0)"
    assert found.found == "slot 41 (block 10, offset 1), and 3 more tokens of this request"


def test_a_specific_reason_silences_the_target_mismatch() -> None:
    record = with_slot(with_slot(two(), 1, 2), 2, 50)
    assert names(record) == ["null_block_write"]


def test_target_beyond_the_declared_blocks() -> None:
    record = plan({"a": Seat(7, 2, [[1, 2]])}, seq_lens=None)
    assert "write_target_mismatch" not in names(with_slot(record, 1, -1))
    found = {v.rule: v for v in judge(with_slot(record, 1, 45))}
    assert found["write_target_mismatch"].expected == "no write: no block is declared for this position"
    assert found["write_target_mismatch"].position == 8


def test_pad_slot_not_masked() -> None:
    (found,) = judge(with_slot(two(), 8, 30))
    assert (found.rule, found.request, found.group, found.block, found.slot) == ("pad_slot_not_masked", None, 0, 7, 30)
    assert found.found == "slot 30 (block 7, offset 2) in padding entry 1"


def same_step(**seat: Any) -> Plan:
    """Request b hits block 4 as its prefix while request a writes it in the same step."""
    values = {"start": 4, "tokens": 2, "blocks": [[4, 5]], **seat}
    return plan({"a": Seat(0, 6, [[4, 6]]), "b": Seat(**values)})


def test_two_identical_prompts_may_share_a_block_that_is_filled_in_this_step() -> None:
    assert judge(same_step()) == []


def test_a_shared_block_may_be_filled_exactly() -> None:
    assert judge(plan({"a": Seat(0, 4, [[4]]), "b": Seat(4, 2, [[4, 5]])})) == []


def test_several_shared_blocks_of_several_readers() -> None:
    """Readers b and c hold 4 and 5 as a legal prefix; d holds 5 and 6 where they do not belong."""
    seats = {
        "a": Seat(0, 12, [[4, 5, 6]]),
        "b": Seat(8, 2, [[4, 5, 7]]),
        "c": Seat(8, 2, [[4, 5, 8]]),
    }
    assert judge(plan(seats)) == []
    seats["d"] = Seat(8, 2, [[5, 6, 9]])
    (found,) = judge(plan(seats))
    assert (found.rule, found.request, found.block) == ("write_block_read_by_other", "a", 5)
    assert "request d" in found.expected
    assert found.found == "request a writes block 5, and 1 more such blocks"


@pytest.mark.parametrize(("tokens", "fires"), [(8, False), (7, True)])
def test_a_shared_block_of_context_parallel_ranks_covers_their_tokens(tokens: int, fires: bool) -> None:
    seats = {"a": Seat(0, tokens, [[4]]), "b": Seat(8, 2, [[4, 5]])}
    record = plan(seats, parallel=Parallel(dcp_size=2, interleave=4))
    assert names(record) == (["write_block_read_by_other"] if fires else [])


def test_a_block_read_by_another_request_that_is_not_filled_in_this_step() -> None:
    record = plan({"a": Seat(0, 3, [[4]]), "b": Seat(4, 2, [[4, 5]])})
    (found,) = judge(record)
    assert (found.rule, found.request, found.group, found.block) == ("write_block_read_by_other", "a", 0, 4)
    assert "request b" in found.expected


def test_a_block_read_by_another_request_at_another_column() -> None:
    record = plan({"a": Seat(0, 6, [[4, 6]]), "b": Seat(8, 2, [[7, 4, 5]])})
    (found,) = judge(record)
    assert (found.rule, found.request, found.block) == ("write_block_read_by_other", "a", 4)
    assert "positions 4 on" in found.expected


def test_a_block_that_only_waits_in_another_request_is_not_read() -> None:
    """Requests outside the plan, and columns that are not computed yet, read nothing in this step."""
    assert judge(plan({"a": Seat(0, 3, [[4]])}, others={"c": [[4]]})) == []
    assert names(plan({"a": Seat(0, 3, [[4]]), "b": Seat(0, 2, [[5, 4]])})) == []


def test_a_freed_block_of_a_sliding_window_is_reused() -> None:
    """The id stays in the row of the request that left it behind; it reads only inside its window."""
    seats = {"a": Seat(0, 3, [[4]]), "b": Seat(13, 1, [[4, 5, 6, 7]])}
    assert judge(plan(seats, groups=(SLIDING,))) == []
    seats["b"] = Seat(9, 1, [[4, 5, 6, 7]])  # the window is 4..9, block 4 holds 0..3
    assert judge(plan(seats, groups=(SLIDING,))) == []
    seats["b"] = Seat(8, 1, [[4, 5, 6, 7]])  # the window is 3..8
    assert names(plan(seats, groups=(SLIDING,))) == ["write_block_read_by_other"]


def test_a_sliding_window_row_may_lead_with_null_blocks() -> None:
    assert judge(plan({"a": Seat(13, 1, [[0, 0, 6, 7]])}, groups=(SLIDING,))) == []


def test_state_groups_may_write_the_null_block() -> None:
    """Mamba rows start with 0 and do get per-token slots, partly in the null block."""
    record = plan({"a": Seat(9, 1, [[1, 2, 3], [0, 0, 9]])}, groups=(FULL, STATE))
    record.slots[1] = ints([2])
    assert judge(record) == []


@pytest.mark.parametrize("parallel", DCP)
def test_dcp_local_slot(parallel: Parallel) -> None:
    record = plan({"a": Seat(0, 16, [[1, 2]])}, parallel=parallel)
    slots = record.slots[0]
    assert slots is not None
    foreign, local = int(np.flatnonzero(slots < 0)[0]), int(np.flatnonzero(slots >= 0)[0])
    (found,) = judge(with_slot(record, foreign, 40))
    assert (found.rule, found.request, found.slot, found.position) == ("dcp_local_slot_mismatch", "a", 40, foreign)
    assert found.expected == "slot -1 (writes nothing)"
    (found,) = judge(with_slot(record, local, 40))
    assert (found.rule, found.expected, found.position) == (
        "dcp_local_slot_mismatch",
        "slot 4 (block 1, offset 0)",
        local,
    )
    (found,) = judge(with_slot(record, local, -1))
    assert found.rule == "write_slot_pad_on_real_token"


def pcp(rows: list[int], slots: list[int]) -> Plan:
    """Request a prefills 4 tokens over two ranks with 3 gathered entries each."""
    seats = {"a": Seat(0, 4, [[5]])}
    return plan(
        seats, parallel=Parallel(pcp_size=2), pcp_rows=ints(rows), slots=[ints(slots)], tables=[None], seq_lens=None
    )


def test_pcp_partition() -> None:
    assert judge(pcp([0, 3, -1, 1, 2, -1], [20, 23, -1, 21, 22, -1])) == []
    found = judge(pcp([0, 3, -1, 1, 1, -1], [20, 23, -1, 21, 21, -1]))
    assert [v.rule for v in found] == ["write_slot_pad_on_real_token", "pcp_partition_mismatch"]
    assert (found[1].request, found[1].position, found[1].found) == (
        "a",
        1,
        "2 entries, and 1 more tokens of this request",
    )


def test_pcp_slots_are_judged_in_token_order() -> None:
    (found,) = judge(pcp([0, 3, -1, 1, 2, -1], [20, 23, -1, 41, 22, -1]))
    assert (found.rule, found.slot, found.position) == ("write_target_mismatch", 41, 1)
    (found,) = judge(pcp([0, 3, -1, 1, 2, -1], [20, 23, 41, 21, 22, -1]))
    assert (found.rule, found.slot) == ("pad_slot_not_masked", 41)


def test_pcp_without_rows_judges_no_slots() -> None:
    record = pcp([], [99, 98, 97, 96, 95, 94])
    assert judge(replace(record, pcp_rows=None)) == []


def test_pcp_rows_that_do_not_fit() -> None:
    found = judge(pcp([0, 3, -1, 1, 2, 9], [20, 23, -1, 21, 22, -1]))
    assert [(v.rule, v.found) for v in found] == [("pcp_partition_mismatch", "token 9 in gathered entry 5")]
    found = judge(pcp([0, 3], [20, 23]))
    assert found[-1].rule == "pcp_partition_mismatch"
    assert found[-1].found == "2 gathered entries"
    found = judge(pcp([0, 3, 1, 2], [20, 23, 21, 22, -1]))
    assert [(v.rule, v.group, v.found) for v in found][-1] == ("pcp_partition_mismatch", 0, "5 slots")


@st.composite
def seats(draw: st.DrawFn, span: int) -> dict[str, Seat]:
    """A few requests with disjoint blocks that cover what they are given, or sometimes do not."""
    result = {}
    block = 1
    for name in draw(st.lists(st.sampled_from("abcd"), unique=True, max_size=4)):
        start, tokens = draw(st.integers(0, 20)), draw(st.integers(1, 9))
        need = max(-(-(start + tokens) // span) - draw(st.sampled_from([0, 0, 0, 1])), 0)
        result[name] = Seat(start, tokens, [list(range(block, block + need))])
        block += need
    return result


@given(data=st.data(), size=st.sampled_from([1, 4, 8]), ranks=st.integers(1, 4), run=st.sampled_from([1, 2, 4]))
def test_expected_slots_against_the_formula_token_by_token(
    data: st.DataObject, size: int, ranks: int, run: int
) -> None:
    run = min(run, size)
    rank = data.draw(st.integers(0, ranks - 1))
    parallel = Parallel(dcp_size=ranks, dcp_rank=rank, interleave=run)
    group = Group(0, "full", size, 200)
    parts = data.draw(seats(size * ranks))
    record = plan(parts, groups=(group,), parallel=parallel)
    naive = [
        naive_slot(seat.start + i, seat.blocks[0], size, parallel)
        for seat in parts.values()
        for i in range(seat.tokens)
    ]
    expected = record.expected_slots(group)
    assert expected is not None
    assert expected.tolist() == naive


@given(ranks=st.integers(1, 4), size=st.sampled_from([2, 4]), tokens=st.integers(1, 40))
def test_the_ranks_share_every_token_once(ranks: int, size: int, tokens: int) -> None:
    blocks = list(range(1, -(-tokens // (size * ranks)) + 1))
    held = np.zeros(tokens, np.int64)
    for rank in range(ranks):
        parallel = Parallel(dcp_size=ranks, dcp_rank=rank, interleave=2)
        group = Group(0, "full", size, 200)
        expected = plan({"a": Seat(0, tokens, [blocks])}, groups=(group,), parallel=parallel).expected_slots(group)
        assert expected is not None
        held += expected >= 0
        local = expected[expected >= 0]
        assert len(np.unique(local)) == len(local)
    assert (held == 1).all()


@given(data=st.data())
def test_sound_plans_of_any_shape_break_nothing(data: st.DataObject) -> None:
    """The covering ones; a plan without enough blocks is bind_insufficient_blocks' and read_len_exceeds_binding's."""
    parts = {n: s for n, s in data.draw(seats(SIZE)).items() if len(s.blocks[0]) * SIZE >= s.start + s.tokens}
    record = plan(
        parts,
        pad_tokens=data.draw(st.integers(0, 3)),
        pad_rows=data.draw(st.integers(0, 2)),
        whole=data.draw(st.booleans()),
        fresh=np.array([data.draw(st.booleans()) for _ in parts], np.bool_),
    )
    assert judge(record) == []


ARRAYS = ["rows", "tokens", "start", "slack", "query_start", "positions", "seq_lens", "local_seq_lens", "pcp_rows"]
PARALLEL = [Parallel(), Parallel(dcp_size=2, dcp_rank=1, interleave=2), Parallel(pcp_size=2)]


@given(data=st.data())
def test_corrupt_plans_never_make_a_rule_raise(data: st.DataObject) -> None:
    groups = (
        Group(0, "sliding", SIZE, 64, window=6),
        Group(1, "chunked", SIZE, 64, window=8),
        Group(2, "state", 8, 9),
        Group(3, "other", 1, 5),
        Group(4, "full", 3, 7),
    )
    blocks = st.lists(st.integers(-3, 70), max_size=5)
    parts = {
        name: Seat(data.draw(st.integers(0, 9)), data.draw(st.integers(0, 5)), [data.draw(blocks) for _ in groups])
        for name in data.draw(st.lists(st.sampled_from("abc"), unique=True, max_size=3))
    }
    record = plan(parts, groups, data.draw(st.sampled_from(PARALLEL)), data.draw(st.integers(0, 2)))
    record.num_tokens = data.draw(st.just(record.num_tokens) | NUMBERS)
    for name in data.draw(st.lists(st.sampled_from(ARRAYS), unique=True)):
        value = data.draw(arrays())
        optional = name in ("positions", "seq_lens", "local_seq_lens", "pcp_rows")
        setattr(record, name, data.draw(st.sampled_from([value, value.astype(np.int32)] + [None] * optional)))
    if data.draw(st.booleans()):
        record.slots = [data.draw(st.none() | arrays()) for _ in range(data.draw(st.integers(0, 6)))]
    if data.draw(st.booleans()):
        record.tables = [
            data.draw(st.none() | st.tuples(st.integers(0, 4), st.integers(0, 4)).map(lambda shape: np.full(shape, 70)))
            for _ in range(data.draw(st.integers(0, 6)))
        ]
    record.ids = data.draw(st.just(record.ids) | st.lists(st.sampled_from("abxy"), max_size=4))
    record.declared_ids = data.draw(st.just(record.declared_ids) | st.lists(st.sampled_from("abz"), max_size=4))
    record.whole, record.redirected = data.draw(st.booleans()), data.draw(st.booleans())
    record.fresh = data.draw(st.none() | arrays())
    never_raises(record)
