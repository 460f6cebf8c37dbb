"""``kvproof layout --diff A B``: two layouts side by side, and what moved in words."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvproof.cli.staged import add_layout_arguments, layout_case, stage, unsupported
from kvproof.findings.case import Case
from kvproof.findings.evidence import LAYOUT
from kvproof.findings.model import Verdict
from kvproof.findings.text import counted, printable
from kvproof.layout import Layout
from kvproof.layout.diff import Diff, diff

DIFFER_EXIT_CODE = 1
SAME = "="
"""Stands in B's column where it says what A says."""


@dataclass(frozen=True)
class Side:
    """One of the two: what was given, and the layout of a file or the case that is to be staged."""

    letter: str
    given: str
    source: Layout | Case


class _CaseParser(argparse.ArgumentParser):
    """Parses a quoted case; a mistake is a ValueError like any other refused input."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def run(args: argparse.Namespace) -> int:
    """0 if the two are the same, 1 if not, 3 where vLLM cannot stage one. ValueError, one line, for refused input."""
    with contextlib.ExitStack() as stack:
        # Both are read before the first is staged: a slip in B must not cost the time of A.
        sides = [_side(letter, given, args, stack) for letter, given in zip("AB", args.diff, strict=True)]
        if not any(isinstance(side.source, Case) for side in sides):
            _require_nothing_of_a_case(args)
        layouts = []
        for side in sides:
            layout = side.source if isinstance(side.source, Layout) else _staged(side, side.source, args.json)
            if isinstance(layout, str):
                return unsupported(f"{side.letter}: {layout}", args.json)
            layouts.append(layout)
    difference = diff(*layouts)
    if args.json:
        named = {side.letter.lower(): side.given for side in sides}
        print(json.dumps({"schema": "kvproof.layout-diff/1", **named, **difference.to_json()}, indent=1))
    else:
        render(difference, sides[0].given, sides[1].given, Console())
    return 0 if difference.same else DIFFER_EXIT_CODE


def _side(letter: str, given: str, args: argparse.Namespace, stack: contextlib.ExitStack) -> Side:
    path = Path(given)
    try:
        if path.is_file():
            return Side(letter, given, read_layout(path))
        if (path / LAYOUT).is_file():
            return Side(letter, given, read_layout(path / LAYOUT))
        return Side(letter, given, stack.enter_context(layout_case(_arguments(given, args))))
    except ValueError as error:
        raise ValueError(f"{letter}: {error}") from error


def _arguments(given: str, args: argparse.Namespace) -> argparse.Namespace:
    """The arguments of a quoted case; what it does not name is taken from beside ``--diff``."""
    parser = _CaseParser(prog="", add_help=False, allow_abbrev=False)
    add_layout_arguments(parser)
    return parser.parse_args(shlex.split(given), argparse.Namespace(**vars(args)))


def _require_nothing_of_a_case(args: argparse.Namespace) -> None:
    """ValueError for an option that says how a case is staged, beside two layouts that are there already."""
    parser = _CaseParser(prog="", add_help=False)
    add_layout_arguments(parser)
    for name, default in vars(parser.parse_args(["MODEL"])).items():
        if name != "model" and getattr(args, name) != default:
            raise ValueError(f"--{name.replace('_', '-')}: both layouts are files, nothing is staged with it")


def read_layout(path: Path) -> Layout:
    """The layout in a JSON file. ValueError, one line, where there is none."""
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return Layout.from_json({key: value for key, value in data.items() if key != "schema"})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: holds no layout ({type(error).__name__}: {error})") from error


def _staged(side: Side, case: Case, quiet: bool) -> Layout | str:
    """The layout vLLM makes of a case, or why it makes none."""
    try:
        report = stage(case, quiet)
    except ValueError as error:
        raise ValueError(f"{side.letter}: {error}") from error
    if report.verdict is Verdict.UNSUPPORTED:
        return report.reason
    if report.verdict is Verdict.FAIL:
        print(f"kvproof layout: {side.letter}: {report.reason}", file=sys.stderr)
    return Layout.from_json(report.layout)


def render(difference: Diff, a: str, b: str, console: Console) -> None:
    """Both sides, the table, the changes in words, and the verdict."""
    console.print(f"A  {a}\nB  {b}", markup=False, highlight=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", overflow="fold", ratio=3)
    for column in "AB":
        table.add_column(column, overflow="fold", ratio=4)
    for fact in difference.facts:
        left, right = (Text(printable(text).replace("; ", "\n")) for text in (fact.a, fact.b))
        if fact.same:
            table.add_row(fact.name, left, Text(SAME, style="dim"))
        else:
            table.add_row(Text(fact.name, style="bold"), left, Text(right.plain, style="yellow"))
    console.print(table)
    if difference.changes:
        console.print(Text("What moved", style="bold"))
        changes = Table.grid(padding=(0, 1))
        changes.add_column(justify="right", width=3, style="dim")
        changes.add_column(overflow="fold")
        for number, change in enumerate(difference.changes, start=1):
            where = f" · {printable(change.where)}" if change.where else ""
            changes.add_row(
                str(number), Text.assemble((change.aspect, "bold"), where, f"\n{printable(change.words)}")
            )  # fmt: skip
        console.print(changes)
    word, style = ("SAME", "bold green") if difference.same else ("DIFFER", "bold red")
    console.print(Text.assemble((word, style), f"  {counted(len(difference.changes), 'change')}"))
