from __future__ import annotations

import argparse
import copy
import json
from dataclasses import replace

import pytest
import report_fakes as fakes
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproof.cli import compare as command
from kvproof.findings import evidence, html
from kvproof.findings.compare import DIFFERENT, EQUAL, MISSING, compare, first_difference
from kvproof.findings.evidence import Evidence

json_values = st.recursive(
    st.none() | st.integers(0, 3) | st.sampled_from("ab"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture(autouse=True)
def _no_page(monkeypatch):
    """The comparison does not read the page; drawing it twice per test would be most of the time."""
    monkeypatch.setattr(html, "render", lambda report: "")


def write(path, report=None, log="INFO 11-29 16:06:32 pid=7 hello\nbye\n", step=0, case=None):
    report = report or fakes.passing()
    writer = Evidence(path)
    writer.write_case(case or fakes.CASE)
    writer.write_layout(report.layout)
    writer.append_transcript({"step": step, "seconds": 0.25, "blocks": [3, 1]})
    writer.log_path.write_text(log, encoding="utf-8")
    writer.write_report(report)
    return path


def criteria(a, b):
    return {c.name: c for c in compare(a, b).criteria}


def changed(a, b):
    return {name: c.difference for name, c in criteria(a, b).items() if c.result == DIFFERENT}


def test_two_runs_of_one_case_agree(tmp_path):
    again = fakes.passing()
    again.scenarios = [replace(s, seconds=9.9) for s in again.scenarios]
    a = write(tmp_path / "a")
    b = write(tmp_path / "b", again, log="bye\nINFO 12-01 10:00:00 pid=99 hello\n")
    comparison = compare(a, b)
    assert comparison.agree
    assert {c.result for c in comparison.criteria} == {EQUAL}
    assert all(c.proves and c.does_not_prove for c in comparison.criteria)


def test_an_evidence_directory_agrees_with_itself(tmp_path):
    a = write(tmp_path / "a", fakes.failing())
    assert compare(a, a).agree


@pytest.mark.parametrize(
    ("criterion", "key", "value", "difference"),
    [
        ("layout strides", "block_stride", 65537, "resources[0].block_stride: 65536 | 65537"),
        ("layout padding", "page_bytes", 70000, "resources[0].page_bytes: 65536 | 70000"),
        ("layout resources", "dtype", "float16", 'resources[0].dtype: "bfloat16" | "float16"'),
    ],
)
def test_a_layout_difference_has_its_own_criterion(tmp_path, criterion, key, value, difference):
    other = fakes.passing()
    other.layout = copy.deepcopy(other.layout)
    other.layout["resources"][0][key] = value
    assert changed(write(tmp_path / "a"), write(tmp_path / "b", other)) == {criterion: difference}


def test_groups_and_sizes_of_the_layout(tmp_path):
    other = fakes.passing()
    other.layout = fakes.dense_layout(blocks=41).to_json()
    other.layout["groups"][0]["block_size"] = 32
    found = changed(write(tmp_path / "a"), write(tmp_path / "b", other))
    assert found == {"layout groups": "groups[0].block_size: 16 | 32", "layout size": "num_blocks: 40 | 41"}


def test_a_pass_and_a_failure_differ_where_they_should(tmp_path):
    found = changed(write(tmp_path / "a"), write(tmp_path / "b", fakes.failing()))
    assert found.keys() == {"verdict", "oracles", "scenarios", "findings"}
    assert found["verdict"] == 'verdict: "PASS" | "FAIL"'
    assert found["oracles"] == 'oracles[1].status: "passed" | "failed"'
    assert found["findings"].endswith(": absent | 1")


def test_order_of_findings_does_not_matter(tmp_path):
    turned = fakes.failing()
    turned.findings.reverse()
    assert compare(write(tmp_path / "a", fakes.failing()), write(tmp_path / "b", turned)).agree


def test_case_transcript_log_counters_and_versions(tmp_path):
    other = fakes.passing()
    other.counters = other.counters | {"connector_loads": 35}
    other.versions = other.versions | {"vllm": "0.33.0"}
    b = write(tmp_path / "b", other, log="INFO 11-29 16:06:32 pid=7 hello\n", step=1, case=fakes.CASE | {"seed": 8})
    assert changed(write(tmp_path / "a"), b) == {
        "case": "seed: 7 | 8",
        "versions": 'versions.vllm: "0.32.0" | "0.33.0"',
        "counters": "counters.connector_loads: 36 | 35",
        "transcript": "[0].step: 0 | 1",
        "log": "bye: 1 | absent",
    }


def test_missing_on_one_side_is_disagreement_on_both_it_is_not(tmp_path):
    a, b = write(tmp_path / "a"), write(tmp_path / "b")
    (a / evidence.TRANSCRIPT).unlink()
    found = criteria(a, b)["transcript"]
    assert (found.result, found.missing_in, compare(a, b).agree) == (MISSING, ("A",), False)
    (b / evidence.TRANSCRIPT).unlink()
    assert criteria(a, b)["transcript"].missing_in == ("A", "B")
    assert compare(a, b).agree


def test_two_runs_that_died_do_not_agree(tmp_path):
    for name in "ab":
        Evidence(tmp_path / name).write_case(fakes.CASE)
    assert not compare(tmp_path / "a", tmp_path / "b").agree


def test_a_normalised_log_alone_is_enough(tmp_path):
    a, b = write(tmp_path / "a"), write(tmp_path / "b")
    (b / evidence.LOG).unlink()
    assert criteria(a, b)["log"].result == EQUAL


@settings(max_examples=25)
@given(json_values, json_values)
def test_first_difference_is_empty_exactly_for_equal_values(a, b):
    assert (first_difference(a, b) == "") == (a == b)
    assert bool(first_difference(a, b)) == bool(first_difference(b, a))


def test_a_long_value_is_cut():
    assert len(first_difference("a" * 1000, "b")) < 200


def run(capsys, *arguments):
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["compare", *map(str, arguments)])
    code = args.run(args)
    return code, *capsys.readouterr()


def test_command_says_in_words_what_differs(tmp_path, capsys):
    a, b = write(tmp_path / "a"), write(tmp_path / "b", fakes.failing())
    code, out, _ = run(capsys, a, b)
    assert code == 1
    assert 'verdict: "PASS" | "FAIL"' in out
    assert "DIFFER  12 of 16 criteria equal" in out
    assert run(capsys, a, a)[0] == 0


def test_command_gives_json(tmp_path, capsys):
    a = write(tmp_path / "a")
    code, out, _ = run(capsys, a, a, "--json")
    data = json.loads(out)
    assert (code, data["schema"], data["agree"], len(data["criteria"])) == (0, "kvproof.compare/1", True, 16)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (evidence.CASE, None, "is not a kvproof evidence directory"),
        (evidence.REPORT, "{", "report.json: broken JSON"),
        (evidence.LAYOUT, "[]", "layout.json: is not a JSON object"),
        (evidence.TRANSCRIPT, '{"step": 0}\n{', "transcript.jsonl line 2: broken JSON"),
    ],
)
def test_command_refuses_what_is_no_evidence_in_one_line(tmp_path, capsys, file, content, message):
    a, b = write(tmp_path / "a"), write(tmp_path / "b")
    (b / file).unlink() if content is None else (b / file).write_text(content, encoding="utf-8")
    code, out, err = run(capsys, a, b)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert str(b) in err
