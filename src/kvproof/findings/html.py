"""The report as one self-contained HTML page: no request leaves it, it works from a file."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from kvproof.findings import bytemap
from kvproof.findings.alike import Alike, alike
from kvproof.findings.model import Report
from kvproof.findings.summary import case_details, first_sentence, headline, next_step, totals, without_hit
from kvproof.findings.text import counted, human_bytes, printable, printable_block
from kvproof.findings.verdict import effective_status

if TYPE_CHECKING:
    from jinja2 import Template

MAX_FINDINGS = 200
"""Findings listed on the page; all of them are in findings.json."""


def render(report: Report) -> str:
    """HTML document of ``report``. Every string from the run is escaped: layer names are not ours."""
    groups = alike(report.findings)
    # Those told in full come first, so that none of them is cut.
    findings = [*(g.first for g in groups), *(f for g in groups for f in g.more)][:MAX_FINDINGS]
    data = bytemap.payload(report, findings)
    return _template().render(
        report=report,
        findings=findings,
        told=_told(groups, len(findings)),
        data=data,
        first_drawn=next((i for i, target in enumerate(data["targets"]) if target), None),
        headline=headline(report),
        details=case_details(report),
        sentence=first_sentence(report),
        next_step=next_step(report),
        totals=totals(report),
        without_hit=without_hit(report),
        oracles=[(oracle, effective_status(oracle).value) for oracle in report.oracles],
    )


def _told(groups: list[Alike], listed: int) -> list[tuple[int, str, range]]:
    """(index of the finding told in full, those like it in words, their indices) as far as they are ``listed``."""
    told = []
    at = len(groups)
    for index, group in enumerate(groups[:listed]):
        told.append((index, group.words, range(min(at, listed), min(at + len(group.more), listed))))
        at += len(group.more)
    return told


@cache
def _template() -> Template:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # slow to import, needed once per report

    # autoescape for every template: the name does not end in .html.
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"line": printable, "block": printable_block, "size": human_bytes, "counted": counted}
    return environment.get_template("report.html.j2")
