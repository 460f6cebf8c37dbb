"""The child process of ``kvproof faults``.

    python -m kvproof.faults CASE.json FAULT ...

Outcomes and controls go to standard output as they come, one marked line of JSON each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kvproof.engine.connectors import profile
from kvproof.engine.staging import InputError, StagingError, stage
from kvproof.faults.run import BROKEN, REFUSED, RESULT, USAGE
from kvproof.findings.case import Case
from kvproof.findings.text import PROGRESS


def main(argv: list[str]) -> int:
    """Case file and fault names in, lines out."""
    case_file, *names = argv
    case = Case.from_json(json.loads(Path(case_file).read_text(encoding="utf-8")))

    def progress(text: str) -> None:
        print(PROGRESS + text, flush=True)

    try:
        staged = stage(case, progress)
    except InputError as error:
        print(RESULT + json.dumps({"usage": str(error)}), flush=True)
        return USAGE
    except StagingError as error:
        print(RESULT + json.dumps({"refused": str(error)}), flush=True)
        return REFUSED
    from kvproof.faults.model import Control
    from kvproof.faults.proof import BrokenEngineError, prove
    from kvproof.faults.rig import Rig

    rig = Rig(case.model, staged, case.seed, profile(case.connector))
    try:
        for result in prove(rig, names, progress):
            key = "control" if isinstance(result, Control) else "outcome"
            print(RESULT + json.dumps({key: result.to_json()}), flush=True)
    except BrokenEngineError as error:
        print(error, flush=True)
        return BROKEN
    staged.shutdown()
    return 0


sys.exit(main(sys.argv[1:]))
