"""Results: each rule where it holds, where it breaks, and the legal results that look broken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from builders_b import MINE, NUMBERS, arrays, ints, judge, never_raises
from hypothesis import given
from hypothesis import strategies as st

from kvproof.trace.records import Result
from kvproof.trace.rules import results


def result(**changes: Any) -> Result:
    """a verified 2 drafts, b decodes, c is in the middle of its prompt."""
    values: dict[str, Any] = {
        "step": 7,
        "awaited": 7,
        "scheduled": {"a": (3, 2, False), "b": (1, 0, False), "c": (64, 0, True)},
        "reported": ["b", "a", "c"],
        "index": {"b": 0, "a": 1, "c": 2},
        "counts": ints([1, 3, 0]),
        "known": frozenset("abc"),
    }
    return Result(**{**values, **changes})


def test_the_rules_of_the_module() -> None:
    assert [r.name for r in MINE if r.check.__module__ == results.__name__] == [
        "result_out_of_order",
        "result_request_set_mismatch",
        "result_index_mismatch",
        "result_row_count_mismatch",
        "result_too_many_tokens",
        "result_token_on_partial_prefill",
    ]


def test_a_sound_result_breaks_nothing() -> None:
    assert judge(result()) == []
    assert judge(result(awaited=None)) == []
    assert judge(result(index={"b": np.int64(0), "a": np.int64(1), "c": np.int64(2)})) == []


def test_a_result_without_tokens_breaks_nothing() -> None:
    """Pooling, and pipeline ranks that do not sample."""
    assert judge(result(counts=None)) == []


def test_out_of_order() -> None:
    (found,) = judge(result(step=8))
    assert (found.rule, found.expected, found.found) == (
        "result_out_of_order",
        "the result of step 7",
        "the result of step 8",
    )


def test_an_empty_result_of_a_step_without_tokens_is_legal() -> None:
    assert judge(result(scheduled={}, reported=[], index={}, counts=None)) == []


def test_an_empty_result_of_a_step_with_tokens() -> None:
    found = judge(result(reported=[], index={}, counts=None))
    assert [(v.rule, v.request, v.expected) for v in found] == [
        ("result_request_set_mismatch", "a", "a result for 3 tokens"),
        ("result_request_set_mismatch", "b", "a result for 1 tokens"),
        ("result_request_set_mismatch", "c", "a result for 64 tokens"),
    ]


def test_a_request_scheduled_without_a_token_need_not_report() -> None:
    scheduled = {**result().scheduled, "d": (0, 0, False)}
    assert judge(result(scheduled=scheduled)) == []


def test_a_result_nobody_asked_for() -> None:
    (found,) = judge(result(reported=["b", "a", "c", "d"], counts=ints([1, 3, 0, 1])))
    assert (found.rule, found.request, found.found) == ("result_request_set_mismatch", "d", "1 rows")


def test_a_request_reported_twice() -> None:
    (found,) = judge(result(reported=["b", "a", "c", "a"], counts=ints([1, 3, 0, 1])))
    assert (found.rule, found.request, found.found) == ("result_request_set_mismatch", "a", "2 rows")


def test_index_of_another_row() -> None:
    found = judge(result(index={"b": 1, "a": 0, "c": 2}))
    assert [(v.rule, v.request, v.expected, v.found) for v in found] == [
        ("result_index_mismatch", "a", "row 1", "row 0, which is request b's"),
        ("result_index_mismatch", "b", "row 0", "row 1, which is request a's"),
    ]


@pytest.mark.parametrize(("row", "words"), [(3, "row 3"), (-1, "row -1"), (None, "row None"), ("1", "row 1")])
def test_index_out_of_range(row: Any, words: str) -> None:
    (found,) = judge(result(index={"b": 0, "a": row, "c": 2}))
    assert (found.rule, found.request, found.expected, found.found) == (
        "result_index_mismatch",
        "a",
        "a row from 0 to 2",
        words,
    )


def test_index_without_the_request() -> None:
    (found,) = judge(result(index={"b": 0, "c": 2}))
    assert (found.rule, found.request, found.found) == ("result_index_mismatch", "a", "no row")


def test_row_count() -> None:
    (found,) = judge(result(counts=ints([1, 3])))
    assert (found.rule, found.expected, found.found) == ("result_row_count_mismatch", "3 rows of tokens", "2 rows")


def test_too_many_tokens() -> None:
    (found,) = judge(result(counts=ints([2, 3, 0])))
    assert (found.rule, found.request) == ("result_too_many_tokens", "b")
    assert (found.expected, found.found) == ("at most 1 tokens (0 drafts)", "2 tokens")
    assert judge(result(counts=ints([2, 3, 0]), sampled_per_step=2)) == []


def test_token_on_partial_prefill() -> None:
    (found,) = judge(result(counts=ints([1, 3, 5])))
    assert (found.rule, found.request, found.found) == ("result_token_on_partial_prefill", "c", "5 tokens")


def test_an_aborted_requests_tokens_are_not_judged() -> None:
    """Abort under async scheduling: the result of the step in flight still comes, and is thrown away."""
    assert judge(result(counts=ints([9, 9, 9]), known=frozenset())) == []


def test_rejected_drafts_are_legal() -> None:
    assert judge(result(counts=ints([1, 1, 0]))) == []


@given(
    reported=st.lists(st.sampled_from("abcz"), max_size=5),
    index=st.dictionaries(st.sampled_from("abcz"), NUMBERS | st.none() | st.text(max_size=2)),
    counts=st.none() | arrays(),
    scheduled=st.dictionaries(st.sampled_from("abc"), st.tuples(NUMBERS, NUMBERS, st.booleans())),
)
def test_corrupt_results_never_make_a_rule_raise(reported: Any, index: Any, counts: Any, scheduled: Any) -> None:
    never_raises(result(reported=reported, index=index, counts=counts, scheduled=scheduled))
