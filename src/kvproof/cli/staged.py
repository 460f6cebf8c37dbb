"""What ``layout``, ``layout --diff`` and ``ablate`` share: a case that is staged for its layout alone."""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from kvproof.cli.check import add_case_arguments, case_of, died, run_watched
from kvproof.engine import connectors
from kvproof.findings.case import Case
from kvproof.findings.model import Report, Verdict


def add_layout_arguments(parser: argparse.ArgumentParser, model_optional: bool = False) -> None:
    """Everything that decides a layout."""
    add_case_arguments(parser, model_optional)
    parser.add_argument("--connector", metavar="NAME", help="stage with this connector; it can change the layout")


@contextlib.contextmanager
def layout_case(args: argparse.Namespace) -> Iterator[Case]:
    """The case of the arguments, valid inside the block. ValueError, one line, where it cannot run."""
    with tempfile.TemporaryDirectory(prefix="kvproof-") as directory:
        workdir = Path(directory)
        (workdir / "store").mkdir()
        connector = connectors.parse(args.connector, str(workdir / "store")) if args.connector else None
        yield case_of(args, workdir, ("layout",), connector)


def stage(case: Case, quiet: bool) -> Report:
    """Stage ``case`` in a child, its progress on standard error. ValueError where vLLM knows no such connector."""
    child = run_watched(case, Console(stderr=True), quiet)
    if child.result is None:
        return died(case, child)
    if child.result.report is None:
        raise ValueError(child.result.usage)
    return child.result.report


def unsupported(reason: str, as_json: bool) -> int:
    """Say that vLLM does not stage a case."""
    print(json.dumps({"verdict": "UNSUPPORTED", "reason": reason}) if as_json else f"UNSUPPORTED: {reason}")
    return Verdict.UNSUPPORTED.exit_code
