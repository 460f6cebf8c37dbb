"""From what the oracles say to one verdict.

The rule leans to one side on purpose: PASS needs every expected oracle to have run, to have judged something and to
have found nothing. Whatever is missing, contradictory or empty ends worse than PASS, never better.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvproof.findings.alike import leading
from kvproof.findings.model import Finding, OracleResult, Status, Verdict
from kvproof.findings.summary import describe
from kvproof.findings.text import counted


def judged_nothing(oracle: OracleResult) -> bool:
    """True if all four judged counts are zero."""
    return not (oracle.judged_bytes or oracle.judged_blocks or oracle.judged_resources or oracle.judged_items)


def effective_status(oracle: OracleResult) -> Status:
    """Status as the verdict reads it: PASSED over nothing is VACUOUS, PASSED with findings is FAILED."""
    if oracle.status is not Status.PASSED:
        return oracle.status
    if oracle.findings:
        return Status.FAILED
    return Status.VACUOUS if judged_nothing(oracle) else Status.PASSED


def decide(
    oracles: Sequence[OracleResult], findings: Sequence[Finding], expected_oracles: Iterable[str]
) -> tuple[Verdict, str]:
    """Verdict of a run that could be staged, and the reason in one line.

    ``expected_oracles`` are the ids that this run must have judged; never returns UNSUPPORTED, which is decided
    where staging fails.
    """
    by_status: dict[Status, list[OracleResult]] = {status: [] for status in Status}
    for oracle in oracles:
        by_status[effective_status(oracle)].append(oracle)
    never_ran = sorted(set(expected_oracles) - {oracle.oracle for oracle in oracles})

    failures: list[str] = []
    if findings:
        first = leading(findings)
        failures.append(
            f"{counted(len(findings), 'finding')}, first: {first.oracle}: {describe(first).rstrip('.')}"
        )
    elif by_status[Status.FAILED]:
        failures.append(f"failed without a finding: {_names(by_status[Status.FAILED])}")
    if by_status[Status.VACUOUS]:
        failures.append(f"judged nothing (vacuous): {_names(by_status[Status.VACUOUS])}")
    if never_ran:
        failures.append(f"never ran: {', '.join(never_ran)}")
    if not oracles and not failures:
        failures.append("no oracle ran")
    if failures:
        return Verdict.FAIL, "; ".join(failures)

    skipped = by_status[Status.SKIPPED]
    if skipped:
        details = "; ".join(f"{o.oracle} ({o.reason or 'no reason given'})" for o in skipped)
        return Verdict.PARTIAL, f"skipped: {details}"
    names = len({oracle.oracle for oracle in oracles})
    return Verdict.PASS, f"{counted(names, 'oracle')} judged {counted(sum(o.judged_bytes for o in oracles), 'byte')}"


def _names(oracles: Sequence[OracleResult]) -> str:
    return ", ".join(sorted({oracle.oracle for oracle in oracles}))
