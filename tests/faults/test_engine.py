"""The proof itself, in real engines: every fault of the catalogue is caught at its exact place. A miss is a failure."""

from __future__ import annotations

import json

import pytest

from kvproof.cli import main
from kvproof.faults.catalogue import CATALOGUE

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("connector", ["SimpleCPUOffloadConnector", "OffloadingConnector", "ExampleConnector"])
def test_every_fault_is_caught(connector: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["faults", "--connector", connector, "--json"])
    proof = json.loads(capsys.readouterr().out)
    faults = {f["name"]: f for f in proof["faults"]}
    assert list(faults) == list(CATALOGUE)
    unfit = {name for name, fault in CATALOGUE.items() if connector in fault.unfit}
    refused = {name for name, f in faults.items() if f["reason"].startswith("vLLM does not stage tiny-qwen3-next")}
    assert not refused or connector == "ExampleConnector"
    assert {name for name, f in faults.items() if not f["applicable"]} == unfit | refused
    planted = [f for f in faults.values() if f["applicable"]]
    assert {f["name"]: f["reason"] for f in planted if not f["caught"]} == {}
    assert all(f["location"] == f["expected"] for f in planted)
    assert all(f["located_pages"] == f["wrong_pages"] for f in planted)
    assert {c["when"] for c in proof["control"]["runs"]} == {"before", "after"}
    assert [c["findings"] for c in proof["control"]["runs"] if not c["clean"]] == []
    assert proof["control"]["clean"]
    assert code == 0
