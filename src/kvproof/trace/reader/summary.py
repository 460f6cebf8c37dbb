"""What a log says in one page: processes, steps, rules, violations, errors, and what the log itself has lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from kvproof.findings.text import counted, printable
from kvproof.trace.reader.log import Damage, Data, Log, Source, items, mapping, names, number

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

IN_FLIGHT = 16
"""Steps at the end of a log that may have been bound and not yet written: pipeline stages and async scheduling."""

SHOWN = 10
"""Rows of a table on the screen; --json has all."""

PAGE = 4096
BOUND, WRITTEN, READ, EMPTY = 1, 2, 4, 8


class Steps:
    """What is known of each step of one scheduler: one byte a step, so that a week of steps fits in memory."""

    def __init__(self) -> None:
        self._pages: dict[int, bytearray] = {}

    def mark(self, step: int, flag: int) -> None:
        """Add a flag to a step."""
        page = self._pages.get(step // PAGE)
        if page is None:
            page = self._pages[step // PAGE] = bytearray(PAGE)
        page[step % PAGE] |= flag

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for number_, page in sorted(self._pages.items()):
            for offset, flags in enumerate(page):
                if flags:
                    yield number_ * PAGE + offset, flags


@dataclass
class ProcessSummary:
    """One role of one process."""

    file: str
    role: str
    host: str
    pid: int
    rank: int = 0
    engine: str = ""
    kvproof: str = ""
    vllm: str = ""
    runs: str = ""
    action: str = ""
    connector: str | None = None
    async_scheduling: bool = False
    lines: int = 0
    first: float = 0.0
    last: float = 0.0
    rules: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    counters: Data = field(default_factory=dict)
    dropped: int = 0
    beheaded: bool = False

    def count(self, counters: Data) -> None:
        """Take the guard's own counts so far."""
        if counters:
            self.counters = counters
            self.dropped = max(self.dropped, number(counters, "dropped") or 0)


@dataclass
class EngineSummary:
    """One scheduler with its workers. Counts are steps, except requests and tokens.

    ``unwritten``: bound, not empty, and no worker wrote them although a later step was written. ``in_flight``: bound
    after the last written step. Both are None when no worker of this scheduler is in the log.
    """

    engine: str
    first: int | None = None
    last: int | None = None
    bound: int = 0
    written: int = 0
    read: int = 0
    empty: int = 0
    in_flight: int | None = None
    unwritten: int | None = None
    unwritten_first: list[int] = field(default_factory=list)
    requests: int = 0
    tokens: int = 0


@dataclass
class RuleSummary:
    """Violations of one rule. ``counted`` is the guard's own count, which a dropped line does not lower."""

    rule: str
    family: str = ""
    logged: int = 0
    counted: int = 0
    requests: int = 0
    first_step: int | None = None
    last_step: int | None = None


@dataclass
class ErrorSummary:
    """Errors of one kind. ``guard``: the guard's own code failed, the engine was not disturbed."""

    where: str
    type: str
    guard: bool
    count: int = 0
    message: str = ""
    first_step: int | None = None
    last_step: int | None = None


@dataclass
class Summary:
    """The whole page."""

    path: str
    processes: list[ProcessSummary]
    engines: list[EngineSummary]
    events: dict[str, int]
    records: dict[str, dict[str, int]]
    skipped: dict[str, int]
    never: dict[str, str]
    failed: dict[str, int]
    """Failures of the guard's own code, by rule or place."""
    violations: list[RuleSummary]
    errors: list[ErrorSummary]
    dropped: int
    torn: int
    corrupt: int

    @property
    def bad(self) -> bool:
        """Whether there is a violation or an error."""
        return bool(self.violations or self.errors)

    @property
    def exit_code(self) -> int:
        return 1 if self.bad else 0

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)


class _Run:
    """Reads one log."""

    def __init__(self) -> None:
        self.processes: dict[tuple[str, int], ProcessSummary] = {}
        self.current: dict[str, ProcessSummary] = {}
        self.steps: dict[str, Steps] = {}
        self.engines: dict[str, EngineSummary] = {}
        self.live: dict[str, set[str]] = {}
        self.events: Counter[str] = Counter()
        self.violations: dict[str, RuleSummary] = {}
        self.violated: dict[str, set[str]] = {}
        self.errors: dict[tuple[str, str, bool], ErrorSummary] = {}

    def feed(self, source: Source, event: Data) -> None:
        name = event["event"]
        self.events[name] += 1
        process = self._process(source, event)
        process.lines += 1
        process.last = max(process.last, event["time"])
        engine = str(event.get("engine") or "")
        step = number(event, "step")
        if name == "kv.bind":
            self._bind(engine, step, event)
        elif name in ("kv.write", "kv.read"):
            if step is not None:
                self._steps(engine).mark(step, WRITTEN if name == "kv.write" else READ)
        elif name == "boundary":
            if event.get("kind") == "counters":
                process.count(mapping(event, "counters"))
            elif event.get("kind") == "log":
                process.dropped = max(process.dropped, number(event, "dropped") or 0)
        elif name == "kv.violation":
            self._violation(event, step)
        elif name == "kv.error":
            self._error(event, step)

    def _process(self, source: Source, event: Data) -> ProcessSummary:
        engine = str(event.get("engine") or "")
        process = self.current.get(source.name)
        enabled = event["event"] == "kv.enabled"
        # A container that starts again has the same host and pid, and goes on in the same file.
        if process is None or (enabled and engine and process.engine and engine != process.engine):
            process = ProcessSummary(
                source.live.name, str(event.get("role") or source.role), source.host,
                number(event, "pid") or source.pid, first=event["time"], last=event["time"], beheaded=source.beheaded,
            )  # fmt: skip
            self.current[source.name] = process
            self.processes[source.name, len(self.processes)] = process
        process.engine = engine or process.engine
        process.rank = number(event, "rank") or process.rank
        if enabled:
            process.kvproof, process.vllm = str(event.get("kvproof") or ""), str(event.get("vllm") or "")
            process.runs = str(event.get("runner") or event.get("scheduler") or "")
            process.action, process.connector = str(event.get("action") or ""), event.get("connector")
            process.async_scheduling = bool(event.get("async_scheduling"))
            process.rules = [str(rule) for rule in items(event, "rules")]
            process.skipped = {str(rule): str(why) for rule, why in mapping(event, "skipped").items()}
            process.count(mapping(event, "counters"))
        return process

    def _steps(self, engine: str) -> Steps:
        if engine not in self.steps:
            self.steps[engine] = Steps()
            self.engines[engine] = EngineSummary(engine)
            self.live[engine] = set()
        return self.steps[engine]

    def _bind(self, engine: str, step: int | None, event: Data) -> None:
        steps = self._steps(engine)
        tokens = sum(count for count in items(event, "tokens") if isinstance(count, int))
        if step is not None:
            empty = not tokens and not number(event, "total")
            steps.mark(step, BOUND | (EMPTY if empty else 0))
        summary, live = self.engines[engine], self.live[engine]
        live.difference_update(names(event, "finished"))
        for request in names(event, "requests"):
            if request not in live:
                live.add(request)
                summary.requests += 1
        summary.tokens += tokens

    def _violation(self, event: Data, step: int | None) -> None:
        rule = str(event.get("rule") or "?")
        summary = self.violations.setdefault(rule, RuleSummary(rule, str(event.get("family") or "")))
        summary.logged += 1
        if isinstance(event.get("request"), str):
            self.violated.setdefault(rule, set()).add(event["request"])
        _span(summary, step)

    def _error(self, event: Data, step: int | None) -> None:
        key = (str(event.get("where") or "?"), str(event.get("type") or "?"), bool(event.get("guard")))
        summary = self.errors.setdefault(key, ErrorSummary(*key, message=str(event.get("message") or "")))
        summary.count += 1
        _span(summary, step)


def summarize(log: Log) -> Summary:
    """Read ``log`` once. Memory grows with the number of live requests and, by one byte, with each step."""
    run, damage = _Run(), Damage()
    for source, event in log.events(damage):
        run.feed(source, event)
    # One engine after the other as they appear, its scheduler before its workers.
    order = list(dict.fromkeys(process.engine for process in run.processes.values()))
    processes = sorted(
        run.processes.values(), key=lambda p: (order.index(p.engine), p.role != "scheduler", p.rank, p.first)
    )
    for engine, steps in run.steps.items():
        # Where rotation has removed the beginning of the workers' files, the steps before their first line say nothing.
        cut = any(p.beheaded for p in processes if p.role == "worker" and p.engine in (engine, ""))
        _count(run.engines[engine], steps, cut)
    records: dict[str, dict[str, int]] = {}
    kinds = ("judged", "fast", "skipped", "failed", "violations", "guard_failures")
    totals: dict[str, Counter[str]] = {name: Counter() for name in kinds}
    for process in processes:
        for name, total in totals.items():
            counts = process.counters.get(name)
            if isinstance(counts, dict):
                total.update({str(key): count for key, count in counts.items() if isinstance(count, int)})
    for name in sorted({*totals["judged"], *totals["fast"]}):
        records[name] = {"judged": totals["judged"][name], "fast": totals["fast"][name]}
    for rule, requests in run.violated.items():
        run.violations[rule].requests = len(requests)
    for rule, count in totals["violations"].items():
        if count:
            run.violations.setdefault(rule, RuleSummary(rule)).counted = count
    judged = {rule for process in processes for rule in process.rules}
    never = {rule: why for p in processes for rule, why in p.skipped.items() if rule not in judged}
    return Summary(
        path=str(log.path),
        processes=processes,
        engines=list(run.engines.values()),
        events=dict(sorted(run.events.items())),
        records=records,
        skipped={rule: count for rule, count in totals["skipped"].items() if count},
        never=never,
        failed={where: count for where, count in (totals["failed"] + totals["guard_failures"]).items() if count},
        violations=sorted(run.violations.values(), key=lambda v: (v.first_step is None, v.first_step or 0, v.rule)),
        errors=list(run.errors.values()),
        dropped=sum(process.dropped for process in processes),
        torn=damage.torn,
        corrupt=damage.corrupt,
    )


def _span(summary: RuleSummary | ErrorSummary, step: int | None) -> None:
    if step is not None:
        summary.first_step = step if summary.first_step is None else min(summary.first_step, step)
        summary.last_step = step if summary.last_step is None else max(summary.last_step, step)


def _count(summary: EngineSummary, steps: Steps, beheaded: bool) -> None:
    waiting: list[int] = []
    last_written = None
    seen_write = False
    for step, flags in steps:
        if flags & BOUND:
            summary.bound += 1
            summary.first = step if summary.first is None else summary.first
            summary.last = step
        summary.empty += bool(flags & EMPTY)
        summary.read += bool(flags & READ)
        if flags & WRITTEN:
            summary.written += 1
            seen_write, last_written = True, step
        elif flags & BOUND and not flags & EMPTY and (seen_write or not beheaded):
            waiting.append(step)
    if last_written is None:
        return
    late = [step for step in waiting if step > last_written][-IN_FLIGHT:]
    missing = waiting[: len(waiting) - len(late)]
    summary.in_flight, summary.unwritten, summary.unwritten_first = len(late), len(missing), missing[:SHOWN]


def moment(seconds: float) -> str:
    """A time of the log in UTC."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"{seconds:g}"


def render(summary: Summary, console: Console) -> None:
    """Print ``summary``; every table fits 80 columns."""
    from rich.text import Text

    first = min((p.first for p in summary.processes), default=0.0)
    last = max((p.last for p in summary.processes), default=0.0)
    console.print(Text(printable(summary.path), style="bold"), soft_wrap=True)
    console.print(Text(
        f"{moment(first)} to {moment(last)} UTC, {last - first:,.1f} s, "
        f"{counted(sum(summary.events.values()), 'event')}"
    ))  # fmt: skip
    console.print()
    for table in (
        _processes(summary), _engines(summary), _events(summary), _records(summary), _skipped(summary),
        _violations(summary), _errors(summary),
    ):  # fmt: skip
        if table.row_count:
            console.print(table)
            console.print()
    for note, style in notes(summary):
        console.print(Text(printable(note), style=style))
    word, style = ("CLEAN", "bold green")
    if summary.bad:
        word, style = ("VIOLATED" if summary.violations else "ERRORS"), "bold red"
    if not summary.bad and not any(sum(r.values()) for r in summary.records.values()):
        word, style = "NO VIOLATION LOGGED", "bold yellow"
    violations = sum(max(v.logged, v.counted) for v in summary.violations)
    errors = sum(e.count for e in summary.errors)
    tail = f"  {counted(violations, 'violation')}, {counted(errors, 'error')}, exit code {summary.exit_code}"
    console.print(Text.assemble((word, style), tail))
    if summary.violations:
        console.print(Text(f"next: kvproof trace explain {summary.path}", style="dim"), soft_wrap=True)


def notes(summary: Summary) -> Iterator[tuple[str, str]]:
    """What limits the page: lost lines, steps without a worker, nothing judged."""
    for engine in summary.engines:
        if engine.unwritten:
            steps = ", ".join(str(step) for step in engine.unwritten_first)
            more = ", …" if engine.unwritten > len(engine.unwritten_first) else ""
            lost = summary.dropped or summary.torn or summary.corrupt
            yield (
                f"engine {engine.engine}: {counted(engine.unwritten, 'step')} bound but written by no worker: "
                f"{steps}{more}" + ("; lines were lost, so this may be the log's own gap" if lost else ""),
                "yellow",
            )
        if engine.bound and engine.unwritten is None:
            yield f"engine {engine.engine}: no worker's lines in this log, so no step can be called written", "yellow"
        if engine.written and not engine.bound:
            yield f"engine {engine.engine}: no scheduler's lines in this log", "yellow"
    if summary.dropped:
        yield f"{counted(summary.dropped, 'event')} dropped by the guard (queue full or disk full)", "yellow"
    if summary.torn or summary.corrupt:
        yield (
            f"{counted(summary.torn, 'torn line')} at the end of a file, "
            f"{counted(summary.corrupt, 'corrupt line')} elsewhere, skipped",
            "yellow",
        )
    cut = sum(process.beheaded for process in summary.processes)
    if cut:
        yield f"the beginning of {counted(cut, 'log')} was removed by rotation", "yellow"
    for where, count in summary.failed.items():
        yield f"the guard itself failed {counted(count, 'time')} in {where} and judged nothing there", "red"
    if not any(sum(record.values()) for record in summary.records.values()):
        yield "no counters in this log: how much was judged is not known", "yellow"


def table_of(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    """A table in the house's style; ``right`` names the columns of numbers."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False,
        padding=(0, 1, 0, 0), min_width=len(title),  # a title folds at its table's width
    )  # fmt: skip
    for column in columns:
        is_number = column in right
        table.add_column(column, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    return table


def cells(*values: Any) -> list[Any]:
    """Values as table cells: numbers grouped, None as a dash, texts made safe."""
    from rich.text import Text

    out: list[Any] = []
    for value in values:
        if value is None or value == "":
            out.append(Text("–", style="dim"))
        elif isinstance(value, int) and not isinstance(value, bool):
            out.append(f"{value:,}")
        elif isinstance(value, Text):
            out.append(value)
        else:
            out.append(Text("\n".join(printable(line) for line in str(value).split("\n"))))
    return out


def _processes(summary: Summary) -> Table:
    table = table_of(
        "Processes", "process", "rank", "pid", "engine", "class", "action", "vLLM", "rules", "lines",
        right=("rank", "pid", "rules", "lines"),
    )  # fmt: skip
    for p in summary.processes:
        table.add_row(
            *cells(p.role, p.rank, str(p.pid), p.engine, p.runs, p.action, p.vllm, len(p.rules), p.lines)
        )  # fmt: skip
    return table


def _engines(summary: Summary) -> Table:
    table = table_of(
        "Steps", "engine", "bound", "written", "read", "empty", "in\nflight", "not\nwritten", "requests", "tokens",
        right=("bound", "written", "read", "empty", "in\nflight", "not\nwritten", "requests", "tokens"),
    )  # fmt: skip
    for e in summary.engines:
        table.add_row(
            *cells(e.engine, e.bound, e.written, e.read, e.empty, e.in_flight, e.unwritten, e.requests, e.tokens)
        )  # fmt: skip
    return table


def _events(summary: Summary) -> Table:
    table = table_of("Events", "event", "lines", right=("lines",))
    for name, count in summary.events.items():
        table.add_row(*cells(name, count))
    return table


def _records(summary: Summary) -> Table:
    table = table_of("Judged", "record", "all rules", "fast check", right=("all rules", "fast check"))
    for name, counts in summary.records.items():
        table.add_row(*cells(name, counts["judged"], counts["fast"]))
    return table


def _skipped(summary: Summary) -> Table:
    table = table_of("Rules not judged", "why", "records", "rules", right=("records",))
    reasons: dict[str, list[str]] = {}
    for rule, why in summary.never.items():
        reasons.setdefault(why, []).append(rule)
    for why, rules in reasons.items():
        table.add_row(*cells(why, "all", "\n".join(rules)))
    for rule, count in summary.skipped.items():
        table.add_row(*cells("a native field is missing", count, rule))
    return table


def _violations(summary: Summary) -> Table:
    table = table_of(
        "Violations", "rule", "logged", "counted", "requests", "first\nstep", "last\nstep",
        right=("logged", "counted", "requests", "first\nstep", "last\nstep"),
    )  # fmt: skip
    for v in summary.violations:
        table.add_row(*cells(v.rule, v.logged, v.counted or None, v.requests, v.first_step, v.last_step))
    return table


def _errors(summary: Summary) -> Table:
    table = table_of(
        "Errors", "where", "type", "count", "first\nstep", "last\nstep", "message",
        right=("count", "first\nstep", "last\nstep"),
    )  # fmt: skip
    for e in summary.errors[:SHOWN]:
        where = f"{e.where} (guard)" if e.guard else e.where
        table.add_row(*cells(where, e.type, e.count, e.first_step, e.last_step, e.message[:200]))
    return table
