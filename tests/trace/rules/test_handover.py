"""From the scheduler to the worker: each rule where it holds and where it breaks."""

from __future__ import annotations

from builders_a import MINE, handed_over, ints, judge, names
from hypothesis import given
from hypothesis import strategies as st

from kvproof.trace.records import Handover


def test_a_sound_handover_breaks_nothing() -> None:
    assert judge(handed_over()) == []


def test_a_workers_first_step_may_have_any_number() -> None:
    assert judge(handed_over(previous=None, step=41)) == []


def test_missing_trace() -> None:
    """Without a trace nothing is known of the sequence: only the missing trace is reported."""
    step = handed_over(trace=False, step=None, digest_sent=None, digest_found=None)
    assert names(step) == ["handover_missing_trace"]
    assert names(handed_over(trace=False, step=3)) == ["handover_missing_trace"]


def test_sequence_gap() -> None:
    (found,) = judge(handed_over(step=11))
    assert (found.rule, found.expected) == ("handover_sequence_gap", "step 8, after step 7")
    assert found.found == "step 11, 3 steps missing"


def test_duplicate_step() -> None:
    for step in (7, 2):
        (found,) = judge(handed_over(step=step))
        assert (found.rule, found.found) == ("handover_duplicate_step", f"step {step}")


def test_digest() -> None:
    (found,) = judge(handed_over(digest_found=0xABD))
    assert found.rule == "handover_digest_mismatch"
    assert "0x00000abc" in found.expected
    assert "0x00000abd" in found.found


def test_a_digest_that_is_missing_on_one_side_is_not_judged() -> None:
    assert judge(handed_over(digest_sent=None)) == []
    assert judge(handed_over(digest_found=None)) == []


def test_unknown_request() -> None:
    found = judge(handed_over(unknown=["b", "c"]))
    assert [(v.rule, v.request) for v in found] == [("handover_unknown_request", name) for name in "bc"]


def test_row_overflow() -> None:
    (found,) = judge(handed_over(overflow=[("b", 1, 65, 64)]))
    assert (found.rule, found.request, found.group) == ("handover_row_overflow", "b", 1)
    assert (found.expected, found.found) == ("at most 64 blocks in one row", "65 blocks")


def test_two_requests_in_one_row() -> None:
    (found,) = judge(handed_over(ids=["a", "b", "c"], rows=ints([5, 2, 5])))
    assert (found.rule, found.request) == ("handover_new_overwrites_live", "c")
    assert found.found == "row 5, the row of request a"


def test_requests_without_a_row_share_nothing() -> None:
    assert judge(handed_over(rows=ints([-1, -1]))) == []
    assert judge(handed_over(rows=None)) == []


NUMBER = st.integers(-(2**63), 2**63 - 1)
TEXT = st.sampled_from("abc")


@given(
    st.builds(
        Handover,
        step=st.none() | NUMBER,
        previous=st.none() | NUMBER,
        trace=st.booleans(),
        digest_sent=st.none() | NUMBER,
        digest_found=st.none() | NUMBER,
        ids=st.lists(TEXT, max_size=4),
        unknown=st.lists(TEXT, max_size=4),
        overflow=st.lists(st.tuples(TEXT, NUMBER, NUMBER, NUMBER), max_size=3),
        rows=st.none() | st.lists(st.integers(-2, 3) | NUMBER, max_size=6).map(ints),
    )
)
def test_no_rule_raises_whatever_arrives(step: Handover) -> None:
    for rule in MINE:
        if rule.record is Handover:
            assert all(str(violation) for violation in rule.check(step))
