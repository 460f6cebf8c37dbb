"""``kvproof layout``: where every KV byte of a model lies, as a table and as JSON; with ``--diff`` two of them."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvproof.cli import layout_diff
from kvproof.cli.check import refuse
from kvproof.cli.staged import add_layout_arguments, layout_case, stage, unsupported
from kvproof.findings.model import Verdict
from kvproof.findings.text import counted, human_bytes, printable
from kvproof.layout import Layout
from kvproof.layout.kinds import Kind, kinds, ranges


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command to ``kvproof``'s parser."""
    parser = subparsers.add_parser(
        "layout",
        help="groups, resources, shapes, strides and pages of a model's KV cache; --diff compares two",
        description="Exit code: 0, 1 where block ids share bytes or two layouts differ, 2 usage, 3 UNSUPPORTED.",
    )
    add_layout_arguments(parser, model_optional=True)
    parser.add_argument(
        "--diff", nargs=2, metavar=("A", "B"),
        help="two layouts side by side: each a file of `kvproof layout --json`, an evidence directory, or a quoted "
        "case (MODEL and options); options outside the quotes hold for every quoted case",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON (docs/json.md)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0, 1 where block ids share bytes or the two differ, 2 for refused input, 3 where vLLM cannot stage a model."""
    if (args.model is None) == (args.diff is None):
        return refuse("layout", "expected MODEL, or --diff A B")
    try:
        if args.diff is not None:
            return layout_diff.run(args)
        with layout_case(args) as case:
            report = stage(case, quiet=args.json)
    except ValueError as error:
        return refuse("layout", error)
    if report.verdict is Verdict.UNSUPPORTED:
        return unsupported(report.reason, args.json)
    if args.json:
        print(json.dumps({"schema": "kvproof.layout/1", **report.layout}, indent=1))
    else:
        render(Layout.from_json(report.layout), args.model, Console())
    if report.verdict is Verdict.FAIL:
        print(f"kvproof layout: {report.reason}", file=sys.stderr)
    return report.verdict.exit_code


def render(layout: Layout, title: str, console: Console) -> None:
    """The groups as a table, then one entry per kind of resource with the layers that share it."""
    head = (
        f"layout {layout.kv_layout}, {counted(layout.num_blocks, 'block')}, "
        f"{human_bytes(layout.bytes_per_block)} per block id, {counted(len(layout.storages), 'storage')}"
    )
    console.print(Text.assemble((printable(title), "bold"), f": {head}"))
    groups = Table(box=box.SIMPLE_HEAD, title="Groups", title_justify="left", title_style="bold", pad_edge=False)
    for column in ("group", "kind", "layers", "tokens\nper block", "window\ntokens", "bytes\nper block", "restore"):
        groups.add_column(column, justify="left" if column in ("kind", "restore") else "right", no_wrap=True)
    for g in layout.groups:
        nbytes = sum(r.page_bytes for r in layout.group_resources(g.id))
        groups.add_row(
            str(g.id), printable(g.kind), str(len(g.layers)), f"{g.block_size:,}", f"{g.window:,}" if g.window else "–",
            f"{nbytes:,}", g.rule,
        )  # fmt: skip
    console.print(groups)
    console.print("[bold]Resources[/bold], one entry per kind; all numbers in bytes unless named otherwise")
    for kind in kinds(layout):
        _render_kind(kind, console)


def _render_kind(kind: Kind, console: Console) -> None:
    """Resources that differ only in their layer and place."""
    r = kind.first
    axes = [a for a in (*r.row_axes, *r.cell_axes) if a.count > 1 or a is r.cell_axes[-1]]
    rows = f"{counted(r.rows, 'row')} of {r.row_bytes:,}"
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="dim", no_wrap=True)
    lines.add_column(overflow="fold")
    for label, value in (
        ("fields", ", ".join(f"{f.name} {f.end - f.start:,}" for f in r.fields) + f"   {r.dtype}"),
        ("shape", " × ".join(f"{a.count:,}" for a in axes) + f"   ({rows})"),
        ("strides", ", ".join(f"{a.stride:,}" for a in axes)),
        ("page", f"{r.page_bytes:,} ({r.page_bytes - r.used_bytes:,} padding), block stride {r.block_stride:,}"),
    ):
        lines.add_row(label, Text(printable(value)))
    groups = ranges(kind.groups)
    console.print(Text.assemble("\n  ", (f"group {groups}", "bold"), f"  {printable(kind.layers)}"))
    console.print(Padding(lines, (0, 0, 0, 4)))
