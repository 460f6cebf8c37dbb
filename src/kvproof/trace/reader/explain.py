"""One violation in full: the rule, the step, the request's block table, who else had the block, and what to do next.

Two passes over the log: the first finds the violation, the second rebuilds the scheduler's declarations up to its step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from kvproof.trace.reader.log import Data, Log, Source, items, label, mapping, number, parallel
from kvproof.trace.reader.story import advice, story
from kvproof.trace.reader.tables import Row, Tables, deltas

if TYPE_CHECKING:
    from kvproof.trace.rules.model import Rule

BEFORE, AFTER = 2, 1
"""Steps around the violation's whose writes and reads are shown."""

LOOK_AHEAD = 4
"""Steps after the violation's that may be bound before its worker lines are written (async scheduling)."""

CROSSINGS = 12
"""Last boundary lines about the request that are kept."""

SLOTTED = ("full", "sliding", "chunked")
"""Kinds of groups where a token's column follows from its position."""

HISTORY = 40
"""Last happenings of the block that are kept."""


class NotFoundError(ValueError):
    """The log has no such violation."""


@dataclass
class Scheduled:
    """What one request was given in the step. Counts are tokens."""

    request: str
    state: str
    start: int | None
    tokens: int | None
    drafts: int | None


@dataclass
class Written:
    """A run of slots planned for the request; it may go over several blocks."""

    step: int | None
    rank: int
    group: int | None
    slot: int
    length: int
    block: int | None
    last_block: int | None


@dataclass
class Seen:
    """What attention was planned to read of the request: context in tokens, the blocks that are listed."""

    step: int | None
    rank: int
    group: int | None
    seq_len: int | None
    first: int | None
    blocks: list[int]
    whole: bool


@dataclass
class Happening:
    """One thing that happened to the block, or a run of the same. ``slots``: the first written, one past the last."""

    time: float
    first_step: int | None
    last_step: int | None
    what: str
    request: str | None
    detail: str = ""
    slots: tuple[int, int] | None = None


@dataclass
class Crossing:
    """A boundary line about the request: what the connector, the runner or the scheduler said of it."""

    time: float
    step: int | None
    kind: str
    detail: str


@dataclass
class Place:
    """Where the violation stands, as far as the log says: ``size`` tokens a block, ``column`` of the position."""

    step: int | None = None
    request: str | None = None
    group: int | None = None
    size: int | None = None
    dcp: int = 1
    column: int | None = None
    slot: int | None = None
    position: int | None = None


@dataclass
class Explanation:
    """All that the log says about one violation.

    ``holders`` are (request, group, column) of every declared use of ``block``, ``ends`` those requests' tokens.
    ``errors`` and ``same_step`` are the exceptions and the other violations of the same step.
    """

    number: int
    total: int
    rules: dict[str, int]
    violation: Data
    who: str
    rule: dict[str, Any] | None
    group: Data | None
    place: Place = field(default_factory=Place)
    bind: Data | None = None
    scheduled: list[Scheduled] = field(default_factory=list)
    row: Row | None = None
    writes: list[Written] = field(default_factory=list)
    reads: list[Seen] = field(default_factory=list)
    block: int | None = None
    block_from: str = ""
    holders: list[tuple[str, int, int]] = field(default_factory=list)
    ends: dict[str, int | None] = field(default_factory=dict)
    crossings: list[Crossing] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    same_step: dict[str, int] = field(default_factory=dict)
    history: list[Happening] = field(default_factory=list)
    history_lost: int = 0
    story: list[str] = field(default_factory=list)
    next: list[str] = field(default_factory=list)

    @property
    def mine(self) -> Scheduled | None:
        """What the violation's request was given in the step."""
        return next((entry for entry in self.scheduled if entry.request == self.place.request), None)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; the bind line is left out, ``scheduled`` says the same."""
        plain = asdict(self)
        del plain["bind"]
        return plain


def explain(log: Log, wanted: int | None = None, rule: str | None = None) -> Explanation:
    """Explain the ``wanted``-th violation, from 1, of ``rule`` only when given. NotFoundError where there is none."""
    found, groups = _find(log, 1 if wanted is None else wanted, rule)
    second = _rebuild(log, _Second(found, groups))
    if not second.blocks and found.block is not None:
        # Only the rebuilt row says which block it is about; following all blocks' histories would not fit in memory.
        _rebuild(log, _Second(found, groups, {found.block}))
    found.story, found.next = list(story(found)), list(advice(found))
    return found


def _rebuild(log: Log, second: _Second) -> _Second:
    for _, event in log.events():
        if second.done(event):
            break
        second.feed(event)
    second.finish()
    return second


def _find(log: Log, wanted: int, rule: str | None) -> tuple[Explanation, dict[tuple[str, str, int], Data]]:
    """First pass: the violation, how many there are, and the newest kv.enabled of each process."""
    if wanted < 1:
        raise NotFoundError(f"--number {wanted}: limit at least 1")
    counts: Counter[str] = Counter()
    chosen: tuple[Source, Data, int] | None = None
    enabled: dict[tuple[str, str, int], Data] = {}
    seen = 0
    for source, event in log.events():
        if event["event"] == "kv.enabled":
            enabled[str(event.get("engine") or ""), str(event.get("role")), number(event, "rank") or 0] = event
        if event["event"] != "kv.violation":
            continue
        name = str(event.get("rule"))
        counts[name] += 1
        if rule is None or name == rule:
            seen += 1
            if seen == wanted:
                chosen = source, event, sum(counts.values())
    total = sum(counts.values())
    if chosen is None:
        if not total:
            raise NotFoundError(f"{log.path}: no violation in this log")
        if not seen:
            raise NotFoundError(f"--rule {rule}: not violated in this log; violated: {', '.join(sorted(counts))}")
        which = f" of {rule}" if rule else " in this log"
        raise NotFoundError(f"--number {wanted}: limit {seen}, the violations{which}")
    source, event, ordinal = chosen
    group = next((g for g in _groups(enabled, event) if g.get("index") == event.get("group")), None)
    known = _rule(str(event.get("rule")))
    return Explanation(
        ordinal, total, dict(counts.most_common()), event, label(source, event),
        None if known is None else {
            "name": known.name, "family": known.family, "boundary": known.boundary, "predicate": known.predicate,
            "fields": list(known.fields), "skips": known.skips, "meaning": known.meaning,
        },
        group,
    ), enabled  # fmt: skip


def _rule(name: str) -> Rule | None:
    from kvproof.trace.rules.catalogue import RULES

    return RULES.get(name)


def _groups(enabled: dict[tuple[str, str, int], Data], event: Data) -> list[Data]:
    """The KV-cache groups as the violating process described them, else as any process of the same scheduler did."""
    own = (str(event.get("engine") or ""), str(event.get("role")), number(event, "rank") or 0)
    others = [key for key in enabled if key[0] == own[0] or not key[0]] or list(enabled)
    for key in (own, *others):
        if key in enabled and (groups := items(enabled[key], "groups")):
            return [group for group in groups if isinstance(group, dict) and number(group, "index") is not None]
    return []


class _Second:
    """Second pass: the state of the scheduler's declarations at the violation's step."""

    def __init__(
        self, found: Explanation, enabled: dict[tuple[str, str, int], Data], blocks: set[int] | None = None
    ):
        event = found.violation
        self.found = found
        self.engine = str(event.get("engine") or "")
        self.step = number(event, "step")
        self.time: float = event["time"]
        request = event.get("request")
        self.request = request if isinstance(request, str) else None
        self.group = number(event, "group")
        self.rank = (number(event, "rank") or 0) if event.get("role") == "worker" else None
        groups = _groups(enabled, event)
        self.sizes = {g["index"]: size for g in groups if (size := number(g, "block_size")) and size > 0}
        self.kinds = {g["index"]: str(g.get("kind")) for g in groups}
        if self.group is None and len(self.sizes) == 1:
            self.group = next(iter(self.sizes))
        context = [mapping(e, "parallel") for e in enabled.values() if str(e.get("engine") or "") == self.engine]
        self.dcp = max([1, *(number(p, "dcp_size") or 1 for p in context)])
        self.tables = Tables(self.request)
        self.bind: Data | None = None
        self.past: list[tuple[int | None, Data]] = []
        self.crossings: deque[Crossing] = deque(maxlen=CROSSINGS)
        self.errors: list[str] = []
        self.same_step: Counter[str] = Counter()
        self.histories: dict[int, deque[Happening]] = {}
        self.lost: Counter[int] = Counter()
        self.blocks = self._suspects() if blocks is None else blocks

    def _suspects(self) -> set[int]:
        """Blocks whose history is kept: the violation's, and what its slot lies in. Empty: known only at the end."""
        event, size = self.found.violation, self.sizes.get(self.group, 0) if self.group is not None else 0
        block, slot = number(event, "block"), number(event, "slot")
        found = {block} if block is not None else set()
        if slot is not None and slot >= 0 and size:
            found.add(slot // size)
        return found

    def column(self) -> int | None:
        """Column of the violation's position in its group."""
        position = number(self.found.violation, "position")
        if position is None or position < 0 or self.group is None or self.kinds.get(self.group) not in SLOTTED:
            return None
        return position // (self.sizes[self.group] * self.dcp) if self.group in self.sizes else None

    def done(self, event: Data) -> bool:
        """Whether nothing of interest can follow."""
        if event["event"] != "kv.bind" or not self._mine(event) or event["time"] <= self.time:
            return False
        step = number(event, "step")
        return self.step is None or (step is not None and step > self.step + LOOK_AHEAD)

    def _mine(self, event: Data) -> bool:
        return not self.engine or str(event.get("engine") or "") == self.engine

    def feed(self, event: Data) -> None:
        if not self._mine(event):
            return
        name, step = event["event"], number(event, "step")
        if name == "kv.bind":
            past = event["time"] <= self.time if self.step is None or step is None else step <= self.step
            if past:
                self._bind(event, step)
        elif name in ("kv.alloc", "kv.release"):
            if event["time"] <= self.time:
                self._pool(event, step)
        elif name in ("kv.write", "kv.read"):
            self._plan(event, step)
        elif name == "boundary" and self.request is not None:
            self._boundary(event, step, self.request)
        elif step is None or step != self.step:
            return
        elif name == "kv.violation" and event != self.found.violation:
            self.same_step[str(event.get("rule"))] += 1
        elif name == "kv.error":
            self.errors.append(f"{event.get('where')} raised {event.get('type')}: {event.get('message')}")

    def _bind(self, event: Data, step: int | None) -> None:
        for how in ("finished", "preempted"):
            for request in items(event, how):
                row = self.tables.rows.get(request) if isinstance(request, str) else None
                for block in self._held(row):
                    self._happen(block, event, step, how, request)
        for delta in deltas(event):
            for offset, block in enumerate(delta.blocks):
                if block in self.blocks:
                    place = f"group {delta.group}, column {delta.first + offset}"
                    self._happen(block, event, step, "declared", delta.request, place)
        self.tables.apply(event)
        if step is not None and (self.step is None or step == self.step):
            self.bind = event

    def _held(self, row: Row | None) -> set[int]:
        if row is None:
            return set()
        return {b for blocks in row.groups.values() for b in blocks if b is not None and b in self.blocks}

    def _pool(self, event: Data, step: int | None) -> None:
        blocks = [block for block in items(event, "blocks") if isinstance(block, int) and block in self.blocks]
        freed = set(items(event, "freed")) if blocks else set()
        for block in blocks:
            if event["event"] == "kv.release":
                what = "freed" if block in freed else "released"
                detail = "nobody refers to it any more" if block in freed else "others still refer to it"
            else:
                shared = event.get("action") == "touch"
                what, detail = ("shared", "one more user of a cached block") if shared else ("handed out", "")
            self._happen(block, event, step, what, event.get("request"), detail)

    def _plan(self, event: Data, step: int | None) -> None:
        if self.step is not None and step is not None and step > self.step + AFTER:
            return
        if self.rank is not None and (number(event, "rank") or 0) != self.rank:
            return
        if self.request is not None and self.request in items(event, "requests"):
            self.past.append((step, event))
            # Of the steps before, only the last few are shown.
            if len(self.past) > 64:
                del self.past[:-32]
        if event["event"] == "kv.write" and (self.step is None or step is None or step <= self.step):
            requests = items(event, "requests")
            for group, who, slot, length in _runs(event):
                size = self.sizes.get(group) if group is not None else None
                if not size or slot < 0 or self.group not in (None, group):
                    continue
                for block in self.blocks:
                    first, stop = max(slot, block * size), min(slot + length, (block + 1) * size)
                    if first < stop:
                        request = requests[who] if 0 <= who < len(requests) else None
                        self._happen(block, event, step, "written", request, slots=(first, stop))

    def _boundary(self, event: Data, step: int | None, request: str) -> None:
        kind = str(event.get("kind"))
        near = self.step is None or step is None or self.step - 1 <= step <= self.step
        # A result comes with every step: only those at the violation say something.
        if event["time"] > self.time + 1 or (kind in ("result", "speculation") and not near):
            return
        if event.get("request") == request:
            detail = ", ".join(f"{name} {_short(event[name])}" for name in DETAILS if event.get(name) is not None)
        elif request in items(event, "requests"):
            index = items(event, "requests").index(request)
            values = {name: items(event, name) for name in ("sampled", "rejected")}
            detail = ", ".join(f"{name} {v[index]}" for name, v in values.items() if index < len(v))
        else:
            named = [name for name in REPORTS if request in items(event, name)]
            if not named:
                return
            detail = ", ".join(named)
        self.crossings.append(Crossing(event["time"], step, kind, detail))

    def _happen(
        self,
        block: int,
        event: Data,
        step: int | None,
        what: str,
        request: str | None,
        detail: str = "",
        slots: tuple[int, int] | None = None,
    ) -> None:
        past = self.histories.setdefault(block, deque(maxlen=HISTORY))
        last = past[-1] if past else None
        if last is not None and slots is not None and (last.what, last.request) == (what, request):
            # A decode writes one slot a step: a run of the same is one line.
            low, high = last.slots or slots
            last.last_step, last.slots = step, (min(low, slots[0]), max(high, slots[1]))
            return
        if len(past) == HISTORY:
            self.lost[block] += 1
        past.append(Happening(event["time"], step, step, what, request, detail, slots))

    def finish(self) -> None:
        found = self.found
        found.bind = self.bind
        if self.bind is not None:
            found.scheduled = list(_scheduled(self.bind))
            self.step = number(self.bind, "step") if self.step is None else self.step
        if self.request is not None:
            found.row = self.tables.row(self.request)
        size = self.sizes.get(self.group) if self.group is not None else None
        violation = found.violation
        found.place = Place(
            self.step, self.request, self.group, size, self.dcp, self.column(), number(violation, "slot"),
            number(violation, "position"),
        )  # fmt: skip
        self._choose_block()
        if found.block is not None:
            found.holders = self.tables.holders(found.block, self.group)
            found.ends = {name: self.tables.rows[name].end for name, _, _ in found.holders}
            found.history = list(self.histories.get(found.block, ()))
            found.history_lost = self.lost[found.block]
        found.writes, found.reads = [], []
        found.crossings, found.errors, found.same_step = list(self.crossings), self.errors, dict(self.same_step)
        if self.request is not None:
            self._collect_plans(self.request)

    def _choose_block(self) -> None:
        found, event = self.found, self.found.violation
        size = self.sizes.get(self.group) if self.group is not None else None
        block, slot, column = number(event, "block"), number(event, "slot"), self.column()
        if block is not None:
            found.block, found.block_from = block, "named by the rule"
        elif slot is not None and slot >= 0 and size:
            found.block, found.block_from = slot // size, f"where slot {slot} lies"
        elif column is not None and found.row is not None and self.group is not None:
            blocks = found.row.groups.get(self.group, [])
            if column < len(blocks):
                found.block, found.block_from = blocks[column], f"declared for position {event.get('position')}"

    def _collect_plans(self, request: str) -> None:
        around = range(self.step - BEFORE, self.step + AFTER + 1) if self.step is not None else None
        rank = self.rank
        for step, event in self.past:
            if around is None or step is None or step not in around:
                continue
            own = number(event, "rank") or 0
            rank = own if rank is None else rank  # one worker is enough: the violating one, else the first in the log
            if own != rank:
                continue
            index = items(event, "requests").index(request)
            if event["event"] == "kv.write":
                for group, who, slot, length in _runs(event):
                    if who == index:
                        size = self.sizes.get(group) if group is not None else None
                        first = last = None
                        if size and slot >= 0:
                            first, last = slot // size, (slot + max(length, 1) - 1) // size
                        self.found.writes.append(Written(step, own, group, slot, length, first, last))
            else:
                self.found.reads += _read_rows(event, step, own, index)


DETAILS = ("matched", "is_async", "local", "total", "external", "blocks", "delayed")
REPORTS = ("finished_sending", "finished_recving", "failed_recving")


def _short(value: Any) -> str:
    text = {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else f"{text[:58]} …"


def _runs(event: Data) -> Iterator[tuple[int | None, int, int, int]]:
    """(group, request index, first slot, length) of a kv.write."""
    for group in items(event, "groups"):
        if isinstance(group, dict):
            for run in items(group, "runs"):
                if isinstance(run, list) and len(run) == 3 and all(isinstance(value, int) for value in run):
                    yield number(group, "group"), run[0], run[1], run[2]


def _read_rows(event: Data, step: int | None, rank: int, index: int) -> Iterator[Seen]:
    lengths = items(event, "seq_lens")
    length = lengths[index] if index < len(lengths) else None
    whole = bool(event.get("whole"))
    listed = False
    for group in items(event, "groups"):
        for entry in items(group, "blocks") if isinstance(group, dict) else ():
            if isinstance(entry, list) and len(entry) == 3 and entry[0] == index and isinstance(entry[2], list):
                listed = True
                yield Seen(step, rank, number(group, "group"), length, entry[1], entry[2], whole)
    if not listed:
        yield Seen(step, rank, None, length, None, [], whole)


def _scheduled(event: Data) -> Iterator[Scheduled]:
    new, resumed = items(event, "new"), items(event, "resumed")
    for request, start, tokens, drafts in parallel(event, "requests", "start", "tokens", "drafts"):
        state = "new" if request in new else "resumed" if request in resumed else "running"
        yield Scheduled(str(request), state, start, tokens, drafts)
