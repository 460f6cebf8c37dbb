from __future__ import annotations

import io
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
    assert "and 16 more in findings.json" in text
    assert text.count("stray_write") == 5


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
