"""A live picture of a running log: rates, live requests, free blocks, violations. Follows new files and rotation."""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvproof.findings.text import counted, printable
from kvproof.trace.reader.log import (
    Damage,
    Data,
    Log,
    NoLogError,
    Source,
    find,
    items,
    label,
    names,
    number,
    open_log,
    parse,
)
from kvproof.trace.reader.summary import cells, moment, table_of

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

INTERVAL_S = 0.5
WINDOW_S = 10.0
"""Seconds over which rates are taken."""
STALE_S = 15.0
"""Seconds without a line after which the picture says so."""


PATIENCE = 4
"""Looks after which a file that was not seen any more is forgotten."""


class Tail:
    """Reads what was appended since the last look. A file is known by its inode, so a rename reads nothing twice."""

    def __init__(self, path: Path):
        self._path = path
        self._offsets: dict[tuple[int, int], int] = {}
        self._missed: Counter[tuple[int, int]] = Counter()
        self.damage = Damage()

    def poll(self) -> Iterator[tuple[Source, Data]]:
        """New events, file by file."""
        seen: set[tuple[int, int]] = set()
        for source in self._sources():
            for path in source.files():
                try:
                    file = path.open("rb")
                except OSError:  # removed by rotation, or not ours to read
                    continue
                with file:
                    status = os.fstat(file.fileno())
                    key = status.st_dev, status.st_ino
                    offset = self._offsets.get(key, 0)
                    # A shorter file than before is another one under a reused inode.
                    offset = offset if offset <= status.st_size else 0
                    seen.add(key)
                    file.seek(offset)
                    for line in file:
                        if not line.endswith(b"\n"):
                            break  # still being written
                        offset += len(line)
                        event = parse(line)
                        if event is not None:
                            yield source, event
                        elif not line.isspace():
                            self.damage.corrupt += 1
                    self._offsets[key] = offset
        # A file that is renamed between listing and opening is there again at the next look.
        self._missed = Counter({key: self._missed[key] + 1 for key in self._offsets if key not in seen})
        self._offsets = {key: offset for key, offset in self._offsets.items() if self._missed[key] < PATIENCE}

    def _sources(self) -> list[Source]:
        if self._path.is_dir():
            return find(self._path)
        return open_log(self._path).sources if self._path.exists() else []


@dataclass
class Picture:
    """What is shown. Rates count the steps bound in the last ``WINDOW_S`` seconds."""

    path: str
    lines: int = 0
    processes: dict[str, str] = field(default_factory=dict)
    first: float | None = None
    last: float = 0.0
    step: dict[str, int] = field(default_factory=dict)
    free: dict[str, int] = field(default_factory=dict)
    blocks: dict[str, int] = field(default_factory=dict)
    live: dict[str, set[str]] = field(default_factory=dict)
    recent: deque[tuple[float, int]] = field(default_factory=deque)
    violations: Counter[str] = field(default_factory=Counter)
    last_violation: Data | None = None
    last_who: str = ""
    errors: int = 0
    last_error: Data | None = None
    dropped: dict[str, int] = field(default_factory=dict)

    def feed(self, source: Source, event: Data) -> None:
        """Take one event."""
        name, at = event["event"], float(event["time"])
        engine = str(event.get("engine") or "")
        self.lines += 1
        self.first = at if self.first is None else min(self.first, at)
        self.last = max(self.last, at)
        self.processes[source.name] = label(source, event)
        if name == "kv.bind":
            live = self.live.setdefault(engine, set())
            live.difference_update(names(event, "finished"))
            live.update(names(event, "requests"))
            step = number(event, "step")
            if step is not None:
                self.step[engine] = max(step, self.step.get(engine, 0))
            tokens = sum(count for count in items(event, "tokens") if isinstance(count, int))
            self.recent.append((at, tokens))
            while self.recent and self.recent[0][0] < self.last - WINDOW_S:
                self.recent.popleft()
        elif name in ("kv.alloc", "kv.release"):
            free = number(event, "free")
            if free is not None:
                self.free[engine] = free
            if name == "kv.release":
                # The next kv.bind adds it again when it lives on.
                self.live.setdefault(engine, set()).discard(str(event.get("request")))
        elif name == "kv.violation":
            self.violations[str(event.get("rule"))] += 1
            if self.last_violation is None or at >= self.last_violation["time"]:
                self.last_violation, self.last_who = event, label(source, event)
        elif name == "kv.error":
            self.errors += 1
            self.last_error = event
        elif name == "boundary" and event.get("kind") == "log":
            self.dropped[source.name] = max(self.dropped.get(source.name, 0), number(event, "dropped") or 0)
        elif name == "kv.enabled":
            sizes = [number(group, "num_blocks") or 0 for group in items(event, "groups") if isinstance(group, dict)]
            self.blocks[engine] = max([*sizes, self.blocks.get(engine, 0)])

    def rates(self, now: float) -> tuple[float, float]:
        """(steps, tokens) per second up to ``now``."""
        recent = [(at, tokens) for at, tokens in self.recent if now - WINDOW_S <= at <= now]
        if not recent or self.first is None:
            return 0.0, 0.0
        seconds = min(WINDOW_S, max(now - self.first, 0.1))
        return len(recent) / seconds, sum(tokens for _, tokens in recent) / seconds


def draw(picture: Picture, damage: Damage, now: float) -> RenderableType:
    """The picture at ``now``, readable at 80 columns."""
    from rich import box
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    if picture.first is None:
        return Text(printable(f"waiting for the first line in {picture.path}"), style="yellow")
    steps, tokens = picture.rates(now)
    grid = Table.grid(padding=(0, 2))
    for _ in range(2):
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(justify="right", no_wrap=True, min_width=16)
    live = sum(map(len, picture.live.values()))
    free = f"{sum(picture.free.values()):,}" if picture.free else "–"
    if picture.free and any(picture.blocks.get(engine) for engine in picture.free):
        free += f" of {sum(picture.blocks.get(engine, 0) for engine in picture.free):,}"
    step = f"{max(picture.step.values()):,}" if picture.step else "–"
    dropped = sum(picture.dropped.values())
    bad, found = ("bold red", "green"), picture.violations.total()
    rows: list[tuple[str, str | Text, str, str | Text]] = [
        ("steps per s", f"{steps:,.1f}", "requests live", f"{live:,}"),
        ("tokens per s", f"{tokens:,.1f}", "free blocks", free),
        ("last step", step, "processes", f"{len(picture.processes):,}"),
        ("violations", Text(f"{found:,}", style=bad[not found]), "errors",
         Text(f"{picture.errors:,}", style=bad[not picture.errors])),
        ("lines", f"{picture.lines:,}", "dropped", Text(f"{dropped:,}", style="yellow" if dropped else "")),
    ]  # fmt: skip
    for row in rows:
        grid.add_row(*row)
    age = now - picture.last
    when = f"last line {moment(picture.last)} UTC" + (f", {age:,.0f} s ago" if age > STALE_S else "")
    note = f"{when}; rates over the last {WINDOW_S:.0f} s"
    if damage.corrupt:
        note += f"; {counted(damage.corrupt, 'corrupt line')} skipped"
    parts: list[RenderableType] = [
        Panel(grid, title=Text(printable(picture.path), style="bold"), title_align="left", box=box.ROUNDED, width=78,
              border_style="red" if found else "green"),
        Text(note, style="yellow" if age > STALE_S else "dim"),
    ]  # fmt: skip
    if picture.violations:
        table = table_of("Violations", "rule", "count", right=("count",))
        for rule, count in picture.violations.most_common(8):
            table.add_row(*cells(rule, count))
        parts += [Text(), table]
    if picture.last_violation is not None:
        parts += [Text(), _violation(picture.last_violation, picture.last_who)]
    if picture.last_error is not None:
        e = picture.last_error
        text = f"last error: {e.get('type')} in {e.get('where')}: {e.get('message')}"
        parts += [Text(), Text(printable(text), "red")]
    return Group(*parts)


def _violation(event: Data, who: str) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("rule", Text(printable(f"{event.get('rule')} ({event.get('family')}, at {event.get('boundary')})")))
    place = [f"{name} {event[name]}" for name in ("request", "group", "block", "slot", "position")
             if event.get(name) is not None]  # fmt: skip
    grid.add_row("where", Text(printable(", ".join(place) or "the whole step")))
    grid.add_row("expected", Text(printable(str(event.get("expected"))), style="green"))
    grid.add_row("found", Text(printable(str(event.get("found"))), style="bold red"))
    step = "outside a step" if event.get("step") is None else f"step {event.get('step')}"
    grid.add_row("when", Text(printable(f"{step}, {moment(event['time'])} UTC, {who}, pid {event.get('pid')}")))
    return Group(Text("Last violation", style="bold"), grid)


def look(log: Log) -> tuple[Picture, Damage]:
    """The picture of what is in ``log`` now."""
    picture, tail = Picture(str(log.path)), Tail(log.path)
    for source, event in tail.poll():
        picture.feed(source, event)
    return picture, tail.damage


def watch(path: Path, console: Console, once: bool = False) -> int:
    """Show the log at ``path`` until Ctrl-C, or one picture. 1 when violations were seen, else 0.

    NoLogError where there is no such directory; one without files is waited for: the engine may be starting.
    """
    from rich.live import Live

    if once or path.is_file():
        log = open_log(path)
        if once:
            picture, damage = look(log)
            console.print(draw(picture, damage, picture.last))
            return 1 if picture.violations else 0
    elif not path.is_dir():
        raise NoLogError(f"{path}: no such file or directory")
    picture, tail = Picture(str(path)), Tail(path)
    try:
        with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                shown = time.monotonic()
                for source, event in tail.poll():
                    picture.feed(source, event)
                    if time.monotonic() - shown > INTERVAL_S:  # a large log is shown while it is read
                        live.update(draw(picture, tail.damage, picture.last), refresh=True)
                        shown = time.monotonic()
                live.update(draw(picture, tail.damage, time.time()), refresh=True)
                time.sleep(INTERVAL_S)
    except KeyboardInterrupt:
        return 1 if picture.violations else 0
