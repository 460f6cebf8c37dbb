"""Declarations reach every interpreter of a run, first of all, and nothing they shadow is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvproof.findings.case import Case
from kvproof.platforms import declaration

CASE = Case("m", "/nowhere", platform="cuda-sim", cuda_capability="9.0")
ASK = """
import sys
from kvproof.platforms import declaration
print("entered", declaration.entered())
print("torch", "torch" in sys.modules)
import sitecustomize
print("shadowed", getattr(sitecustomize, "MARK", None))
"""


def run(extra, *arguments, code=ASK):
    done = subprocess.run(
        [sys.executable, *arguments, "-c", code],
        env={**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, **extra},
        capture_output=True,
        text=True,
    )
    return done.stdout.splitlines(), done.stderr


@pytest.fixture
def shadowed(tmp_path, monkeypatch):
    """A folder on PYTHONPATH with a sitecustomize of somebody else."""
    (tmp_path / "sitecustomize.py").write_text("MARK = 'theirs'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_an_interpreter_declares_before_anything_else_and_imports_no_torch():
    with declaration.declared(CASE) as extra:
        out, err = run(extra)
    assert out[:2] == ["entered True", "torch False"]
    assert err == ""


def test_the_sitecustomize_it_shadows_runs_too(shadowed):
    with declaration.declared(CASE) as extra:
        assert str(shadowed) in extra["PYTHONPATH"]
        out, err = run(extra)
    assert out == ["entered True", "torch False", "shadowed theirs"]
    assert err == ""


def test_a_shadowed_one_that_fails_is_reported_as_without_us(shadowed):
    (shadowed / "sitecustomize.py").write_text("raise RuntimeError('theirs broke')\n")
    with declaration.declared(CASE) as extra:
        out, err = run(extra)
    assert out[0] == "entered True"
    assert "theirs broke" in err


def test_grandchildren_declare_as_well():
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ASK!r}])"
    with declaration.declared(CASE) as extra:
        out, _ = run(extra, code=code)
    assert out[0] == "entered True"


def test_each_run_has_a_folder_of_its_own_and_it_is_gone_afterwards():
    with declaration.declared(CASE) as one, declaration.declared(CASE) as two:
        folders = [Path(e[declaration.VARIABLE]) for e in (one, two)]
        assert folders[0] != folders[1]
        assert all(f.is_dir() for f in folders)
    assert not any(f.exists() for f in folders)


@pytest.mark.parametrize("flag", ["-S", "-E", "-I"])
def test_an_interpreter_that_skips_it_knows(flag):
    code = f"import sys; sys.path[:0] = {sys.path!r}\n"
    code += "from kvproof.platforms import declaration\nprint(declaration.entered())"
    with declaration.declared(CASE) as extra:
        out, _ = run(extra, flag, code=code)
    assert out == ["False"]


def test_a_platform_resolved_too_early_is_refused():
    code = """
import sys, types
sys.modules["torch"] = types.ModuleType("torch")
from kvproof.platforms.cuda_sim.declare import declare
from kvproof.platforms.cuda_sim.devices import device
try:
    declare(device("9.0", {}))
except RuntimeError as error:
    print(type(error).__name__, error)
"""
    out, _ = run({}, code=code)
    assert out == ["PlatformResolvedError torch was imported before the device could be declared"]
