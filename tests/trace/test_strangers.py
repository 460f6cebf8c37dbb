"""What strangers found: each case once went wrong for somebody who only had the documentation."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvproof.cli import main
from kvproof.trace.guard import TraceViolation
from kvproof.trace.judge import Judge
from kvproof.trace.options import Options, parse
from kvproof.trace.reader.watch import PATIENCE, Tail
from kvproof.trace.records import Metadata
from kvproof.trace.rules.model import Violation
from kvproof.trace.writer import Sink

EVENT = {"event": "boundary", "time": 1.0, "role": "worker", "pid": 1, "rank": 0, "engine": "e", "step": 1,
         "trace": "e-1", "kind": "reset"}  # fmt: skip


def sink_in(directory: Path, **options: object) -> Sink:
    return Sink(Options(enabled=True, path=str(directory), **options), "worker")  # type: ignore[arg-type]


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("sql", ["", ";", "-- nothing"])
def test_sql_without_a_statement_is_refused_in_one_line(
    sql: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kv_trace-worker-h-1.jsonl").write_text(json.dumps(EVENT) + "\n")
    assert main(["trace", "query", str(tmp_path), sql]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_directory_named_like_a_log_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kv_trace-worker-h-1.jsonl").mkdir()
    assert main(["trace", "query", str(tmp_path), "SELECT 1 FROM kv_bind"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_line_longer_than_duckdb_usually_takes_can_be_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = {**EVENT, "requests": ["r" * (17 << 20)]}
    (tmp_path / "kv_trace-worker-h-1.jsonl").write_text(json.dumps(long) + "\n")
    assert main(["trace", "query", str(tmp_path), "SELECT len(requests[1]) AS n FROM boundary"]) == 0
    assert str(17 << 20) in capsys.readouterr().out.replace(",", "")


@pytest.mark.parametrize("content", [b"", b"root:x:0:0\n", bytes(range(256))])
def test_what_is_no_log_is_not_called_clean(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "something.jsonl"
    path.write_bytes(content)
    assert main(["trace", "summary", str(path)]) == 2
    assert "no event of kv_trace" in capsys.readouterr().err


def test_a_file_that_was_missed_in_one_look_is_not_read_again(tmp_path: Path) -> None:
    live = tmp_path / "kv_trace-worker-h-1.jsonl"
    live.write_text(json.dumps(EVENT) + "\n")
    tail = Tail(tmp_path)
    assert len(list(tail.poll())) == 1
    away = tmp_path / "elsewhere"
    live.rename(away)
    assert list(tail.poll()) == []
    away.rename(live)
    assert list(tail.poll()) == []
    live.rename(away)
    for _ in range(PATIENCE):
        list(tail.poll())
    assert not tail._offsets


def test_a_removed_log_directory_is_made_again(tmp_path: Path) -> None:
    sink = sink_in(tmp_path / "logs")
    assert sink.path is not None
    sink.emit(dict(EVENT))
    sink.flush()
    os.remove(sink.path)
    sink.path.parent.rmdir()
    sink.emit(dict(EVENT, step=2))
    sink.flush()
    assert [line["step"] for line in lines(sink.path)] == [2]
    assert sink.dropped == 0


def test_nul_in_a_path_is_refused_and_would_not_raise_in_the_sink(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"kv_trace\.path"):
        parse({"kv_trace": {"path": "a\0b"}})
    sink = Sink(Options(enabled=True, path=str(tmp_path / "a\0b")), "worker")
    sink.emit({**EVENT, "event": "kv.error"})
    assert sink.dropped == 1


def test_a_home_directory_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    sink = Sink(Options(enabled=True, path="~/logs"), "worker")
    sink.emit({**EVENT, "event": "kv.error"})
    assert sink.path is not None
    assert sink.path.parent == tmp_path / "logs"


def test_a_redacted_exception_does_not_name_the_request(tmp_path: Path) -> None:
    sink = sink_in(tmp_path, redact="all")
    sink.emit({**EVENT, "request": "cmpl-secret"})
    sink.flush()
    violation = Violation("write_target_mismatch", "slot 1", "slot 2", request="cmpl-secret")
    error = TraceViolation([violation], "e-1", sink.readable(str(violation)))
    assert "cmpl-secret" not in str(error)
    assert "request r-" in str(error)


def test_a_rule_that_is_named_as_impossible_is_not_counted_as_skipped_as_well() -> None:
    judge = Judge(["connector_metadata_mismatch"], lambda where, error: None)
    record = Metadata(configured=True, sent=None)
    assert judge.judge(record)
    judge.leave_out(["connector_metadata_mismatch"])
    assert not judge.judge(record)
    assert not judge.skipped
