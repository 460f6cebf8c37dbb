"""``kvproof doctor``: what is present here, which platforms can run, what is missing and how to get it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvproof.engine.doctor import Diagnosis, Package, diagnose
from kvproof.findings.model import Verdict


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command to ``kvproof``'s parser."""
    parser = subparsers.add_parser(
        "doctor",
        help="what is installed here, which platforms can run, what is missing",
        description="Exit code 0 where a platform can run, 3 where none can.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--deep", action="store_true", help="really import torch, vLLM and its connectors (up to minutes)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis; 0 where a platform can run, 3 where none can."""
    diagnosis = diagnose(deep=args.deep)
    if args.json:
        print(json.dumps(diagnosis.to_json(), indent=2))
    else:
        render(diagnosis, Console())
    return 0 if diagnosis.healthy else Verdict.UNSUPPORTED.exit_code


def render(diagnosis: Diagnosis, console: Console) -> None:
    """The diagnosis as tables, with the platforms last: they are the answer."""
    amx = {True: "yes", False: "no: vLLM's FP8 and MXFP4 kernels refuse this CPU", None: "unknown"}
    bf16 = {
        True: "yes: vLLM's CPU build keeps the states of gated delta nets in float32",
        False: "no: vLLM's CPU build keeps the states of gated delta nets in the model's type",
        None: "unknown",
    }
    compiler = diagnosis.compiler
    _table(
        console,
        "This machine",
        ("what", "found"),
        [
            ("python", diagnosis.python),
            ("system", diagnosis.system),
            ("AMX tiles", amx[diagnosis.amx]),
            ("AVX512_BF16", bf16[diagnosis.avx512_bf16]),
            ("C compiler", compiler.version or f"missing: {compiler.hint}"),
        ],
    )
    _packages(console, "Engine", diagnosis.engine)
    _packages(console, "Third-party connectors", diagnosis.connectors)
    if diagnosis.probes:
        _table(
            console,
            "Imports",
            ("what", "works", "detail", "seconds"),
            [(p.name, _yes(p.ok), p.detail, f"{p.seconds:.1f}") for p in diagnosis.probes],
        )
    if diagnosis.registered:
        _table(
            console,
            "Connectors registered in vLLM (the class alone: most load their library when they start)",
            ("connector", "imports", "error"),
            [(c.name, _yes(c.ok), "" if c.ok else c.detail) for c in diagnosis.registered],
        )
    _table(
        console,
        "Platforms",
        ("platform", "runs", "reason", "what to do"),
        [(p.name, _yes(p.runs), p.reason, p.hint) for p in diagnosis.platforms],
    )


def _packages(console: Console, title: str, packages: Iterable[Package]) -> None:
    rows = [(p.name, p.purpose, p.version or f"not installed; {p.hint}") for p in packages]
    _table(console, title, ("package", "for", "version"), rows)


def _table(console: Console, title: str, columns: Iterable[str], rows: Iterable[tuple[str, ...]]) -> None:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold")
    table.columns[0].no_wrap = True
    for row in rows:
        # Text, not str: an error line may hold square brackets, which rich would take for markup.
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def _yes(value: bool) -> str:
    return "yes" if value else "no"
