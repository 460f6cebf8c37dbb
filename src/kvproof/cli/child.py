"""Starts the child that stages vLLM, relays its progress, keeps its log."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvproof.engine.staging import environment
from kvproof.findings.case import Case
from kvproof.findings.text import PROGRESS
from kvproof.scenarios.run import Result

STARTED = "scenario "


@dataclass(frozen=True)
class ChildRun:
    """``result`` is None when the child died; ``last`` is its last progress line, ``log`` its whole output."""

    result: Result | None
    returncode: int
    last: str
    log: str


def run_child(case: Case, progress: Callable[[str], None]) -> ChildRun:
    """Run ``case`` in a child process of its own and wait for it."""
    with tempfile.TemporaryDirectory(prefix="kvproof-") as directory:
        case_file, result_file = Path(directory, "case.json"), Path(directory, "result.pickle")
        case_file.write_text(case.dumps(), encoding="utf-8")
        child = subprocess.Popen(
            [sys.executable, "-u", "-m", "kvproof.scenarios", str(case_file), str(result_file)],
            env={**os.environ, **environment(case)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        lines, last = [], "start"
        try:
            for line in child.stdout or ():
                lines.append(line)
                if line.startswith(PROGRESS):
                    last = line.removeprefix(PROGRESS).strip()
                    progress(last)
            child.wait()
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        result = None
        if child.returncode == 0 and result_file.exists():
            # Written by our own child a moment ago in a directory only this user can enter.
            result = pickle.loads(result_file.read_bytes())
        return ChildRun(result, child.returncode, last, "".join(lines))
