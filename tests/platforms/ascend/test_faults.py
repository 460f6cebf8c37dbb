"""The fault catalogue under vllm-ascend's layouts."""

from __future__ import annotations

import json

import pytest

from kvproof.cli import main
from kvproof.faults.catalogue import CATALOGUE


@pytest.mark.parametrize("connector", ["SimpleCPUOffloadConnector", "AscendStoreConnector"])
def test_planted_faults_are_caught_at_their_place(connector, capsys):
    code = main(["faults", "--platform", "ascend-sim", "--soc", "ascend910b", "--connector", connector, "--json"])
    proof = json.loads(capsys.readouterr().out)
    assert (proof["platform"], proof["connector"]) == ("ascend-sim", connector)
    judged = [f for f in proof["faults"] if f["applicable"]]
    assert not {f["name"]: f["reason"] for f in judged if not f["caught"]}
    unfit = {name for name, fault in CATALOGUE.items() if connector in fault.unfit}
    assert {f["name"] for f in proof["faults"] if not f["applicable"]} == unfit
    assert len(judged) >= 65
    assert proof["control"]["clean"]
    assert {run["model"] for run in proof["control"]["runs"]} == {"tiny-qwen3", "tiny-gemma3", "tiny-qwen3-next"}
    assert code == 0
