"""``kvproof layout``: where every KV byte of a model lies, as a table and as JSON."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kvproof.cli.check import add_case_arguments, case_of, died, refuse, run_watched
from kvproof.engine import connectors
from kvproof.findings.model import Verdict
from kvproof.findings.text import human_bytes
from kvproof.layout import Layout, Resource


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command to ``kvproof``'s parser."""
    parser = subparsers.add_parser("layout", help="groups, resources, shapes, strides and pages of a model's KV cache")
    add_case_arguments(parser)
    parser.add_argument("--connector", metavar="NAME", help="stage with this connector; it can change the layout")
    parser.add_argument("--json", action="store_true", help="print the layout as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0, 2 for refused input, 3 where vLLM cannot stage the model."""
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
    return 0


def render(layout: Layout, title: str, console: Console) -> None:
    """Tables: the groups, then one line per distinct kind of resource with the layers that share it."""
    console.print(
        f"[bold]{title}[/bold]: layout {layout.kv_layout}, {layout.num_blocks} blocks, "
        f"{human_bytes(layout.bytes_per_block)} per block id, {len(layout.storages)} storages"
    )
    groups = Table(box=box.SIMPLE_HEAD, title="Groups", title_justify="left", title_style="bold")
    for column in ("group", "kind", "spec", "layers", "block [tokens]", "window [tokens]", "restore"):
        groups.add_column(column, justify="right" if column not in ("kind", "spec", "restore") else "left")
    for g in layout.groups:
        groups.add_row(
            str(g.id), g.kind, g.spec, str(len(g.layers)), str(g.block_size), str(g.window or "–"), g.rule
        )  # fmt: skip
    console.print(groups)
    table = Table(box=box.SIMPLE_HEAD, title="Resources", title_justify="left", title_style="bold")
    columns = ("group", "layers", "fields [B]", "dtype", "rows × cells [B]", "strides [B]", "page", "block stride")
    for column in columns:
        table.add_column(column, justify="right" if column in ("group", "page", "block stride") else "left")
    kinds: dict[tuple[Any, ...], list[Resource]] = {}
    for r in layout.resources:
        key = (r.group, r.fields, r.dtype, r.row_axes, r.cell_axes, r.page_bytes, r.block_stride)
        kinds.setdefault(key, []).append(r)
    for same in kinds.values():
        r = same[0]
        axes = (*r.row_axes, *r.cell_axes)
        table.add_row(
            str(r.group),
            r.layer if len(same) == 1 else f"{r.layer} … ({len(same)})",
            " ".join(f"{f.name} {f.end - f.start}" for f in r.fields),
            r.dtype,
            " × ".join(str(a.count) for a in axes),
            " ".join(str(a.stride) for a in axes),
            f"{r.page_bytes:,}",
            f"{r.block_stride:,}",
        )
    console.print(table)
