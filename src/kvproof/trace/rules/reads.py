"""Rules 39–46: attention reads the declared blocks, and only as far as they reach.

What a request reads in a group are its live columns: from the first one the attention window of its first query token
still covers, to the last one its context reaches. Whatever else stands in the worker's row is legal, stale ids
included.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvproof.trace.records import NULL_BLOCK, Group, Ints, Parallel, Plan
from kvproof.trace.rules.model import Violation, rule
from kvproof.trace.rules.writes import firsts, fit, live_columns, more, name_of, once, rows_of

_TABLES = ("BlockTables.input_block_tables", "CommonAttentionMetadata.block_table_tensor")
_SEQ_LENS = ("InputBatch.seq_lens", "CommonAttentionMetadata.seq_lens")
_BLOCKS = ("scheduled_new_reqs.block_ids", "scheduled_cached_reqs.new_block_ids")


@dataclass(slots=True)
class Suspects:
    """Cells of one group that are read and do not plainly hold the declared block.

    ``found`` stands in the worker's table, ``declared`` in the declaration (−1: nothing is declared for the column).
    """

    group: Group
    who: Ints
    column: Ints
    found: Ints
    declared: Ints


@dataclass(slots=True)
class Span:
    """What each request reads of one group: columns [``first``, ``last``), of which ``bound`` are declared.

    ``rows`` are the batch rows that can be judged (declared ones).
    """

    rows: Ints
    first: Ints
    last: Ints
    bound: Ints


def context(plan: Plan) -> tuple[Ints, Ints]:
    """(tokens in the cache before this step, tokens read) per request: the worker's numbers where it shows them.

    The first planned position is held between the declared bounds, so that a wrong one does not move the window too.
    """
    return once(plan, "_context", _context)


def _context(plan: Plan) -> tuple[Ints, Ints]:
    r = rows_of(plan)
    lowest = r.start - r.slack
    computed = np.maximum(np.where(r.first >= 0, np.clip(r.first, lowest, r.start), lowest), 0)
    if plan.seq_lens is not None and plan.seq_lens.size >= plan.count:
        return computed, fit(plan.seq_lens, plan.count)
    return computed, computed + np.maximum(np.where(r.length >= 0, r.length, r.tokens), 0)


def spans_of(plan: Plan) -> list[Span]:
    """Per group the columns that are read; for groups without token columns all that are declared."""
    return once(plan, "_spans", lambda plan: [_span(plan, group) for group in plan.groups])


def _span(plan: Plan, group: Group) -> Span:
    r = rows_of(plan)
    rows = r.declared
    bound = plan.shadow.counts[group.index][r.row[rows]].astype(np.int64)
    if not group.slotted:
        return Span(rows, np.zeros_like(bound), bound, bound)
    computed, end = context(plan)
    return Span(rows, *live_columns(plan, group, computed[rows], end[rows]), bound)


def suspects_of(plan: Plan) -> list[Suspects]:
    """One vectorised look at every table: the rules only sort what it finds."""
    return once(
        plan,
        "_suspects",
        lambda plan: [
            _suspects(plan, group, span, table)
            for group, span, table in zip(plan.groups, spans_of(plan), plan.tables, strict=False)
            if table is not None and table.ndim == 2
        ],
    )


def _suspects(plan: Plan, group: Group, span: Span, table: Ints) -> Suspects:
    """Compare whole rows where asked to, else the rows that grew and everybody's last column."""
    height, width = table.shape
    inside = span.rows < height
    rows, first, bound = span.rows[inside], span.first[inside], span.bound[inside]
    last = np.minimum(span.last[inside], width)
    shadow_rows = rows_of(plan).row[rows]
    if plan.whole:
        fresh = np.ones(len(rows), np.bool_)
    elif plan.fresh is None:
        fresh = np.zeros(len(rows), np.bool_)
    else:
        fresh = fit(plan.fresh, plan.count, 0)[rows] != 0

    picked = np.flatnonzero(fresh)
    top = int(last[picked].max(initial=0))
    found = table[rows[picked], :top]
    declared = plan.shadow.tables[group.index][shadow_rows[picked], :top]
    if declared.shape[1] < top:
        declared = np.pad(declared, ((0, 0), (0, top - declared.shape[1])), constant_values=-1)
    columns = np.arange(top)
    live = (columns >= first[picked, None]) & (columns < last[picked, None])
    # Columns beyond the declaration hold ids of nobody: they count as different.
    odd = (found != declared) | (columns >= bound[picked, None]) | _not_a_block(found, group)
    who, column = np.nonzero(live & odd)
    cell = found[who, column].astype(np.int64)
    wanted = np.where(column < bound[picked[who]], declared[who, column], -1).astype(np.int64)
    who = rows[picked[who]]
    if not fresh.all():
        rest = np.flatnonzero(~fresh & (last > first))
        end = last[rest] - 1
        tail = table[rows[rest], end].astype(np.int64)
        tail_wanted = plan.shadow.lookup(group.index, shadow_rows[rest], end)
        odd_tail = np.flatnonzero((tail != tail_wanted) | _not_a_block(tail, group))
        who = np.concatenate([who, rows[rest[odd_tail]]])
        column = np.concatenate([column, end[odd_tail]])
        cell = np.concatenate([cell, tail[odd_tail]])
        wanted = np.concatenate([wanted, tail_wanted[odd_tail]])
    return Suspects(group, who, column, cell, wanted)


def _not_a_block(found: Ints, group: Group) -> NDArray[np.bool_]:
    return (found <= NULL_BLOCK) | (found >= group.num_blocks)


def _findings(plan: Plan, s: Suspects, bad: Ints, name: str, expected: str | None = None) -> Iterator[Violation]:
    """One finding per request, at its first bad column."""
    tokens = s.group.block_size * plan.parallel.dcp_size
    for first, count in firsts(s.who[bad]):
        i = int(bad[first])
        column, found, declared = int(s.column[i]), int(s.found[i]), int(s.declared[i])
        wanted = f"block {declared}" if declared >= 0 else "no declared block"
        yield Violation(
            name,
            expected if expected is not None else f"{wanted} in column {column}",
            f"block {found} in column {column}" + more(count, "columns of this request"),
            request=name_of(plan, int(s.who[i])),
            group=s.group.index,
            block=found,
            position=column * tokens if s.group.slotted else None,
        )


@rule(
    Plan,
    family="read",
    boundary="read",
    predicate="a request's context is its first planned position plus its query length",
    fields=(*_SEQ_LENS, "InputBatch.positions", "InputBatch.query_start_loc"),
    needs=("seq_lens",),
    skips="requests that were not declared; without positions the declared start stands in for the first one",
    yields_to=("plan_request_set_mismatch", "plan_query_len_mismatch", "plan_position_start_mismatch"),
    meaning="Attention reads more or less context than the request has.",
)
def plan_seq_len_mismatch(plan: Plan) -> Iterator[Violation]:
    """Judge the worker's context lengths; async scheduling may lower them by last step's rejected drafts."""
    assert plan.seq_lens is not None
    if plan.seq_lens.size < plan.count:
        yield Violation("plan_seq_len_mismatch", f"{plan.count} context lengths", f"{plan.seq_lens.size}")
    r = rows_of(plan)
    found = fit(plan.seq_lens, plan.count)
    length = np.where(r.length >= 0, r.length, r.tokens)
    known = r.first >= 0
    high = np.where(known, r.first, r.start) + length
    low = np.where(known, high, high - r.slack)
    bad = ((found < low) | (found > high)) & (np.arange(plan.count) < plan.seq_lens.size)
    for i in r.declared[bad[r.declared]]:
        yield Violation(
            "plan_seq_len_mismatch",
            f"{high[i]} tokens of context" if low[i] == high[i] else f"{low[i]} to {high[i]} tokens of context",
            f"{found[i]} tokens of context",
            request=plan.ids[i],
            position=int(high[i]),
        )


@rule(
    Plan,
    family="read",
    boundary="read",
    predicate="every block that is read, and every state block, is inside the cache",
    fields=_TABLES,
    skips="columns that are not read; between full checks only rows that grew, last columns, and in steady steps the "
    "columns just entered",
    meaning="Attention would read outside the KV cache.",
)
def read_outside_cache(plan: Plan) -> Iterator[Violation]:
    """Judge the range of the cells that are read."""
    for s in suspects_of(plan):
        bad = np.flatnonzero((s.found < 0) | (s.found >= s.group.num_blocks))
        yield from _findings(plan, s, bad, "read_outside_cache", f"block 0 to {s.group.num_blocks - 1}")


@rule(
    Plan,
    family="read",
    boundary="read",
    predicate="no column that attention reads holds the null block",
    fields=_TABLES,
    skips="columns below the window, state and cross-attention groups, columns nobody declared, redirected writes; "
    "between full checks only rows that grew, last columns, and in steady steps the columns just entered",
    meaning="Attention reads the null block, which holds nobody's KV, as part of a request's context.",
)
def read_null_block(plan: Plan) -> Iterator[Violation]:
    """Judge that live columns name real blocks."""
    if plan.redirected:
        return
    for s in suspects_of(plan):
        if s.group.slotted:
            bad = np.flatnonzero((s.found == NULL_BLOCK) & (s.declared >= 0))
            yield from _findings(plan, s, bad, "read_null_block")


@rule(
    Plan,
    family="read",
    boundary="read",
    predicate="every column that attention reads holds the declared block",
    fields=(*_TABLES, *_BLOCKS),
    skips="columns below the window or beyond the declaration, state and cross-attention groups, redirected writes; "
    "between full checks only rows that grew, last columns, and in steady steps the columns just entered",
    yields_to=("plan_request_set_mismatch", "read_outside_cache", "read_null_block"),
    meaning="Attention reads a block that is not, or no longer, this request's.",
)
def read_block_table_mismatch(plan: Plan) -> Iterator[Violation]:
    """Judge live columns against the declaration."""
    if plan.redirected:
        return
    for s in suspects_of(plan):
        if s.group.slotted:
            bad = np.flatnonzero((s.declared >= 0) & (s.found != s.declared))
            yield from _findings(plan, s, bad, "read_block_table_mismatch")


@rule(
    Plan,
    family="read",
    boundary="read",
    predicate="the declared blocks cover the context that is read",
    fields=(*_SEQ_LENS, *_BLOCKS),
    skips="state and cross-attention groups, requests that were not declared",
    meaning="Attention reads past the blocks the request was given, into stale ids.",
)
def read_len_exceeds_binding(plan: Plan) -> Iterator[Violation]:
    """Judge the needed columns against the declared ones."""
    _, end = context(plan)
    for group, span in zip(plan.groups, spans_of(plan), strict=True):
        if not group.slotted:
            continue
        size = group.block_size * plan.parallel.dcp_size
        for i in np.flatnonzero(span.last > span.bound):
            row, bound = int(span.rows[i]), int(span.bound[i])
            yield Violation(
                "read_len_exceeds_binding",
                f"at most {bound * size} tokens of context ({bound} blocks)",
                f"{end[row]} tokens of context ({span.last[i]} blocks)",
                request=plan.ids[row],
                group=group.index,
                position=bound * size,
            )


@rule(
    Plan,
    family="read",
    boundary="read",
    predicate="padding rows have no context",
    fields=(*_SEQ_LENS, "InputBatch.num_reqs", "InputBatch.num_reqs_after_padding"),
    needs=("seq_lens",),
    meaning="A padding row of a captured graph reads stale blocks of an earlier batch.",
)
def pad_seq_len_nonzero(plan: Plan) -> Iterator[Violation]:
    """Judge the rows behind the batch."""
    assert plan.seq_lens is not None
    tail = plan.seq_lens.reshape(-1)[plan.count :]
    bad = np.flatnonzero(tail)
    if len(bad):
        yield Violation(
            "pad_seq_len_nonzero",
            f"0 tokens of context in all {len(tail)} padding rows",
            f"{tail[bad[0]]} tokens in row {plan.count + bad[0]}" + more(len(bad), "rows"),
        )


@rule(
    Plan,
    family="read",
    boundary="read",
    predicate="the block table has a row for every request and a column for every block that is read",
    fields=(*_TABLES, *_SEQ_LENS),
    skips="the columns of state and cross-attention groups",
    meaning="Attention indexes the block table past its end.",
)
def read_table_overrun(plan: Plan) -> Iterator[Violation]:
    """Judge the table's shape."""
    for group, span, table in zip(plan.groups, spans_of(plan), plan.tables, strict=False):
        if table is None or table.ndim != 2:
            continue
        height, width = table.shape
        if height < plan.count:
            yield Violation("read_table_overrun", f"{plan.count} rows", f"{height} rows", group=group.index)
        if not group.slotted:
            continue
        for i in np.flatnonzero(span.last > width):
            yield Violation(
                "read_table_overrun",
                f"at most {width} columns",
                f"{span.last[i]} columns to be read",
                request=plan.ids[span.rows[i]],
                group=group.index,
                position=width * group.block_size * plan.parallel.dcp_size,
            )


def local_length(tokens: Ints, parallel: Parallel) -> Ints:
    """How many of the first ``tokens`` positions this decode-context-parallel rank holds."""
    turn = parallel.interleave * parallel.dcp_size
    rest = tokens % turn - parallel.dcp_rank * parallel.interleave
    return tokens // turn * parallel.interleave + np.clip(rest, 0, parallel.interleave)


@rule(
    Plan,
    family="read",
    boundary="read",
    predicate="the local context length counts the positions of the context that this rank holds",
    fields=("InputBatch.dcp_local_seq_lens", "CommonAttentionMetadata.dcp_local_seq_lens", *_SEQ_LENS),
    needs=("local_seq_lens",),
    skips="ranks without decode context parallelism, requests that were not declared",
    yields_to=("plan_request_set_mismatch", "plan_seq_len_mismatch"),
    meaning="A rank reads more or less of its share of the context than it stores.",
)
def dcp_local_seq_len_mismatch(plan: Plan) -> Iterator[Violation]:
    """Judge the local lengths; V1 derives them from the optimistic context, which last step's drafts may exceed."""
    assert plan.local_seq_lens is not None
    if plan.parallel.dcp_size == 1:
        return
    found = plan.local_seq_lens
    if found.size < plan.count:
        yield Violation("dcp_local_seq_len_mismatch", f"{plan.count} local lengths", f"{found.size}")
    r = rows_of(plan)
    _, end = context(plan)
    low, high = local_length(end, plan.parallel), local_length(end + r.slack, plan.parallel)
    lengths = fit(found, plan.count)
    bad = ((lengths < low) | (lengths > high)) & (np.arange(plan.count) < found.size)
    for i in r.declared[bad[r.declared]]:
        yield Violation(
            "dcp_local_seq_len_mismatch",
            f"{low[i]} local tokens" if low[i] == high[i] else f"{low[i]} to {high[i]} local tokens",
            f"{lengths[i]} local tokens",
            request=plan.ids[i],
            position=int(end[i]),
        )
