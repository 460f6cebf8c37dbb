"""What crosses the connector: each rule where it holds, where it breaks, and the legal reports that look broken."""

from __future__ import annotations

from typing import Any

import pytest
from builders_b import MINE, NUMBERS, SIZE, arrays, ints, judge, never_raises
from hypothesis import given
from hypothesis import strategies as st

from kvproof.trace.records import Group, LoadTarget, Match, Metadata, Transfers
from kvproof.trace.rules import connector

FULL = Group(0, "full", SIZE, 32)
SLIDING = Group(0, "sliding", SIZE, 32, window=6)
STATE = Group(1, "state", SIZE, 32)


def transfers(**changes: Any) -> Transfers:
    """a has been sent, b received, c's receive failed: it is reported as finished too, and counts no tokens."""
    values: dict[str, Any] = {
        "finished_sending": ["a"],
        "finished_recving": ["b", "c"],
        "failed_recving": ["c"],
        "invalid_blocks": ints([5]),
        "known": frozenset("abcd"),
        "repeated_sending": frozenset(),
        "repeated_recving": frozenset(),
        "computed": {"c": 0},
        "num_blocks": 32,
        "bound": frozenset({4, 5}),
    }
    return Transfers(**{**values, **changes})


def load(**changes: Any) -> LoadTarget:
    """4 tokens are a local hit, 8 are loaded into blocks 6 and 7, block 8 is for what comes then."""
    values: dict[str, Any] = {
        "request": "a",
        "blocks": [[5, 6, 7, 8]],
        "bound": [[5, 6, 7, 8]],
        "external": 8,
        "local": 4,
        "groups": (FULL,),
    }
    return LoadTarget(**{**values, **changes})


def test_the_rules_of_the_module() -> None:
    assert [r.name for r in MINE if r.check.__module__ == connector.__name__] == [
        "connector_unknown_request",
        "connector_load_block_not_bound",
        "connector_load_null_or_out_of_range",
        "connector_finish_twice",
        "connector_recv_and_failed",
        "connector_invalid_block_unknown",
        "connector_metadata_mismatch",
        "connector_matched_tokens_invalid",
    ]


def test_sound_transfers_break_nothing() -> None:
    """A failed receive is also reported as finished: that is vLLM's contract, not a contradiction."""
    assert judge(transfers()) == []


@pytest.mark.parametrize("what", ["finished_sending", "finished_recving", "failed_recving"])
def test_unknown_request(what: str) -> None:
    (found,) = judge(transfers(**{what: ["z"]}))
    assert (found.rule, found.request) == ("connector_unknown_request", "z")
    assert found.found == f"an unknown id in {what}"


@pytest.mark.parametrize("what", ["sending", "recving"])
def test_finish_twice(what: str) -> None:
    (found,) = judge(transfers(**{f"repeated_{what}": frozenset({"b"})}))
    assert (found.rule, found.request, found.found) == (
        "connector_finish_twice",
        "b",
        f"another one in finished_{what}",
    )


def test_tokens_of_a_failed_receive_that_stay_counted() -> None:
    (found,) = judge(transfers(computed={"c": 12, "b": 40}))
    assert (found.rule, found.request, found.position) == ("connector_recv_and_failed", "c", 12)
    assert found.found == "12 computed tokens"


def test_a_failed_receive_of_a_request_without_a_count_is_not_judged() -> None:
    assert judge(transfers(computed={})) == []


@pytest.mark.parametrize("block", [0, -1, 32, 2**62])
def test_invalid_block_out_of_range(block: int) -> None:
    (found,) = judge(transfers(invalid_blocks=ints([4, block])))
    assert (found.rule, found.block, found.expected) == ("connector_invalid_block_unknown", block, "block 1 to 31")


def test_invalid_block_of_nobody() -> None:
    (found,) = judge(transfers(invalid_blocks=ints([6])))
    assert (found.rule, found.block, found.found) == ("connector_invalid_block_unknown", 6, "block 6, held by nobody")
    assert judge(transfers(invalid_blocks=ints([6]), bound=None)) == []


def test_a_sound_load_breaks_nothing() -> None:
    assert judge(load()) == []
    assert judge(load(external=0, blocks=[[0, 5]], bound=[[5]])) == []


def test_load_block_not_bound() -> None:
    (found,) = judge(load(bound=[[5, 6, 8]]))
    assert (found.rule, found.request, found.group, found.block) == ("connector_load_block_not_bound", "a", 0, 7)
    assert found.found == "block 7 in column 2"


def test_load_block_bound_in_another_group_only() -> None:
    (found,) = judge(load(blocks=[[5, 6, 7], [9]], bound=[[5, 6, 7, 9], [5]], groups=(FULL, STATE)))
    assert (found.rule, found.group, found.block) == ("connector_load_block_not_bound", 1, 9)
    (found,) = judge(load(blocks=[[5, 6, 7], [9]], bound=[[5, 6, 7]], groups=(FULL, STATE)))
    assert (found.rule, found.group, found.block) == ("connector_load_block_not_bound", 1, 9)


@pytest.mark.parametrize("block", [0, 32, -4])
def test_load_null_or_out_of_range(block: int) -> None:
    (found,) = judge(load(blocks=[[5, block, 7, 8]], bound=[[5, block, 7, 8]]))
    assert (found.rule, found.request, found.group, found.block, found.position) == (
        "connector_load_null_or_out_of_range",
        "a",
        0,
        block,
        4,
    )
    assert found.expected == "block 1 to 31 in column 1"


def test_columns_outside_the_loaded_tokens_are_not_judged() -> None:
    assert judge(load(blocks=[[0, 6, 7, 99]], bound=[[6, 7, 99]])) == []


def test_blocks_are_not_missed_where_nothing_is_loaded() -> None:
    assert judge(load(external=0, blocks=[[0]], bound=[[]])) == []
    assert judge(load(external=0, local=16)) == []
    chunked = Group(0, "chunked", SIZE, 32, window=8)
    assert judge(load(blocks=[[0, 0]], local=0, external=16, groups=(chunked,))) == []


def test_load_without_enough_blocks() -> None:
    (found,) = judge(load(blocks=[[5, 6]]))
    assert (found.rule, found.position) == ("connector_load_null_or_out_of_range", 8)
    assert (found.expected, found.found) == ("3 blocks for 12 tokens", "2 blocks")


def test_a_sliding_window_loads_only_what_will_be_read() -> None:
    """After 12 tokens the window reaches back to token 7: column 1 is the first that must exist."""
    assert judge(load(blocks=[[0, 6, 7]], bound=[[6, 7]], local=0, external=12, groups=(SLIDING,))) == []
    (found,) = judge(load(blocks=[[0, 0, 7]], bound=[[7]], local=0, external=12, groups=(SLIDING,)))
    assert (found.rule, found.block, found.position) == ("connector_load_null_or_out_of_range", 0, 4)


def test_state_groups_may_load_next_to_null_blocks() -> None:
    both = [[5, 6, 7], [0, 0, 9]]
    assert judge(load(blocks=both, bound=both, groups=(FULL, STATE))) == []
    bad = [[5, 6, 7], [0, 0, 32]]
    (found,) = judge(load(blocks=bad, bound=bad, groups=(FULL, STATE)))
    assert (found.group, found.block, found.position) == (1, 32, None)


@pytest.mark.parametrize(
    ("record", "expected", "found"),
    [
        (Metadata(True, "Meta"), None, None),
        (Metadata(False, None), None, None),
        (Metadata(True, "Meta", "Meta", worker=True), None, None),
        (Metadata(True, None), "metadata, as a connector is configured", "none"),
        (Metadata(False, "Meta"), "no metadata, as no connector is configured", "Meta"),
        (Metadata(True, "Meta", None, worker=True), "Meta", "no metadata"),
        (Metadata(True, "Meta", "Other", worker=True), "Meta", "Other"),
        (Metadata(False, None, "Other", worker=True), "no metadata", "Other"),
    ],
)
def test_metadata(record: Metadata, expected: str | None, found: str | None) -> None:
    violations = judge(record)
    assert [(v.rule, v.expected, v.found) for v in violations] == (
        [("connector_metadata_mismatch", expected, found)] if expected else []
    )


@pytest.mark.parametrize(
    ("matched", "is_async", "found"),
    [
        (None, False, None),
        (None, True, None),
        (0, False, None),
        (16, True, None),
        (12, False, None),
        (0, True, "0 tokens, asynchronously"),
        (-4, False, "-4 tokens"),
        (17, False, "17 tokens"),
        (2.0, False, "float 2.0"),
        (True, False, "bool True"),
        ("8", False, "str '8'"),
        (8, None, "NoneType None"),
        (8, 1, "int 1"),
    ],
)
def test_matched_tokens(matched: Any, is_async: Any, found: str | None) -> None:
    violations = judge(Match("a", matched, is_async, local=4, total=20))
    assert [v.found for v in violations] == ([found] if found else [])
    assert all((v.rule, v.request) == ("connector_matched_tokens_invalid", "a") for v in violations)


ANYTHING = st.one_of(st.none(), st.booleans(), NUMBERS, st.floats(), st.text(max_size=3), st.lists(NUMBERS, max_size=2))


@given(matched=ANYTHING, is_async=ANYTHING, local=NUMBERS, total=NUMBERS)
def test_corrupt_answers_never_make_a_rule_raise(matched: Any, is_async: Any, local: int, total: int) -> None:
    never_raises(Match("a", matched, is_async, local, total))


@given(
    blocks=st.lists(st.lists(NUMBERS, max_size=4), max_size=3),
    bound=st.lists(st.lists(NUMBERS, max_size=4), max_size=3),
    external=NUMBERS | st.just(2**80),
    local=NUMBERS,
)
def test_corrupt_loads_never_make_a_rule_raise(
    blocks: list[list[int]], bound: list[list[int]], external: int, local: int
) -> None:
    never_raises(LoadTarget("a", blocks, bound, external, local, (SLIDING, STATE)))


NAMES = st.lists(st.sampled_from("abcz"), max_size=4)


@given(
    sending=NAMES,
    recving=NAMES,
    failed=NAMES,
    invalid=arrays(),
    computed=st.dictionaries(st.sampled_from("ac"), NUMBERS),
)
def test_corrupt_transfers_never_make_a_rule_raise(
    sending: list[str], recving: list[str], failed: list[str], invalid: Any, computed: dict[str, int]
) -> None:
    never_raises(
        transfers(
            finished_sending=sending,
            finished_recving=recving,
            failed_recving=failed,
            invalid_blocks=invalid,
            computed=computed,
            repeated_sending=frozenset(sending),
        )
    )
