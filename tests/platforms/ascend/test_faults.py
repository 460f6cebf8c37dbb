"""The fault catalogue under vllm-ascend's layouts."""

from __future__ import annotations

import json

from kvproof.cli import main

OPEN = {
    # vllm-ascend gives groups allocations of their own, so a stride taken from another group ends in frames of a third.
    "stride-of-another-group": "wrong pages are not named by any finding",
    # Their stories need a state that tiny-qwen3-next does not load from this connector.
    "table-of-another-group": "never planted",
    "state-of-earlier-boundary": "never planted",
}
"""Faults this platform does not prove yet, with the reason as the proof gives it. The list can only become shorter."""


def test_planted_faults_are_caught_at_their_place(capsys):
    main(["faults", "--platform", "ascend-sim", "--soc", "ascend910b", "--json"])
    proof = json.loads(capsys.readouterr().out)
    assert proof["platform"] == "ascend-sim"
    judged = [f for f in proof["faults"] if f["applicable"]]
    missed = {f["name"]: f["reason"] for f in judged if not f["caught"]}
    assert set(missed) <= set(OPEN), missed
    assert all(OPEN[name] in reason for name, reason in missed.items())
    assert len(judged) - len(missed) >= 64
    assert proof["control"]["clean"]
