"""UCM's published wheel, its shared objects unmodified, on the CUDA layouts of vLLM's published wheel."""

import json
import os
import signal
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from kvproof.cli import main
from kvproof.engine import connectors
from kvproof.findings.case import Case
from kvproof.platforms.declaration import declared

try:
    UCM = version("uc-manager-cuda-cu129")
    version("vllm")
except PackageNotFoundError:
    pytest.skip("needs vLLM's CUDA wheel and uc-manager-cuda-cu129: .venv-cuda", allow_module_level=True)

MODULE = "ucm.integration.vllm.ucm_connector:UCMConnector"
SHORT = ("--platform", "cuda-sim", "--cuda-capability", "9.0", "--tokens", "64", "--seed", "3")


@pytest.fixture
def check(tmp_path):
    def run(model, *arguments):
        code = main(["check", model, *SHORT, *arguments, "--evidence", str(tmp_path / "evidence")])
        return code, json.loads((tmp_path / "evidence" / "report.json").read_text())

    return run


def oracle(report, name):
    return next(o for o in report["oracles"] if o["oracle"] == name)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("model", "connector", "runner", "delay"),
    [
        ("tiny-qwen3", MODULE, "v1", "0"),
        ("tiny-qwen3", "UCMLayerwise", "v2", "3000"),  # late copies: who waits for none is seen
        ("tiny-deepseek-v3", "UCMLayerwise", "v1", "0"),
    ],
)
def test_every_byte_comes_back_and_every_address_is_seen(check, monkeypatch, model, connector, runner, delay):
    monkeypatch.setenv("KVPROOF_STREAM_DELAY_US", delay)
    code, report = check(model, "--connector", connector, "--runner", runner)
    assert (code, report["verdict"], report["findings"]) == (0, "PASS", [])
    layerwise = connector == "UCMLayerwise"
    assert report["case"]["connector"]["extra_config"]["use_layerwise"] is layerwise
    assert {s["mode"] for s in report["scenarios"]} == {"bulk", "layerwise", "async"}
    assert all(g["restored_bytes"] > 0 for g in report["groups"])
    # The addresses are those its binaries gave the CUDA runtime: what was restored was claimed, byte for byte or more.
    counters = report["counters"]
    assert counters["claimed_load_bytes"] >= counters["restored_bytes"] > 0
    assert counters["claimed_save_bytes"] > 0
    assert oracle(report, "legality")["status"] == "passed"
    assert any("libcudart.so.12" in s["symbol"] for s in report["substitutions"])


def test_addresses_outside_the_cache_are_named_and_not_used(check, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "support"))
    preset = connectors.parse("UCM", str(tmp_path)).extra_config
    code, report = check(
        "tiny-qwen3", "--connector", "misplaced_ucm:BeyondTheEnd", "--connector-config", json.dumps(preset),
        "--mode", "bulk",
    )  # fmt: skip
    assert (code, report["verdict"]) == (1, "FAIL")
    outside = [f for f in report["findings"] if f["kind"] == "address_outside_page"]
    assert outside
    assert all(f["message"].startswith("a save reads") for f in outside)
    assert oracle(report, "footprint")["status"] == "passed"
    log = (tmp_path / "evidence" / "log.txt").read_text()
    assert "libcudart.so.12: cudaMemcpyAsync: source 0x" in log


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV])
def test_a_fatal_signal_ends_every_interpreter_of_a_run(number):
    """UCM's start-up hook takes it and returns."""
    with declared(Case("none", "", platform="cuda-sim", cuda_capability="9.0")) as extra:
        code = f"import os; os.kill(os.getpid(), {int(number)})"
        done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **extra}, timeout=60, check=False)
    assert done.returncode == -number


def test_an_interrupt_reaches_the_command_line():
    code = (
        "import os, signal, sys; from kvproof import cli\n"
        "cli.zoo.run = lambda args: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.exit(cli.main(['zoo', 'list']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "kvproof: interrupted\n")


@pytest.mark.usefixtures("nothing_left")
def test_a_fault_among_ucms_libraries_ends_the_engine_where_it_did(check, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "support"))
    preset = connectors.parse("UCM", str(tmp_path)).extra_config
    code, report = check(
        "tiny-qwen3", "--connector", "misplaced_ucm:Faults", "--connector-config", json.dumps(preset), "--mode", "bulk",
    )  # fmt: skip
    assert (code, report["verdict"]) == (1, "FAIL")
    (finding,) = report["findings"]
    assert (finding["kind"], finding["scenario"]) == ("process_ended", "bulk/64")
    assert "signal 11" in finding["message"]


@pytest.mark.skipif(UCM != "0.9.0rc3", reason=f"seen with 0.9.0rc3, this is {UCM}")
def test_groups_beyond_the_first_are_hit_but_never_restored(check):
    """docs/ucm.md: it says that it handles several KV-cache groups, and moves the blocks of the first one."""
    code, report = check("tiny-gemma3", "--connector", "UCM", "--mode", "bulk", "--tokens", "512")
    assert (code, report["verdict"]) == (1, "FAIL")
    assert [g["restored_bytes"] > 0 for g in report["groups"]] == [True, False, False]
    wrong = [f for f in report["findings"] if f["oracle"] == "placement"]
    assert {f["location"]["group"] for f in wrong} == {1, 2}
    assert {f["kind"] for f in wrong} == {"still_poison"}
    null = [f for f in report["findings"] if f["kind"] == "null_block_written"]
    assert null
    assert all(f["origin"]["request"].startswith("bulk/") for f in null)
    loads = [f["message"] for f in report["findings"] if f["message"].startswith("a load writes")]
    assert loads
    assert all("block [0]" in message for message in loads)
