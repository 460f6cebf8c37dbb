"""Bytes saved and restored by vLLM's own connectors under the layouts of the CUDA wheel, every one of them judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvproof.cli import main
from kvproof.platforms.installed import vllm_release

SIM = ("--platform", "cuda-sim", "--seed", "5")


@pytest.fixture
def check(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "support"))

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
    ("tiny-qwen3-next", "9.0", "v1", "OffloadingConnector"),
    ("tiny-qwen3-next", "9.0", "v2", "SimpleCPUOffloadConnector"),
]
FLUSHES = ("--connector-config", json.dumps({"cpu_bytes_to_use": 2 << 30}))


@pytest.mark.parametrize(("model", "capability", "runner", "connector"), CASES)
def test_every_group_comes_back(check, model, capability, runner, connector):
    code, report = check(model, capability, runner, connector, "--tokens", "256" if "next" not in model else "512")
    assert (report["reason"], report["findings"], code) == (report["reason"], [], 0)
    assert {s["mode"] for s in report["scenarios"]} == {"bulk", "layerwise", "async"}
    assert all(group["restored_bytes"] > 0 for group in report["groups"])
    assert all(o["status"] == "passed" for o in report["oracles"])
    assert report["case"]["cuda_capability"] == capability


@pytest.mark.parametrize(
    ("capability", "connector", "options"),
    [
        ("9.0", "SimpleCPUOffloadConnector", ()),
        ("10.0", "early_flush:EarlyFlush", FLUSHES),
        ("12.0", "SimpleCPUOffloadConnector", ()),
    ],
)
def test_deepseek_v41_says_per_group_what_is_not_restored(check, capability, connector, options):
    code, report = check("deepseek-v4.1", capability, "v2", connector, "--tokens", "256", *options)
    assert (report["findings"], code) == ([], 0)
    assert {s["mode"] for s in report["scenarios"]} == {"bulk", "layerwise", "async"}
    for group in report["groups"]:
        if group["kind"] == "mla_attention":
            assert group["restored_bytes"] > 0
        else:
            assert (group["restored_bytes"], group["not_restored_bytes"] > 0) == (0, True)
            assert group["declared"] == "nothing: recomputed by the model, not restored"


# 0.32 finds no hit of a hybrid model that ends with the block in question.
ZEROED_FIRST = [("deepseek-v4.1", "10.0"), *([("tiny-qwen3-next", "9.0")] if vllm_release() >= (0, 33) else [])]


@pytest.mark.parametrize(("model", "capability"), ZEROED_FIRST)
def test_runner_v2_zeroes_blocks_before_an_owed_store_has_read_them(check, model, capability):
    """docs/layouts.md: zeros are stored under the key of what stood there, and restored. V1 flushes first."""
    code, report = check(model, capability, "v2", "OffloadingConnector", "--tokens", "512", "--mode", "bulk")
    assert (code, report["verdict"]) == (1, "FAIL")
    assert {f["scenario"] for f in report["findings"]} == {"bulk/reuse"}
    assert {f["kind"] for f in report["findings"] if f["oracle"] == "placement"} == {"zero"}


def test_the_same_connector_passes_where_it_may_flush_first(check):
    """The counter-check: nothing but the order of the two is different."""
    code, report = check("tiny-qwen3-next", "9.0", "v2", "early_flush:EarlyFlush", *FLUSHES, "--tokens", "512")
    assert (report["findings"], code) == ([], 0)


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
