"""Where events go: JSON lines in one file per process, or the logger. A bounded queue, one thread, no wait in the step.

A line is written whole in one system call; what was flushed survives a kill −9. A full disk or an unwritable directory
costs one warning and a counter, never the engine.
"""

from __future__ import annotations

import atexit
import contextlib
import glob
import hashlib
import logging
import os
import re
import socket
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvproof.trace.options import Options

LOGGER = logging.getLogger("vllm.kvproof.trace")
"""A child of vLLM's logger, so that its level, format and stream apply."""

INTERVAL_S = 0.01
SEGMENTS = 8
MIB = 1 << 20

LEVELS = {"kv.enabled": logging.INFO, "kv.violation": logging.ERROR, "kv.error": logging.ERROR}
URGENT = frozenset(LEVELS)
"""Events that are on disk before the guard goes on."""

ID_FIELDS = frozenset(
    {"request", "requests", "new", "resumed", "finished", "preempted"}
    | {"finished_sending", "finished_recving", "failed_recving"}
)
"""Fields that hold request ids."""

TEXT_FIELDS = frozenset({"message", "expected", "found"})


class Runs:
    """Slots of one plan, turned into runs of consecutive slots only when the writer gets to it.

    ``query_start`` None: one token per request.
    """

    __slots__ = ("query_start", "slots")

    def __init__(self, slots: Any, query_start: Any):
        self.slots, self.query_start = slots, query_start

    def encode(self) -> list[list[int]]:
        """[[request index, first slot, length in slots]]; a run never crosses a request."""
        slots, starts = self.slots, self.query_start
        if len(slots) == 0:
            return []
        if starts is None:
            return [[i, slot, 1] for i, slot in enumerate(slots.tolist())]
        step = np.diff(slots)
        same = np.where(slots[1:] < 0, step == 0, step == 1)
        fresh = np.ones(len(slots), np.bool_)
        fresh[1:] = ~same
        inner = starts[(starts > 0) & (starts < len(slots))]
        fresh[inner] = True
        first = np.flatnonzero(fresh)
        length = np.diff(np.append(first, len(slots)))
        owner = np.searchsorted(starts, first, side="right") - 1
        return np.stack([owner, slots[first], length], axis=1).tolist()  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Runs):
        return value.encode()
    return str(value)


class Redactor:
    """Replaces request ids by 12 hex digits of their BLAKE2, the same in every process and file."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, str] = OrderedDict()

    def name(self, value: str) -> str:
        """Hash of one id."""
        known = self._seen.get(value)
        if known is None:
            known = self._seen[value] = "r-" + hashlib.blake2b(value.encode(), digest_size=6).hexdigest()
            if len(self._seen) > 65_536:
                self._seen.popitem(last=False)
        return known

    def text(self, value: str) -> str:
        """A message with every id seen so far replaced."""
        found = [name for name in self._seen if name in value]
        if not found:
            return value
        return re.sub("|".join(re.escape(n) for n in sorted(found, key=len, reverse=True)),
                      lambda m: self._seen[m[0]], value)  # fmt: skip

    def event(self, event: dict[str, Any]) -> dict[str, Any]:
        """The event with its request ids hashed."""
        out = dict(event)
        for key, value in event.items():
            if key in ID_FIELDS:
                out[key] = self.name(value) if isinstance(value, str) else value and [self.name(v) for v in value]
        for key in TEXT_FIELDS & out.keys():
            if isinstance(out[key], str):
                out[key] = self.text(out[key])
        return out


class Sink:
    """Takes events of one role of one process. ``emit`` never blocks and never raises."""

    def __init__(self, options: Options, role: str, header: Callable[[], dict[str, Any]] | None = None):
        self._limit = options.max_queue
        self._queue: deque[dict[str, Any] | Callable[[], dict[str, Any]]] = deque()
        self._encode = msgspec.json.Encoder(enc_hook=_plain).encode
        self._redactor = Redactor() if options.redact == "all" else None
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._size = 0
        self._torn = False
        self._warned = False
        self._told = 0
        # Weak: this process's list of sinks must not keep a scheduler or a KV cache alive.
        self._header = None if header is None else weakref.WeakMethod(header)
        self._max = max(options.max_log_mib * MIB // SEGMENTS, MIB)
        self.path: Path | None = None
        self.dropped = 0
        if options.path is not None:
            self.path = Path(options.path).expanduser() / f"kv_trace-{role}-{socket.gethostname()}-{os.getpid()}.jsonl"
        self._steps = self.path is not None or LOGGER.isEnabledFor(logging.DEBUG)
        _pump(self)

    def wants(self, name: str) -> bool:
        """Whether events of this name go anywhere; saves building those that do not."""
        return self._steps or name in URGENT

    def know(self, names: Iterable[str]) -> None:
        """Have these request ids replaced in texts from now on; no effect unless ids are redacted."""
        if self._redactor is not None:
            with self._lock:
                for name in names:
                    self._redactor.name(name)

    def emit(self, event: dict[str, Any]) -> None:
        """Queue one event; its arrays must be the sink's own copies."""
        urgent = event["event"] in URGENT  # never dropped for want of room: the flush makes it
        if len(self._queue) >= self._limit and not urgent:
            self.dropped += 1
            return
        self._queue.append(event)
        if urgent:
            self.flush()

    def readable(self, text: str) -> str:
        """A message as it may leave this process: request ids hashed when the options say so."""
        return self._redactor.text(text) if self._redactor else text

    def emit_later(self, build: Callable[[], dict[str, Any]]) -> None:
        """Queue an event that the writer's thread builds; whatever it is built from must not change any more."""
        if len(self._queue) >= self._limit:
            self.dropped += 1
        else:
            self._queue.append(build)

    def flush(self) -> None:
        """Write all that is queued."""
        with self._lock:
            batch: list[dict[str, Any]] = []
            while self._queue:
                queued = self._queue.popleft()
                try:
                    batch.append(queued if isinstance(queued, dict) else queued())
                except Exception as error:  # costs this event, not those taken from the queue before it
                    self.dropped += 1
                    self._warn(f"an event cannot be built: {error}")
            if batch:
                self._write(batch)

    def _write(self, batch: list[dict[str, Any]]) -> None:
        lines = []
        written = []
        for event in batch:
            try:
                lines.append(self._encode(self._redactor.event(event) if self._redactor else event))
                written.append(event)
            except Exception as error:  # an event that cannot be written is lost, the engine is not
                self.dropped += 1
                self._warn(f"event {event.get('event')} cannot be encoded: {error}")
        if self.path is None:
            for event, line in zip(written, lines, strict=True):
                LOGGER.log(LEVELS.get(event["event"], logging.DEBUG), "kv_trace %s", line.decode())
            return
        if self.dropped > self._told:
            self._told = self.dropped
            last = batch[-1]
            lines.append(self._encode({**{k: last.get(k) for k in COMMON_FIELDS}, "event": "boundary", "kind": "log",
                                       "dropped": self.dropped}))  # fmt: skip
        data = b"\n".join(lines) + b"\n"
        try:
            self._append(data)
        except (OSError, ValueError) as error:
            self.dropped += len(batch)
            self._close()
            reason = getattr(error, "strerror", None) or error
            self._warn(f"{self.path}: {reason}; events are dropped until it can be written again")

    def _append(self, data: bytes) -> None:
        if self._fd is not None and os.fstat(self._fd).st_nlink == 0:
            self._close()  # somebody removed the file; what would follow would be lost unseen
        if self._fd is None:
            assert self.path is not None
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
            self._size = os.fstat(self._fd).st_size
        if self._torn:
            data = b"\n" + data
        view = memoryview(data)
        self._torn = True
        while view:
            view = view[os.write(self._fd, view) :]
        self._torn = False
        self._size += len(data)
        if self._size >= self._max:
            self._rotate()

    def _rotate(self) -> None:
        assert self.path is not None
        self._close()
        # A restarted container may have the host name and pid of its predecessor, whose segments stay.
        segments = sorted(
            int(found.suffixes[-2][1:])
            for found in self.path.parent.glob(f"{glob.escape(self.path.stem)}.*.jsonl")
            if found.suffixes[-2][1:].isdigit()
        )
        newest = segments[-1] + 1 if segments else 1
        self.path.rename(self.path.with_suffix(f".{newest}.jsonl"))
        for old in segments[: max(len(segments) + 2 - SEGMENTS, 0)]:
            with contextlib.suppress(FileNotFoundError):
                self.path.with_suffix(f".{old}.jsonl").unlink()
        header = self._header() if self._header is not None else None
        if header is not None:
            self._append(self._encode(header()) + b"\n")

    def end_if_orphaned(self) -> bool:
        """Close the file when the guard this sink belongs to is gone; whether it is."""
        if self._header is None or self._header() is not None:
            return False
        self.flush()
        with self._lock:
            self._close()
        return True

    def _close(self) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.close(self._fd)
        self._fd = None

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            LOGGER.warning("kv_trace: %s", text)


COMMON_FIELDS = ("time", "role", "pid", "rank", "engine", "step", "trace")

_sinks: list[Sink] = []
_thread: threading.Thread | None = None
_wake = threading.Event()


def _pump(sink: Sink) -> None:
    """Let the process's one writer thread serve this sink."""
    global _thread
    _sinks.append(sink)
    if _thread is None or not _thread.is_alive():
        _thread = threading.Thread(target=_serve, name="kv_trace-writer", daemon=True)
        _thread.start()
        atexit.register(_flush_all)


def _serve() -> None:
    # Polling costs the step nothing; waking this thread from the step would cost it a system call and the GIL.
    while True:
        _wake.wait(INTERVAL_S)
        _flush_all()


def _flush_all() -> None:
    for sink in list(_sinks):
        try:
            sink.flush()
            if sink.end_if_orphaned():
                _sinks.remove(sink)
        except Exception as error:  # the thread must live as long as the engine
            sink.dropped += 1
            sink._warn(f"the writer failed: {error}")
