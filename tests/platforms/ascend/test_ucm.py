"""UCM's published Ascend wheel, its shared objects unmodified, on the layouts of vllm-ascend."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from kvproof.engine import connectors
from kvproof.hostrt import build, elf, libraries
from kvproof.platforms import ucm
from kvproof.platforms.ascend_sim import cann

UCM = [path for path in ucm.shared_objects() if libraries.ACL.soname in elf.imports(path).libraries]
P2P = "libucm_p2p_transport.so"
"""Needs libraries of CANN that nothing of the pipeline asks for (docs/ucm.md)."""
RUNNABLE = [path for path in UCM if path.name != P2P]
SEPARATE = (
    "--cudagraph-mode", "FULL_DECODE_ONLY", "--engine-args", '{"additional_config": {"pa_shape_list": [1, 2, 4]}}',
)  # fmt: skip
"""K and V of a layer lie in storages of their own."""
SHORT = ("--tokens", "512", "--seed", "3")


def test_the_wheel_is_here():
    assert version("uc-manager-cann900-a2") == "0.9.0rc3"
    assert len(RUNNABLE) == len(UCM) - 1 == 5


@pytest.mark.parametrize(("library", "count"), [(libraries.ACL, 38), (libraries.RUNTIME, 1)])
def test_no_symbol_is_missing(library, count):
    wanted = build.wanted(library, UCM)
    assert len(wanted) == count
    assert wanted <= elf.exports(cann.directory() / library.soname)


@pytest.mark.parametrize("path", RUNNABLE, ids=lambda path: path.name)
def test_the_linker_resolves_every_symbol_at_once(path):
    code = f"import ctypes; ctypes.CDLL({str(path)!r}, mode=2)  # RTLD_NOW"
    environment = {"LD_LIBRARY_PATH": str(cann.directory())}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_a_task_that_is_a_kernel_ends_the_process_with_its_name():
    library = str(cann.directory() / libraries.RUNTIME.soname)
    code = f"import ctypes; ctypes.CDLL({library!r}).rtFftsPlusTaskLaunchWithFlag()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode < 0
    assert done.stderr == "kvproof-hostrt: libruntime.so: rtFftsPlusTaskLaunchWithFlag is not implemented\n"


def test_a_fatal_signal_ends_every_interpreter_of_a_run(interpreter):
    """UCM's start-up hook takes it and returns."""
    assert interpreter("import os; os.kill(os.getpid(), 11)").returncode == -11


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("model", "connector", "runner", "delay", "options"),
    [
        ("tiny-deepseek-v3", "UCM", "v1", "0", ()),
        ("tiny-deepseek-v3", "UCMLayerwise", "v2", "3000", ()),  # late copies: who waits for none is seen
        ("tiny-qwen3-next", "UCM", "v2", "0", ()),
        ("tiny-qwen3-next", "UCMLayerwise", "v1", "0", ()),  # linear attention calls the connector itself here
        ("tiny-qwen3", "UCM", "v1", "0", SEPARATE),
    ],
)
def test_every_byte_comes_back_and_every_address_is_seen(
    check, monkeypatch, tmp_path, model, connector, runner, delay, options
):
    monkeypatch.setenv("KVPROOF_STREAM_DELAY_US", delay)
    before = set(ucm.SHARED_MEMORY.iterdir())
    code, report = check(model, "ascend910b", "--connector", connector, "--runner", runner, *options, *SHORT)
    assert (code, report["verdict"], report["findings"]) == (0, "PASS", [])
    assert {s["mode"] for s in report["scenarios"]} == {"bulk", "layerwise", "async"}
    assert all(group["restored_bytes"] > 0 for group in report["groups"])
    counters = report["counters"]
    assert counters["claimed_load_bytes"] >= counters["restored_bytes"]
    assert counters["claimed_save_bytes"] > 0
    assert next(o for o in report["oracles"] if o["oracle"] == "legality")["status"] == "passed"
    # Files in shared memory are named by the store's identity or the engine's process, which the log has; another run
    # may be under way beside this one.
    log = (tmp_path / "evidence" / "log.txt").read_text()
    left = [path.name for path in set(ucm.SHARED_MEMORY.iterdir()) - before if path.name.startswith("uc")]
    assert not [name for name in left if name.rpartition("_")[2] in log or name.endswith(f"_{os.getpid()}")]


@pytest.mark.parametrize("connector", ["UCM", "UCMLayerwise"])
def test_a_page_of_k_is_not_the_distance_between_blocks(check, connector):
    """docs/ucm.md: K and V are two views of one tensor, a block's V lies behind its K; UCM takes the size of K for the
    block stride."""
    options = ("--connector", connector, "--runner", "v1", "--mode", "bulk", *SHORT)
    code, report = check("tiny-qwen3", "ascend910b", *options)
    assert (code, report["verdict"]) == (1, "FAIL")
    assert report["counters"]["claimed_load_bytes"] > 0
    assert sum(group["restored_bytes"] for group in report["groups"]) == 0
    assert {f["kind"] for f in report["findings"]} >= {"still_poison", "null_block_written", "block_not_allowed"}
    places = [f for f in report["findings"] if f["kind"] == "foreign" and f["origin"]]
    # What was meant for K of a block stands in V of another, and the other way round.
    assert any(f["location"]["resource"] != f["origin"]["resource"] for f in places)


def test_events_of_the_python_binding_are_the_librarys(interpreter):
    done = interpreter(
        "import acl, torch, torch_npu\n"
        "event, code = acl.rt.create_event()\n"
        "stream = torch.npu.current_stream().npu_stream\n"
        "print(code, event > 0, acl.rt.record_event(event, stream), acl.rt.destroy_event(event))\n"
        "try:\n    acl.rt.memcpy(1, 2)\n"
        "except NotImplementedError as error:\n    print(error)\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == [
        "0 True 0 0", "kvproof ascend-sim: acl.rt.memcpy needs CANN, which is not installed"
    ]  # fmt: skip


def test_addresses_outside_the_cache_are_named_and_not_used(check, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "support"))
    preset = connectors.parse("UCM", str(tmp_path)).extra_config
    code, report = check(
        "tiny-deepseek-v3", "ascend910b", "--connector", "misplaced_ucm:Nowhere", "--connector-config",
        json.dumps(preset), "--runner", "v1", "--mode", "bulk", *SHORT,
    )  # fmt: skip
    assert (code, report["verdict"]) == (1, "FAIL")
    outside = [f for f in report["findings"] if f["kind"] == "address_outside_page"]
    assert outside
    assert all(f["message"].startswith("a save reads") for f in outside)
    assert "libascendcl.so: aclrtMemcpyAsync: source 0x" in (tmp_path / "evidence" / "log.txt").read_text()
