"""Finds the files of a log and walks all processes' events in the order of time, one line in memory per process.

A process can be killed in the middle of a line and a disk can lose a page: a line that is not an event is counted and
skipped, never an error.
"""

from __future__ import annotations

import heapq
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

NAME = re.compile(r"kv_trace-(?P<role>[^-]+)-(?P<host>.+)-(?P<pid>\d+)(?:\.(?P<segment>\d+))?\.jsonl")
"""File names: without a segment the one being written, else the rotated ones, the highest the newest."""

Data = dict[str, Any]
LATEST_S = 1e11
"""A time beyond this is no time: nothing could be put in order by it."""
_BROKEN = (msgspec.MsgspecError, ValueError, RecursionError)
_decode = msgspec.json.Decoder().decode


class NoLogError(ValueError):
    """There is no log at the given path."""


@dataclass(frozen=True, slots=True)
class Source:
    """The files of one role of one process. ``live`` is the file without a segment number."""

    name: str
    live: Path
    role: str = ""
    host: str = ""
    pid: int = 0
    rotates: bool = True

    def segments(self) -> dict[int, Path]:
        """Rotated files by number, the oldest first."""
        if not self.rotates:
            return {}
        found = (NAME.fullmatch(path.name) for path in self.live.parent.glob(f"{_literal(self.name)}.*.jsonl"))
        numbers = sorted(int(match["segment"]) for match in found if match and match["segment"])
        return {number: self.live.with_name(f"{self.name}.{number}.jsonl") for number in numbers}

    def files(self) -> list[Path]:
        """All files that exist now, the oldest first."""
        return [*self.segments().values(), *([self.live] if self.live.exists() else [])]

    @property
    def beheaded(self) -> bool:
        """Whether rotation has removed the beginning of this process's log."""
        return min(self.segments(), default=1) > 1


@dataclass(slots=True)
class Damage:
    """Lines that were skipped. ``torn``: the last one of a file, without its end; ``corrupt``: any other."""

    torn: int = 0
    corrupt: int = 0

    @property
    def lines(self) -> int:
        return self.torn + self.corrupt


@dataclass
class Log:
    """A log directory, or a single file of one."""

    path: Path
    sources: list[Source] = field(default_factory=list)

    def events(self, damage: Damage | None = None) -> Iterator[tuple[Source, Data]]:
        """Every event with its process, in the order of time; may be called again for another pass."""
        damage = Damage() if damage is None else damage
        streams = [_stamped(source, damage) for source in self.sources]
        for _, source, event in heapq.merge(*streams, key=itemgetter(0)):
            yield source, event

    def files(self) -> list[Path]:
        """All files of all processes."""
        return [path for source in self.sources for path in source.files()]


def open_log(path: str | Path) -> Log:
    """The log at ``path``. NoLogError, one line, where there is none."""
    path = Path(path)
    if path.is_file():
        match = NAME.fullmatch(path.name)
        known = {"role": match["role"], "host": match["host"], "pid": int(match["pid"])} if match else {}
        return Log(path, [Source(path.stem, path, rotates=False, **known)])  # type: ignore[arg-type]
    if not path.exists():
        raise NoLogError(f"{path}: no such file or directory")
    sources = find(path)
    if not sources:
        raise NoLogError(f"{path}: no file named kv_trace-<role>-<host>-<pid>.jsonl here")
    return Log(path, sources)


def find(directory: Path) -> list[Source]:
    """The processes that have files in ``directory``, schedulers first."""
    found: dict[str, Source] = {}
    for entry in sorted(os.listdir(directory)):
        if match := NAME.fullmatch(entry):
            name = f"kv_trace-{match['role']}-{match['host']}-{match['pid']}"
            live = directory / f"{name}.jsonl"
            found[name] = Source(name, live, match["role"], match["host"], int(match["pid"]))
    return sorted(found.values(), key=lambda source: (source.role != "scheduler", source.role, source.host, source.pid))


def parse(line: bytes) -> Data | None:
    """The event of one line, None when it is not one."""
    try:
        event = _decode(line)
    except _BROKEN:
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    time = event.get("time")
    usable = isinstance(time, int | float) and not isinstance(time, bool) and abs(time) < LATEST_S
    return event if usable else None


def _stamped(source: Source, damage: Damage) -> Iterator[tuple[float, Source, Data]]:
    for event in _read(source, damage):
        yield event["time"], source, event


def _read(source: Source, damage: Damage) -> Iterator[Data]:
    # The live file is opened first: a rotation while the older ones are read then costs nothing.
    with ExitStack() as stack:
        try:
            live = stack.enter_context(source.live.open("rb"))
        except FileNotFoundError:
            live = None
        for path in source.segments().values():
            try:
                file = path.open("rb")
            except FileNotFoundError:  # the writer has removed its oldest segment meanwhile
                continue
            with file:
                if live is None or not os.path.sameopenfile(file.fileno(), live.fileno()):
                    yield from _events(file, damage)
        if live is not None:
            yield from _events(live, damage)


def _events(file: BinaryIO, damage: Damage) -> Iterator[Data]:
    for line in file:
        event = parse(line)
        if event is not None:
            yield event
        elif not line.endswith(b"\n"):
            damage.torn += 1
        elif not line.isspace():
            damage.corrupt += 1


def _literal(name: str) -> str:
    """A name with the wildcards of glob disarmed."""
    return re.sub(r"([*?\[])", r"[\1]", name)


def items(event: Data, name: str) -> list[Any]:
    """The list in a field; empty when the field is absent or holds something else."""
    value = event.get(name)
    return value if isinstance(value, list) else []


def mapping(event: Data, name: str) -> Data:
    """The object in a field; empty when the field is absent or holds something else."""
    value = event.get(name)
    return value if isinstance(value, dict) else {}


def number(event: Data, name: str) -> int | None:
    """The integer in a field, else None."""
    value = event.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def names(event: Data, *fields: str) -> Iterable[str]:
    """The strings in several list fields."""
    return (value for name in fields for value in items(event, name) if isinstance(value, str))


def parallel(event: Data, *fields: str) -> Iterable[tuple[Any, ...]]:
    """The rows of several parallel list fields; a field that is absent gives None in each row."""
    columns = [items(event, name) for name in fields]
    length = len(columns[0])
    return zip(*(column if len(column) == length else [None] * length for column in columns), strict=True)


def label(source: Source, event: Data) -> str:
    """Who wrote a line, for people: ``scheduler`` or ``worker 3``."""
    role = str(event.get("role") or source.role or "process")
    return role if role == "scheduler" else f"{role} {event.get('rank', 0)}"
