"""The log's writer alone: what it encodes, hides, drops, rotates, and how it lives with a file system that does not."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import resource
import subprocess
import sys
import threading
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproof.trace import writer
from kvproof.trace.options import Options
from kvproof.trace.writer import Redactor, Runs, Sink


class Owner:
    """Stands for the guard: the header is its method."""

    def enabled(self) -> dict[str, Any]:
        return {"event": "kv.enabled", "step": None, "counters": {"dropped": 0}}


@pytest.fixture(autouse=True)
def _no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flushes happen when a test asks for them: the process's writer thread does not see these sinks."""
    monkeypatch.setattr(writer, "_pump", lambda sink: None)


def step(number: int, **fields: Any) -> dict[str, Any]:
    """One ordinary event."""
    return {"event": "kv.bind", "step": number, **fields}


def lines(path: Path) -> list[dict[str, Any]]:
    """All lines of a file; one that does not parse fails the test."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def sink(tmp_path: Path, owner: Owner | None = None, **options: Any) -> Sink:
    """A sink that writes into ``tmp_path / "log"``."""
    return Sink(Options(path=str(tmp_path / "log"), **options), "scheduler", owner.enabled if owner else None)


def path_of(one: Sink) -> Path:
    assert one.path is not None
    return one.path


# -- encoding ---------------------------------------------------------------------------------------------------------


def naive_runs(slots: list[int], starts: list[int]) -> list[list[int]]:
    """Runs of consecutive slots, of −1s, never across two requests: token by token."""
    runs: list[list[int]] = []
    for request, (first, last) in enumerate(pairwise(starts)):
        previous: int | None = None
        for slot in slots[first:last]:
            if previous is not None and slot == (previous + 1 if slot >= 0 else previous):
                runs[-1][2] += 1
            else:
                runs.append([request, slot, 1])
            previous = slot
    return runs


@given(st.lists(st.lists(st.integers(-1, 6), min_size=1, max_size=9), min_size=1, max_size=5))
def test_runs_are_what_a_loop_finds(requests: list[list[int]]) -> None:
    slots = [slot for one in requests for slot in one]
    starts = np.concatenate([[0], np.cumsum([len(one) for one in requests])])
    assert Runs(np.array(slots), starts).encode() == naive_runs(slots, starts.tolist())


def test_runs_of_padding_rows_and_of_nothing() -> None:
    assert Runs(np.array([4, 5]), np.array([0, 1, 2, 2, 2])).encode() == [[0, 4, 1], [1, 5, 1]]
    assert Runs(np.array([], np.int64), np.array([0])).encode() == []
    assert Runs(np.array([7, 8, -1]), None).encode() == [[0, 7, 1], [1, 8, 1], [2, -1, 1]]


def test_numpy_sets_and_runs_become_plain_json(tmp_path: Path) -> None:
    one = sink(tmp_path)
    runs = Runs(np.array([3, 4]), np.array([0, 2]))
    one.emit(step(1, blocks=np.arange(3, dtype=np.int32), total=np.int64(7), new=frozenset({"a"}), runs=runs))
    one.flush()
    assert lines(path_of(one)) == [
        {"event": "kv.bind", "step": 1, "blocks": [0, 1, 2], "total": 7, "new": ["a"], "runs": [[0, 3, 2]]}
    ]


def test_one_event_that_cannot_be_written_costs_only_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = sink(tmp_path)

    class Bad:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def unbuildable() -> dict[str, Any]:
        raise RuntimeError("no event")

    one.emit(step(1))
    one.emit(step(2, bad=Bad()))
    one.emit_later(unbuildable)
    one.emit_later(lambda: step(3))
    with caplog.at_level(logging.WARNING, writer.LOGGER.name):
        one.flush()
    found = lines(path_of(one))
    assert [line["step"] for line in found if line["event"] == "kv.bind"] == [1, 3]
    assert found[-1] == {**dict.fromkeys(writer.COMMON_FIELDS), "event": "boundary", "kind": "log", "dropped": 2,
                         "step": 3}  # fmt: skip
    assert len(caplog.records) == 1


# -- redaction --------------------------------------------------------------------------------------------------------


def test_ids_are_hashed_in_every_field_and_text() -> None:
    redactor = Redactor()
    event = {
        "event": "kv.violation", "request": "cmpl-1", "requests": ["cmpl-1", "cmpl-12"], "new": frozenset({"cmpl-2"}),
        "resumed": [], "finished": ["cmpl-3"], "preempted": ("cmpl-4",), "finished_sending": ["cmpl-5"],
        "finished_recving": ["cmpl-6"], "failed_recving": ["cmpl-7"],
        "message": "rule: request cmpl-12: expected x, found a block of request cmpl-1",
        "expected": "request cmpl-3", "found": "request cmpl-7",
    }  # fmt: skip
    hidden = redactor.event(event)
    assert "cmpl" not in json.dumps(hidden, default=list)
    assert hidden["requests"] == [redactor.name("cmpl-1"), redactor.name("cmpl-12")]
    # The longer id is replaced as a whole, not its beginning.
    assert redactor.name("cmpl-12") in hidden["message"]
    assert hidden["message"].endswith(redactor.name("cmpl-1"))
    assert Redactor().name("cmpl-1") == redactor.name("cmpl-1") != redactor.name("cmpl-2")


@pytest.mark.parametrize("request_id", ["", None])
def test_no_request_stays_no_request(request_id: str | None) -> None:
    hidden = Redactor().event({"event": "kv.alloc", "request": request_id})
    assert hidden["request"] is None if request_id is None else hidden["request"].startswith("r-")


def test_an_id_that_no_field_named_is_hidden_in_a_text(tmp_path: Path) -> None:
    one = sink(tmp_path, redact="all")
    one.know(["other-secret"])
    one.emit({"event": "kv.violation", "request": "secret", "message": "secret against other-secret", "found": "5"})
    text = path_of(one).read_text()
    assert "secret" not in text


def test_the_memory_of_ids_is_bounded() -> None:
    redactor = Redactor()
    for n in range(70_000):
        redactor.name(f"id-{n}")
    assert len(redactor._seen) <= 65_536
    assert redactor.text("id-69999") == redactor.name("id-69999")


def test_nothing_is_hashed_unless_asked_for(tmp_path: Path) -> None:
    one = sink(tmp_path)
    one.emit({"event": "kv.violation", "request": "mine", "message": "mine"})
    assert lines(path_of(one))[0]["message"] == "mine"


# -- queue ------------------------------------------------------------------------------------------------------------


def test_a_full_queue_drops_and_counts_but_never_a_finding(tmp_path: Path) -> None:
    one = sink(tmp_path, max_queue=16)
    for n in range(20):
        one.emit(step(n))
    one.emit_later(lambda: step(99))
    assert one.dropped == 5
    one.emit({"event": "kv.violation", "step": 20})
    found = lines(path_of(one))
    assert [line["step"] for line in found if line["event"] == "kv.bind"] == list(range(16))
    assert found[16]["event"] == "kv.violation"
    assert found[17]["kind"] == "log"
    assert found[17]["dropped"] == 5


def test_findings_are_on_disk_when_emit_returns(tmp_path: Path) -> None:
    one = sink(tmp_path)
    one.emit(step(1))
    assert not path_of(one).exists()
    one.emit({"event": "kv.error", "step": 1})
    assert [line["event"] for line in lines(path_of(one))] == ["kv.bind", "kv.error"]


def test_threads_lose_and_mix_nothing(tmp_path: Path) -> None:
    one = sink(tmp_path, max_queue=100_000)
    start = threading.Barrier(5)

    def emit(who: int) -> None:
        start.wait()
        for n in range(500):
            one.emit(step(n, who=who) if n % 50 else {"event": "kv.violation", "step": n, "who": who})

    def flush() -> None:
        start.wait()
        for _ in range(200):
            one.flush()

    threads = [threading.Thread(target=emit, args=(who,)) for who in range(4)] + [threading.Thread(target=flush)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one.flush()
    found = lines(path_of(one))
    assert len(found) == 2000
    for who in range(4):
        assert [line["step"] for line in found if line["who"] == who] == list(range(500))


def test_the_threads_of_a_process_write_without_being_asked(tmp_path: Path) -> None:
    """In a process of its own: the real thread, and what is left when the interpreter ends."""
    code = (
        "import sys, threading; from kvproof.trace.options import Options\n"
        "from kvproof.trace.writer import Sink, _sinks\n"
        "a, b = (Sink(Options(path=sys.argv[1]), role) for role in ('scheduler', 'worker'))\n"
        "print(len(_sinks), sum(t.name == 'kv_trace-writer' for t in threading.enumerate()))\n"
        "[s.emit({'event': 'kv.bind', 'step': n}) for n in range(1000) for s in (a, b)]\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["2", "1"]
    for role in ("scheduler", "worker"):
        (file,) = tmp_path.glob(f"kv_trace-{role}-*.jsonl")
        assert [line["step"] for line in lines(file)] == list(range(1000))


def test_a_sink_whose_guard_is_gone_lets_go(tmp_path: Path) -> None:
    owner = Owner()
    one = sink(tmp_path, owner)
    gone = weakref.ref(owner)
    one.emit(step(1))
    assert not one.end_if_orphaned()
    del owner
    gc.collect()
    assert gone() is None
    assert one.end_if_orphaned()
    assert [line["step"] for line in lines(path_of(one))] == [1]


# -- the logger -------------------------------------------------------------------------------------------------------


def test_without_a_path_findings_go_to_the_logger_and_steps_only_when_debugging(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, writer.LOGGER.name):
        quiet = Sink(Options(), "worker")
        assert not quiet.wants("kv.bind")
        assert quiet.wants("kv.violation")
        quiet.emit({"event": "kv.violation", "request": "a"})
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [
        (logging.ERROR, 'kv_trace {"event":"kv.violation","request":"a"}')
    ]
    caplog.clear()
    with caplog.at_level(logging.DEBUG, writer.LOGGER.name):
        chatty = Sink(Options(), "worker")
        assert chatty.wants("kv.bind")
        chatty.emit(step(1))
        chatty.flush()
    assert [r.levelno for r in caplog.records] == [logging.DEBUG]


# -- rotation ---------------------------------------------------------------------------------------------------------


def test_segments_rotate_by_size_and_the_oldest_go(tmp_path: Path) -> None:
    owner = Owner()
    one = sink(tmp_path, owner)
    one._max = 1500
    for n in range(600):
        one.emit(step(n, filler="x" * 100))
        one.flush()
    directory = path_of(one).parent
    segments = sorted(directory.glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    assert len(segments) == writer.SEGMENTS
    assert segments[-1] == path_of(one)
    found = [lines(path) for path in segments]
    assert all(part[0]["event"] == "kv.enabled" for part in found)
    steps = [line["step"] for part in found for line in part if line["event"] == "kv.bind"]
    assert steps == list(range(steps[0], 600))  # no hole up to the last one
    assert one.dropped == 0
    assert max(path.stat().st_size for path in segments) < 3000


@pytest.mark.parametrize("rotations", range(1, 11))
def test_no_segment_goes_before_there_are_too_many(tmp_path: Path, rotations: int) -> None:
    one = sink(tmp_path)
    one._max = 1
    for n in range(rotations):
        one.emit(step(n))
        one.flush()
    kept = {line["step"] for path in path_of(one).parent.glob("*.jsonl") for line in lines(path)}
    assert kept == set(range(max(0, rotations - (writer.SEGMENTS - 1)), rotations))


def test_segments_of_a_predecessor_with_the_same_pid_stay(tmp_path: Path) -> None:
    first = sink(tmp_path)
    first._max = 1
    first.emit(step(1))
    first.flush()
    second = sink(tmp_path)
    second._max = 1
    second.emit(step(2))
    second.flush()
    assert sorted(line["step"] for path in path_of(second).parent.glob("*.jsonl") for line in lines(path)) == [1, 2]


def test_the_limit_is_the_options(tmp_path: Path) -> None:
    assert sink(tmp_path, max_log_mib=1024)._max == 128 << 20
    assert sink(tmp_path, max_log_mib=8)._max == 1 << 20


# -- faults of the file system ----------------------------------------------------------------------------------------


def test_a_full_disk_costs_one_warning_and_a_counter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = sink(tmp_path)
    one.emit(step(1))
    one.flush()
    native, room = os.write, [9]

    def write(fd: int, data: Any) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        part = bytes(data)[: room[0]]
        room[0] -= len(part)
        return native(fd, part)

    with caplog.at_level(logging.WARNING, writer.LOGGER.name), monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        for n in range(2, 5):
            one.emit(step(n))
            one.flush()
        one.emit({"event": "kv.violation", "step": 4})  # a finding does not reach the engine either
    assert [r.getMessage() for r in caplog.records] == [
        f"kv_trace: {one.path}: No space left on device; events are dropped until it can be written again"
    ]
    assert one.dropped == 4
    one.emit(step(5))
    one.flush()
    raw = path_of(one).read_bytes().splitlines()
    assert raw[1] == b'{"event":'  # the torn line stands alone
    parsed = [json.loads(line) for line in (raw[0], *raw[2:])]
    assert [line["step"] for line in parsed] == [1, 5, 5]
    assert parsed[-1]["dropped"] == 4


def test_a_file_size_limit_is_a_full_disk(tmp_path: Path) -> None:
    """The kernel's own refusal (EFBIG), in a process of its own."""
    code = (
        "import resource, signal, sys; from kvproof.trace.options import Options\n"
        "from kvproof.trace.writer import Sink\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        "s = Sink(Options(path=sys.argv[1]), 'worker')\n"
        "for n in range(1000): s.emit({'event': 'kv.bind', 'step': n}); s.flush()\n"
        "print(s.dropped)\n"
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 5000
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True)
    (file,) = tmp_path.glob("*.jsonl")
    raw = file.read_bytes().splitlines()
    whole = [json.loads(line) for line in raw[:-1]]
    assert 100 < len(whole) == 1000 - int(done.stdout) < 1000
    assert done.stderr.count("kv_trace: ") == 1


def test_a_directory_that_cannot_be_made_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "log").write_text("a file where the directory should be")
    one = sink(tmp_path)
    with caplog.at_level(logging.WARNING, writer.LOGGER.name):
        for n in range(3):
            one.emit(step(n))
            one.flush()
    assert len(caplog.records) == 1
    assert one.dropped == 3
    (tmp_path / "log").unlink()
    one.emit(step(4))
    one.flush()
    assert [line["step"] for line in lines(path_of(one))] == [4, 4]


def test_a_log_that_is_removed_is_begun_again_and_nothing_more_is_lost(tmp_path: Path) -> None:
    one = sink(tmp_path)
    one.emit(step(1))
    one.flush()
    path_of(one).unlink()
    path_of(one).parent.rmdir()
    one.emit(step(2))
    one.flush()
    one.emit(step(3))
    one.flush()
    assert [line["step"] for line in lines(path_of(one))] == [2, 3]
    assert one.dropped == 0
