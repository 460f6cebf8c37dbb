"""The report as JUnit XML: one suite per run, one test case per oracle, and one for the verdict itself.

The extra case ``verdict`` makes the file red whenever the verdict is FAIL or UNSUPPORTED, also where no oracle can
say so (an oracle that never ran, a run that could not be staged).
"""

from __future__ import annotations

from xml.etree import ElementTree as ET

from kvproof.findings.model import Finding, OracleResult, Report, Status, Verdict
from kvproof.findings.summary import case_details, describe, headline
from kvproof.findings.text import printable, printable_block
from kvproof.findings.verdict import effective_status


def render(report: Report) -> str:
    """XML document of ``report``; valid for any text in it."""
    suite = ET.Element("testsuite", name=f"kvproof {dict(headline(report)).get('model', '')}".strip())
    properties = ET.SubElement(suite, "properties")
    facts = [*headline(report), *case_details(report), *((f"version.{k}", v) for k, v in report.versions.items())]
    for name, value in facts:
        ET.SubElement(properties, "property", name=printable(name), value=printable(value))

    judged = {oracle.oracle for oracle in report.oracles}
    for oracle in report.oracles:
        _oracle_case(suite, oracle, [f for f in report.findings if f.oracle == oracle.oracle])
    # A finding of an oracle without a result would otherwise be lost.
    for name in sorted({f.oracle for f in report.findings} - judged):
        orphan = OracleResult(name, Status.FAILED, source="")
        _oracle_case(suite, orphan, [f for f in report.findings if f.oracle == name])
    _verdict_case(suite, report)

    suite.set("tests", str(len(suite.findall("testcase"))))
    for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(attribute, str(sum(case.find(tag) is not None for case in suite.findall("testcase"))))
    suite.set("time", f"{sum(s.seconds for s in report.scenarios):.3f}")
    ET.indent(suite)
    body = ET.tostring(suite, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}\n'


def _case(suite: ET.Element, name: str) -> ET.Element:
    return ET.SubElement(suite, "testcase", classname="kvproof.check", name=printable(name), time="0")


def _outcome(case: ET.Element, tag: str, message: str, kind: str, body: str = "") -> None:
    element = ET.SubElement(case, tag, message=printable(message))
    if tag != "skipped":
        element.set("type", printable(kind))
    element.text = printable_block(body) or None


def _oracle_case(suite: ET.Element, oracle: OracleResult, findings: list[Finding]) -> None:
    case = _case(suite, oracle.oracle)
    for finding in findings:
        body = [describe(finding), f"scenario {finding.scenario}, {finding.bytes_affected} bytes affected"]
        body += [f"next: {finding.next_step}"] if finding.next_step else []
        _outcome(case, "failure", finding.message, finding.kind, "\n".join(body))
    status = effective_status(oracle)
    if findings:
        pass
    elif status is Status.FAILED:
        _outcome(case, "failure", oracle.reason or "failed without a finding", "failed")
    elif status is Status.VACUOUS:
        _outcome(case, "failure", f"judged nothing: {oracle.reason or 'all counts are zero'}", "vacuous")
    elif status is Status.SKIPPED:
        _outcome(case, "skipped", oracle.reason or "no reason given", "skipped")
    counts = (
        f"judged {oracle.judged_bytes} bytes, {oracle.judged_blocks} blocks, {oracle.judged_resources} resources, "
        f"{oracle.judged_items} items against: {oracle.source}"
    )
    ET.SubElement(case, "system-out").text = printable(counts)


def _verdict_case(suite: ET.Element, report: Report) -> None:
    case = _case(suite, "verdict")
    tag = {Verdict.FAIL: "failure", Verdict.UNSUPPORTED: "error", Verdict.PARTIAL: "skipped"}.get(report.verdict)
    if tag:
        _outcome(case, tag, f"{report.verdict.value}: {report.reason}", report.verdict.name.lower(), report.reason)
