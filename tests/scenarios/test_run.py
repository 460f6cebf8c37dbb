"""What may turn a run without a hit into UNSUPPORTED: nothing but the missing hit."""

import pytest

from kvproof.findings.model import Finding
from kvproof.oracles.transcript import Load, Transcript
from kvproof.scenarios.run import _only_lacks_hits

COLD = Load("s", "r", 10, 0, 0, 0, False, 0, None)
HIT = Load("s", "r", 10, 0, 8, 8, False, 8, 8)


def finding(oracle):
    return Finding(oracle, "k", "m", "s")


def test_only_the_missing_hit():
    assert _only_lacks_hits([finding("hit_length"), finding("inventory")], Transcript(loads=[COLD]))
    assert not _only_lacks_hits([], Transcript(loads=[COLD, HIT]))


@pytest.mark.parametrize("oracle", ["legality", "footprint", "placement", "lifecycle", "source_footprint"])
def test_any_other_finding_stays_a_fail(oracle):
    assert not _only_lacks_hits([finding("hit_length"), finding(oracle)], Transcript(loads=[COLD]))
