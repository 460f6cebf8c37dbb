"""The log as Chrome trace events, to be opened in Perfetto (ui.perfetto.dev) or chrome://tracing.

One row per request (its states), rows of steps per process, a counter of free blocks, rows of transfers, and a marker
at every violation and error. Events are written while the log is read: a log of any size needs little memory.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kvproof.trace.reader.log import Data, Log, Source, items, label, names, number, parallel

WAITING, PREFILL, DECODE, PREEMPTED = "waiting for load", "prefill", "decode", "preempted"

STEP_TOKENS = 1
"""A running request given no more than this, drafts aside, is decoding. A last chunk of one token looks alike."""


@dataclass
class Counts:
    """What was written."""

    events: int = 0
    requests: int = 0
    steps: int = 0
    transfers: int = 0
    markers: int = 0


@dataclass
class _Request:
    tid: int
    state: str
    since: float
    first_step: int | None
    steps: int = 0
    tokens: int = 0
    idle: float | None = None
    scheduled: bool = False


@dataclass
class _Lanes:
    """Rows for spans that may overlap: each takes the first free one."""

    busy: list[bool] = field(default_factory=list)

    def take(self) -> int:
        """Index of a free row, now taken."""
        for lane, busy in enumerate(self.busy):
            if not busy:
                self.busy[lane] = True
                return lane
        self.busy.append(True)
        return len(self.busy) - 1


@dataclass
class _Span:
    pid: int
    lane: int
    since: float
    last: float
    args: Data


class Timeline:
    """Turns events, in the order of time, into trace events handed to ``emit``."""

    def __init__(self, emit: Callable[[Data], None]):
        self._emit = emit
        self.counts = Counts()
        self.start: float | None = None
        self._now = 0.0
        self._pids: dict[tuple[str, str], int] = {}
        self._lanes: dict[int, _Lanes] = {}
        self._requests: dict[tuple[str, str], _Request] = {}
        self._last_tid: dict[str, int] = {}
        self._bound: dict[tuple[str, int], _Span] = {}
        self._running: dict[int, tuple[int, str, _Span]] = {}
        self._transfers: dict[tuple[str, str, str], _Span] = {}
        self._async: dict[tuple[str, str], bool] = {}

    def feed(self, source: Source, event: Data) -> None:
        """Take one event of the log."""
        if self.start is None:
            self.start = event["time"]
        self._now = max(self._now, self._us(event["time"]))
        name, engine, step = event["event"], str(event.get("engine") or ""), number(event, "step")
        pid = self._process(source, event)
        if name in ("kv.write", "kv.read") and step is not None:
            self._worker_step(pid, engine, step, event)
        elif name == "kv.bind":
            self._bind(pid, engine, step, event)
        elif name == "boundary":
            self._boundary(engine, step, event)
        elif name in ("kv.alloc", "kv.release"):
            free = number(event, "free")
            if free is not None:
                self._counter(pid, "free blocks", "blocks", free, event)
            if name == "kv.release" and isinstance(event.get("request"), str):
                self._idle(engine, event["request"], event)
        elif name in ("kv.violation", "kv.error"):
            self._marker(pid, engine, event)

    def finish(self) -> None:
        """Close what is still open at the end of the log."""
        for key in list(self._requests):
            self._close_state(key, self._now, open_ended=True)
        for span_key in list(self._transfers):
            self._close_transfer(span_key, self._now, open_ended=True)
        for step_key in list(self._bound):
            self._close_bound(step_key, self._now, open_ended=True)
        for pid in list(self._running):
            self._close_running(pid, None)

    # -- processes and rows --------------------------------------------------------------------------------------------

    def _us(self, time: float) -> float:
        assert self.start is not None
        return max(round((time - self.start) * 1e6, 1), 0.0)

    def _process(self, source: Source, event: Data) -> int:
        where = f" on {source.host}" if source.host else ""
        return self._pid(("process", source.name), f"{label(source, event)}, pid {event.get('pid')}{where}")

    def _pid(self, key: tuple[str, str], name: str) -> int:
        """Number of a process of the picture; its name is written when it is first needed."""
        pid = self._pids.get(key)
        if pid is None:
            pid = self._pids[key] = len(self._pids) + 1
            self._meta("process_name", pid, 0, {"name": name})
            self._meta("process_sort_index", pid, 0, {"sort_index": ("process", "transfers", "requests").index(key[0])})
        return pid

    def _lane(self, pid: int, name: str) -> int:
        lanes = self._lanes.setdefault(pid, _Lanes())
        known = len(lanes.busy)
        lane = lanes.take()
        if lane == known:
            self._meta("thread_name", pid, lane + 1, {"name": name if lane == 0 else f"{name} ({lane + 1})"})
        return lane

    def _meta(self, name: str, pid: int, tid: int, args: Data) -> None:
        self._put({"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args})

    def _put(self, event: Data) -> None:
        self.counts.events += 1
        self._emit(event)

    def _complete(self, pid: int, tid: int, name: str, category: str, since: float, end: float, args: Data) -> None:
        self._put({"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": since,
                   "dur": round(max(end - since, 0.0), 1), "args": args})  # fmt: skip

    def _counter(self, pid: int, name: str, unit: str, value: int, event: Data) -> None:
        self._put({"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": self._us(event["time"]), "args": {unit: value}})

    # -- requests ------------------------------------------------------------------------------------------------------

    def _enter(self, engine: str, request: str, state: str, at: float, step: int | None) -> _Request:
        """Put a request into a state; nothing happens when it is in it already."""
        known = self._requests.get((engine, request))
        if known is not None and known.state == state:
            return known
        pid = self._pid(("requests", engine), f"requests of engine {engine or '?'}")
        if known is None:
            tid = self._last_tid[engine] = self._last_tid.get(engine, 0) + 1
            self.counts.requests += 1
            self._meta("thread_name", pid, tid, {"name": request})
            self._meta("thread_sort_index", pid, tid, {"sort_index": tid})
            scheduled = False
        else:
            tid, scheduled = known.tid, known.scheduled
            self._close_state((engine, request), at)
        entry = self._requests[engine, request] = _Request(tid, state, at, step, scheduled=scheduled)
        return entry

    def _close_state(self, key: tuple[str, str], at: float, open_ended: bool = False) -> None:
        known = self._requests.pop(key)
        args: Data = {"request": key[1], "first step": known.first_step, "steps": known.steps, "tokens": known.tokens}
        if open_ended:
            args["open at the end of the log"] = True
        pid = self._pids["requests", key[0]]
        self._complete(pid, known.tid, known.state, "request", known.since, at, args)

    def _idle(self, engine: str, request: str, event: Data) -> None:
        """Remember when a request gave up its blocks: its end is declared only with the next step, maybe much later."""
        known = self._requests.get((engine, request))
        if known is not None:
            known.idle = self._us(event["time"])

    def _bind(self, pid: int, engine: str, step: int | None, event: Data) -> None:
        at = self._us(event["time"])
        for request in names(event, "finished"):
            known = self._requests.get((engine, request))
            if known is not None:
                self._close_state((engine, request), known.idle if known.idle is not None else at)
            self._async.pop((engine, request), None)
        for request in names(event, "preempted"):
            if (engine, request) in self._requests:
                self._enter(engine, request, PREEMPTED, at, step)
        fresh = {*names(event, "new", "resumed")}
        total = 0
        for request, tokens, drafts in parallel(event, "requests", "tokens", "drafts"):
            if not isinstance(request, str) or not isinstance(tokens, int):
                continue
            total += tokens
            known = self._requests.get((engine, request))
            before = known is not None and known.scheduled and request not in fresh
            if known is not None and known.idle is not None and request in fresh and known.state in (PREFILL, DECODE):
                # Not every scheduler names the preempted: a running request that gave up its blocks was.
                self._enter(engine, request, PREEMPTED, known.idle, step)
            few = tokens - (drafts if isinstance(drafts, int) else 0) <= STEP_TOKENS
            decoding = before and (few or (known is not None and known.state == DECODE))
            entry = self._enter(engine, request, DECODE if decoding else PREFILL, at, step)
            entry.steps, entry.tokens = entry.steps + 1, entry.tokens + tokens
            entry.scheduled, entry.idle = True, None
            load = self._transfers.get((engine, "load", request))
            if load is not None and not self._async.get((engine, request), False):
                load.args["step"] = step
        self._counter(pid, "scheduled tokens", "tokens", total, event)
        if step is not None:
            self._close_bound((engine, step), at)
            count = len(items(event, "requests"))
            args = {"step": step, "trace": event.get("trace"), "requests": count, "tokens": total}
            self._bound[engine, step] = _Span(pid, self._lane(pid, "steps, bind to result"), at, at, args)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _close_bound(self, key: tuple[str, int], at: float, open_ended: bool = False) -> None:
        span = self._bound.pop(key, None)
        if span is not None:
            args = {**span.args, **({"open at the end of the log": True} if open_ended else {})}
            self._complete(span.pid, span.lane + 1, f"step {key[1]}", "step", span.since, at, args)
            self._lanes[span.pid].busy[span.lane] = False
            self.counts.steps += 1

    def _worker_step(self, pid: int, engine: str, step: int, event: Data) -> None:
        at = self._us(event["time"])
        running = self._running.get(pid)
        if running is not None and running[0] != step:
            self._close_running(pid, at)
            running = None
        if running is None:
            span = _Span(pid, self._lane(pid, "steps"), at, at, {"step": step, "trace": event.get("trace")})
            running = self._running[pid] = (step, engine, span)
        span = running[2]
        span.last = at
        if event["event"] == "kv.write":
            span.args |= {"requests": len(items(event, "requests")), "tokens": number(event, "num_tokens"),
                          "padded tokens": number(event, "padded")}  # fmt: skip

    def _close_running(self, pid: int, at: float | None) -> None:
        """End a worker's step at ``at``, or where its last line stands."""
        step, _, span = self._running.pop(pid)
        end = span.last if at is None else at
        self._complete(pid, span.lane + 1, f"step {step}", "step", span.since, end, span.args)
        self._lanes[pid].busy[span.lane] = False
        self.counts.steps += 1

    def _boundary(self, engine: str, step: int | None, event: Data) -> None:
        kind, at, request = event.get("kind"), self._us(event["time"]), event.get("request")
        if kind == "result" and step is not None:
            self._close_bound((engine, step), at)
            for pid, (running, owner, _) in list(self._running.items()):
                if owner == engine and running <= step:
                    self._close_running(pid, at)
            for key, span in list(self._transfers.items()):
                if key[0] == engine and span.args.get("step") == step:
                    self._close_transfer(key, at)
        elif kind == "match" and isinstance(request, str):
            self._async[engine, request] = bool(event.get("is_async"))
        elif kind == "load_target" and isinstance(request, str) and (number(event, "external") or 0) > 0:
            if isinstance(event.get("is_async"), bool):
                self._async[engine, request] = event["is_async"]
            blocks = [len(group) for group in items(event, "blocks") if isinstance(group, list)]
            args = {"request": request, "tokens": number(event, "external"), "blocks per group": blocks}
            self._open_transfer(engine, "load", request, at, args)
            if self._async.get((engine, request), False):
                self._enter(engine, request, WAITING, at, step)
        elif kind == "finished" and isinstance(request, str):
            self._idle(engine, request, event)
            if event.get("delayed"):
                self._open_transfer(engine, "save", request, at, {"request": request})
        elif kind == "transfers":
            for name in names(event, "finished_recving"):
                self._close_transfer((engine, "load", name), at)
            for name in names(event, "failed_recving"):
                self._close_transfer((engine, "load", name), at, failed=True)
            for name in names(event, "finished_sending"):
                self._close_transfer((engine, "save", name), at)

    # -- transfers -----------------------------------------------------------------------------------------------------

    def _open_transfer(self, engine: str, what: str, request: str, at: float, args: Data) -> None:
        self._close_transfer((engine, what, request), at)
        pid = self._pid(("transfers", engine), f"transfers of engine {engine or '?'}")
        self._transfers[engine, what, request] = _Span(pid, self._lane(pid, "transfers"), at, at, args)

    def _close_transfer(
        self, key: tuple[str, str, str], at: float, failed: bool = False, open_ended: bool = False
    ) -> None:
        span = self._transfers.pop(key, None)
        if span is None:
            return
        args = dict(span.args)
        if failed:
            args["failed"] = True
        if open_ended:
            args["open at the end of the log"] = True
        name = f"{key[1]} {key[2]}" + (" failed" if failed else "")
        self._complete(span.pid, span.lane + 1, name, "transfer", span.since, at, args)
        self._lanes[span.pid].busy[span.lane] = False
        self.counts.transfers += 1

    # -- markers -------------------------------------------------------------------------------------------------------

    def _marker(self, pid: int, engine: str, event: Data) -> None:
        self.counts.markers += 1
        violation = event["event"] == "kv.violation"
        name = str(event.get("rule")) if violation else f"{event.get('type')} in {event.get('where')}"
        args = {k: event[k] for k in ("message", "request", "step", "expected", "found") if event.get(k) is not None}
        marker = {"ph": "i", "name": name, "cat": "violation" if violation else "error", "ts": self._us(event["time"]),
                  "args": args}  # fmt: skip
        self._put({**marker, "pid": pid, "tid": 1, "s": "p"})
        request = event.get("request")
        known = self._requests.get((engine, request)) if isinstance(request, str) else None
        if known is not None:
            self._put({**marker, "pid": self._pids["requests", engine], "tid": known.tid, "s": "t"})


def trace_events(log: Log) -> Iterator[Data]:
    """All trace events of ``log``; for tests and small logs."""
    found: list[Data] = []
    timeline = Timeline(found.append)
    for source, event in log.events():
        timeline.feed(source, event)
        yield from found
        found.clear()
    timeline.finish()
    yield from found


def write(log: Log, output: Path) -> Counts:
    """Write the trace of ``log``; a name that ends in .gz is compressed, which Perfetto opens as it is."""
    encode = msgspec.json.Encoder().encode
    with _open(output) as put:
        first = True

        def emit(event: Data) -> None:
            nonlocal first
            put(b"\n" if first else b",\n")
            put(encode(event))
            first = False

        put(b'{"displayTimeUnit":"ms","traceEvents":[')
        timeline = Timeline(emit)
        for source, event in log.events():
            timeline.feed(source, event)
        timeline.finish()
        put(b'\n],"otherData":')
        about = {"written by": "kvproof trace timeline", "log": str(log.path), "start (Unix s)": timeline.start or 0}
        put(encode(about))
        put(b"}\n")
    return timeline.counts


@contextmanager
def _open(output: Path) -> Iterator[Callable[[bytes], Any]]:
    if output.suffix == ".gz":
        with gzip.open(output, "wb", compresslevel=5) as packed:
            yield packed.write
    else:
        with output.open("wb") as file:
            yield file.write
