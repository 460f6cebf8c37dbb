"""``kvproof compare A B``: do two evidence directories agree, and what does that prove?"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvproof.findings.compare import DIFFERENT, DOES_NOT_PROVE, EQUAL, MISSING, Comparison, Criterion, compare
from kvproof.findings.model import USAGE_EXIT_CODE
from kvproof.findings.text import printable

if TYPE_CHECKING:
    SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]

DISAGREE_EXIT_CODE = 1
SHOWN = 240
"""Characters of a first difference shown in the table."""
_PLATFORM = {
    "yes": "Sees the platform",
    "partly": "Sees part of it",
    "no": "Cannot see it",
}
"""How ``sees_platform`` begins -> the words for it."""
_STYLE = {EQUAL: "green", DIFFERENT: "bold red", MISSING: "yellow"}


def add_parser(subparsers: SubParsers) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "compare",
        help="say whether two evidence directories agree, criterion by criterion",
        description="Exit code 0: they agree. 1: they differ. 2: one is neither evidence nor a proof of faults.",
    )
    parser.add_argument("a", metavar="A", type=Path, help="evidence directory, or the output of kvproof faults --json")
    parser.add_argument("b", metavar="B", type=Path, help="another one of the same sort")
    parser.add_argument("--json", action="store_true", help="print JSON (docs/json.md)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the comparison; returns the exit code."""
    try:
        comparison = compare(args.a, args.b)
    except ValueError as error:
        print(f"kvproof compare: {error}", file=sys.stderr)
        return USAGE_EXIT_CODE
    if args.json:
        print(json.dumps(comparison.to_json(), indent=1))
    else:
        _print(comparison, Console())
    return 0 if comparison.agree else DISAGREE_EXIT_CODE


def _print(comparison: Comparison, console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("criterion")
    table.add_column("result")
    table.add_column("first difference (A | B), or what agreement proves", overflow="fold", ratio=1)
    for criterion in comparison.criteria:
        style = _STYLE[criterion.result] if criterion.decides else "dim"
        table.add_row(criterion.name, Text(criterion.result, style=style), Text(printable(_note(criterion))))
    console.print(f"A  {comparison.a}\nB  {comparison.b}", markup=False, highlight=False, soft_wrap=True)
    console.print(table)
    for answer, meaning in _PLATFORM.items():
        names = [c.name for c in comparison.criteria if c.sees_platform.partition(":")[0] == answer]
        if names:
            console.print(Text.assemble((f"{meaning}: ", "bold"), ", ".join(names)))
    console.print(Text(DOES_NOT_PROVE, style="dim"))
    equal = sum(criterion.result == EQUAL for criterion in comparison.criteria)
    word, style = ("AGREE", "bold green") if comparison.agree else ("DIFFER", "bold red")
    console.print(Text.assemble((word, style), f"  {equal} of {len(comparison.criteria)} criteria equal"))


def _note(criterion: Criterion) -> str:
    if not criterion.decides and criterion.result != EQUAL:
        return f"other on another platform or in another case, does not decide: {_shortened(criterion)}"
    if criterion.missing_in:
        return f"missing in {' and '.join(criterion.missing_in)}: nothing was compared"
    if not criterion.difference:
        return f"{criterion.proves}; not {criterion.does_not_prove}"
    return _shortened(criterion)


def _shortened(criterion: Criterion) -> str:
    """The first difference; a line of a log can be pages long, and --json has all of it."""
    return textwrap.shorten(criterion.difference, SHOWN, placeholder=" …")
