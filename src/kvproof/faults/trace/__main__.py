"""The child process of ``kvproof faults --trace``.

    python -m kvproof.faults.trace MODEL ENGINE FAULT ...

MODEL is a directory; the model is made there when it does not exist.

Outcomes and controls go to standard output as they come, one marked line of JSON each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kvproof.faults.run import BROKEN, RESULT
from kvproof.faults.trace.model import Control
from kvproof.faults.trace.proof import BrokenEngineError, prove
from kvproof.findings.text import PROGRESS


def main(argv: list[str]) -> int:
    """Directory, engine and fault names in, lines out."""
    model, engine, *names = argv

    def progress(text: str) -> None:
        print(PROGRESS + text, flush=True)

    try:
        for result in prove(Path(model), engine, names, progress):
            key = "control" if isinstance(result, Control) else "outcome"
            print(RESULT + json.dumps({key: result.to_json()}), flush=True)
    except BrokenEngineError as error:
        print(error, flush=True)
        return BROKEN
    return 0


sys.exit(main(sys.argv[1:]))
