"""The report in a terminal: header, groups, scenarios, oracles, findings, verdict."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvproof.findings.alike import Alike, alike
from kvproof.findings.evidence import FINDINGS, HTML
from kvproof.findings.model import Report, Status, Verdict
from kvproof.findings.summary import headline, without_hit
from kvproof.findings.text import counted, human_bytes, printable, printable_block
from kvproof.findings.verdict import effective_status

MAX_FINDINGS = 10
"""Findings told in full, each with those like it in words; the rest is in findings.json."""

WIDE = 96
"""Columns from which the oracles' sources find room; they are in every other report."""

_VERDICT_STYLE = {
    Verdict.PASS: "bold green",
    Verdict.PARTIAL: "bold yellow",
    Verdict.FAIL: "bold red",
    Verdict.UNSUPPORTED: "bold magenta",
}
_STATUS_STYLE = {Status.PASSED: "green", Status.FAILED: "red", Status.SKIPPED: "yellow", Status.VACUOUS: "red"}


def render(report: Report, console: Console, evidence: Path | None = None) -> None:
    """Print ``report``; ``evidence`` is the directory that holds the rest of it."""
    _header(report, console)
    if report.groups:
        console.print(_groups(report), "")
    if report.scenarios:
        console.print(_scenarios(report))
        if note := without_hit(report):
            console.print(Text(note, style="yellow"))
        console.print()
    if report.oracles:
        console.print(_oracles(report, with_source=console.width >= WIDE), "")
    _findings(report, console, FINDINGS if evidence is not None else f"{FINDINGS}, which --evidence DIR keeps")
    _verdict(report, console, evidence)


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )


def _number(count: int, alarm: bool = False) -> Text:
    return Text(f"{count:,}", style="bold red" if alarm and count else "")


def _header(report: Report, console: Console) -> None:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    for label, value in headline(report):
        grid.add_row(label, Text(value))
    if report.versions:
        versions = "  ".join(f"{name} {version}" for name, version in report.versions.items())
        grid.add_row("versions", Text(printable(versions)))
    console.print(grid)
    console.print()


def _groups(report: Report) -> Table:
    table = _table("KV-cache groups")
    table.add_column("group", justify="right", no_wrap=True)
    table.add_column("kind", overflow="fold")
    table.add_column("layers", justify="right", no_wrap=True)
    table.add_column("tokens\nper block", justify="right", no_wrap=True)
    table.add_column("must be restored", ratio=1)
    table.add_column("restored", justify="right", no_wrap=True)
    for group in report.groups:
        table.add_row(
            str(group.group),
            Text(printable(group.kind)),
            _number(group.layers),
            _number(group.block_size),
            Text(printable(f"{group.rule}: {group.declared}")),
            human_bytes(group.restored_bytes),
        )
    return table


def _scenarios(report: Report) -> Table:
    table = _table("Scenarios (prompt and hits in tokens)")
    table.add_column("scenario", overflow="fold")
    table.add_column("mode", no_wrap=True)
    for name in ("requests", "steps", "prompt", "local\nhit", "external\nhit", "findings"):
        table.add_column(name, justify="right", no_wrap=True)
    for s in report.scenarios:
        counts = (s.requests, s.steps, s.prompt_tokens, s.local_hit_tokens, s.external_hit_tokens)
        numbers = [_number(count) for count in counts]
        table.add_row(Text(printable(s.name)), Text(printable(s.mode)), *numbers, _number(s.findings, alarm=True))
    return table


def _oracles(report: Report, with_source: bool) -> Table:
    table = _table("Oracles")
    table.add_column("oracle", overflow="fold")
    table.add_column("status", no_wrap=True)
    for name in ("bytes", "blocks", "resources", "items"):
        table.add_column(name, justify="right", no_wrap=True)
    if with_source:
        table.add_column("against", ratio=1)
    for oracle in report.oracles:
        status = effective_status(oracle)
        # Where an oracle did not pass, its reason matters more than its source.
        note = oracle.source if status is Status.PASSED else oracle.reason or oracle.source
        cells = [
            Text(printable(oracle.oracle)),
            Text(status.value, style=_STATUS_STYLE[status]),
            _number(oracle.judged_bytes),
            _number(oracle.judged_blocks),
            _number(oracle.judged_resources),
            _number(oracle.judged_items),
        ]
        table.add_row(*cells, *([Text(printable(note))] if with_source else []))
    return table


def _findings(report: Report, console: Console, file: str) -> None:
    """``file`` says where all of them are."""
    if not report.findings:
        return
    groups = alike(report.findings)
    console.print(
        Text.assemble(
            (counted(len(report.findings), "finding"), "bold red"),
            (f", those alike told once; all are in {file}" if len(groups) < len(report.findings) else "", "dim"),
        )
    )
    for number, group in enumerate(groups[:MAX_FINDINGS], start=1):
        console.print(_finding(number, group))
    more = sum(1 + len(group.more) for group in groups[MAX_FINDINGS:])
    if more > 0:
        console.print(Text(f"and {more:,} more in {file}", style="dim"))
    console.print()


def _finding(number: int, group: Alike) -> Table:
    finding = group.first
    head = Text.assemble(
        (printable(finding.oracle), "bold"), " · ", (printable(finding.kind), "red"), " · ",
        printable(str(finding.location or finding.scenario)),
    )  # fmt: skip
    lines = [head, Text(printable(finding.message))]
    if finding.origin:
        lines.append(Text.assemble(("holds ", "dim"), printable(str(finding.origin))))
    lines.append(
        Text(f"{counted(finding.bytes_affected, 'byte')} affected · scenario {printable(finding.scenario)}", "dim")
    )
    if finding.next_step:
        lines.append(Text.assemble(("next: ", "dim"), printable(finding.next_step)))
    if group.more:
        lines.append(Text(group.words))
    grid = Table.grid(padding=(0, 1))
    grid.add_column(justify="right", width=3, style="dim")
    grid.add_column(overflow="fold")
    grid.add_row(f"{number}", Text("\n").join(lines))
    return grid


def _verdict(report: Report, console: Console, evidence: Path | None) -> None:
    if report.reason:
        console.print(Text(printable_block(report.reason)))
    parts: list[str | tuple[str, str]] = [
        (report.verdict.value, _VERDICT_STYLE[report.verdict]),
        f"  exit code {report.verdict.exit_code}",
    ]
    if evidence is not None:
        parts.append(f"  {evidence / HTML}")
    # soft_wrap: a path must stay one word, to be copied and to be opened with a click.
    console.print(Text.assemble(*parts), soft_wrap=True)
