from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproof.findings.model import Finding, OracleResult, Origin, Status, Verdict
from kvproof.findings.verdict import decide, effective_status, judged_nothing

NAMES = ("equality", "placement", "footprint", "legality")
oracle_results = st.builds(
    OracleResult,
    oracle=st.sampled_from(NAMES),
    status=st.sampled_from(Status),
    source=st.just("snapshots"),
    judged_bytes=st.integers(0, 1),
    judged_items=st.integers(0, 1),
    findings=st.integers(0, 1),
)
GOOD = OracleResult("equality", Status.PASSED, "snapshots", judged_bytes=4096)
FOREIGN = Finding("placement", "foreign", "wrong", "bulk")
anything = (
    st.lists(oracle_results, max_size=4),
    st.lists(st.just(FOREIGN), max_size=1),
    st.sets(st.sampled_from(NAMES), max_size=2),
)


@settings(max_examples=30)
@given(*anything)
def test_the_verdict_follows_the_worst_of_what_was_seen(oracles, found, expected):
    verdict, reason = decide(oracles, found, expected)
    complete = bool(oracles) and expected <= {o.oracle for o in oracles}
    skipped = [o for o in oracles if o.status is Status.SKIPPED]
    clean = all(
        o.status is Status.PASSED and not o.findings and not judged_nothing(o) for o in oracles if o not in skipped
    )
    if found or not complete or not clean:
        assert verdict is Verdict.FAIL
    else:
        assert verdict is (Verdict.PARTIAL if skipped else Verdict.PASS)
    assert reason
    assert "\n" not in reason


@settings(max_examples=30)
@given(*anything)
def test_order_does_not_matter_and_one_more_finding_never_helps(oracles, found, expected):
    verdict, _ = decide(oracles, found, expected)
    assert decide(oracles[::-1], found[::-1], expected)[0] is verdict
    assert decide(oracles, [*found, FOREIGN], expected)[0] is Verdict.FAIL


@pytest.mark.parametrize("count", ["judged_bytes", "judged_blocks", "judged_resources", "judged_items"])
def test_one_count_is_enough_not_to_be_vacuous(count):
    empty = OracleResult("equality", Status.PASSED, "snapshots")
    assert effective_status(empty) is Status.VACUOUS
    assert effective_status(replace(empty, **{count: 1})) is Status.PASSED


def test_reasons_name_what_is_wrong():
    finding = replace(FOREIGN, message="layer 9 holds layer 8")
    empty = OracleResult("footprint", Status.PASSED, "snapshots")
    verdict, reason = decide([GOOD, empty], [finding], ["equality", "hit length"])
    assert verdict is Verdict.FAIL
    assert reason == (
        "1 finding, first: placement: layer 9 holds layer 8; judged nothing (vacuous): footprint; never ran: hit length"
    )


def test_the_reason_begins_with_a_finding_that_knows_the_owner():
    differs = replace(FOREIGN, oracle="equality", kind="restored_differs", message="7 bytes differ")
    owned = replace(FOREIGN, message="7 bytes are foreign", origin=Origin("layer 8", "K", "A", 5, 3, 64))
    assert decide([GOOD], [differs, owned], [])[1] == (
        "2 findings, first: placement: 7 bytes are foreign. It holds layer 8 K block 3 byte 64 (token 5 of A)"
    )


def test_contradictions_fail():
    counted = replace(GOOD, findings=2)
    assert decide([counted], [], [])[0] is Verdict.FAIL
    assert decide([replace(GOOD, status=Status.FAILED)], [], [])[1] == "failed without a finding: equality"
    assert decide([], [], []) == (Verdict.FAIL, "no oracle ran")


def test_pass_says_how_much_was_judged():
    assert decide([GOOD], [], ["equality"]) == (Verdict.PASS, "1 oracle judged 4,096 bytes")


def test_skip_without_a_reason_is_said_so():
    skipped = replace(GOOD, oracle="legality", status=Status.SKIPPED)
    assert decide([GOOD, skipped], [], []) == (Verdict.PARTIAL, "skipped: legality (no reason given)")
