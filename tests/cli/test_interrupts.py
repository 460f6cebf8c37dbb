"""A command ended from outside ends everything it started, leaves no folder and writes nothing."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvproof.cli import interrupts

SUPPORT = Path(__file__).parents[1] / "support"
PARENT = """
import ctypes, signal, sys
# As UCM's start-up hook does: a handler Python knows nothing of, which does nothing.
libc = ctypes.CDLL(None)
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    signal.signal(number, handler)
libc.signal(signal.SIGINT, ctypes.cast(libc.abs, ctypes.c_void_p))
from kvproof import cli
from kvproof.cli import child
from kvproof.platforms.cpu import Cpu
from kvproof.scenarios.children import follow
Cpu.here = lambda self: None
child.watch = lambda module, arguments, case, progress: follow("waiting", [sys.argv[1]], {}, progress)
sys.exit(cli.main(["check", "tiny-qwen3", "--evidence", sys.argv[2]]))
"""
LIMIT_S = 60


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGINT, 130, "kvproof: interrupted\n"),
        (signal.SIGTERM, 143, "kvproof: ended by SIGTERM\n"),
        (signal.SIGHUP, 129, "kvproof: ended by SIGHUP\n"),
    ],
)
def test_a_signal_ends_all_of_it(number, code, said, tmp_path):
    pipe, evidence = tmp_path / "pipe", tmp_path / "evidence"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as temporary:  # short enough for sockets
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, str(pipe), str(evidence)], stderr=subprocess.PIPE, text=True,
            env={**os.environ, "TMPDIR": temporary, "PYTHONPATH": os.pathsep.join([*sys.path, str(SUPPORT)])},
        )  # fmt: skip
        assert "waiting" in parent.stderr.readline()
        assert list(Path(temporary).iterdir())
        parent.send_signal(number)
        _, err = parent.communicate(timeout=LIMIT_S)
        assert (parent.returncode, err) == (code, said)
        assert not list(Path(temporary).iterdir())
    # The pipe ends when nobody holds it open any more: the child and its child are gone.
    assert select.select([reader], [], [], LIMIT_S)[0]
    assert os.read(reader, 1) == b""
    os.close(reader)
    assert not evidence.exists()


def test_what_was_ignored_stays_ignored_and_all_is_as_before():
    before = {number: signal.getsignal(number) for number in interrupts.ENDING}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupts.taken():
            signal.raise_signal(signal.SIGHUP)
            with pytest.raises(interrupts.EndedError):
                signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)  # the first one decides: clearing up is not disturbed
    finally:
        after = {number: signal.getsignal(number) for number in interrupts.ENDING}
        for number, handler in before.items():
            signal.signal(number, handler)
    assert after == {**before, signal.SIGHUP: signal.SIG_IGN}
