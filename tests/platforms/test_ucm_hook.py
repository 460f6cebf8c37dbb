"""What UCM's start-up hook and its engines do to a process and to the machine, taken back. No UCM is needed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from kvproof.platforms import ucm

HOOKED = """
import ctypes, faulthandler, os, signal, sys, types
from kvproof.platforms import ucm
libc = ctypes.CDLL(None)
def hook():
    # Handlers Python knows nothing of, which return: a fault repeats for ever, an interrupt is lost.
    for number in (signal.SIGINT, *ucm.FATAL):
        libc.signal(number, ctypes.cast(libc.abs, ctypes.c_void_p))
"""


def run(code, *options):
    return subprocess.run(
        [sys.executable, *options, "-c", HOOKED + code], capture_output=True, text=True, timeout=60, check=False,
        env={k: v for k, v in os.environ.items() if k != "PYTHONFAULTHANDLER"}
        | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip


TAKEN_BACK = "hook(); sys.modules['ucm'] = types.ModuleType('ucm'); ucm.release_signals()\n"


@pytest.mark.parametrize("options", [(), ("-X", "faulthandler")])
@pytest.mark.parametrize("number", ucm.FATAL)
def test_a_fatal_signal_ends_the_process_by_its_number(number, options):
    done = run(TAKEN_BACK + f"os.kill(os.getpid(), {int(number)})", *options)
    assert done.returncode == -number
    assert ("Current thread" in done.stderr) == bool(options)


def test_a_fault_ends_the_process_though_faulthandler_came_after_the_hook():
    done = run("hook(); faulthandler.enable(); " + TAKEN_BACK + "ctypes.string_at(0)")
    assert done.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in done.stderr


def test_an_interrupt_is_pythons_again():
    # Whoever runs the tests in the background of a shell lets their children ignore it.
    code = "signal.signal(signal.SIGINT, signal.default_int_handler); " + TAKEN_BACK
    assert "KeyboardInterrupt" in run(code + "os.kill(os.getpid(), signal.SIGINT)").stderr


def test_an_ignored_interrupt_stays_ignored():
    code = "signal.signal(signal.SIGINT, signal.SIG_IGN); " + TAKEN_BACK
    assert run(code + "os.kill(os.getpid(), signal.SIGINT); print('on')").stdout == "on\n"


@pytest.mark.skipif("ucm" in sys.modules, reason="UCM's own hook ran")
def test_without_ucm_every_handler_stays():
    done = run("hook(); ucm.release_signals(); os.kill(os.getpid(), signal.SIGABRT); print('on')")
    assert (done.returncode, done.stdout) == (0, "on\n")


def test_only_what_our_engines_published_is_removed(monkeypatch, tmp_path):
    monkeypatch.setattr(ucm, "SHARED_MEMORY", tmp_path)
    ours = [
        "ucm_uniqueid_71", "ucm_blocksize_71", "ucm_blocksize_71_rope", "ucm_blocksize_7.tmp.71", "uc_shm_cache_0a1b",
    ]  # fmt: skip
    others = ["ucm_uniqueid_710", "ucm_blocksize_7", "ucm_blocksize_171", "uc_shm_cache_0a1c", "psm_71", "other_71"]
    for name in (*ours, *others):
        (tmp_path / name).write_text("0a1b" if name == "ucm_uniqueid_71" else "128")
    ucm.remove_published(71, 72)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


@pytest.mark.parametrize("said", ["", "../precious", "/etc/passwd"])
def test_an_identity_that_is_none_names_nothing(said, monkeypatch, tmp_path):
    shared = tmp_path / "shm"
    shared.mkdir()
    monkeypatch.setattr(ucm, "SHARED_MEMORY", shared)
    (tmp_path / "precious").touch()
    (shared / "uc_shm_cache_").touch()
    (shared / "ucm_uniqueid_71").write_text(said)
    ucm.remove_published(71)
    assert (tmp_path / "precious").exists()
    assert [path.name for path in shared.iterdir()] == ["uc_shm_cache_"]
