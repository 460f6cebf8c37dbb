"""The child process of the command line.

    python -m kvproof.scenarios CASE.json RESULT.pickle

It exists because the environment must be right before Python starts and because a connector may end its process.
Progress goes to standard output as lines that begin with ``PROGRESS``.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path

from kvproof.findings.case import Case
from kvproof.findings.text import PROGRESS
from kvproof.scenarios.run import run_case


def main(argv: list[str]) -> None:
    """Case file in, pickled ``Result`` out. Does not return."""
    case_file, result_file = argv
    case = Case.from_json(json.loads(Path(case_file).read_text(encoding="utf-8")))

    def progress(text: str) -> None:
        print(PROGRESS + text, flush=True)

    result = run_case(case, progress)
    Path(result_file).write_bytes(pickle.dumps(result))
    # The engine is shut down and the result is written: taking the interpreter apart would only cost seconds.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


main(sys.argv[1:])
