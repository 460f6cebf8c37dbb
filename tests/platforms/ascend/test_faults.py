"""The fault catalogue under vllm-ascend's layouts."""

from __future__ import annotations

import json

from kvproof.cli import main


def test_planted_faults_are_caught_at_their_place(capsys):
    code = main(["faults", "--platform", "ascend-sim", "--soc", "ascend910b", "--json"])
    proof = json.loads(capsys.readouterr().out)
    assert proof["platform"] == "ascend-sim"
    judged = [f for f in proof["faults"] if f["applicable"]]
    assert not {f["name"]: f["reason"] for f in judged if not f["caught"]}
    # The connector's loads are asynchronous, as on every platform.
    assert [f["name"] for f in proof["faults"] if not f["applicable"]] == ["load-behind-hit"]
    assert proof["control"]["clean"]
    assert {run["model"] for run in proof["control"]["runs"]} == {"tiny-qwen3", "tiny-gemma3", "tiny-qwen3-next"}
    assert code == 0
