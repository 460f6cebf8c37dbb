"""Carries a case's declarations into every Python interpreter of a run.

A patch made in one process does not travel into the interpreters it starts (vLLM inspects model classes in one of
them). So each run gets a folder of its own on PYTHONPATH with a ``sitecustomize`` that declares before anything else is
imported, and then runs the ``sitecustomize`` it shadows, if there is one. The folder is removed when the run ends.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvproof.findings.case import Case

VARIABLE = "KVPROOF_DECLARATION"
"""Names the folder; set for the run and everything it starts."""
_CASE = "case.json"
_SITECUSTOMIZE = "from kvproof.platforms import declaration\n\ndeclaration.enter()\n"
_entered = False


@contextlib.contextmanager
def declared(case: Case) -> Iterator[dict[str, str]]:
    """Environment variables that make every interpreter started with them declare ``case``; valid inside the block."""
    with tempfile.TemporaryDirectory(prefix="kvproof-declare-") as directory:
        Path(directory, _CASE).write_text(case.dumps(), encoding="utf-8")
        Path(directory, "sitecustomize.py").write_text(_SITECUSTOMIZE, encoding="utf-8")
        paths = [directory, os.environ.get("PYTHONPATH", "")]
        yield {VARIABLE: directory, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def enter() -> None:
    """Called by the generated ``sitecustomize``: declare, then run the one it shadows."""
    global _entered
    from kvproof.platforms import ucm
    from kvproof.platforms.registry import platform

    ucm.release_signals()
    directory = os.environ[VARIABLE]
    case = Case.from_json(json.loads(Path(directory, _CASE).read_text(encoding="utf-8")))
    try:
        platform(case.platform).declare(case)
        _entered = True
    finally:
        _run_shadowed(directory)


def entered() -> bool:
    """Whether this interpreter declared at its start. False under ``python -S``, ``-I`` or ``-E``."""
    return _entered


def _run_shadowed(directory: str) -> None:
    """Run the ``sitecustomize`` that would have been imported without ours; silent where there is none."""
    others = [path for path in sys.path if Path(path or ".").resolve() != Path(directory).resolve()]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    # Under its own name, as if nothing shadowed it: whoever imports it later gets the original.
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)
