"""``kvproof layout``: where every KV byte of a model lies, as a table and as JSON."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from kvproof.cli.check import add_case_arguments, case_of, died, refuse, run_watched
from kvproof.engine import connectors
from kvproof.findings.bytemap import short_names
from kvproof.findings.model import Verdict
from kvproof.findings.text import counted, human_bytes
from kvproof.layout import Layout, Resource


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command to ``kvproof``'s parser."""
    parser = subparsers.add_parser("layout", help="groups, resources, shapes, strides and pages of a model's KV cache")
    add_case_arguments(parser)
    parser.add_argument("--connector", metavar="NAME", help="stage with this connector; it can change the layout")
    parser.add_argument("--json", action="store_true", help="print the layout as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0, 1 where block ids share bytes, 2 for refused input, 3 where vLLM cannot stage the model."""
    with tempfile.TemporaryDirectory(prefix="kvproof-") as directory:
        workdir = Path(directory)
        (workdir / "store").mkdir()
        try:
            connector = connectors.parse(args.connector, str(workdir / "store")) if args.connector else None
            case = case_of(args, workdir, ("layout",), connector)
        except ValueError as error:
            return refuse("layout", error)
        child = run_watched(case, Console(stderr=True), quiet=args.json)
    report = child.result.report if child.result is not None else died(case, child)
    if report is None or report.verdict is Verdict.UNSUPPORTED:
        reason = report.reason if report is not None else "no report"
        print(json.dumps({"verdict": "UNSUPPORTED", "reason": reason}) if args.json else f"UNSUPPORTED: {reason}")
        return Verdict.UNSUPPORTED.exit_code
    if args.json:
        print(json.dumps({"schema": "kvproof.layout/1", **report.layout}, indent=1))
    else:
        render(Layout.from_json(report.layout), args.model, Console())
    if report.verdict is Verdict.FAIL:
        print(f"kvproof layout: {report.reason}", file=sys.stderr)
    return report.verdict.exit_code


def render(layout: Layout, title: str, console: Console) -> None:
    """The groups as a table, then one entry per distinct kind of resource with the layers that share it."""
    console.print(
        f"[bold]{title}[/bold]: layout {layout.kv_layout}, {layout.num_blocks} blocks, "
        f"{human_bytes(layout.bytes_per_block)} per block id, {len(layout.storages)} storages"
    )
    groups = Table(box=box.SIMPLE_HEAD, title="Groups", title_justify="left", title_style="bold")
    for column in ("group", "kind", "spec", "layers", "tokens per block", "window tokens", "restore"):
        words = column in ("kind", "spec", "restore")
        groups.add_column(column, justify="left" if words else "right", overflow="fold")
    for g in layout.groups:
        groups.add_row(
            str(g.id), g.kind, g.spec, str(len(g.layers)), str(g.block_size), str(g.window or "–"), g.rule
        )  # fmt: skip
    console.print(groups)
    console.print("[bold]Resources[/bold], one entry per kind; all numbers in bytes unless named otherwise")
    kinds: dict[tuple[Any, ...], list[Resource]] = {}
    for r in layout.resources:
        key = (r.fields, r.dtype, r.row_axes, r.cell_axes, r.page_bytes, r.block_stride)
        kinds.setdefault(key, []).append(r)
    for same in kinds.values():
        _render_kind(same, console)


def _render_kind(same: list[Resource], console: Console) -> None:
    """Resources that differ only in their layer and place."""
    r = same[0]
    pattern, short = short_names([one.layer for one in same])
    which = pattern if len(same) == 1 else f"{len(same)} × {pattern} ({_ranges(list(short.values()))})"
    groups = _ranges([str(g) for g in sorted({one.group for one in same})])
    axes = [a for a in (*r.row_axes, *r.cell_axes) if a.count > 1 or a is r.cell_axes[-1]]
    page = f"{r.page_bytes:,} ({r.page_bytes - r.used_bytes:,} padding), block stride {r.block_stride:,}"
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="dim", no_wrap=True)
    lines.add_column(overflow="fold")
    lines.add_row("layers", which)
    lines.add_row("fields", ", ".join(f"{f.name} {f.end - f.start:,}" for f in r.fields) + f"   {r.dtype}")
    rows = f"{counted(r.rows, 'row')} of {r.row_bytes:,}"
    lines.add_row("shape", " × ".join(f"{a.count:,}" for a in axes) + f"   ({rows})")
    lines.add_row("strides", ", ".join(f"{a.stride:,}" for a in axes))
    lines.add_row("page", page)
    console.print(f"\n  group {groups}")
    console.print(Padding(lines, (0, 0, 0, 2)))


def _ranges(names: list[str]) -> str:
    """``0 … 27`` for a run of numbers, else the names themselves."""
    if all(n.isdigit() for n in names):
        numbers = sorted(int(n) for n in names)
        if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
            return f"{numbers[0]} … {numbers[-1]}"
        return ", ".join(str(n) for n in numbers)
    return ", ".join(names)
