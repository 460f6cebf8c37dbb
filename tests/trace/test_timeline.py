"""The timeline is a Chrome trace that Perfetto loads: complete spans on numbered rows, counters, instants."""

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import logs
import pytest

from kvproof.trace.reader.log import open_log
from kvproof.trace.reader.timeline import trace_events

Events = list[dict[str, Any]]


@pytest.fixture(name="events")
def events_(tmp_path: Path) -> Events:
    return list(trace_events(open_log(logs.violated(tmp_path))))


def rows(events: Events) -> dict[tuple[int, int], str]:
    """"process / thread" of each (pid, tid)."""
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = [e for e in events if e["name"] == "thread_name"]
    return {(e["pid"], e["tid"]): f"{processes[e['pid']]} / {e['args']['name']}" for e in threads}


def spans(events: Events, category: str) -> list[tuple[str, str, dict[str, Any]]]:
    """(row, name, event) of each span of a category, by time."""
    named = rows(events)
    found = [(named[e["pid"], e["tid"]], e["name"], e) for e in events if e["ph"] == "X" and e["cat"] == category]
    return sorted(found, key=lambda span: span[2]["ts"])


def test_structure(events: Events) -> None:
    for event in events:
        assert event["ph"] in "XMCi"
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert (event["pid"], event["tid"]) in rows(events)
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
        if event["ph"] == "i":
            assert event["s"] in "pt"


def test_spans_of_a_row_do_not_overlap(events: Events) -> None:
    ends: dict[tuple[int, int], float] = defaultdict(float)
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        row = event["pid"], event["tid"]
        assert event["ts"] >= ends[row] - 0.2
        ends[row] = event["ts"] + event["dur"]


def test_states_of_the_requests(events: Events) -> None:
    states = defaultdict(list)
    for row, name, _ in spans(events, "request"):
        states[row.split(" / ")[1]].append(name)
    assert states == {
        "req-a": ["prefill", "decode"],
        "req-b": ["prefill", "decode"],
        "req-c": ["waiting for load", "prefill", "preempted", "prefill", "decode"],
    }
    (first, *_) = spans(events, "request")
    assert first[2]["args"] == {"request": "req-a", "first step": 1, "steps": 2, "tokens": 40}


def test_a_finished_request_ends_where_it_gave_its_blocks_back(tmp_path: Path) -> None:
    engine = logs.Engine()
    engine.step({"r": 4}, new=["r"])
    engine.finish("r")
    gone = engine.now
    engine.now += 3600  # nothing to do for an hour
    engine.step({"s": 4}, new=["s"])
    events = list(trace_events(open_log(engine.save(tmp_path))))
    (first, *_) = (span for _, _, span in spans(events, "request"))
    assert first["ts"] + first["dur"] == pytest.approx((gone - logs.START - 0.001) * 1e6, abs=1)


def test_a_scheduler_that_does_not_name_the_preempted(tmp_path: Path) -> None:
    engine = logs.Engine()
    engine.step({"r": 4}, new=["r"])
    engine.step({"r": 1})
    engine.preempt("r")
    engine.put_off = []
    engine.step({"r": 5}, resumed=["r"])
    events = list(trace_events(open_log(engine.save(tmp_path))))
    assert [name for _, name, _ in spans(events, "request")] == ["prefill", "decode", "preempted", "prefill"]


def test_steps_per_process(events: Events) -> None:
    steps = defaultdict(list)
    for row, name, _ in spans(events, "step"):
        steps[row].append(name)
    numbers = [f"step {n}" for n in range(1, 12)]
    assert steps == {
        "scheduler, pid 100 on node-1 / steps, bind to result": numbers,
        "worker 0, pid 200 on node-1 / steps": numbers,
    }


def test_steps_in_flight_side_by_side_take_two_rows(tmp_path: Path) -> None:
    engine = logs.Engine()
    engine.step({"r": 4}, new=["r"], result=False)
    engine.step({"r": 1}, result=False)
    for step in (1, 2):
        engine.number = step
        engine.boundary("result", requests=["r"], sampled=[1])
    events = list(trace_events(open_log(engine.save(tmp_path))))
    found = [(row.split(" / ")[1], name) for row, name, _ in spans(events, "step") if row.startswith("scheduler")]
    assert found == [("steps, bind to result", "step 1"), ("steps, bind to result (2)", "step 2")]


def test_transfers(events: Events) -> None:
    load, save = spans(events, "transfer")
    assert (load[1], save[1]) == ("load req-c", "save req-a")
    assert load[2]["args"] == {"request": "req-c", "tokens": 32, "blocks per group": [2]}
    assert load[2]["dur"] > 10_000


def test_a_failed_load_and_a_load_inside_a_step(tmp_path: Path) -> None:
    engine = logs.Engine()
    for request, beside in (("r", True), ("s", False)):
        engine.boundary("match", request=request, matched=16, is_async=beside, local=0, total=20)
        engine.boundary("load_target", request=request, external=16, local=0, blocks=[[1]])
    engine.boundary("transfers", finished_sending=[], finished_recving=[], failed_recving=["r"], invalid_blocks=[])
    engine.step({"s": 4}, new=["s"])
    events = list(trace_events(open_log(engine.save(tmp_path))))
    assert {name for _, name, _ in spans(events, "transfer")} == {"load r failed", "load s"}
    assert not any("open at the end" in key for _, _, span in spans(events, "transfer") for key in span["args"])


def test_counters_and_markers(events: Events) -> None:
    free = [e["args"]["blocks"] for e in events if e["ph"] == "C" and e["name"] == "free blocks"]
    assert free[0] == logs.BLOCKS - 3
    assert len(free) == 8
    markers = [e for e in events if e["ph"] == "i"]
    assert [(m["name"], m["s"]) for m in markers] == [(logs.RULE, "p"), (logs.RULE, "t")]
    assert rows(events)[markers[1]["pid"], markers[1]["tid"]].endswith("/ req-b")


def test_what_is_open_at_the_end_is_closed_and_said(events: Events) -> None:
    last = [e for _, name, e in spans(events, "request") if e["args"].get("open at the end of the log")]
    assert {e["args"]["request"] for e in last} == {"req-b", "req-c"}


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_file(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / name
    assert logs.command("timeline", logs.violated(tmp_path / "log"), "-o", output) == 0
    out = capsys.readouterr().out
    assert "3 requests, 22 steps, 2 transfers, 1 marker" in out
    text = gzip.decompress(output.read_bytes()) if name.endswith(".gz") else output.read_bytes()
    document = json.loads(text)
    assert document["traceEvents"] == list(trace_events(open_log(tmp_path / "log")))
    assert document["otherData"]["start (Unix s)"] == logs.START + 0.001


def test_no_place_to_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "missing" / "trace.json"
    assert logs.command("timeline", logs.clean(tmp_path / "log"), "-o", output) == 2
    assert capsys.readouterr().err == f"kvproof trace timeline: {output}: No such file or directory\n"
