"""The fault catalogue under the layouts of the CUDA wheel: what kvproof says there, it can also deny."""

from __future__ import annotations

import json

from kvproof.cli import main


def test_every_planted_fault_is_caught_at_its_place(capsys):
    code = main(["faults", "--platform", "cuda-sim", "--cuda-capability", "9.0", "--json"])
    proof = json.loads(capsys.readouterr().out)
    assert proof["platform"] == "cuda-sim"
    judged = [f for f in proof["faults"] if f["applicable"]]
    missed = {f["name"]: f["reason"] for f in judged if not f["caught"]}
    assert not missed
    assert len(judged) >= 60
    assert proof["control"]["clean"]
    assert {run["model"] for run in proof["control"]["runs"]} >= {"tiny-qwen3", "tiny-gemma3", "tiny-qwen3-next"}
    assert code == 0
