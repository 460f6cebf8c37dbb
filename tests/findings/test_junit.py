from __future__ import annotations

from xml.etree import ElementTree as ET

import report_fakes as fakes
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproof.findings import junit
from kvproof.findings.model import Finding, OracleResult, Report, Status, Verdict


def cases(report: Report) -> dict[str, ET.Element]:
    suite = ET.fromstring(junit.render(report).encode())
    return {case.get("name", ""): case for case in suite.findall("testcase")}


def test_a_pass_is_green():
    suite = ET.fromstring(junit.render(fakes.passing()).encode())
    assert {key: suite.get(key) for key in ("tests", "failures", "errors", "skipped")} == {
        "tests": "9",
        "failures": "0",
        "errors": "0",
        "skipped": "0",
    }
    assert suite.get("name") == "kvproof qwen3-8b"


def test_each_finding_is_a_failure_with_its_location():
    found = cases(fakes.failing())
    (failure,) = found["placement"].findall("failure")
    assert failure.get("type") == "foreign"
    assert "group 0 model.layers.9.self_attn.attn V block 14 byte 256" in (failure.text or "")
    assert found["equality"].find("failure") is None
    assert found["verdict"].find("failure") is not None


def test_skipped_carries_its_reason():
    found = cases(fakes.hybrid())
    assert found["legality"].find("skipped").get("message") == "the connector reports no addresses"
    assert found["verdict"].find("skipped") is not None


def test_unsupported_is_an_error():
    assert "sparse MLA needs <CUDA>" in cases(fakes.unsupported())["verdict"].find("error").get("message")


def test_vacuous_and_unexplained_failures_are_failures():
    report = fakes.passing()
    report.oracles = [OracleResult("empty", Status.PASSED, "layout"), fakes.oracle("footprint", Status.FAILED)]
    found = cases(report)
    assert found["empty"].find("failure").get("type") == "vacuous"
    assert found["footprint"].find("failure").get("message") == "failed without a finding"


def test_a_finding_without_an_oracle_result_is_not_lost():
    report = fakes.passing()
    report.findings = [Finding("lifecycle", "leak", "a block was never freed", "async")]
    assert cases(report)["lifecycle"].find("failure").get("message") == "a block was never freed"


@settings(max_examples=25)
@given(st.text(), st.text(), st.text())
def test_valid_xml_for_any_text(name, message, reason):
    report = Report(
        case={"model": name, name: message},
        verdict=Verdict.FAIL,
        reason=reason,
        oracles=[OracleResult(name, Status.SKIPPED, message, reason=reason)],
        findings=[Finding(name, message, reason, name, next_step=message)],
        versions={name: message},
    )
    assert len(ET.fromstring(junit.render(report).encode()).findall("testcase")) == 2
