"""Nothing a child leaves behind stays, whatever way it ended."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvproof.scenarios import children

SPILLS = """
import os, sys, tempfile
tempfile.mkdtemp(); tempfile.mkstemp()
open(os.environ["TMPDIR"] + "/vllm_dist_0123", "w").close()
print("at", tempfile.gettempdir())
sys.stdout.flush()
os._exit(int(sys.argv[1]))
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A short temporary directory that nobody else uses; pytest has made its own by then."""
    del tmp_path
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield Path(directory)


@pytest.mark.parametrize("code", [0, 7])
def test_nothing_a_child_spills_is_left(place, tmp_path, monkeypatch, code):
    (tmp_path / "spills.py").write_text(SPILLS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*sys.path, str(tmp_path)]))
    watched = children.follow("spills", [str(code)], {}, lambda text: None)
    assert watched.returncode == code
    assert watched.lines[0].startswith(f"at {place}/kvproof-")
    assert not list(place.iterdir())


def test_what_a_child_of_ours_published_is_removed_and_no_more(place, tmp_path, monkeypatch):
    monkeypatch.setattr(children.ucm, "SHARED_MEMORY", tmp_path)
    (tmp_path / "publishes.py").write_text(
        "import os\n"
        "for pid in (os.getpid(), os.getppid(), 1):\n"
        f"    open(f'{tmp_path}/ucm_blocksize_{{pid}}', 'w').close()\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*sys.path, str(tmp_path)]))
    assert children.follow("publishes", [], {}, lambda text: None).returncode == 0
    assert [path.name for path in tmp_path.glob("ucm_*")] == ["ucm_blocksize_1"]


def test_a_failing_caller_does_not_leave_the_child_behind(place, tmp_path, monkeypatch):
    support = Path(__file__).parents[1] / "support"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*sys.path, str(support)]))
    started = []
    monkeypatch.setattr(subprocess, "Popen", _remembering(subprocess.Popen, started))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(ZeroDivisionError):
        children.follow("waiting", [str(pipe)], {}, lambda text: 1 // 0)
    os.close(reader)
    (child,) = started
    assert child.returncode == -9
    assert not list(place.iterdir())


def _remembering(popen, started):
    def start(*arguments, **options):
        started.append(popen(*arguments, **options))
        return started[-1]

    return start
