"""``kvproof ablate MODEL``: stages a layout again with one declared quantity at a time varied; did anything move?"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvproof.cli.check import refuse
from kvproof.cli.staged import add_layout_arguments, layout_case, stage, unsupported
from kvproof.findings.case import Case
from kvproof.findings.model import Report, Verdict
from kvproof.findings.text import printable
from kvproof.layout import Layout
from kvproof.layout.diff import Change, diff
from kvproof.platforms.platform import Platform
from kvproof.platforms.registry import platform

SAME, MOVED, REFUSED = "same", "moved", "refused"
MOVED_EXIT_CODE = 1
_STYLE = {SAME: "green", MOVED: "bold red", REFUSED: "yellow"}


@dataclass(frozen=True)
class Ablation:
    """One quantity at another value: whether the layout is the ``same``, ``moved``, or vLLM ``refused`` to stage it."""

    quantity: str
    value: Any
    result: str
    reason: str
    changes: tuple[Change, ...]


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command to ``kvproof``'s parser."""
    parser = subparsers.add_parser(
        "ablate",
        help="vary what is declared but must not matter (memory size, core count, name): does the layout move?",
        description="Exit code: 0 the layout never moved, 1 it did, 2 usage, 3 UNSUPPORTED.",
    )
    add_layout_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON (docs/json.md)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 the layout never moved, 1 it did, 2 for refused input, 3 where vLLM refuses the case or a variation of it."""
    try:
        with layout_case(args) as case:
            host = platform(case.platform)
            if not host.variations:
                raise ValueError(f"--platform {host.name}: declares no quantity that could be varied")
            base = stage(case, quiet=args.json)
            if base.verdict is Verdict.UNSUPPORTED:
                return unsupported(base.reason, args.json)
            found = tuple(_ablations(case, host, base, quiet=args.json))
    except ValueError as error:
        return refuse("ablate", error)
    if args.json:
        print(json.dumps(_to_json(case, host, found), indent=1))
    else:
        render(case, host, found, Console())
    results = {ablation.result for ablation in found}
    if MOVED in results:
        return MOVED_EXIT_CODE
    return Verdict.UNSUPPORTED.exit_code if REFUSED in results else 0


def inputs(case: Case, host: Platform) -> dict[str, str]:
    """What decides the layout of a case and is therefore not varied: option -> its value."""
    declared = {option: str(getattr(case, option.lstrip("-").replace("-", "_"))) for option in host.inputs}
    return {
        **declared,
        "--runner": case.runner,
        "--connector": case.connector.display if case.connector else "none",
        "--cudagraph-mode": case.cudagraph_mode or "eager",
        "--block-size": str(case.block_size or "vLLM's"),
        "--engine-args": json.dumps(case.engine_args),
    }


def _ablations(case: Case, host: Platform, base: Report, quiet: bool) -> Iterator[Ablation]:
    before = Layout.from_json(base.layout)
    for quantity, values in host.variations.items():
        for value in values:
            varied = dataclasses.replace(case, varied={quantity: value}, model=f"{case.model} · {quantity} {value}")
            report = stage(varied, quiet)
            if report.verdict is Verdict.UNSUPPORTED:
                yield Ablation(quantity, value, REFUSED, report.reason, ())
                continue
            changes = diff(before, Layout.from_json(report.layout)).changes
            yield Ablation(quantity, value, MOVED if changes else SAME, "", changes)


def _to_json(case: Case, host: Platform, found: tuple[Ablation, ...]) -> dict[str, Any]:
    return {
        "schema": "kvproof.ablate/1",
        "case": case.to_json(),
        "moved": any(ablation.result == MOVED for ablation in found),
        "inputs": inputs(case, host),
        "ablations": [dataclasses.asdict(ablation) for ablation in found],
    }


def render(case: Case, host: Platform, found: tuple[Ablation, ...], console: Console) -> None:
    """Inputs, one row per variation, the verdict."""
    console.print(Text.assemble((printable(case.model), "bold"), f" on {host.name}"))
    given = ", ".join(f"{option} {value}" for option, value in inputs(case, host).items())
    console.print(Text(f"inputs of the layout, not varied: {given}"))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("quantity", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("layout", no_wrap=True)
    table.add_column("what moved", overflow="fold", ratio=1)
    for ablation in found:
        value = f"{ablation.value:,}" if isinstance(ablation.value, int) else str(ablation.value)
        words = ablation.reason or "\n".join(f"{c.aspect}: {c.words}" for c in ablation.changes) or "nothing"
        result = Text(ablation.result, _STYLE[ablation.result])
        table.add_row(ablation.quantity, Text(value), result, Text(printable(words) if ablation.reason else words))
    console.print(table)
    counts = {result: sum(a.result == result for a in found) for result in (SAME, MOVED, REFUSED)}
    word, style = ("MOVED", "bold red") if counts[MOVED] else ("NOT MOVED", "bold green")
    if not counts[MOVED] and counts[REFUSED]:
        word, style = "UNSUPPORTED", "bold magenta"
    console.print(Text.assemble((word, style), f"  {counts[SAME]} of {len(found)} variations changed nothing"))
