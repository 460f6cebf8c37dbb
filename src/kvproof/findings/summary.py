"""The few sentences every report opens with, so that terminal, JUnit and HTML say the same."""

from __future__ import annotations

from typing import Any

from kvproof.findings.alike import leading
from kvproof.findings.case import BYTE_MODES
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


DECLARED = {"cuda_capability": "compute capability", "soc": "SoC"}
"""Keys of the case that declare hardware -> the words for them; they belong to the platform."""

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
    if key == "platform":
        return ", ".join((value_text(value), *_declared(report.case)))
    if key == "connector" and isinstance(value, dict):
        return value_text(value.get("name"))
    return "automatic" if key in AUTOMATIC_KEYS and value == 0 else value_text(value)


def _declared(case: dict[str, Any]) -> list[str]:
    """The hardware a case declares, in words."""
    return [f"{words} {value_text(case[key])}" for key, words in DECLARED.items() if case.get(key)]


def describe(finding: Finding) -> str:
    """A finding in one sentence: where, and whose bytes stand there."""
    where = f"{finding.location}: " if finding.location else ""
    holds = f" It holds {finding.origin}." if finding.origin else ""
    message = finding.message.rstrip()
    return printable(where + message + ("" if message.endswith((".", "!", "?")) else ".") + holds)


def first_sentence(report: Report) -> str:
    """The verdict in one sentence: the finding to start with where there is one, the reason's first line otherwise."""
    if report.findings:
        return describe(leading(report.findings))
    return printable(report.reason.strip().partition("\n")[0])


def next_step(report: Report) -> str:
    """What the reader should do now."""
    own = leading(report.findings).next_step if report.findings else ""
    return printable(own) or _NEXT_STEP[report.verdict]


def without_hit(report: Report) -> str:
    """Which scenarios judged no load, because no request of theirs was hit, in one line; empty where all were.

    A connector whose hits are its own business may answer 0 tokens and pass: then this line says over how little.
    """
    ran = [s for s in report.scenarios if s.mode in BYTE_MODES]
    names = [s.name for s in ran if not s.external_hit_tokens]
    if not names:
        return ""
    which = f"{len(names)} of {counted(len(ran), 'scenario')} had no external hit"
    return printable(f"{which}: no load was judged there: {', '.join(names)}")


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
