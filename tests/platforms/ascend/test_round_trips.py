"""Byte-exact round trips on vllm-ascend's layouts, through its own connectors."""

import pytest

SHORT = ("--tokens", "256", "--seed", "3")


@pytest.mark.parametrize(
    ("model", "connector", "runner"),
    [
        ("tiny-qwen3", "SimpleCPUOffloadConnector", "v1"),
    ],
)
def test_every_byte_comes_back(check, model, connector, runner):
    code, report = check(model, "ascend910b", "--connector", connector, "--runner", runner, *SHORT)
    assert (code, report["verdict"], report["findings"]) == (0, "PASS", [])
    assert {s["mode"] for s in report["scenarios"]} == {"bulk", "layerwise", "async"}
    assert all(g["restored_bytes"] > 0 for g in report["groups"])
    counters = report["counters"]
    assert counters["claimed_load_bytes"] >= counters["restored_bytes"] > 0
    assert any("swap_blocks_batch" in s["symbol"] for s in report["substitutions"])
