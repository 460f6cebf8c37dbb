from __future__ import annotations

import json
from xml.etree import ElementTree as ET

import numpy as np
import pytest
import report_fakes as fakes

from kvproof.findings import evidence
from kvproof.findings.evidence import Evidence, is_evidence
from kvproof.layout import Layout


def complete(path, report=None):
    writer = Evidence(path)
    writer.write_case(fakes.CASE)
    writer.write_layout(fakes.dense_layout(2).to_json())
    writer.append_transcript({"step": 0, "blocks": {"0": [3, 1]}})
    writer.log_path.write_text("INFO 11-29 16:06:32 pid=7 hello\n", encoding="utf-8")
    writer.write_report(report or fakes.failing())
    return writer


def test_a_run_leaves_every_file_and_nothing_else(tmp_path):
    complete(tmp_path / "e")
    assert {p.name for p in (tmp_path / "e").iterdir()} == set(evidence.FILES)


def test_contents(tmp_path):
    complete(tmp_path)
    read = {name: (tmp_path / name).read_text(encoding="utf-8") for name in evidence.FILES}
    assert json.loads(read[evidence.CASE]) == {"schema": "kvproof.case/1", **fakes.CASE}
    assert Layout.from_json(json.loads(read[evidence.LAYOUT])) == fakes.dense_layout(2)
    report = json.loads(read[evidence.REPORT])
    assert (report["verdict"], report["exit_code"]) == ("FAIL", 1)
    assert json.loads(read[evidence.FINDINGS])["findings"] == report["findings"]
    assert json.loads(read[evidence.COUNTERS])["counters"] == report["counters"]
    assert ET.fromstring(read[evidence.JUNIT]).get("failures") == "3"
    assert read[evidence.HTML].startswith("<!doctype html>")
    assert read[evidence.NORMALISED_LOG] == "INFO <time> pid=<pid> hello\n"


def test_the_constructor_leaves_no_trace(tmp_path):
    Evidence(tmp_path / "deep" / "down")
    assert list(tmp_path.iterdir()) == []


def test_case_creates_the_directory_and_comes_first(tmp_path):
    Evidence(tmp_path / "deep" / "down").write_case(fakes.CASE)
    assert [p.name for p in (tmp_path / "deep" / "down").iterdir()] == [evidence.CASE]
    assert is_evidence(tmp_path / "deep" / "down")


def test_transcript_grows_line_by_line_and_takes_numpy(tmp_path):
    writer = Evidence(tmp_path)
    writer.write_case({})
    for step in range(3):
        writer.append_transcript({"step": np.int64(step), "table": np.arange(2)})
    lines = (tmp_path / evidence.TRANSCRIPT).read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [{"step": step, "table": [0, 1]} for step in range(3)]


def test_what_is_no_data_is_refused(tmp_path):
    writer = Evidence(tmp_path)
    writer.write_case({})
    with pytest.raises(TypeError, match="object has no place in evidence"):
        writer.append_transcript({"x": object()})


def test_an_earlier_evidence_stays_until_the_new_run_begins(tmp_path):
    complete(tmp_path)
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    writer = Evidence(tmp_path)
    assert (tmp_path / evidence.HTML).exists()
    writer.write_case({"model": "other"})
    assert {p.name for p in tmp_path.iterdir()} == {evidence.CASE, "notes.txt"}
    assert json.loads((tmp_path / evidence.CASE).read_text(encoding="utf-8"))["model"] == "other"


@pytest.mark.parametrize("content", ["{}", '{"schema": "other/1"}', "not json", "[]", "\xff"])
def test_a_foreign_directory_is_refused(tmp_path, content):
    (tmp_path / evidence.CASE).write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match="is not empty and holds no kvproof evidence") as caught:
        Evidence(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_is_refused(tmp_path):
    file = tmp_path / "f"
    file.touch()
    with pytest.raises(ValueError, match="is not a directory"):
        Evidence(file)
    with pytest.raises(ValueError, match="f/below: Not a directory"):
        Evidence(file / "below")


def test_an_unwritable_place_is_refused():
    # /proc refuses new files to root, too.
    with pytest.raises(ValueError, match=r"^evidence directory /proc/none/x: "):
        Evidence("/proc/none/x")


def test_a_failed_write_leaves_the_old_file_and_no_temporary(tmp_path, monkeypatch):
    writer = complete(tmp_path)
    before = (tmp_path / evidence.LAYOUT).read_bytes()

    def refuse(*_):
        raise OSError("disk full")

    monkeypatch.setattr(evidence.os, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        writer.write_layout({})
    assert (tmp_path / evidence.LAYOUT).read_bytes() == before
    assert {p.name for p in tmp_path.iterdir()} == set(evidence.FILES)


def test_undecodable_names_do_not_lose_the_report(tmp_path):
    report = fakes.unsupported()
    report.reason = "cannot open m\udcff.json"
    complete(tmp_path, report)
    assert json.loads((tmp_path / evidence.REPORT).read_text(encoding="utf-8"))["reason"] == report.reason
