"""The few sentences every report opens with, so that terminal, JUnit and HTML say the same."""

from __future__ import annotations

from typing import Any

from kvproof.findings.model import Finding, Report, Verdict
from kvproof.findings.text import counted, printable

HEADLINE_KEYS = ("model", "platform", "connector", "runner", "modes", "tokens")
"""Keys of the case that name the run; the other keys follow in the order of the case."""

_NEXT_STEP = {
    Verdict.PASS: "Keep the evidence directory; VERIFICATION.md says what this verdict asserts and what it does not.",
    Verdict.PARTIAL: "Read the reasons of the skipped oracles; what they cover is not verified.",
    Verdict.FAIL: "Start with the first finding; later ones often follow from it.",
    Verdict.UNSUPPORTED: "This case was not checked. Read the reason, then run `kvproof doctor`.",
}


AUTOMATIC_KEYS = ("tokens", "max_model_len", "block_size")
"""Keys of the case where 0 means that kvproof or vLLM chooses."""


def value_text(value: Any) -> str:
    """One value of the case on one line."""
    if value is None or value == "":
        return "–"
    if isinstance(value, dict):
        return printable(", ".join(f"{key}={value_text(item)}" for key, item in value.items())) or "–"
    if isinstance(value, list | tuple):
        return printable(", ".join(value_text(item) for item in value)) or "–"
    return printable(str(value))


def headline(report: Report) -> list[tuple[str, str]]:
    """The part of the case that names the run, as (label, value)."""
    return [(key, _case_text(report, key)) for key in HEADLINE_KEYS if key in report.case]


def case_details(report: Report) -> list[tuple[str, str]]:
    """The rest of the case, as (label, value)."""
    rest = (key for key in report.case if key not in HEADLINE_KEYS and key != "schema")
    details = [(printable(key), _case_text(report, key)) for key in rest]
    connector = report.case.get("connector")
    if isinstance(connector, dict):
        details += [(f"connector {key}", value_text(value)) for key, value in connector.items() if key != "name"]
    return details


def _case_text(report: Report, key: str) -> str:
    value = report.case[key]
    if key == "connector" and isinstance(value, dict):
        return value_text(value.get("name"))
    return "automatic" if key in AUTOMATIC_KEYS and value == 0 else value_text(value)


def describe(finding: Finding) -> str:
    """A finding in one sentence: where, and whose bytes stand there."""
    where = f"{finding.location}: " if finding.location else ""
    holds = f" It holds {finding.origin}." if finding.origin else ""
    message = finding.message.rstrip()
    return printable(where + message + ("" if message.endswith((".", "!", "?")) else ".") + holds)


def first_sentence(report: Report) -> str:
    """The verdict in one sentence: the first finding where there is one, the reason's first line otherwise."""
    return describe(report.findings[0]) if report.findings else printable(report.reason.strip().partition("\n")[0])


def next_step(report: Report) -> str:
    """What the reader should do now."""
    own = report.findings[0].next_step if report.findings else ""
    return printable(own) or _NEXT_STEP[report.verdict]


def totals(report: Report) -> str:
    """How much was looked at, in one line."""
    return ", ".join(
        (
            counted(len(report.oracles), "oracle"),
            counted(len(report.scenarios), "scenario"),
            counted(len(report.groups), "group"),
            counted(len(report.findings), "finding"),
        )
    )
