"""The live view follows a log as it grows, rotates and gains processes, and shows one picture on demand."""

import io
import re
import time
from collections.abc import Callable
from pathlib import Path

import logs
import pytest
from rich.console import Console

from kvproof.trace.reader import watch
from kvproof.trace.reader.log import NoLogError, Source, open_log
from kvproof.trace.reader.watch import WINDOW_S, Picture, Tail


def at(moment: float) -> str:
    return logs.line({"event": "boundary", "time": moment, "kind": "dummy"})


def polled(tail: Tail) -> list[float]:
    return [event["time"] for _, event in tail.poll()]


def test_tail_reads_what_is_new_once(tmp_path: Path) -> None:
    live = tmp_path / "kv_trace-worker-h-7.jsonl"
    tail = Tail(tmp_path)
    assert polled(tail) == []
    live.write_text(at(1) + at(2)[:20])
    assert polled(tail) == [1]
    assert polled(tail) == []
    with live.open("a") as file:
        file.write(at(2)[20:] + "nonsense\n" + at(3))
    assert polled(tail) == [2, 3]
    assert tail.damage.corrupt == 1


def test_tail_follows_rotation_and_new_processes(tmp_path: Path) -> None:
    live = tmp_path / "kv_trace-worker-h-7.jsonl"
    live.write_text(at(1))
    tail = Tail(tmp_path)
    assert polled(tail) == [1]
    with live.open("a") as file:
        file.write(at(2))
    live.rename(tmp_path / "kv_trace-worker-h-7.1.jsonl")
    live.write_text(at(3))
    live.rename(tmp_path / "kv_trace-worker-h-7.2.jsonl")
    live.write_text(at(4))
    (tmp_path / "kv_trace-scheduler-h-8.jsonl").write_text(at(5))
    assert sorted(polled(tail)) == [2, 3, 4, 5]
    (tmp_path / "kv_trace-worker-h-7.1.jsonl").unlink()
    assert polled(tail) == []


def test_picture_counts(tmp_path: Path) -> None:
    picture, damage = watch.look(open_log(logs.violated(tmp_path)))
    assert damage.lines == 0
    assert picture.step == {logs.ENGINE: 11}
    assert picture.live == {logs.ENGINE: {"req-b", "req-c"}}
    assert picture.free == {logs.ENGINE: 58}
    assert picture.violations == {logs.RULE: 1}
    assert picture.last_violation is not None
    assert picture.last_violation["slot"] == 58
    steps, tokens = picture.rates(picture.last)
    seconds = picture.last - logs.START - 0.001
    assert steps == pytest.approx(11 / seconds, rel=0.1)
    assert tokens == pytest.approx(127 / seconds, rel=0.1)
    assert picture.rates(picture.last + WINDOW_S + 1) == (0, 0)


def test_rates_forget_what_is_older_than_the_window(tmp_path: Path) -> None:
    engine = logs.Engine()
    engine.step({"r": 64}, new=["r"])
    engine.now += 100
    for _ in range(20):
        engine.step({"r": 1})
    picture, _ = watch.look(open_log(engine.save(tmp_path)))
    assert picture.rates(picture.last) == (20 / WINDOW_S, 20 / WINDOW_S)
    assert len(picture.recent) == 20


def test_once(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    assert logs.command("watch", logs.clean(tmp_path / "clean").relative_to(tmp_path), "--once") == 0
    assert "Last violation" not in capsys.readouterr().out
    assert logs.command("watch", logs.violated(tmp_path / "violated").relative_to(tmp_path), "--once") == 1
    out = capsys.readouterr().out
    assert "58 of 64" in out
    assert "found     slot 58" in out
    assert max(map(len, out.splitlines())) <= 80


def live(path: Path, monkeypatch: pytest.MonkeyPatch, *between: Callable[[], object]) -> tuple[int, str]:
    """Watch ``path``; after each look the next of ``between`` is done, after the last one Ctrl-C is pressed."""
    todo = iter(between)

    def sleep(seconds: float) -> None:
        try:
            next(todo)()
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(time, "sleep", sleep)
    screen = io.StringIO()
    code = watch.watch(path, Console(file=screen, force_terminal=True, width=80, color_system=None))
    return code, screen.getvalue()


def test_live_view_waits_follows_and_leaves_cleanly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, screen = live(tmp_path, monkeypatch, lambda: logs.clean(tmp_path))
    assert code == 0
    assert "waiting for the first line in" in screen  # the words first: a long path wraps the line
    assert "last step" in screen
    assert "s ago" in screen  # the builder's clock is long past: it says that nothing comes any more
    code, screen = live(tmp_path, monkeypatch, lambda: None, lambda: logs.violated(tmp_path / "more"))
    assert code == 0  # a directory below is another log
    later = logs.violated(tmp_path / "more")
    code, screen = live(later, monkeypatch, lambda: None)
    assert code == 1
    assert "Last violation" in screen


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(NoLogError):
        watch.watch(tmp_path / "nowhere", Console())


def test_dropped_and_errors_are_shown() -> None:
    screen = io.StringIO()
    picture = Picture("log")
    engine = logs.Engine()
    engine.boundary("log", dropped=4)
    engine.boundary("log", dropped=9)
    engine.error(message="bad\x1b[31m news")
    source = Source("kv_trace-worker-h-7", Path("kv_trace-worker-h-7.jsonl"))
    for role in engine.lines:
        for event in engine.lines[role]:
            picture.feed(source, event)
    tail = Tail(Path("nowhere"))
    Console(file=screen, width=80).print(watch.draw(picture, tail.damage, picture.last))
    assert picture.dropped == {source.name: 9}
    assert re.search(r"dropped +9 ", screen.getvalue())
    assert "last error: RuntimeError in execute_model: bad[31m news" in screen.getvalue()
