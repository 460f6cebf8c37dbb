"""Bytes saved and restored by vLLM's own connectors under the layouts of the CUDA wheel, every one of them judged."""

from __future__ import annotations

import json

import pytest

from kvproof.cli import main

SIM = ("--platform", "cuda-sim", "--seed", "5")


@pytest.fixture
def check(tmp_path):
    def run(model, capability, runner, connector, *options):
        evidence = tmp_path / "evidence"
        code = main(
            ["check", model, *SIM, "--cuda-capability", capability, "--runner", runner, "--connector", connector,
             "--evidence", str(evidence), *options]
        )  # fmt: skip
        return code, json.loads((evidence / "report.json").read_text())

    return run


CASES = [
    # kind of cache, connector, runner
    ("tiny-qwen3", "9.0", "v1", "SimpleCPUOffloadConnector"),
    ("tiny-qwen3", "10.0", "v2", "MultiConnector"),
    ("tiny-deepseek-v3", "9.0", "v2", "OffloadingConnector"),
    ("tiny-gemma3", "10.0", "v1", "OffloadingConnector"),
    ("tiny-qwen3-next", "9.0", "v2", "OffloadingConnector"),
]


@pytest.mark.parametrize(("model", "capability", "runner", "connector"), CASES)
def test_every_group_comes_back(check, model, capability, runner, connector):
    code, report = check(model, capability, runner, connector, "--tokens", "256" if "next" not in model else "512")
    assert (report["reason"], report["findings"], code) == (report["reason"], [], 0)
    assert {s["mode"] for s in report["scenarios"]} == {"bulk", "layerwise", "async"}
    assert all(group["restored_bytes"] > 0 for group in report["groups"])
    assert all(o["status"] == "passed" for o in report["oracles"])
    assert report["case"]["cuda_capability"] == capability


@pytest.mark.parametrize(
    ("capability", "connector"),
    [("9.0", "SimpleCPUOffloadConnector"), ("10.0", "OffloadingConnector"), ("12.0", "OffloadingConnector")],
)
def test_deepseek_v41_says_per_group_what_is_not_restored(check, capability, connector):
    code, report = check("deepseek-v4.1", capability, "v2", connector, "--tokens", "256")
    assert (report["findings"], code) == ([], 0)
    assert {s["mode"] for s in report["scenarios"]} == {"bulk", "layerwise", "async"}
    for group in report["groups"]:
        if group["kind"] == "mla_attention":
            assert group["restored_bytes"] > 0
        else:
            assert (group["restored_bytes"], group["not_restored_bytes"] > 0) == (0, True)
            assert group["declared"] == "nothing: recomputed by the model, not restored"


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_step_that_would_replay_a_graph_runs(check, runner):
    """Nothing was captured here; the case, and with it the layout, still says which graphs a card would have."""
    mode = ("--cudagraph-mode", "FULL_AND_PIECEWISE", "--mode", "bulk", "--tokens", "64")
    code, report = check("tiny-qwen3", "9.0", runner, "SimpleCPUOffloadConnector", *mode)
    assert (report["findings"], code) == ([], 0)
    assert report["case"]["cudagraph_mode"] == "FULL_AND_PIECEWISE"


def test_the_fault_of_example_connector_is_found_here_too(check):
    """Public fault (vLLM #53314): with chunked prefill only the first chunk is saved."""
    code, report = check("tiny-qwen3", "9.0", "v1", "ExampleConnector", "--tokens", "256")
    assert (code, report["verdict"]) == (1, "FAIL")
    assert all(f["scenario"].startswith("layerwise") for f in report["findings"])
