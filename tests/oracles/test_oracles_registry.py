"""All oracles together: clean, empty, and nothing observed may be lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transcripts import (
    FOREIGN,
    LAYOUT,
    LOOSE,
    POISON,
    UNCOMPUTED,
    ZERO,
    clean,
    observed,
    with_observations,
)  # fmt: skip

from kvproof.bytecode import Mismatch
from kvproof.findings.model import Status
from kvproof.findings.summary import describe
from kvproof.oracles.registry import ORACLES, judge
from kvproof.oracles.transcript import (
    CACHED,
    COMPUTED,
    FOREIGN_BLOCK,
    FREE,
    LOADED,
    NULL,
    OPTIONAL,
    PADDING,
    Transcript,
)  # fmt: skip

REGIONS = (LOADED, OPTIONAL, CACHED, COMPUTED, NULL, PADDING, FREE, FOREIGN_BLOCK)
MOMENTS = ("after_load", "read", "at_rest")
COUNTED = ("foreign", "zero", "poison_target", "poison_uncomputed", "poison_free", "poison_null")


@st.composite
def mismatches(draw: st.DrawFn) -> Mismatch:
    base = draw(st.sampled_from((FOREIGN, POISON, UNCOMPUTED, ZERO, LOOSE)))
    counts = draw(st.dictionaries(st.sampled_from(COUNTED), st.integers(1, 9), min_size=1))
    decoded = draw(st.sampled_from((base.decoded, FOREIGN.decoded))) if base.resource is not None else None
    return Mismatch(**{**base.__dict__, "counts": counts, "decoded": decoded})


def test_a_clean_run_passes_every_oracle_and_each_says_what_it_judged():
    results, findings = judge(LAYOUT, clean())
    assert findings == []
    assert [r.oracle for r in results] == list(ORACLES)
    for r in results:
        assert (r.status, r.findings) == (Status.PASSED, 0), r
        assert r.source
        assert r.judged_bytes or r.judged_items


def test_a_run_that_judged_nothing_passes_no_oracle():
    results, findings = judge(LAYOUT, Transcript())
    assert {r.oracle: r.status for r in results} == {
        **dict.fromkeys(ORACLES, Status.VACUOUS), "legality": Status.SKIPPED, "inventory": Status.FAILED,
    }  # fmt: skip
    assert {f.oracle for f in findings} == {"inventory"}


@settings(max_examples=100)
@given(st.sampled_from(MOMENTS), st.sampled_from(REGIONS), mismatches(), st.sampled_from(("b#2", None)))
def test_nothing_observed_is_lost(moment, region, mismatch, request_id):
    """Every wrong byte is counted by at least one finding, and every finding names the place."""
    o = observed(moment, region, mismatch, request_id)
    results, findings = judge(LAYOUT, with_observations(o))
    assert findings
    by_oracle: dict[str, int] = {}
    for f in findings:
        by_oracle[f.oracle] = by_oracle.get(f.oracle, 0) + f.bytes_affected
        place = f.location
        assert (place.group, place.layer, place.block, place.byte, place.request) == (
            mismatch.group, mismatch.layer, mismatch.block, mismatch.page_byte, request_id,
        )  # fmt: skip
        assert str(place) in describe(f)
        assert f.next_step
        assert f.scenario == "bulk/9"
    assert mismatch.wrong_bytes in (
        *by_oracle.values(), by_oracle.get("placement", 0) + by_oracle.get("source_footprint", 0)
    )  # fmt: skip
    for r in results:
        assert r.findings == sum(f.oracle == r.oracle for f in findings)
        assert (r.status is Status.FAILED) == bool(r.findings)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("region", REGIONS)
def test_every_moment_and_region_is_somebodys(moment, region):
    _, findings = judge(LAYOUT, with_observations(observed(moment, region)))
    assert {f.oracle for f in findings} & {"placement", "footprint"}


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(MOMENTS), st.sampled_from(REGIONS), mismatches()), max_size=5))
def test_the_oracles_do_not_change_what_they_read(observations):
    transcript = with_observations(*(observed(*o) for o in observations))
    before = repr(transcript)
    first = judge(LAYOUT, transcript)
    assert repr(transcript) == before
    assert judge(LAYOUT, transcript) == first
