"""Which blocks may be bound: each rule where it holds, where it breaks, and the legal steps that look broken."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from builders_a import BLOCK, FULL_GROUP, MINE, Part, World, ints, judge, names
from hypothesis import given
from hypothesis import strategies as st

from kvproof.trace.records import Cells, Group, Schedule
from kvproof.trace.rules import binding

SLIDING = Group(0, "sliding", BLOCK, 32, window=6)
STATE = Group(1, "state", BLOCK, 32)
OTHER = Group(1, "other", BLOCK, 32)


def running(name: str = "a", length: int = 8, blocks: tuple[int, ...] = (1, 2, 3)) -> World:
    """A world with one request that has ``length`` tokens in the cache."""
    world = World()
    world.step(new={name: Part(0, length, [blocks])})
    return world


def test_sound_steps_break_nothing() -> None:
    world = running()
    assert judge(world.step(running={"a": Part(8, 1)}, counts={})) == []
    assert judge(world.step(running={"a": Part(9, 7, [[4]])}, new={"b": Part(0, 5, [[5, 6]])}, counts={})) == []


def test_group_count() -> None:
    world = World(FULL_GROUP, STATE)
    assert judge(world.step(new={"a": Part(0, 3, [[1], [2]])})) == []
    (found,) = judge(world.step(new={"b": Part(0, 3, [[3]])}))
    assert (found.rule, found.request) == ("bind_group_count_mismatch", "b")
    assert (found.expected, found.found) == ("block ids for 2 groups", "block ids for 1 groups")


@pytest.mark.parametrize("block", [-1, -7, 32, 2**40])
def test_block_out_of_range(block: int) -> None:
    (found,) = judge(World().step(new={"a": Part(0, 3, [[1, block]])}, counts={}))
    assert found.rule == "bind_block_out_of_range"
    assert (found.request, found.group, found.block, found.position) == ("a", 0, block, 4)
    assert (found.expected, found.found) == ("a block from 0 to 31", f"block {block}")


def test_block_out_of_range_of_a_state_group_has_no_position() -> None:
    (found,) = judge(World(FULL_GROUP, STATE).step(new={"a": Part(0, 3, [[1], [0, 99]])}))
    assert (found.rule, found.group, found.block, found.position) == ("bind_block_out_of_range", 1, 99, None)


def test_last_block_of_the_pool_is_in_range() -> None:
    assert judge(World().step(new={"a": Part(0, 3, [[31]])}, counts={})) == []


def test_null_block_in_write_range() -> None:
    (found,) = judge(World().step(new={"a": Part(0, 7, [[3, 0]])}, counts={}))
    assert found.rule == "bind_null_block_in_write_range"
    assert (found.request, found.group, found.block, found.position) == ("a", 0, 0, 4)
    assert found.found == "block 0 (null)"


def test_null_blocks_that_nobody_writes_are_legal() -> None:
    """Rows of a sliding window lead with null blocks; rows of recurrent state start with them and are never slotted."""
    world = World(SLIDING, STATE)
    assert judge(world.step(new={"a": Part(16, 3, [[0, 0, 3, 4, 5], [0, 0, 0, 0, 6]])}, counts={})) == []


def test_null_block_as_a_redirected_target_is_legal() -> None:
    assert judge(World().step(new={"a": Part(0, 7, [[3, 0]])}, redirected=True)) == []


def test_duplicate_block_in_one_request() -> None:
    world = running()
    (found,) = judge(world.step(running={"a": Part(8, 5, [[2]])}), "bind_duplicate_block_in_request")
    assert (found.request, found.group, found.block, found.position) == ("a", 0, 2, 12)
    assert found.found == "block 2 at column 1 and at column 3"


def test_duplicate_block_is_found_beside_sharing_requests() -> None:
    """A shared prefix makes blocks be used twice; only the row that repeats one is named."""
    world = running("a", 8, (1, 2, 3))
    step = world.step(new={"b": Part(8, 7, [[1, 2, 4, 4]]), "c": Part(8, 2, [[1, 2, 5]])})
    (found,) = judge(step, "bind_duplicate_block_in_request")
    assert (found.request, found.block, found.position) == ("b", 4, 12)


def test_duplicates_that_are_legal() -> None:
    """Null blocks repeat; a block freed below the window comes back; state blocks move; rings repeat."""
    world = World(SLIDING, STATE)
    world.step(new={"a": Part(0, 16, [[1, 2, 3, 4], [0, 0, 5, 6]])})
    assert judge(world.step(running={"a": Part(16, 4, [[1], [5]])}, counts={})) == []
    ring = World(FULL_GROUP, OTHER)
    assert judge(ring.step(new={"a": Part(0, 5, [[1, 2], [7, 7]])}, counts={})) == []


def test_a_row_that_did_not_grow_is_not_judged_again() -> None:
    world = running()
    world.step(running={"a": Part(8, 1, [[2]])})
    assert judge(world.step(running={"a": Part(9, 1)}), "bind_duplicate_block_in_request") == []


def test_insufficient_blocks() -> None:
    (found,) = judge(World().step(new={"a": Part(0, 13, [[1, 2]])}, counts={}))
    assert found.rule == "bind_insufficient_blocks"
    assert (found.request, found.group, found.position) == ("a", 0, 8)
    assert (found.expected, found.found) == ("at least 4 blocks for 13 tokens", "2 blocks")


def test_insufficient_blocks_far_behind_the_row() -> None:
    (found,) = judge(World().step(new={"a": Part(2**62, 2**61, [[1, 2]])}), "bind_insufficient_blocks")
    assert found.position == 2**62


def test_more_blocks_than_tokens_are_legal() -> None:
    """Look-ahead slots and asynchronous external loads own blocks that no token of the step needs."""
    assert judge(World().step(new={"a": Part(0, 4, [[1, 2, 3, 4]])}, counts={})) == []


def test_groups_without_token_slots_need_no_block_per_token() -> None:
    for group in (STATE, OTHER):
        assert judge(World(FULL_GROUP, group).step(new={"a": Part(0, 8, [[1, 2], [0]])}, counts={})) == []


def test_a_block_another_request_has_written() -> None:
    """b is to write block 2, which holds a's tokens 4 ... 7."""
    world = running()
    (found,) = judge(world.step(new={"b": Part(0, 6, [[4, 2]])}, counts={}))
    assert found.rule == "bind_write_block_shared"
    assert (found.request, found.group, found.block, found.position) == ("b", 0, 2, 4)
    assert found.found == "a block of request a as well, at its column 1, with 8 tokens"


def test_a_block_another_request_writes_too() -> None:
    """Both must write: neither is a reader."""
    step = World().step(new={"a": Part(0, 4, [[5]]), "b": Part(0, 4, [[5]])}, counts={})
    assert [(v.rule, v.request, v.block, v.position) for v in judge(step)] == [
        ("bind_write_block_shared", "a", 5, 0),
        ("bind_write_block_shared", "b", 5, 0),
    ]


def test_a_prefix_hit_of_the_same_step_is_legal() -> None:
    """b's prompt starts like a's: a fills blocks 1 and 2 in this step, b reads them in the same step."""
    step = World().step(new={"a": Part(0, 9, [[1, 2, 3]]), "b": Part(8, 1, [[1, 2, 4]])}, counts={})
    assert judge(step) == []


def test_a_prefix_hit_on_the_block_a_running_request_fills_is_legal() -> None:
    world = running("a", 6, (1, 2))
    assert judge(world.step(running={"a": Part(6, 4, [[3]])}, new={"b": Part(8, 2, [[1, 2, 4]])}, counts={})) == []
    assert judge(world.step(running={"a": Part(10, 1), "b": Part(10, 1)}, counts={})) == []


def test_a_prefix_hit_of_a_resumed_request_is_legal() -> None:
    world = running("b", 8, (7, 8))
    step = world.step(
        running={}, new={"a": Part(0, 8, [[1, 2]])}, resumed={"b": Part(8, 1, [[1, 2, 3]])}, preempted=["b"], counts={}
    )
    assert judge(step) == []


def test_a_prefix_hit_on_a_block_that_is_not_filled() -> None:
    """a leaves the last slot of block 2 unwritten, so b cannot read it in this step."""
    step = World().step(new={"a": Part(0, 7, [[1, 2]]), "b": Part(8, 1, [[1, 2, 4]])}, counts={})
    assert [(v.rule, v.request, v.block) for v in judge(step)] == [("bind_write_block_shared", "a", 2)]


def test_a_prefix_hit_at_another_column() -> None:
    step = World().step(new={"a": Part(0, 8, [[1, 2]]), "b": Part(8, 1, [[2, 1, 4]])}, counts={})
    assert {(v.rule, v.request) for v in judge(step)} == {("bind_write_block_shared", "a")}


def test_a_running_requests_full_block_handed_to_a_newcomer_is_no_prefix_hit() -> None:
    """The newcomer fills block 2 and a starts behind it, as in a hit; but a had the block before."""
    world = running("a", 9)
    step = world.step(running={"a": Part(9, 1)}, new={"b": Part(0, 8, [[4, 2]])}, counts={})
    assert [(v.rule, v.request, v.block) for v in judge(step)] == [("bind_write_block_shared", "b", 2)]


def test_a_shared_block_whose_load_failed_may_be_recomputed() -> None:
    """a and b share a prefix; its load failed, so a computes it again while b goes on behind it."""
    world = World()
    world.step(new={"a": Part(8, 1, [[1, 2, 3]]), "b": Part(8, 1, [[1, 2, 4]])})
    assert judge(world.step(running={"a": Part(4, 5), "b": Part(9, 1)}, counts={})) == []


def test_a_shared_block_is_legal_while_the_other_has_no_token_in_it() -> None:
    """b's end lies before the block it shares, or is not known yet."""
    for end, expected in ((4, []), (-1, []), (5, ["bind_write_block_shared"])):
        world = World()
        world.step(new={"b": Part(0, 4, [[1, 2]])})
        world.shadow.end[world.shadow.row_of["b"]] = end
        assert names(world.step(new={"a": Part(0, 7, [[3, 2]])})) == expected


def test_blocks_of_requests_that_are_gone_are_free() -> None:
    for how in ("finished", "preempted"):
        for forget in (True, False):
            world = running()
            step = world.step(new={"b": Part(0, 8, [[1, 2]])}, **{how: ["a"]}, forget=forget, counts={})
            assert judge(step) == []


def test_a_block_freed_below_the_window_is_free() -> None:
    world = World(SLIDING)
    world.step(new={"a": Part(0, 16, [[1, 2, 3, 4]])})
    step = world.step(running={"a": Part(16, 1, [[5]])}, new={"b": Part(0, 4, [[1]])}, counts={})
    assert judge(step) == []


def test_a_block_inside_the_window_is_not_free() -> None:
    world = World(SLIDING)
    world.step(new={"a": Part(0, 16, [[1, 2, 3, 4]])})
    step = world.step(running={"a": Part(16, 1, [[5]])}, new={"b": Part(0, 4, [[3]])}, counts={})
    assert [(v.rule, v.request, v.block) for v in judge(step)] == [("bind_write_block_shared", "b", 3)]


def test_replayed_tokens_whose_writes_are_redirected_may_lie_in_a_shared_block() -> None:
    world = running()
    assert judge(world.step(new={"b": Part(6, 3, [[1, 2, 4]])}, redirected=True)) == []
    world = running()
    assert names(world.step(new={"b": Part(6, 3, [[1, 2, 4]])})) == ["bind_write_block_shared"]


def test_the_shared_block_is_named_in_its_own_group() -> None:
    world = World(FULL_GROUP, Group(1, "full", 2, 16))
    world.step(new={"a": Part(0, 4, [[1], [2, 3]])})
    (found,) = judge(world.step(new={"b": Part(0, 4, [[2], [4, 3]])}, counts={}))
    assert (found.group, found.block, found.position) == (1, 3, 2)


def test_more_requests_than_the_shadow_had_rows_for() -> None:
    """Twenty requests share a prefix that the first one computes in the same step; the last one may not write it."""
    shares = {f"r{i}": Part(4 * bool(i), 4, [[1, 10 + i]]) for i in range(20)}
    assert judge(World().step(new=shares, counts={})) == []
    step = World().step(new={**shares, "r19": Part(0, 5, [[1, 29]])}, counts={})
    assert [(v.request, v.block) for v in judge(step)] == [("r0", 1), ("r19", 1)]


def test_written_after_its_release() -> None:
    world = running()
    (found,) = judge(world.step(running={"a": Part(8, 1)}, counts={3: 0}))
    assert (found.rule, found.request, found.group) == ("used_after_release", "a", 0)
    assert (found.block, found.position, found.found) == (3, 8, "0 references")


def test_not_referenced_in_the_pool() -> None:
    """The books were right, the pool's own count is not: the general rule speaks when the specific one is silent."""
    step = running().step(running={"a": Part(8, 1)}, counts={3: 0})
    step.held = ints([1])
    (found,) = judge(step)
    assert (found.rule, found.request, found.block, found.position) == ("bind_block_not_referenced", "a", 3, 8)
    step.held = None
    assert names(step) == ["bind_block_not_referenced"]


def test_counts_of_null_and_impossible_blocks_are_not_judged() -> None:
    step = World().step(new={"a": Part(0, 12, [[1, 0, 77]])}, counts={0: 0, 77: 0, -1: 0})
    assert set(names(step)) == {"bind_block_out_of_range", "bind_null_block_in_write_range"}


def test_counts_nobody_looked_up_are_not_judged() -> None:
    assert judge(running().step(running={"a": Part(8, 1)})) == []


@pytest.mark.parametrize(("block", "word"), [(0, "block 0 (null)"), (32, "block 32"), (-1, "block -1")])
def test_zeroed_block(block: int, word: str) -> None:
    assert judge(World().step(zero=ints([1, 31, 1]))) == []
    (found,) = judge(World().step(zero=ints([1, block])))
    assert (found.rule, found.block, found.found) == ("zero_block_invalid", block, word)


def test_zeroed_block_of_the_larger_pool() -> None:
    groups = (Group(0, "full", BLOCK, 8), Group(1, "full", BLOCK, 16))
    assert judge(World(*groups).step(zero=ints([15]))) == []


@pytest.mark.parametrize(
    ("copy", "block"), [((32, 1), 32), ((-1, 1), -1), ((1, 0), 0), ((1, 32), 32), ((1, -3), -3), ((4, 4), 4)]
)
def test_copied_block(copy: tuple[int, int], block: int) -> None:
    assert judge(World().step(copies=ints([1, 2, 3, 4]).reshape(2, 2))) == []
    (found,) = judge(World().step(copies=ints([1, 2, *copy]).reshape(2, 2)))
    assert (found.rule, found.block) == ("copy_block_invalid", block)
    assert found.found.startswith("a copy from block ")


def test_a_nonsensical_token_count_does_not_exhaust_the_memory() -> None:
    step = World().step(new={"a": Part(0, 2**61, [[1]])})
    assert names(step) == ["sched_budget_exceeded", "bind_insufficient_blocks"]


HUGE = [-(2**63), -(2**31) - 1, -5, -1, 0, 1, 2, 3, 7, 31, 32, 33, 2**31, 2**40, 2**40 + 1, 2**62, 2**63 - 1]
NUMBER = st.one_of(st.integers(-3, 40), st.sampled_from(HUGE))
GROUPS = (
    Group(0, "full", 4, 32),
    Group(1, "sliding", 8, 16, window=5),
    Group(2, "state", 4, 8),
    Group(3, "chunked", 2, 32, window=4),
)
PART = st.builds(
    Part,
    st.integers(-3, 40) | NUMBER,
    st.integers(-3, 40) | NUMBER,
    st.none() | st.lists(st.lists(NUMBER, max_size=6), max_size=5),
    NUMBER,
)
SHARE = st.dictionaries(st.sampled_from("abcd"), PART, max_size=4)
SOME = st.lists(st.sampled_from("abcdx"), max_size=3)


def bounded(part: Part) -> Part:
    """The shadow cannot hold an end beyond 64 bits; everything else goes in as drawn."""
    return replace(part, start=max(part.start, -(2**62)), tokens=min(part.tokens, 2**62))


@given(st.data())
def test_no_rule_raises_whatever_the_engine_declares(data: st.DataObject) -> None:
    world = World(*GROUPS[: data.draw(st.integers(1, 4))])
    for _ in range(data.draw(st.integers(1, 3))):
        share = {name: bounded(part) for name, part in data.draw(SHARE).items()}
        kinds = {name: data.draw(st.sampled_from(["new", "running", "resumed"])) for name in share}
        step = world.step(
            **{kind: {n: p for n, p in share.items() if kinds[n] == kind} for kind in ("new", "running", "resumed")},
            finished=data.draw(SOME),
            preempted=data.draw(SOME),
            forget=data.draw(st.booleans()),
            redirected=data.draw(st.booleans()),
            budget=data.draw(st.none() | NUMBER),
            zero=ints(data.draw(st.lists(NUMBER, max_size=4))),
            copies=ints(data.draw(st.lists(NUMBER, max_size=4).filter(lambda x: len(x) % 2 == 0))).reshape(-1, 2),
        )
        n = len(step.ids)
        if data.draw(st.booleans()):
            step.rows = ints(data.draw(st.lists(NUMBER, min_size=n, max_size=n)))
            step.previous_end = ints(data.draw(st.lists(NUMBER, min_size=n, max_size=n)))
            step.declared = data.draw(SOME)
            step.group_counts = [(name, data.draw(NUMBER)) for name in step.declared]
        if data.draw(st.booleans()):
            wild = data.draw(st.lists(st.tuples(NUMBER, NUMBER, NUMBER, NUMBER), max_size=5))
            step.appended = Cells(*ints(x for cell in wild for x in cell).reshape(-1, 4).T)
        size = data.draw(st.integers(0, 12))
        step.references = ints(data.draw(st.lists(NUMBER, min_size=size, max_size=size)))
        step.held = np.zeros(len(binding._write(step)), np.int64)
        for rule in MINE:
            if rule.record is Schedule:
                for violation in rule.check(step):
                    assert violation.rule == rule.name
                    assert str(violation)
                    assert violation.request is None or isinstance(violation.request, str)
                    assert all(
                        type(x) in (int, type(None))
                        for x in (violation.group, violation.block, violation.slot, violation.position)
                    )
