"""hit length, legality, lifecycle: both answers of each."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transcripts import LAYOUT, LOAD, LOAD_CLAIM, PAGE, SAVE_CLAIM, clean

from kvproof.findings.model import Location, Status
from kvproof.oracles.hit_length import hit_length
from kvproof.oracles.legality import legality
from kvproof.oracles.lifecycle import lifecycle
from kvproof.oracles.transcript import Transcript


def hits(*loads):
    transcript = clean()
    transcript.loads = list(loads)
    return hit_length(LAYOUT, transcript)


# ---------------------------------------------------------------------- hit length


@pytest.mark.parametrize("load", [
    LOAD,
    replace(LOAD, local=4, external=4, claimed=4),
    replace(LOAD, claimed=None, expected=None),
    replace(LOAD, stored=9, expected=4),  # more than the rule promises is no fault as long as it is stored
    replace(LOAD, prompt=8, external=8, asynchronous=True),  # vLLM itself goes back by one token
])  # fmt: skip
def test_right_hits(load):
    result, findings = hits(load)
    assert findings == []
    assert (result.status, result.judged_items) == (Status.PASSED, 1)


@pytest.mark.parametrize(("load", "kind", "what"), [
    (replace(LOAD, external=-4, claimed=-4, expected=None), "negative_hit", "external hit of -4 tokens"),
    (replace(LOAD, claimed=9), "claim_ignored", "lookup answered 9 tokens, scheduler used 8"),
    (replace(LOAD, stored=4, expected=4), "longer_than_stored", "hit of 8 tokens, but only 4 of this prompt"),
    (replace(LOAD, prompt=8), "whole_prompt_hit", "hit of 8 tokens leaves nothing of 8"),
    (replace(LOAD, prompt=7, asynchronous=True), "whole_prompt_hit", "hit of 8 tokens leaves nothing of 7"),
    (replace(LOAD, local=4, external=4, claimed=4, expected=12), "shorter_than_stored", "hit of 8 tokens, 12 are"),
])  # fmt: skip
def test_wrong_hits_are_named_with_their_numbers(load, kind, what):
    result, (finding,) = hits(load)
    assert (result.status, finding.kind, finding.scenario) == (Status.FAILED, kind, "bulk/9")
    assert finding.message.startswith(f"b#2: {what}")
    assert finding.next_step


def test_a_connector_that_never_hits():
    cold, repeated = replace(LOAD, external=0, claimed=0, stored=0, expected=None), replace(LOAD, external=0, claimed=0)
    result, (finding,) = hits(cold, replace(repeated, expected=None))
    assert (result.status, finding.kind) == (Status.FAILED, "never_hit")
    assert "none of 2 requests was hit, 1 repeated a prompt" in finding.message


def test_one_hit_among_cold_requests_is_enough():
    result, findings = hits(replace(LOAD, external=0, claimed=0, stored=0, expected=0), LOAD)
    assert (result.status, findings, result.judged_items) == (Status.PASSED, [], 2)


def test_no_admission_is_vacuous():
    assert hits()[0].status is Status.VACUOUS


# ---------------------------------------------------------------------- legality


def claims(*seen):
    transcript = clean()
    transcript.claims = list(seen)
    return legality(LAYOUT, transcript)


def test_legal_addresses_are_counted():
    result, findings = claims(SAVE_CLAIM, LOAD_CLAIM)
    assert findings == []
    assert (result.status, result.judged_bytes, result.judged_blocks, result.judged_items) == (Status.PASSED, 512, 3, 8)


@pytest.mark.parametrize(("claim", "verb"), [(SAVE_CLAIM, "a save reads"), (LOAD_CLAIM, "a load writes")])
def test_a_block_of_nobody(claim, verb):
    claim = replace(claim, blocks=(0, 1, 2, 3), allowed=(1, 3))
    result, (finding,) = claims(claim, SAVE_CLAIM, LOAD_CLAIM)
    assert (result.status, finding.kind) == (Status.FAILED, "block_not_allowed")
    assert f"{verb} blocks [0, 2], allowed are [1, 3]" in finding.message


@pytest.mark.parametrize(("byte", "place"), [
    (2 * PAGE + 88, Location(0, "layers.0.attn", "V", 2, 88)),
    (2 * PAGE, Location(0, "layers.0.attn", "K", 2, 0)),
    (5 * PAGE, None),
])  # fmt: skip
def test_the_illegal_block_is_located_where_it_was_first_touched(byte, place):
    claim = replace(LOAD_CLAIM, blocks=(2, 3), starts={2: (0, byte), 3: (0, 3 * PAGE)})
    _, (finding,) = claims(claim, SAVE_CLAIM)
    assert finding.location == place


@pytest.mark.parametrize("trouble", [{"outside": 2}, {"crossing": 1}])
def test_addresses_that_leave_their_page(trouble):
    claim = replace(LOAD_CLAIM, first_illegal="0x1234 + 16", **trouble)
    result, (finding,) = claims(SAVE_CLAIM, claim)
    assert (result.status, finding.kind) == (Status.FAILED, "address_outside_page")
    assert "0x1234 + 16" in finding.message


@pytest.mark.parametrize(("seen", "missing"), [((), "load and save"), ((SAVE_CLAIM,), "load"), ((LOAD_CLAIM,), "save")])
def test_what_cannot_be_seen_is_skipped_with_its_reason(seen, missing):
    result, findings = claims(*seen)
    assert (result.status, findings) == (Status.SKIPPED, [])
    assert f"no {missing} of this connector could be seen" in result.reason


def test_half_a_view_that_shows_a_fault_fails():
    assert claims(replace(LOAD_CLAIM, allowed=()))[0].status is Status.FAILED


def test_calls_without_addresses_are_vacuous():
    assert claims(replace(SAVE_CLAIM, addresses=0), replace(LOAD_CLAIM, addresses=0))[0].status is Status.VACUOUS


# ---------------------------------------------------------------------- lifecycle


def test_scenarios_that_end():
    result, findings = lifecycle(LAYOUT, clean())
    assert (result.status, findings, result.judged_items) == (Status.PASSED, [], 1)


def test_an_exception_ends_the_run_and_is_quoted():
    transcript = clean()
    transcript.errors.append(("async/together", "KeyError: 7"))
    result, (finding,) = lifecycle(LAYOUT, transcript)
    assert (result.status, finding.kind, finding.scenario) == (Status.FAILED, "engine_stopped", "async/together")
    assert "KeyError: 7" in finding.message


def test_no_request_at_all_is_vacuous():
    assert lifecycle(LAYOUT, Transcript())[0].status is Status.VACUOUS
