"""The child that stages and judges one case: hands it the case, takes its result."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvproof.findings.case import Case
from kvproof.scenarios.children import Watched, watch
from kvproof.scenarios.run import Result

STARTED = "scenario "


@dataclass(frozen=True)
class ChildRun:
    """``result`` is None when the child died; ``watched`` says how it ended and what it printed."""

    result: Result | None
    watched: Watched

    @property
    def log(self) -> str:
        """Everything the child printed."""
        return "".join(self.watched.lines)


def run_child(case: Case, progress: Callable[[str], None]) -> ChildRun:
    """Run ``case`` in a child process of its own and wait for it."""
    with tempfile.TemporaryDirectory(prefix="kvproof-") as directory:
        case_file, result_file = Path(directory, "case.json"), Path(directory, "result.pickle")
        case_file.write_text(case.dumps(), encoding="utf-8")
        watched = watch("kvproof.scenarios", [str(case_file), str(result_file)], case, progress)
        result = None
        if watched.returncode == 0 and result_file.exists():
            # Written by our own child a moment ago in a directory only this user can enter.
            result = pickle.loads(result_file.read_bytes())
        return ChildRun(result, watched)
