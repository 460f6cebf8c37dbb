from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import report_fakes as fakes

from kvproof.findings import html
from kvproof.findings.model import ByteMap, Finding, Location, PageMap

REPORTS = [fakes.passing, fakes.failing, fakes.hybrid, fakes.unsupported]
EVIL = "</script><img src=x onerror=alert(1)>'\"&{{7*7}}\u202e\x1b[31m"


class Page(HTMLParser):
    """Elements, visible text and the embedded data of a page."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.visible = ""
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(source)
        self.data = json.loads(self.scripts[0])

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts.append(data)
        elif self._inside != "style":
            self.visible += data


@pytest.mark.parametrize("make", REPORTS)
def test_nothing_is_loaded_from_anywhere(make):
    source = html.render(make())
    page = Page(source)
    for tag, attributes in page.tags:
        assert tag not in {"link", "img", "iframe", "object", "embed"}
        assert not {"src", "srcset", "action"} & set(attributes)
        assert attributes.get("href", "#").startswith("#")
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest", source)
    assert any("default-src 'none'" in (a.get("content") or "") for t, a in page.tags if t == "meta")


@pytest.mark.parametrize("make", REPORTS)
def test_the_banner_gives_verdict_exit_code_sentence_and_next_step(make):
    report = make()
    page = Page(html.render(report))
    assert report.verdict.value in page.visible
    assert f"exit code {report.verdict.exit_code}" in page.visible
    assert "Next step" in page.visible
    assert ("body", {"class": report.verdict.name.lower()}) in page.tags


def test_the_first_finding_is_the_sentence_and_has_a_button():
    page = Page(html.render(fakes.failing()))
    sentence = "group 0 model.layers.9.self_attn.attn V block 14 byte 256: V holds bytes that were stored as K"
    assert sentence in page.visible
    assert page.visible.count("Jump to the first failing byte") == 1
    links = [a["data-target"] for t, a in page.tags if t == "a" and "data-target" in a]
    assert links == ["0", "1"]


def test_the_owner_is_the_sentence_though_equality_was_asked_first():
    report = fakes.failing()
    wrong = report.findings[0]
    report.findings = [replace(wrong, oracle="equality", kind="restored_differs", origin=None)] * 300 + [wrong]
    page = Page(html.render(report))
    assert "It holds model.layers.9.self_attn.attn K block 14 byte 0 (token 0 of A)." in page.visible
    assert "and 299 more like it: model.layers.9.self_attn.attn V, block 14" in page.visible
    assert [d["id"] for t, d in page.tags if t == "li" and "id" in d][:2] == ["finding-0", "finding-1"]


def test_more_sorts_than_the_page_lists():
    report = fakes.failing()
    letters = "abcdefghijklmno"
    report.findings = [replace(f, message=a + b) for a in letters for b in letters for f in report.findings] * 2
    page = Page(html.render(report))
    assert len([1 for t, d in page.tags if t == "li" and "id" in d]) == html.MAX_FINDINGS
    assert "and 700 more in findings.json" in page.visible


def test_the_declared_hardware_and_scenarios_without_a_hit_are_said():
    report = fakes.passing()
    report.case |= {"platform": "cuda-sim", "cuda_capability": "9.0"}
    report.scenarios[0] = replace(report.scenarios[0], external_hit_tokens=0)
    visible = Page(html.render(report)).visible
    assert "cuda-sim, compute capability 9.0" in visible
    assert "1 of 4 scenarios had no external hit: no load was judged there: bulk/8 blocks" in visible


def test_no_button_without_a_byte_to_show():
    for make in (fakes.passing, fakes.unsupported):
        assert "data-target" not in [k for _, a in Page(html.render(make())).tags for k in a]


def test_what_is_missing_is_said():
    assert "before the KV cache existed" in Page(html.render(fakes.unsupported())).visible
    report = fakes.passing()
    report.bytemaps = []
    assert "No request was judged" in Page(html.render(report)).visible


def test_unsupported_shows_the_whole_reason():
    assert "NotImplementedError: sparse MLA needs <CUDA>" in Page(html.render(fakes.unsupported())).visible


def test_every_string_of_the_run_is_escaped():
    report = fakes.failing()
    report.case = {"model": EVIL, EVIL: EVIL}
    report.versions = {EVIL: EVIL}
    report.counters = {EVIL: 1}
    report.reason = EVIL
    report.layout["resources"][9]["layer"] = EVIL
    report.layout["resources"][9]["fields"][0]["name"] = EVIL
    report.layout["groups"][0]["kind"] = EVIL
    report.findings = [Finding(EVIL, EVIL, EVIL, EVIL, Location(0, EVIL, EVIL, 14, 0, request=EVIL), None, 3, EVIL)]
    report.bytemaps = [ByteMap(EVIL, EVIL, {0: [14]}, [PageMap(9, 14, fakes.whole(65536, EVIL))])]
    source = html.render(report)
    page = Page(source)
    assert "<img" not in source
    assert [t for t, _ in page.tags].count("script") == 2
    assert all("onerror" not in a for _, a in page.tags)
    assert not {"\u202e", "\x1b"} & set(source)
    assert "{{7*7}}" in page.visible
    assert "</script><img" in page.data["resources"]["9"]["layer"]
    assert page.data["targets"][0]["resource"] == 9


def test_statuses_are_words_not_only_colours():
    report = fakes.hybrid()
    page = Page(html.render(report))
    assert "skipped" in page.visible
    assert "the connector reports no addresses" in page.visible
    assert {state[1] for state in page.data["states"]} >= {"restored", "computed", "poison", "foreign", "stray", "null"}


def test_many_findings_are_counted():
    report = fakes.failing()
    report.findings *= 150
    assert "and 100 more in findings.json" in Page(html.render(report)).visible
