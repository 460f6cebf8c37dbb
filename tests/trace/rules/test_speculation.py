"""Speculation results: each rule where it holds, where it breaks, and the legal rows that look broken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from builders_b import MINE, NUMBERS, arrays, ints, judge, names, never_raises
from hypothesis import given
from hypothesis import strategies as st

from kvproof.trace.records import Verification
from kvproof.trace.rules import speculation


def rows(**changes: Any) -> Verification:
    """a accepts 2 of 3 drafts and one more, b decodes, c is in the middle of its prompt; a graph's tail follows."""
    values: dict[str, Any] = {
        "ids": ["a", "b", "c"],
        "count": 3,
        "indices": ints([4, 2, 0, 9, 9]),
        "expected_indices": ints([4, 2, 0]),
        "num_sampled": ints([3, 1, 0, 77, -5]),
        "num_rejected": ints([1, 0, 0, 77, -5]),
        "drafts": ints([3, 0, 0]),
        "partial": np.array([False, False, True]),
        "width": 4,
        "states": 8,
    }
    return Verification(**{**values, **changes})


def test_the_rules_of_the_module() -> None:
    assert [r.name for r in MINE if r.check.__module__ == speculation.__name__] == [
        "spec_row_count_mismatch",
        "spec_idx_mapping_invalid",
        "spec_accept_out_of_range",
        "spec_reject_out_of_range",
        "spec_count_not_conserved",
    ]


def test_sound_rows_break_nothing() -> None:
    """Only the first rows count, and a prefill chunk that is not the last gives 0 tokens."""
    assert judge(rows()) == []
    assert judge(rows(num_rejected=None)) == []
    assert judge(rows(count=0)) == []


@pytest.mark.parametrize(("sampled", "rejected"), [([5, 1, 0], [1, 0, 0]), ([-1, 1, 0], [1, 0, 0])])
def test_accept_out_of_range(sampled: list[int], rejected: list[int]) -> None:
    (found,) = judge(rows(num_sampled=ints(sampled), num_rejected=ints(rejected)))
    assert (found.rule, found.request) == ("spec_accept_out_of_range", "a")
    assert (found.expected, found.found) == ("0 to 4 tokens", f"{sampled[0]} tokens")


def test_accepted_beyond_the_sampled_array() -> None:
    (found,) = judge(rows(width=2))
    assert (found.rule, found.expected) == ("spec_accept_out_of_range", "0 to 2 tokens")


def test_token_for_an_unfinished_prompt() -> None:
    (found,) = judge(rows(num_sampled=ints([3, 1, 1])))
    assert (found.rule, found.request, found.expected) == ("spec_accept_out_of_range", "c", "0 to 0 tokens")


@pytest.mark.parametrize("rejected", [4, -1, 2**62])
def test_reject_out_of_range(rejected: int) -> None:
    (found,) = judge(rows(num_rejected=ints([rejected, 0, 0])))
    assert (found.rule, found.request) == ("spec_reject_out_of_range", "a")
    assert (found.expected, found.found) == ("0 to 3 rejected tokens", f"{rejected} rejected tokens")


def test_reject_for_an_unfinished_prompt() -> None:
    (found,) = judge(rows(num_rejected=ints([1, 0, 1])))
    assert (found.rule, found.request) == ("spec_reject_out_of_range", "c")


def test_a_request_without_any_token_rejects_the_one_that_was_not_a_draft() -> None:
    assert judge(rows(num_sampled=ints([0, 1, 0]), num_rejected=ints([4, 0, 0]))) == []


def test_rows_without_drafts_are_judged_too() -> None:
    (found,) = judge(rows(num_sampled=ints([3, 2, 0])))
    assert (found.rule, found.request, found.expected) == ("spec_accept_out_of_range", "b", "0 to 1 tokens")
    (found,) = judge(rows(num_rejected=ints([1, 1, 0])))
    assert (found.rule, found.request, found.expected) == ("spec_reject_out_of_range", "b", "0 to 0 rejected tokens")


def test_a_request_without_any_token_need_not_conserve() -> None:
    assert judge(rows(num_sampled=ints([0, 1, 0]), num_rejected=ints([2, 0, 0]))) == []


def test_range_is_judged_without_an_expectation() -> None:
    (found,) = judge(rows(indices=ints([4, 2, 8]), expected_indices=ints([4, 2])))
    assert (found.rule, found.request) == ("spec_idx_mapping_invalid", "c")
    assert judge(rows(indices=ints([4, 2, 7]), expected_indices=ints([4, 2]))) == []


def test_count_not_conserved() -> None:
    (found,) = judge(rows(num_rejected=ints([2, 0, 0])))
    assert (found.rule, found.request) == ("spec_count_not_conserved", "a")
    assert (found.expected, found.found) == ("4 tokens accepted or rejected", "3 accepted and 2 rejected tokens")


def test_masked_rows_are_not_judged() -> None:
    assert judge(rows(indices=ints([-1, 2, 0]), num_sampled=ints([99, 1, 0]), num_rejected=ints([-9, 0, 0]))) == []


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (0, "state row 2, or -1"),
        (3, "state row 2, or -1"),
        (8, "state row 0 to 7, or -1"),
        (-2, "state row 0 to 7, or -1"),
    ],
)
def test_idx_mapping(index: int, expected: str) -> None:
    (found,) = judge(rows(indices=ints([4, index, 0])))
    assert (found.rule, found.request) == ("spec_idx_mapping_invalid", "b")
    assert (found.expected, found.found) == (expected, f"state row {index}")


def test_row_count() -> None:
    for name, column in (("indices", "idx_mapping"), ("num_sampled", "num_sampled"), ("num_rejected", "num_rejected")):
        (found,) = judge(rows(**{name: getattr(rows(), name)[:2]}))
        assert (found.rule, found.expected, found.found) == (
            "spec_row_count_mismatch",
            "at least 3 rows",
            f"2 rows of {column}",
        )


ARRAYS = ["indices", "expected_indices", "num_sampled", "num_rejected", "drafts", "partial"]


@given(data=st.data())
def test_corrupt_rows_never_make_a_rule_raise(data: st.DataObject) -> None:
    record = rows(**{name: data.draw(arrays()) for name in data.draw(st.lists(st.sampled_from(ARRAYS), unique=True))})
    record.count = data.draw(st.just(3) | NUMBERS)
    record.width, record.states = data.draw(NUMBERS), data.draw(NUMBERS)
    record.ids = record.ids[: data.draw(st.integers(0, 3))]
    never_raises(record)


@given(drafts=st.lists(st.integers(0, 4), min_size=1, max_size=6), data=st.data())
def test_every_honest_verification_breaks_nothing(drafts: list[int], data: st.DataObject) -> None:
    sampled = [data.draw(st.integers(1, d + 1)) for d in drafts]
    count = len(drafts)
    record = rows(
        ids=[str(i) for i in range(count)],
        count=count,
        indices=np.arange(count),
        expected_indices=np.arange(count),
        num_sampled=ints(sampled),
        num_rejected=ints([d + 1 - s for d, s in zip(drafts, sampled, strict=True)]),
        drafts=ints(drafts),
        partial=np.zeros(count, np.bool_),
        width=5,
    )
    assert names(record) == []
