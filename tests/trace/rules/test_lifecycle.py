"""The block pool: each rule where it holds, where it breaks, and the legal calls that look broken."""

from __future__ import annotations

from typing import Any

import pytest
from builders_a import MINE, ints, judge, names, pool_call
from hypothesis import given
from hypothesis import strategies as st

from kvproof.trace.records import PoolChange, PoolState


def state(**changes: Any) -> PoolState:
    """A quiet pool of 32 blocks, two of them kept on purpose, with 5 prefix-cache entries."""
    values: dict[str, Any] = {
        "idle": True,
        "free": 29,
        "total": 32,
        "kept": 2,
        "leftover": {},
        "cached_by_events": 5,
        "cached_in_pool": 5,
        "missing_in_pool": 0,
    }
    return PoolState(**{**values, **changes})


def test_sound_calls_break_nothing() -> None:
    assert judge(pool_call("alloc", [1, 31], [0, 0], [1, 1])) == []
    assert judge(pool_call("touch", [1, 2], [1, 0], [2, 1])) == []
    assert judge(pool_call("release", [1, 2], [2, 1], [1, 0])) == []
    assert judge(pool_call("alloc", [], [], [])) == []


def test_a_block_that_is_in_use_is_handed_out() -> None:
    (found,) = judge(pool_call("alloc", [4, 5], [0, 1], [1, 2], users={5: "b"}))
    assert (found.rule, found.request, found.block) == ("alloc_block_referenced", "a", 5)
    assert (found.expected, found.found) == (
        "0 references before it is handed out",
        "1 references, one of request b",
    )


def test_touching_a_block_in_use_is_legal() -> None:
    assert judge(pool_call("touch", [5], [3], [4], users={5: "b"}, loading={5: "b"})) == []


@pytest.mark.parametrize(
    ("block", "words"), [(0, "block 0 (null)"), (32, "block 32 of 32 blocks"), (-1, "block -1 of")]
)
def test_a_block_that_must_not_be_handed_out(block: int, words: str) -> None:
    (found,) = judge(pool_call("alloc", [4, block], [0, 0], [1, 1]))
    assert (found.rule, found.request, found.block) == ("alloc_block_invalid", "a", block)
    assert found.found.startswith(words)


def test_a_block_is_handed_out_twice_in_one_call() -> None:
    """Whether the books count between the two or not, the reason is the repetition."""
    for before in ([0, 0], [0, 1]):
        (found,) = judge(pool_call("alloc", [6, 6], before, [2, 2]))
        assert (found.rule, found.block, found.found) == ("alloc_block_invalid", 6, "block 6 2 times")


def test_released_while_a_transfer_is_open() -> None:
    (found,) = judge(pool_call("release", [4, 5], [1, 1], [0, 0], loading={5: "b"}, users={5: "b"}))
    assert (found.rule, found.request, found.block) == ("release_block_in_flight", "a", 5)
    assert "transfer of request b" in found.expected
    assert found.found == "0 references"


def test_given_back_by_one_of_two_users_while_a_transfer_is_open_is_legal() -> None:
    assert judge(pool_call("release", [5], [2], [1], loading={5: "b"}, users={5: "b"})) == []


def test_released_while_a_live_request_reads_it() -> None:
    (found,) = judge(pool_call("release", [7], [1], [0], users={7: "b", 8: "b"}))
    assert (found.rule, found.request, found.block) == ("release_block_referenced", "a", 7)
    assert "request b reads it" in found.expected


def test_a_request_that_gives_back_what_it_still_reads() -> None:
    """A window that moves on too early: user and caller are the same request."""
    (found,) = judge(pool_call("release", [7], [1], [0], users={7: "a"}))
    assert (found.rule, found.request) == ("release_block_referenced", "a")


def test_released_once_too_often() -> None:
    (found,) = judge(pool_call("release", [7], [0], [-1]))
    assert (found.rule, found.request, found.block, found.found) == ("release_unreferenced", "a", 7, "0 references")


def test_a_block_may_be_given_back_as_often_as_it_is_held() -> None:
    """The books may count before the call or before each mention."""
    assert judge(pool_call("release", [7, 7], [2, 2], [0, 0])) == []
    assert judge(pool_call("release", [7, 7], [2, 1], [1, 0])) == []
    for before in ([1, 1], [1, 0]):
        (found,) = judge(pool_call("release", [7, 7], before, [0, -1]))
        assert (found.rule, found.found) == ("release_unreferenced", "1 references")


def test_the_null_block_is_nobodys() -> None:
    """vLLM touches and releases it together with the rest of a row; its count means nothing."""
    step = pool_call("release", [0, 0, 3], [0, 0, 1], [-1, -2, 0], native=ints([-9, -9, 0]), users={0: "b"})
    assert judge(step) == []
    assert judge(pool_call("touch", [0], [0], [1], native=ints([4]))) == []


def test_refcount_mismatch() -> None:
    (found,) = judge(pool_call("touch", [3, 4], [0, 1], [1, 2], native=ints([1, 3])))
    assert (found.rule, found.request, found.block) == ("pool_refcount_mismatch", "a", 4)
    assert (found.expected, found.found) == ("2 references", "3 references in the pool")


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        (("alloc", [3], [1], [2]), "alloc_block_referenced"),
        (("alloc", [3, 3], [0, 0], [2, 2]), "alloc_block_invalid"),
        (("release", [3], [0], [-1]), "release_unreferenced"),
    ],
)
def test_a_refcount_mismatch_yields_to_its_cause(call: Any, rule: str) -> None:
    assert names(pool_call(*call, native=ints([9] * len(call[1])))) == [rule]


def test_a_quiet_pool_breaks_nothing() -> None:
    assert judge(state()) == []


def test_finished_with_blocks() -> None:
    (found,) = judge(state(idle=False, free=0, leftover={"a": 3, "b": 0}))
    assert (found.rule, found.request, found.found) == ("finished_with_blocks", "a", "3 blocks")


@pytest.mark.parametrize("free", [28, 30])
def test_pool_not_restored(free: int) -> None:
    (found,) = judge(state(free=free))
    assert (found.rule, found.found) == ("pool_not_restored", f"{free} free blocks")
    assert found.expected.startswith("29 free blocks")


def test_a_busy_pool_is_not_expected_to_be_whole() -> None:
    assert judge(state(idle=False, free=3)) == []


def test_events_disagree() -> None:
    (found,) = judge(state(cached_by_events=6))
    assert (found.rule, found.found) == ("events_disagree_with_pool", "5 cached entries in the pool, 0 missing")
    (found,) = judge(state(missing_in_pool=1))
    assert found.found == "5 cached entries in the pool, 1 missing"


def test_events_that_are_off_are_not_judged() -> None:
    assert judge(state(cached_by_events=None, cached_in_pool=None, missing_in_pool=None)) == []
    assert judge(state(missing_in_pool=None)) == []


NUMBER = st.integers(-2, 4) | st.integers(-(2**63), 2**63 - 1)
NUMBERS = st.lists(NUMBER, max_size=6)
NAMES = st.dictionaries(NUMBER | st.integers(2**63, 2**70), st.sampled_from("ab"), max_size=4)


@given(
    st.builds(
        PoolChange,
        action=st.sampled_from(["alloc", "touch", "release", "?"]),
        blocks=NUMBERS.map(ints),
        before=NUMBERS.map(ints),
        after=NUMBERS.map(ints),
        native=NUMBERS.map(ints),
        num_blocks=NUMBER,
        request=st.none() | st.just("a"),
        users=NAMES,
        loading=NAMES,
    )
)
def test_no_rule_raises_whatever_the_pool_does(call: PoolChange) -> None:
    for rule in MINE:
        if rule.record is PoolChange:
            for violation in rule.check(call):
                assert str(violation)
                assert type(violation.block) is int
