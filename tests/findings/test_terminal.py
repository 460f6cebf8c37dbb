from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
import report_fakes as fakes
from rich.console import Console

from kvproof.findings import terminal
from kvproof.findings.model import Finding, Location

EVIDENCE = Path("/srv/kvproof/evidence/qwen3-8b/2026-11-29/run-with-a-very-long-name-that-is-wider-than-a-terminal")


def printed(report, width=100, **options):
    stream = io.StringIO()
    terminal.render(report, Console(file=stream, width=width, **options), EVIDENCE)
    return stream.getvalue()


REPORTS = [fakes.passing, fakes.failing, fakes.hybrid, fakes.unsupported]


@pytest.mark.parametrize("make", REPORTS)
@pytest.mark.parametrize("width", [80, 100, 160])
def test_no_line_is_wider_than_the_terminal_but_the_path(make, width):
    *lines, last = printed(make(), width).splitlines()
    assert max(map(len, lines)) <= width
    assert last.endswith(f"{EVIDENCE}/report.html")
    assert last.startswith(f"{make().verdict.value}  exit code {make().verdict.exit_code}")


@pytest.mark.parametrize("width", [80, 100])
def test_no_column_is_cut(width):
    text = printed(fakes.failing(), width)
    assert "…" not in text
    for word in ("layerwise", "requests", "source footprint", "37,748,736", "items", "resources", "external"):
        assert word in text


def test_a_pipe_gets_no_escape_codes_and_a_terminal_gets_colour():
    assert "\x1b" not in printed(fakes.failing())
    assert "\x1b" in printed(fakes.failing(), force_terminal=True)


def test_a_finding_says_where_whose_how_much_and_what_next():
    text = printed(fakes.failing())
    assert "placement · foreign · group 0 model.layers.9.self_attn.attn V block 14 byte 256" in text
    assert "holds model.layers.9.self_attn.attn K block 14 byte 0 (token 0 of A)" in text
    assert "458,752 bytes affected · scenario bulk/8 blocks" in text
    assert "next: Look for an off-by-one" in text


def test_many_findings_are_counted():
    report = fakes.failing()
    report.findings *= 13
    text = printed(report)
    assert "26 findings" in text
    assert text.count("and 12 more like it: model.layers.9.self_attn.attn V, block 14") == 1
    assert text.count("and 12 more like it: model.layers.20.self_attn.attn K, block 11") == 1
    assert "more in findings.json" not in text


def test_findings_that_are_not_alike_are_counted_beyond_the_first_ten():
    report = fakes.failing()
    report.findings = [replace(f, message=f"fault {letter}") for letter in "abcdefghijklm" for f in report.findings]
    text = printed(report)
    assert "26 findings" in text
    assert "and 16 more in findings.json" in text
    assert text.count("placement · foreign") + text.count("footprint · stray_write") == 10
    assert text.index("footprint · stray_write") < text.index("fault b")


def test_without_evidence_it_is_said_how_to_keep_all_findings():
    report = fakes.failing()
    report.findings *= 2
    stream = io.StringIO()
    terminal.render(report, Console(file=stream, width=100))
    assert "all are in findings.json, which --evidence DIR keeps" in stream.getvalue()
    assert "all are in findings.json\n" in re.sub(" +\n", "\n", printed(report))


def test_the_owner_is_told_before_what_only_differs():
    report = fakes.failing()
    wrong = report.findings[0]
    report.findings = [replace(wrong, oracle="equality", kind="restored_differs", origin=None)] * 20 + [wrong] * 20
    text = printed(report)
    assert text.index("placement · foreign") < text.index("equality · restored_differs")
    assert text.count("holds model.layers.9.self_attn.attn K block 14 byte 0 (token 0 of A)") == 1


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ({"platform": "cuda-sim", "cuda_capability": "9.0"}, "cuda-sim, compute capability 9.0"),
        ({"platform": "ascend-sim", "soc": "ascend910b"}, "ascend-sim, SoC ascend910b"),
    ],
)
def test_the_declared_hardware_stands_in_the_head(declared, words):
    report = fakes.passing()
    report.case |= declared
    assert f"platform   {words}" in printed(report)


def test_scenarios_without_a_hit_are_named():
    report = fakes.passing()
    assert "external hit:" not in printed(report)
    report.scenarios[1:3] = [replace(s, external_hit_tokens=0) for s in report.scenarios[1:3]]
    text = " ".join(printed(report).split())
    assert (
        "2 of 4 scenarios had no external hit: no load was judged there: layerwise/8 blocks, bulk/chunked prefill"
    ) in text
    report.scenarios = [replace(s, mode="engine") for s in report.scenarios]
    assert "external hit:" not in printed(report)


def test_the_reason_replaces_the_source_of_a_skipped_oracle():
    assert "the connector reports no" in printed(fakes.hybrid())


def test_untrusted_names_are_plain_text():
    report = fakes.failing()
    evil = "[red]x[/red]\x1b]0;title\x07\u202e"
    report.findings = [Finding("placement", evil, evil, evil, Location(0, evil, "K", 1, 2))]
    report.case |= {"model": evil}
    text = printed(report)
    assert "[red]x[/red]" in text
    assert not {"\x1b", "\x07", "\u202e"} & set(text)


def test_a_reason_of_several_lines_keeps_them():
    assert "get_kv_cache_spec:\nNotImplementedError" in printed(fakes.unsupported()).replace(" \n", "\n").replace(
        " \n", "\n"
    )
