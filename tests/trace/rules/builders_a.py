"""Small worlds for the rules of schedule, binding, hand-over and pool: a real shadow, driven as the guard drives it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvproof.trace.records import Cells, Group, Handover, PoolChange, Schedule
from kvproof.trace.rules import binding, handover, lifecycle, schedule
from kvproof.trace.rules.catalogue import RULES
from kvproof.trace.rules.model import Rule, Violation
from kvproof.trace.shadow import Shadow

MODULES = (schedule, binding, handover, lifecycle)
MINE: tuple[Rule, ...] = tuple(r for m in MODULES for r in RULES.values() if r.check.__module__ == m.__name__)
"""The rules these tests are about, in the order they are judged."""

BLOCK = 4
FULL_GROUP = Group(0, "full", BLOCK, 32)


@dataclass
class Part:
    """A request's part of one step: start and tokens in tokens, block ids per group (None: none declared)."""

    start: int
    tokens: int
    blocks: Sequence[Sequence[int]] | None = None
    drafts: int = 0


def ints(values: Iterable[int]) -> np.ndarray:
    """int64 array, also of an empty list."""
    return np.array(list(values), np.int64)


class World:
    """A shadow and the steps that are declared to it. ``step`` returns the record the guard would judge."""

    def __init__(self, *groups: Group):
        self.groups = groups or (FULL_GROUP,)
        self.shadow = Shadow([g.num_blocks for g in self.groups], rows=4, columns=4)
        self.number = 0

    def step(
        self,
        new: Mapping[str, Part] | None = None,
        running: Mapping[str, Part] | None = None,
        resumed: Mapping[str, Part] | None = None,
        finished: Sequence[str] = (),
        preempted: Sequence[str] = (),
        forget: bool = True,
        counts: Mapping[int, int] | None = None,
        **changes: Any,
    ) -> Schedule:
        """Declare one step. ``counts`` are the pool's and the books' counts per block (1 where it is silent).

        ``forget`` False leaves finished and preempted requests in the shadow.
        """
        new, running, resumed = new or {}, running or {}, resumed or {}
        self.number += 1
        parts = {**new, **running, **resumed}
        for name in (*finished, *preempted) if forget else ():
            if name not in running:
                self.shadow.forget(name)
        cells: list[tuple[int, int, int, int]] = []
        previous: list[int] = []
        for who, (name, part) in enumerate(parts.items()):
            known = name in running
            row = self.shadow.row_of.get(name, -1) if known else self.shadow.add(name)
            row = self.shadow.add(name) if row < 0 else row
            previous.append(int(self.shadow.end[row]) if known else -1)
            for g, blocks in enumerate((part.blocks or ())[: len(self.groups)]):
                first = self.shadow.append(g, row, ints(blocks))
                cells += [(who, g, first + i, block) for i, block in enumerate(blocks)]
        ids = list(parts)
        rows = self.shadow.rows(ids)
        start = ints(part.start for part in parts.values())
        tokens = ints(part.tokens for part in parts.values())
        for group in self.groups:
            self.shadow.drop_before(group.index, rows, group.first_live_column(np.maximum(start, 0)))
        self.shadow.end[rows] = start + tokens
        flat = ints(n for cell in cells for n in cell).reshape(-1, 4)
        values: dict[str, Any] = {
            "step": self.number,
            "ids": ids,
            "rows": rows,
            "tokens": tokens,
            "total": int(tokens.sum()),
            "budget": 8192,
            "start": start,
            "previous_end": ints(previous),
            "drafts": ints(part.drafts for part in parts.values()),
            "declared": ids.copy(),
            "new": frozenset(new),
            "resumed": frozenset(resumed),
            "finished": frozenset(finished),
            "preempted": frozenset(preempted),
            "group_counts": [(name, len(part.blocks)) for name, part in parts.items() if part.blocks is not None],
            "appended": Cells(*flat.T),
            "groups": self.groups,
            "shadow": self.shadow,
            **changes,
        }
        record = Schedule(**values)
        if counts is not None:
            of_cells = ints(counts.get(int(block), 1) for block in record.write.block)
            record.references, record.held = of_cells, of_cells.copy()
        return record


def judge(record: Any, *only: str) -> list[Violation]:
    """What the guard's judge would report: needs and yields as there. ``only`` limits it to these rules."""
    found: list[Violation] = []
    named: set[tuple[str, str | None, int | None]] = set()
    for rule in MINE:
        if rule.record is not type(record) or (only and rule.name not in only):
            continue
        if any(getattr(record, need) is None for need in rule.needs):
            continue
        for violation in rule.check(record):
            assert violation.rule == rule.name
            if not any((other, violation.request, violation.group) in named for other in rule.yields_to):
                named.add((rule.name, violation.request, violation.group))
                found.append(violation)
    return found


def names(record: Any) -> list[str]:
    """Names of the broken rules, in the order they are judged, each once."""
    return list(dict.fromkeys(violation.rule for violation in judge(record)))


def handed_over(**changes: Any) -> Handover:
    """A sound hand-over of step 8 after step 7 with two requests."""
    values: dict[str, Any] = {
        "step": 8,
        "previous": 7,
        "trace": True,
        "digest_sent": 0xABC,
        "digest_found": 0xABC,
        "ids": ["a", "b"],
        "unknown": [],
        "overflow": [],
        "rows": ints([0, 1]),
    }
    return Handover(**{**values, **changes})


def pool_call(
    action: str, blocks: Sequence[int], before: Sequence[int], after: Sequence[int], **more: Any
) -> PoolChange:
    """One call of a pool of 32 blocks by request ``a``; the pool counts as the books do unless told otherwise."""
    values: dict[str, Any] = {"native": ints(after), "num_blocks": 32, "request": "a", **more}
    return PoolChange(action, ints(blocks), ints(before), ints(after), **values)
