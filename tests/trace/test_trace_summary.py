"""The summary counts what the builder wrote, and says what the log itself does not show."""

import json
from pathlib import Path

import logs
import pytest

from kvproof.trace.reader.log import open_log
from kvproof.trace.reader.summary import IN_FLIGHT, Summary, summarize


def page(directory: Path) -> Summary:
    return summarize(open_log(directory))


def test_counts_of_a_clean_log(tmp_path: Path) -> None:
    found = page(logs.clean(tmp_path))
    (engine,) = found.engines
    assert (engine.engine, engine.first, engine.last) == (logs.ENGINE, 1, 9)
    assert (engine.bound, engine.written, engine.read, engine.empty) == (9, 9, 9, 0)
    assert (engine.in_flight, engine.unwritten) == (0, 0)
    assert (engine.requests, engine.tokens) == (2, 32 + 28 + 12 + 1)
    assert found.events["kv.bind"] == 9
    assert found.records == {"Plan": {"judged": 9, "fast": 0}, "Schedule": {"judged": 1, "fast": 8}}
    assert found.never == {"dcp_local_slot_mismatch": "no decode context parallelism"}
    assert found.skipped == {"pcp_partition_mismatch": 9}
    assert (found.bad, found.exit_code, found.dropped, found.torn, found.corrupt) == (False, 0, 0, 0, 0)


def test_processes_as_they_introduced_themselves(tmp_path: Path) -> None:
    scheduler, worker = page(logs.clean(tmp_path)).processes
    assert (scheduler.role, scheduler.runs, scheduler.pid, scheduler.host) == ("scheduler", "Scheduler", 100, "node-1")
    assert (worker.role, worker.runs, worker.pid, len(worker.rules)) == ("worker", "GPUModelRunner", 200, 2)
    assert (worker.kvproof, worker.vllm, worker.action, worker.engine) == ("0.1.0", "0.32.0", "log", logs.ENGINE)


def test_violations_and_errors_by_kind(tmp_path: Path) -> None:
    engine = logs.Engine()
    for number in range(3):
        engine.step({"req-a": 1}, new=["req-a"] if not number else [])
        engine.violation("req-a" if number else "req-z")
        engine.error(guard=number == 1)
    engine.counters("worker", violations={logs.RULE: 5, "null_block_write": 2})
    found = page(engine.save(tmp_path))
    rules = {entry.rule: entry for entry in found.violations}
    mine = rules[logs.RULE]
    assert (mine.logged, mine.counted, mine.requests, mine.first_step, mine.last_step) == (3, 5, 2, 1, 3)
    # The guard counted it and its line was lost.
    assert (rules["null_block_write"].logged, rules["null_block_write"].counted) == (0, 2)
    assert {(entry.guard, entry.count, entry.first_step, entry.last_step) for entry in found.errors} == {
        (False, 2, 1, 3), (True, 1, 2, 2)
    }  # fmt: skip
    assert found.exit_code == 1


def test_an_error_alone_is_an_exit_code(tmp_path: Path) -> None:
    engine = logs.Engine()
    engine.error()
    assert page(engine.save(tmp_path)).exit_code == 1


def test_steps_nobody_wrote(tmp_path: Path) -> None:
    engine = logs.Engine()
    engine.step({"r": 1}, new=["r"])
    engine.step({"r": 1}, written=False)  # lost
    engine.step({})  # zero tokens: legally never written
    engine.step({"r": 1})
    for _ in range(IN_FLIGHT + 3):
        engine.step({"r": 1}, written=False)
    found = page(engine.save(tmp_path)).engines[0]
    assert (found.bound, found.written, found.empty, found.in_flight) == (4 + IN_FLIGHT + 3, 2, 1, IN_FLIGHT)
    assert (found.unwritten, found.unwritten_first) == (4, [2, 5, 6, 7])


def test_without_a_workers_log_no_step_is_called_unwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs.clean(tmp_path)
    (tmp_path / logs.WORKER).unlink()
    found = page(tmp_path).engines[0]
    assert (found.written, found.unwritten, found.in_flight) == (0, None, None)
    assert logs.command("summary", tmp_path) == 0
    assert "no worker's lines in this log" in capsys.readouterr().out


def test_rotation_of_the_workers_beginning_makes_no_step_unwritten(tmp_path: Path) -> None:
    logs.clean(tmp_path)
    worker = tmp_path / logs.WORKER
    late = [text for text in worker.read_text().splitlines(keepends=True) if (json.loads(text)["step"] or 0) >= 5]
    worker.write_text("".join(late))
    assert page(tmp_path).engines[0].unwritten == 4
    worker.rename(tmp_path / logs.WORKER.replace(".jsonl", ".3.jsonl"))
    found = page(tmp_path)
    assert found.engines[0].unwritten == 0
    assert found.processes[1].beheaded


def test_a_process_number_used_again_is_another_process(tmp_path: Path) -> None:
    first, second = logs.Engine(), logs.Engine("deadbeef", logs.START + 100)
    for engine in (first, second):
        engine.step({"r": 1}, new=["r"])
        engine.counters("worker", judged={"Plan": 1})
    for role, lines in second.lines.items():
        first.lines[role] += lines
    found = page(first.save(tmp_path))
    assert [(process.role, process.engine) for process in found.processes] == [
        ("scheduler", logs.ENGINE), ("worker", logs.ENGINE), ("scheduler", "deadbeef"), ("worker", "deadbeef"),
    ]  # fmt: skip
    assert [(engine.engine, engine.bound, engine.written) for engine in found.engines] == [
        (logs.ENGINE, 1, 1), ("deadbeef", 1, 1)
    ]  # fmt: skip
    assert found.records == {"Plan": {"judged": 2, "fast": 0}}


def test_the_header_after_rotation_is_the_same_process(tmp_path: Path) -> None:
    engine = logs.Engine()
    engine.step({"r": 1}, new=["r"])
    engine.enabled("worker", judged={"Plan": 7})
    found = page(engine.save(tmp_path))
    assert len(found.processes) == 2
    assert found.records == {"Plan": {"judged": 7, "fast": 0}}


def test_lost_lines_are_counted_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = logs.Engine()
    engine.boundary("log", dropped=3)
    engine.boundary("log", dropped=5)  # counts up
    engine.boundary("log", role="worker", dropped=2)
    engine.save(tmp_path)
    with (tmp_path / logs.WORKER).open("a") as file:
        file.write('nonsense\n{"event":"kv.wri')
    found = page(tmp_path)
    assert (found.dropped, found.torn, found.corrupt) == (7, 1, 1)
    assert logs.command("summary", tmp_path) == 0
    out = capsys.readouterr().out
    assert "7 events dropped" in out
    assert "1 torn line at the end of a file, 1 corrupt line elsewhere, skipped" in out
    assert "NO VIOLATION LOGGED" in out  # nothing was judged: not called clean


def test_json_and_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert logs.command("summary", logs.clean(tmp_path / "clean"), "--json") == 0
    assert json.loads(capsys.readouterr().out)["engines"][0]["bound"] == 9
    assert logs.command("summary", logs.violated(tmp_path / "violated"), "--json") == 1
    assert json.loads(capsys.readouterr().out)["violations"][0]["rule"] == logs.RULE


@pytest.mark.parametrize("command", ["summary", "explain"])
def test_tables_fit_80_columns(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    logs.violated(tmp_path / "log")
    logs.command(command, "log")
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "write_target_mismatch" in out  # no name is folded
