"""The proof itself, in real engines: every fault is caught at its exact place by its rule. A miss is a failure."""

from __future__ import annotations

import json

import pytest

from kvproof.cli import main
from kvproof.faults.trace.catalogue import CATALOGUE, UNREACHABLE
from kvproof.faults.trace.stage import ENGINES
from kvproof.trace.rules.catalogue import RULES

pytestmark = pytest.mark.engine


def test_every_fault_is_caught(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["faults", "--trace", "--json"])
    proof = json.loads(capsys.readouterr().out)
    faults = {f["name"]: f for f in proof["faults"]}
    assert list(faults) == list(CATALOGUE)
    assert {name: f["reason"] for name, f in faults.items() if not f["caught"]} == {}
    assert all(f["location"] == f["expected_location"] for f in faults.values())
    caught = {f["rule"] for f in faults.values()}
    assert caught == set(RULES) - set(UNREACHABLE)
    assert len(caught) >= 45
    assert {(c["engine"], c["when"]) for c in proof["controls"]} == {
        (engine, when) for engine in ENGINES for when in ("before", "after")
    }
    assert [c["findings"] for c in proof["controls"] if not c["clean"]] == []
    assert proof["holds"]
    assert code == 0
