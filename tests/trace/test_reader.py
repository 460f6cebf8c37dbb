"""Files are found in their order, events come in the order of time, and no line can stop the reader."""

import io
import json
import os
from pathlib import Path
from typing import Any

import logs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from kvproof.trace.reader import explain, explain_view, summary, timeline, watch
from kvproof.trace.reader.log import Damage, Log, NoLogError, open_log
from kvproof.trace.reader.tables import Tables


def at(time: float, **fields: Any) -> str:
    return logs.line({"event": "boundary", "time": time, "kind": "dummy", **fields})


def times(log: Log) -> list[float]:
    return [event["time"] for _, event in log.events()]


def test_processes_are_merged_by_time(tmp_path: Path) -> None:
    log = open_log(logs.violated(tmp_path))
    found = times(log)
    assert found == sorted(found)
    assert {source.role for source, _ in log.events()} == {"scheduler", "worker"}
    assert len(found) == sum(len(path.read_text().splitlines()) for path in tmp_path.iterdir())


def test_segments_are_read_oldest_first_by_number_not_by_name(tmp_path: Path) -> None:
    # The times are equal: only the order of the files decides.
    for number in (10, 9, 2):
        (tmp_path / f"kv_trace-worker-a.b-c-7.{number}.jsonl").write_text(at(1.0, tokens=number))
    (tmp_path / "kv_trace-worker-a.b-c-7.jsonl").write_text(at(1.0, tokens=99))
    log = open_log(tmp_path)
    assert [event["tokens"] for _, event in log.events()] == [2, 9, 10, 99]
    (source,) = log.sources
    assert (source.role, source.host, source.pid, source.beheaded) == ("worker", "a.b-c", 7, True)


def test_only_rotated_segments_left(tmp_path: Path) -> None:
    (tmp_path / "kv_trace-worker-h-7.1.jsonl").write_text(at(1.0))
    assert times(open_log(tmp_path)) == [1.0]
    assert not open_log(tmp_path).sources[0].beheaded


def test_rotation_during_the_read_repeats_nothing(tmp_path: Path) -> None:
    live = tmp_path / "kv_trace-worker-h-7.jsonl"
    (tmp_path / "kv_trace-worker-h-7.1.jsonl").write_text(at(1.0))
    live.write_text(at(2.0) + at(3.0))
    events = open_log(tmp_path).events()
    first = next(events)[1]["time"]
    live.rename(tmp_path / "kv_trace-worker-h-7.2.jsonl")
    live.write_text(at(4.0))
    assert [first, *(event["time"] for _, event in events)] == [1.0, 2.0, 3.0]


def test_two_writers_of_the_same_process_number(tmp_path: Path) -> None:
    for role, host in (("scheduler", "a"), ("worker", "a"), ("worker", "b")):
        (tmp_path / f"kv_trace-{role}-{host}-1.jsonl").write_text(at(1.0))
    assert len(open_log(tmp_path).sources) == 3


def test_one_file(tmp_path: Path) -> None:
    logs.violated(tmp_path)
    log = open_log(tmp_path / logs.WORKER)
    assert [source.role for source in log.sources] == ["worker"]
    other = tmp_path / "copied.txt"
    other.write_bytes((tmp_path / logs.WORKER).read_bytes())
    assert times(open_log(other)) == times(log)


@pytest.mark.parametrize(
    ("text", "torn", "corrupt"),
    [
        (b'{"event":"kv.bind","ti', 1, 0),
        (b'{"event":"kv.bind","ti\n', 0, 1),
        (b"\x00" * 100, 1, 0),
        (b"\xff\xfe{}\n", 0, 1),
        (b"[1]\n7\nnull\n", 0, 3),
        (b'{"time":1.0}\n{"event":1,"time":1.0}\n{"event":"x"}\n{"event":"x","time":true}\n', 0, 4),
        (b'{"event":"x","time":1e300}\n', 0, 1),
        (b"[" * 100_000 + b"\n", 0, 1),
        (b"\n \n", 0, 0),
    ],
)  # fmt: skip
def test_lines_that_are_no_events_are_counted(tmp_path: Path, text: bytes, torn: int, corrupt: int) -> None:
    logs.clean(tmp_path)
    whole = times(open_log(tmp_path))
    with (tmp_path / logs.WORKER).open("ab") as file:
        file.write(text)
    damage = Damage()
    assert [event["time"] for _, event in open_log(tmp_path).events(damage)] == whole
    assert (damage.torn, damage.corrupt, damage.lines) == (torn, corrupt, torn + corrupt)


def test_a_last_line_without_its_end_counts_when_it_is_whole(tmp_path: Path) -> None:
    (tmp_path / "kv_trace-worker-h-7.jsonl").write_text(at(1.0).rstrip("\n"))
    damage = Damage()
    assert len(list(open_log(tmp_path).events(damage))) == 1
    assert damage.lines == 0


def test_names_with_wildcards(tmp_path: Path) -> None:
    directory = tmp_path / "run[1]*"
    directory.mkdir()
    (directory / "kv_trace-worker-h[x]-7.1.jsonl").write_text(at(1.0))
    (directory / "kv_trace-worker-h[x]-7.jsonl").write_text(at(2.0))
    assert times(open_log(directory)) == [1.0, 2.0]


def test_no_log(tmp_path: Path) -> None:
    with pytest.raises(NoLogError, match="nowhere: no such file or directory"):
        open_log(tmp_path / "nowhere")
    (tmp_path / "other.jsonl").write_text("")
    with pytest.raises(NoLogError, match="no file named kv_trace-"):
        open_log(tmp_path)


@pytest.mark.parametrize("arguments", [["summary"], ["explain"], ["watch", "--once"], ["query", "SELECT 1"],
                                       ["timeline", "-o", "out.json"]])  # fmt: skip
def test_every_command_refuses_a_path_without_a_log(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name, *rest = arguments
    assert logs.command(name, "nowhere", *rest) == 2
    error = capsys.readouterr().err
    assert error == f"kvproof trace {name}: nowhere: no such file or directory\n"
    assert not (tmp_path / "out.json").exists()


def bind(step: int, **fields: Any) -> dict[str, Any]:
    return {"event": "kv.bind", "time": float(step), "step": step, **fields}


def test_rows_start_grow_are_replaced_and_dropped() -> None:
    tables = Tables(keep="r")
    first = [[1, 0, 0, [5, 6]], [1, 1, 0, [7]], [0, 0, 0, [5]]]
    tables.apply(bind(1, requests=["s", "r"], new=["r", "s"], blocks=first))
    tables.apply(bind(2, requests=["r"], blocks=[[0, 0, 2, [8]]], start=[20], tokens=[3]))
    row = tables.row("r")
    assert row is not None
    assert row.groups == {0: [5, 6, 8], 1: [7]}
    assert (row.declared, row.last, row.end) == (1, 2, 23)
    assert sorted(tables.holders(5, 0)) == [("r", 0, 0), ("s", 0, 0)]
    tables.apply(bind(3, requests=["r"], preempted=["r"], resumed=["r"], blocks=[[0, 0, 0, [9]]]))
    row = tables.row("r")
    assert row is not None
    assert row.groups == {0: [9]}
    tables.apply(bind(4, requests=[], finished=["r", "s"], blocks=[]))
    row = tables.row("r")
    assert row is not None
    assert row.gone == "finished at step 4"
    assert tables.rows == {}
    assert tables.row("s") is None


def test_a_row_whose_beginning_was_rotated_away_keeps_its_columns() -> None:
    tables = Tables()
    tables.apply(bind(90, requests=["r"], blocks=[[0, 0, 3, [8]]]))
    row = tables.row("r")
    assert row is not None
    assert row.groups == {0: [None, None, None, 8]}


STRANGE = st.sampled_from([
    None, True, -1, 0, 3, 2**70, 1.5, "", "req-b", "x\x1b[31m", [], {}, [None], [[]], [-1], ["req-a"], [{}], {"a": 1},
    [[0, 0, 0]], [[0, 0, 0, [1]]], [[9, 0, -5, [1]]], {"group": 0}, {"a": {"b": 1}},
    [{"group": 0, "runs": [[0, 1, 2**60]]}],
])  # fmt: skip


@given(data=st.data())
@settings(max_examples=40)
def test_wrong_types_stop_no_command(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A log of another version, or a line that is whole and wrong, may mislead; it must not end in a traceback."""
    directory = logs.violated(tmp_path_factory.mktemp("log"))
    for name in (logs.SCHEDULER, logs.WORKER):
        path = directory / name
        events = [json.loads(text) for text in path.read_text().splitlines()]
        for _ in range(6):
            event = data.draw(st.sampled_from(events))
            field = data.draw(st.sampled_from(sorted(event)))
            if data.draw(st.booleans()):
                event.pop(field)
            else:
                event[field] = data.draw(STRANGE)
        path.write_text("".join(map(logs.line, events)))
    log = open_log(directory)
    console = Console(file=io.StringIO(), width=80)
    page = summary.summarize(log)
    summary.render(page, console)
    json.dumps(page.to_json())
    for number in range(1, 3):
        try:
            found = explain.explain(log, number)
        except explain.NotFoundError:
            continue
        explain_view.render(found, console)
        json.dumps(found.to_json())
    for event in timeline.trace_events(log):
        assert event["ts"] >= 0
    picture, damage = watch.look(log)
    console.print(watch.draw(picture, damage, picture.last))
    assert "\x1b[31m" not in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_builder_writes_what_the_contract_says(tmp_path: Path) -> None:
    from kvproof.trace.events import COMMON, EVENTS

    for _, event in open_log(logs.violated(tmp_path)).events():
        declared = {field.name: field for field in (*COMMON, *EVENTS[event["event"]].fields)}
        assert event.keys() <= declared.keys()
        assert {name for name, field in declared.items() if not field.optional} <= event.keys(), event["event"]


def test_a_live_file_grows_between_passes(tmp_path: Path) -> None:
    logs.clean(tmp_path)
    log = open_log(tmp_path)
    before = times(log)
    with (tmp_path / logs.WORKER).open("a") as file:
        file.write(at(2e9))
    assert times(log) == [*before, 2e9]
    os.remove(tmp_path / logs.WORKER)
    assert len(times(log)) < len(before)
