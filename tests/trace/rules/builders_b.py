"""Plans as a worker makes them, built token by token in plain Python, so that the rules meet an independent opinion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from kvproof.trace.records import Group, Parallel, Plan
from kvproof.trace.rules import connector, content, dummy, reads, results, speculation, writes
from kvproof.trace.rules.catalogue import RULES
from kvproof.trace.rules.model import LIMIT, Rule, Violation
from kvproof.trace.shadow import Shadow

MODULES = (writes, reads, dummy, speculation, connector, results, content)
MINE: tuple[Rule, ...] = tuple(r for r in RULES.values() if r.check.__module__ in {m.__name__ for m in MODULES})
"""The rules these tests are about, in the order they are judged."""

SIZE = 4
FULL = Group(0, "full", SIZE, 64)
STALE = 61
"""Stands in every table cell nobody declared: an earlier batch left it there."""


@dataclass(frozen=True)
class Seat:
    """One request's part of a step. ``real`` is where it really starts when that lies below the declared start."""

    start: int
    tokens: int
    blocks: Sequence[Sequence[int]]
    slack: int = 0
    real: int | None = None


def naive_slot(position: int, blocks: Sequence[int], size: int, parallel: Parallel) -> int:
    """The formula of the facts for one token: −1 where another rank holds it, −2 where no block is declared."""
    ranks, run = parallel.dcp_size, parallel.interleave
    column, offset = divmod(position, size * ranks)
    if ranks > 1:
        if (offset // run) % ranks != parallel.dcp_rank:
            return -1
        offset = (offset // (run * ranks)) * run + offset % run
    return blocks[column] * size + offset if column < len(blocks) else -2


def planned_slot(position: int, blocks: Sequence[int], size: int, parallel: Parallel) -> int:
    """What the worker computes: beyond the declared blocks it uses the stale id that stands in its table."""
    slot = naive_slot(position, blocks, size, parallel)
    return slot if slot != -2 else naive_slot(position, [STALE] * (position + 1), size, parallel)


def naive_local_length(tokens: int, parallel: Parallel) -> int:
    """Positions of the context that this rank holds, counted one by one."""
    turn = parallel.interleave * parallel.dcp_size
    return sum((position % turn) // parallel.interleave == parallel.dcp_rank for position in range(tokens))


def plan(
    seats: Mapping[str, Seat],
    groups: Sequence[Group] = (FULL,),
    parallel: Parallel | None = None,
    pad_tokens: int = 0,
    pad_rows: int = 0,
    others: Mapping[str, Sequence[Sequence[int]]] | None = None,
    **changes: Any,
) -> Plan:
    """The plan a flawless worker makes of ``seats``; ``changes`` replace fields afterwards.

    ``others`` are requests with blocks that are not part of the step.
    """
    parallel = parallel or Parallel()
    shadow = Shadow([g.num_blocks for g in groups], rows=4, columns=4)
    everybody = {**{name: seat.blocks for name, seat in seats.items()}, **(others or {})}
    for name, blocks in everybody.items():
        row = shadow.add(name)
        for index, ids in enumerate(blocks):
            shadow.append(index, row, np.array(ids, np.int64))
    starts = {name: seat.start if seat.real is None else seat.real for name, seat in seats.items()}
    rows = shadow.rows(list(seats))
    start = np.array([seat.start for seat in seats.values()], np.int64)
    for index, group in enumerate(groups):
        if group.kind in ("sliding", "chunked") and len(seats):
            shadow.drop_before(index, rows, group.first_live_column(start))

    lengths = [seat.tokens for seat in seats.values()]
    positions = [starts[name] + i for name, seat in seats.items() for i in range(seat.tokens)]
    slots: list[Any] = []
    tables: list[Any] = []
    for index, group in enumerate(groups):
        slots.append(
            np.array(
                [
                    planned_slot(starts[name] + i, seat.blocks[index], group.block_size, parallel)
                    for name, seat in seats.items()
                    for i in range(seat.tokens)
                ]
                + [-1] * pad_tokens,
                np.int64,
            )
            if group.slotted
            else None
        )
        width = max((len(seat.blocks[index]) for seat in seats.values()), default=0) + 3
        table = np.full((len(seats) + pad_rows, width), STALE, np.int32)
        for row, seat in enumerate(seats.values()):
            table[row, : len(seat.blocks[index])] = seat.blocks[index]
        table[len(seats) :] = 0
        tables.append(table)
    edges = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    seq_lens = np.array([starts[name] + seat.tokens for name, seat in seats.items()] + [0] * pad_rows, np.int32)
    values: dict[str, Any] = {
        "step": 7,
        "ids": list(seats),
        "declared_ids": list(seats),
        "rows": rows,
        "tokens": np.array(lengths, np.int64),
        "start": start,
        "slack": np.array([seat.slack for seat in seats.values()], np.int64),
        "num_tokens": sum(lengths),
        "query_start": np.concatenate([edges, np.full(pad_rows, edges[-1], np.int32)]),
        "positions": np.array(positions + [0] * pad_tokens, np.int64),
        "seq_lens": seq_lens,
        "slots": slots,
        "tables": tables,
        "groups": tuple(groups),
        "shadow": shadow,
        "parallel": parallel,
    }
    if parallel.dcp_size > 1:
        values["local_seq_lens"] = np.array([naive_local_length(int(n), parallel) for n in seq_lens], np.int32)
    return Plan(**{**values, **changes})


def two(**changes: Any) -> Plan:
    """Request a decodes at position 9 (blocks 1 2 3), b prefills 6 tokens (blocks 4 5); 2 tokens, 1 row of padding."""
    seats = {"a": Seat(9, 1, [[1, 2, 3]]), "b": Seat(0, 6, [[4, 5]])}
    return plan(seats, pad_tokens=2, pad_rows=1, **changes)


def with_slot(record: Plan, token: int, slot: int, group: int = 0) -> Plan:
    """The plan with another slot for one token (``token`` counts padding too)."""
    slots = list(record.slots)
    array = slots[group]
    assert array is not None
    slots[group] = array.copy()
    slots[group][token] = slot  # type: ignore[index]
    return replace(record, slots=slots)


def with_cell(record: Plan, row: int, column: int, block: int, group: int = 0) -> Plan:
    """The plan with another block in one cell of the worker's table."""
    tables = list(record.tables)
    array = tables[group]
    assert array is not None
    tables[group] = array.copy()
    tables[group][row, column] = block  # type: ignore[index]
    return replace(record, tables=tables)


def judge(record: object, rules: Sequence[Rule] = MINE) -> list[Violation]:
    """What the judge would report: rules in order, the specific ones silencing the general ones."""
    found: list[Violation] = []
    named: set[tuple[str, str | None, int | None]] = set()
    for rule in rules:
        if rule.record is not type(record) or any(getattr(record, need) is None for need in rule.needs):
            continue
        results = list(rule.check(record))[:LIMIT]
        assert all(v.rule == rule.name for v in results)
        results = [v for v in results if not any((o, v.request, v.group) in named for o in rule.yields_to)]
        named |= {(v.rule, v.request, v.group) for v in results}
        found += results
    return found


def names(record: object) -> list[str]:
    """Names of the rules that fire."""
    return [v.rule for v in judge(record)]


def ints(values: Sequence[int]) -> np.ndarray:
    """int64 array, also of an empty list."""
    return np.array(values, np.int64)


NUMBERS = st.one_of(
    st.integers(-3, 70), st.sampled_from([-(2**63), -(2**62), -(2**31), 2**31 - 1, 2**31, 2**62, 2**63 - 1])
)


def arrays(limit: int = 12) -> st.SearchStrategy[np.ndarray]:
    """Arrays no engine would make: any length, any sign, any size."""
    return st.lists(NUMBERS, max_size=limit).map(ints)


def never_raises(record: object) -> None:
    """Run every rule of the record's type to its end, whatever its numbers are."""
    for rule in MINE:
        if rule.record is type(record) and all(getattr(record, need) is not None for need in rule.needs):
            for violation in rule.check(record):
                assert str(violation)
