"""Rules 25–38: the worker plans exactly the declared tokens, and each goes where the declaration says.

Under prefill context parallelism a plan is judged in the order of the global batch: ``Plan.pcp_rows`` names, for each
gathered slot, the planned token it belongs to (−1: this entry writes nothing), and the slots are put back in token
order before any rule looks at them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from kvproof.trace.records import PAD_SLOT, Group, Ints, Plan
from kvproof.trace.rules.model import Violation, rule

T = TypeVar("T")

UNDECLARED = -2
"""What ``Plan.expected_slots`` says of a token whose column the declaration does not cover."""

_QUERY_START = ("InputBatch.query_start_loc", "CommonAttentionMetadata.query_start_loc")
_POSITIONS = ("InputBatch.positions", "GPUModelRunner.positions")
_SLOT_MAPPINGS = ("BlockTables.slot_mappings", "BlockTable.slot_mapping")
_BLOCKS = ("scheduled_new_reqs.block_ids", "scheduled_cached_reqs.new_block_ids")


@dataclass(slots=True)
class Rows:
    """What is declared and planned per request, every array cut to ``Plan.count`` entries and safe to use as an index.

    ``row`` is the shadow's row (−1: the request was not declared). ``length`` is the query length in tokens (−1 where
    ``query_start`` is too short). ``first`` is the first planned position (−1: unknown).
    """

    row: Ints
    tokens: Ints
    start: Ints
    slack: Ints
    length: Ints
    first: Ints

    @property
    def declared(self) -> Ints:
        """Indices of the requests the scheduler gave tokens to; the others are plan_request_set_mismatch's."""
        return np.flatnonzero((self.row >= 0) & (self.tokens >= 0) & (self.start >= 0))


@dataclass(slots=True)
class Slots:
    """One group's slots: ``real`` for the planned tokens in token order, ``tail`` for the padding behind them.

    ``owner`` is each token's batch row (``Plan.count`` where query_start gives none). ``expected`` is None when the
    plan is not sound enough to derive it; the rules that compare with it then leave the reason to those before them.
    """

    group: Group
    real: Ints
    tail: Ints
    owner: Ints
    expected: Ints | None


def fit(values: NDArray[Any], count: int, fill: int = -1) -> Ints:
    """The first ``count`` entries as int64, filled up: a rule must not fail on an array that is too short."""
    flat = values.reshape(-1)[:count].astype(np.int64)
    if len(flat) == count:
        return flat
    return np.concatenate([flat, np.full(count - len(flat), fill, np.int64)])


def name_of(plan: Plan, index: int) -> str | None:
    """Request id of a batch row, None for a row the batch does not have."""
    return plan.ids[index] if 0 <= index < plan.count else None


def firsts(who: Ints) -> Iterator[tuple[int, int]]:
    """(index of the first entry, number of entries) per distinct value: one finding per request tells enough."""
    if len(who):
        _, index, counts = np.unique(who, return_index=True, return_counts=True)
        yield from zip(index.tolist(), counts.tolist(), strict=True)


def more(count: int, what: str) -> str:
    """Says that the finding stands for several."""
    return f", and {count - 1} more {what}" if count > 1 else ""


def once(plan: Plan, name: str, make: Callable[[Plan], T]) -> T:
    """What ``make`` says of the plan, kept with it: several rules look at the same derived arrays."""
    kept = vars(plan)
    if name not in kept:
        kept[name] = make(plan)
    return cast(T, kept[name])


def rows_of(plan: Plan) -> Rows:
    """The plan's numbers per request."""
    return once(plan, "_rows", _rows)


def _rows(plan: Plan) -> Rows:
    count = plan.count
    row = fit(plan.rows, count)
    row[row >= len(plan.shadow.end)] = -1
    edges = plan.query_start.reshape(-1)[: count + 1].astype(np.int64)
    length = fit(np.diff(edges), count)
    first = np.full(count, -1, np.int64)
    if plan.positions is not None and count and len(edges) > 1:
        begin = fit(edges, count)
        usable = (length > 0) & (begin >= 0) & (begin < min(len(plan.positions), max(plan.num_tokens, 0)))
        first[usable] = plan.positions[begin[usable]]
    return Rows(
        row, fit(plan.tokens, count), fit(plan.start, count), np.maximum(fit(plan.slack, count, 0), 0), length, first
    )


def slots_of(plan: Plan) -> list[Slots]:
    """The slots of every group with token slots."""
    return once(plan, "_slots", _slots)


def _slots(plan: Plan) -> list[Slots]:
    result = []
    for group, slots in zip(plan.groups, plan.slots, strict=False):
        if slots is None or not group.slotted:
            continue
        split = _split(plan, slots.reshape(-1).astype(np.int64, copy=False))
        if split is not None:
            real, tail = split
            result.append(Slots(group, real, tail, _owner(plan, len(real)), _expected(plan, group, len(real))))
    return result


def _split(plan: Plan, slots: Ints) -> tuple[Ints, Ints] | None:
    """(slots of the planned tokens in token order, slots that must write nothing)."""
    count = min(max(plan.num_tokens, 0), len(slots))
    if plan.parallel.pcp_size == 1:
        return slots[:count], slots[count:]
    if plan.pcp_rows is None:
        return None
    token = fit(plan.pcp_rows, len(slots))
    real = np.full(count, PAD_SLOT, np.int64)
    ours = (token >= 0) & (token < count)
    real[token[ours]] = slots[ours]
    return real, slots[token < 0]


def _owner(plan: Plan, count: int) -> Ints:
    """Batch row of each of the first ``count`` tokens; for an unsound plan bounded by the arrays that are there."""
    if plan.sound:
        return plan.owner[:count]
    edges = plan.query_start.reshape(-1)[1 : plan.count + 1]
    return np.searchsorted(edges, np.arange(count), side="right") if len(edges) else np.full(count, plan.count)


def _expected(plan: Plan, group: Group, count: int) -> Ints | None:
    if plan.redirected or len(plan.rows) != plan.count or not plan.sound:
        return None
    expected = plan.expected_slots(group)
    return None if expected is None else expected[:count].astype(np.int64, copy=False)


def slot_words(slot: int, block_size: int) -> str:
    """A slot as a reader needs it."""
    if slot == PAD_SLOT:
        return "slot -1 (writes nothing)"
    if slot < 0:
        return f"slot {slot}"
    return f"slot {slot} (block {slot // block_size}, offset {slot % block_size})"


def _findings(plan: Plan, s: Slots, bad: Ints, name: str, expected: str | None = None) -> Iterator[Violation]:
    """One finding per request, at the first token in ``bad``."""
    for first, count in firsts(s.owner[bad]):
        token = int(bad[first])
        slot = int(s.real[token])
        yield Violation(
            name,
            _expected_words(s, token) if expected is None else expected,
            slot_words(slot, s.group.block_size) + more(count, "tokens of this request"),
            request=name_of(plan, int(s.owner[token])),
            group=s.group.index,
            block=slot // s.group.block_size if slot >= 0 else None,
            slot=slot,
            position=position_of(plan, token),
        )


def position_of(plan: Plan, token: int) -> int | None:
    """Position of a planned token, None when the worker's array does not reach it."""
    return int(plan.positions[token]) if plan.positions is not None and token < len(plan.positions) else None


@rule(
    Plan,
    family="write",
    boundary="write",
    predicate="the batch holds exactly the requests the scheduler gave tokens to, each once",
    fields=("InputBatch.req_ids", "num_scheduled_tokens"),
    meaning="The worker runs a request it was not asked to run, or leaves one out.",
)
def plan_request_set_mismatch(plan: Plan) -> Iterator[Violation]:
    """Judge the batch against the declaration."""
    declared = set(plan.declared_ids)
    rows = Counter(plan.ids)
    for name, count in rows.items():
        if name not in declared:
            yield Violation(
                "plan_request_set_mismatch", "a request that was given tokens", "a row in the batch", request=name
            )
        elif count > 1:
            yield Violation("plan_request_set_mismatch", "1 row in the batch", f"{count} rows", request=name)
    for name in plan.declared_ids:
        if name not in rows:
            yield Violation("plan_request_set_mismatch", "1 row in the batch", "0 rows", request=name)


@rule(
    Plan,
    family="write",
    boundary="write",
    predicate="each request's query is as long as the tokens it was given",
    fields=(*_QUERY_START, "num_scheduled_tokens"),
    skips="requests that were not declared",
    yields_to=("plan_request_set_mismatch",),
    meaning="A request computes more or fewer tokens than the scheduler gave it.",
)
def plan_query_len_mismatch(plan: Plan) -> Iterator[Violation]:
    """Judge the lengths that query_start gives."""
    r = rows_of(plan)
    for i in r.declared[(r.length != r.tokens)[r.declared]]:
        missing = len(plan.query_start) < i + 2
        yield Violation(
            "plan_query_len_mismatch",
            f"{r.tokens[i]} query tokens",
            "no end in query_start" if missing else f"{r.length[i]} query tokens",
            request=plan.ids[i],
        )


@rule(
    Plan,
    family="write",
    boundary="write",
    predicate="the batch's token count equals the declared sum, and query_start and slots cover exactly these tokens",
    fields=("InputBatch.num_tokens", *_QUERY_START, *_SLOT_MAPPINGS, "total_num_scheduled_tokens"),
    skips="batches with an undeclared request; query_start's end where a query length is wrong already",
    meaning="The worker's idea of how many tokens this step has is not the scheduler's.",
)
def plan_token_count_mismatch(plan: Plan) -> Iterator[Violation]:
    """Judge the one number everything else is cut to."""
    r = rows_of(plan)
    if len(r.declared) == plan.count and set(plan.ids) == set(plan.declared_ids):
        total = int(r.tokens.sum())
        if plan.num_tokens != total:
            yield Violation("plan_token_count_mismatch", f"{total} tokens", f"{plan.num_tokens} tokens")
        elif bool((r.length == r.tokens).all()) and len(plan.query_start) > plan.count:
            end = int(plan.query_start[plan.count])
            if end != total:
                yield Violation(
                    "plan_token_count_mismatch", f"query_start from 0 to {total} tokens", f"an end at {end} tokens"
                )
    for group, slots in zip(plan.groups, plan.slots, strict=False):
        if slots is not None and group.slotted and slots.size < plan.num_tokens:
            yield Violation(
                "plan_token_count_mismatch",
                f"slots for {plan.num_tokens} tokens",
                f"{slots.size} slots",
                group=group.index,
            )


@rule(
    Plan,
    family="write",
    boundary="write",
    predicate="within a request positions rise by one",
    fields=(*_POSITIONS, *_QUERY_START),
    needs=("positions",),
    yields_to=("plan_request_set_mismatch", "plan_query_len_mismatch"),
    meaning="Tokens of one request are out of order or doubled, so they overwrite each other's place.",
)
def plan_position_not_contiguous(plan: Plan) -> Iterator[Violation]:
    """Judge neighbouring positions that belong to the same request."""
    assert plan.positions is not None
    if len(plan.positions) < plan.num_tokens:
        yield Violation(
            "plan_position_not_contiguous", f"{plan.num_tokens} positions", f"{len(plan.positions)} positions"
        )
    positions = plan.positions.reshape(-1)[: max(plan.num_tokens, 0)].astype(np.int64)
    steps = np.flatnonzero(np.diff(positions) != 1)
    if not len(steps):
        return
    # Only now worth naming the owners: every request boundary is such a step, so check these few alone.
    edges = plan.query_start.reshape(-1)[1 : plan.count + 1]
    owner = np.searchsorted(edges, steps, side="right") if len(edges) else np.zeros_like(steps)
    next_owner = np.searchsorted(edges, steps + 1, side="right") if len(edges) else owner
    inside = owner == next_owner
    steps, owner = steps[inside], owner[inside]
    for first, count in firsts(owner):
        i = int(steps[first])
        yield Violation(
            "plan_position_not_contiguous",
            f"position {int(positions[i]) + 1} after position {int(positions[i])}",
            f"position {positions[i + 1]}" + more(count, "breaks in this request"),
            request=name_of(plan, int(owner[first])),
            position=int(positions[i + 1]),
        )


@rule(
    Plan,
    family="write",
    boundary="write",
    predicate="a request's first position is its declared computed tokens, or lower by at most last step's drafts",
    fields=(*_POSITIONS, "scheduled_new_reqs.num_computed_tokens", "scheduled_cached_reqs.num_computed_tokens"),
    needs=("positions",),
    skips="requests that were not declared or have an empty query",
    yields_to=("plan_request_set_mismatch", "plan_query_len_mismatch"),
    meaning="The worker continues a request somewhere else than the scheduler believes.",
)
def plan_position_start_mismatch(plan: Plan) -> Iterator[Violation]:
    """Judge the first position; under async scheduling the declared one is only an upper bound."""
    r = rows_of(plan)
    assert plan.positions is not None
    begin = fit(plan.query_start, plan.count)
    # A query that begins inside the batch has a first position, whatever stands there; −1 then is a value.
    known = (r.length > 0) & (begin >= 0) & (begin < min(len(plan.positions), max(plan.num_tokens, 0)))
    bad = known & ((r.first > r.start) | (r.first < r.start - r.slack))
    for i in r.declared[bad[r.declared]]:
        low, high = int(r.start[i] - r.slack[i]), int(r.start[i])
        yield Violation(
            "plan_position_start_mismatch",
            f"first position {high}" if low == high else f"first position {low} to {high}",
            f"first position {r.first[i]}",
            request=plan.ids[i],
            position=int(r.first[i]),
        )


@rule(
    Plan,
    family="write",
    boundary="write",
    predicate="every slot is −1 or inside the cache",
    fields=_SLOT_MAPPINGS,
    meaning="The forward pass would write outside the KV cache.",
)
def write_outside_cache(plan: Plan) -> Iterator[Violation]:
    """Judge the range of every real token's slot."""
    for s in slots_of(plan):
        end = s.group.num_blocks * s.group.block_size
        bad = np.flatnonzero((s.real < PAD_SLOT) | (s.real >= end))
        yield from _findings(plan, s, bad, "write_outside_cache", f"slot 0 to {end - 1}, or -1")


@rule(
    Plan,
    family="write",
    boundary="write",
    predicate="no real token is written to the null block",
    fields=_SLOT_MAPPINGS,
    skips="state groups, and runs that send all writes to the null block on purpose",
    meaning="A token's KV goes to the block nobody reads back, so it is lost.",
)
def null_block_write(plan: Plan) -> Iterator[Violation]:
    """Judge that no slot lies in block 0."""
    if plan.redirected:
        return
    for s in slots_of(plan):
        bad = np.flatnonzero((s.real >= 0) & (s.real < s.group.block_size))
        yield from _findings(plan, s, bad, "null_block_write")


def _expected_words(s: Slots, token: int) -> str:
    """The slot a token should have; where it cannot be derived, what is known of it."""
    if s.expected is None:
        return f"slot {s.group.block_size} or above (block 0 is the null block)"
    slot = int(s.expected[token])
    if slot == UNDECLARED:
        return "no write: no block is declared for this position"
    return slot_words(slot, s.group.block_size)


@rule(
    Plan,
    family="write",
    boundary="write",
    predicate="a real token that belongs on this rank has a slot",
    fields=(*_SLOT_MAPPINGS, *_BLOCKS),
    skips="state groups, redirected writes, and plans whose slots cannot be derived",
    meaning="A token's KV is not written at all, and later steps attend to whatever stood there.",
)
def write_slot_pad_on_real_token(plan: Plan) -> Iterator[Violation]:
    """Judge that padding marks padding only."""
    for s in slots_of(plan):
        if s.expected is not None:
            bad = np.flatnonzero((s.real == PAD_SLOT) & (s.expected >= 0))
            yield from _findings(plan, s, bad, "write_slot_pad_on_real_token")


@rule(
    Plan,
    family="write",
    boundary="write",
    predicate="no two real tokens of a step are written to the same slot",
    fields=_SLOT_MAPPINGS,
    skips="state groups and redirected writes",
    yields_to=("write_outside_cache", "null_block_write"),
    meaning="Two tokens overwrite each other's KV in the same step.",
)
def write_slot_collision(plan: Plan) -> Iterator[Violation]:
    """Judge that the slots that are written are distinct."""
    if plan.redirected:
        return
    for s in slots_of(plan):
        ordered = np.sort(s.real)
        same = (ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)
        if not same.any():
            continue
        doubled = np.unique(ordered[1:][same])
        tokens = np.flatnonzero(np.isin(s.real, doubled))
        order = tokens[np.argsort(s.real[tokens], kind="stable")]
        group_start = np.searchsorted(s.real[order], doubled)
        other, token = order[group_start], order[group_start + 1]
        if s.expected is not None:
            # Name the token that is in the wrong place, not the one it hits.
            swap = (s.expected[token] == s.real[token]) & (s.expected[other] != s.real[other])
            other, token = np.where(swap, token, other), np.where(swap, other, token)
        for first, count in firsts(s.owner[token]):
            i, j = int(token[first]), int(other[first])
            slot = int(s.real[i])
            yield Violation(
                "write_slot_collision",
                "a slot of its own" if s.expected is None else _expected_words(s, i),
                f"{slot_words(slot, s.group.block_size)}, which position {position_of(plan, j)} of request "
                f"{name_of(plan, int(s.owner[j]))} is written to as well" + more(count, "doubled slots"),
                request=name_of(plan, int(s.owner[i])),
                group=s.group.index,
                block=slot // s.group.block_size,
                slot=slot,
                position=position_of(plan, i),
            )


@rule(
    Plan,
    family="write",
    boundary="write",
    predicate="every real token goes to the slot that follows from its position and the declared blocks",
    fields=(*_SLOT_MAPPINGS, *_POSITIONS, *_BLOCKS),
    skips="state groups, redirected writes, decode context parallelism (dcp_local_slot_mismatch), and plans whose "
    "slots cannot be derived",
    yields_to=("write_outside_cache", "null_block_write", "write_slot_pad_on_real_token", "write_slot_collision"),
    meaning="A token's KV goes to a place that belongs to another token.",
)
def write_target_mismatch(plan: Plan) -> Iterator[Violation]:
    """Judge every slot against the declaration."""
    if plan.parallel.dcp_size == 1:
        yield from _mismatches(plan, "write_target_mismatch")


def _mismatches(plan: Plan, name: str) -> Iterator[Violation]:
    for s in slots_of(plan):
        if s.expected is None:
            continue
        wrong = s.real != s.expected
        if wrong.any():
            # A token without a declared block that is not written either is the scheduler's fault, not this plan's.
            wrong &= ~((s.expected == UNDECLARED) & (s.real == PAD_SLOT))
            yield from _findings(plan, s, np.flatnonzero(wrong), name)


@rule(
    Plan,
    family="write",
    boundary="write",
    predicate="every entry behind the real tokens writes nothing (−1)",
    fields=(*_SLOT_MAPPINGS, "InputBatch.num_tokens", "InputBatch.num_tokens_after_padding"),
    skips="state groups; plans without padding",
    meaning="Padding tokens of a captured graph write garbage into a live slot.",
)
def pad_slot_not_masked(plan: Plan) -> Iterator[Violation]:
    """Judge the padding."""
    for s in slots_of(plan):
        bad = np.flatnonzero(s.tail != PAD_SLOT)
        if len(bad):
            slot = int(s.tail[bad[0]])
            yield Violation(
                "pad_slot_not_masked",
                f"slot -1 (writes nothing) in all {len(s.tail)} padding entries",
                f"{slot_words(slot, s.group.block_size)} in padding entry {bad[0]}" + more(len(bad), "entries"),
                group=s.group.index,
                block=slot // s.group.block_size if slot >= 0 else None,
                slot=slot,
            )


@rule(
    Plan,
    family="write",
    boundary="write",
    predicate="no request reads a block, as already computed, that another request writes in the same step",
    fields=(*_SLOT_MAPPINGS, *_BLOCKS, "num_computed_tokens"),
    skips="blocks both hold in the same column and that the writer fills to the end (a prefix hit within one step), "
    "columns outside the reader's window, state groups, redirected writes",
    meaning="One request overwrites context that another request attends to in the same step.",
)
def write_block_read_by_other(plan: Plan) -> Iterator[Violation]:
    """Join the blocks written with the blocks read as computed; both sides are empty unless a block has two users."""
    if plan.redirected:
        return
    r = rows_of(plan)
    for s in slots_of(plan):
        uses = plan.shadow.uses[s.group.index]
        size = s.group.block_size
        inside = (s.real >= size) & (s.real < len(uses) * size) & (s.owner < plan.count)
        shared = np.flatnonzero(inside)
        shared = shared[uses[s.real[shared] // size] > 1]
        if not len(shared):
            continue
        target, author = np.divmod(np.unique(s.real[shared] // size * plan.count + s.owner[shared]), plan.count)
        reader, column, block = _computed_cells(plan, r, s.group, target)
        low = np.searchsorted(target, block, side="left")
        count = np.searchsorted(target, block, side="right") - low
        pick = np.repeat(low, count) + np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        reader, column, block = np.repeat(reader, count), np.repeat(column, count), np.repeat(block, count)
        writer = author[pick]
        span = size * plan.parallel.dcp_size
        filled = r.start[writer] + r.tokens[writer] >= (column + 1) * span
        same = plan.shadow.lookup(s.group.index, r.row[writer], column) == block
        bad = np.flatnonzero((writer != reader) & ~(filled & same))
        for first, number in firsts(writer[bad]):
            i = bad[first]
            yield Violation(
                "write_block_read_by_other",
                f"block {block[i]} written by nobody while request {name_of(plan, int(reader[i]))} reads it as its "
                f"computed positions {int(column[i]) * span} on",
                f"request {name_of(plan, int(writer[i]))} writes block {block[i]}" + more(number, "such blocks"),
                request=name_of(plan, int(writer[i])),
                group=s.group.index,
                block=int(block[i]),
            )


def _computed_cells(plan: Plan, r: Rows, group: Group, blocks: Ints) -> tuple[Ints, Ints, Ints]:
    """(batch row, column, block) of every cell that holds one of ``blocks`` and is read as already computed."""
    index = group.index
    rows = np.flatnonzero((r.row >= 0) & (r.start >= 0))
    computed = np.where(r.first >= 0, np.clip(r.first, r.start - r.slack, r.start), r.start - r.slack)[rows]
    low, high = live_columns(plan, group, np.maximum(computed, 0), computed)
    counts = plan.shadow.counts[index][r.row[rows]]
    high = np.minimum(high, counts)
    table = plan.shadow.tables[index][r.row[rows], : int(high.max(initial=0))]
    columns = np.arange(table.shape[1])
    live = (columns >= low[:, None]) & (columns < high[:, None]) & np.isin(table, blocks)
    who, column = np.nonzero(live)
    return rows[who], column, table[who, column].astype(np.int64)


def live_columns(plan: Plan, group: Group, computed: Ints, end: Ints) -> tuple[Ints, Ints]:
    """(first, one past the last) column that attention reads with ``computed`` tokens cached and ``end`` tokens in all.

    With decode context parallelism a column covers ``block_size`` tokens on each rank.
    """
    span = group.block_size * plan.parallel.dcp_size
    first = group.first_live_column(computed)
    if span != group.block_size:
        # The group's own answer counts columns of block_size tokens; its first live token decides, not that column.
        first = first * group.block_size // span
    return np.maximum(first, 0), np.maximum(-(-end // span), 0)


@rule(
    Plan,
    family="write",
    boundary="write",
    predicate="this decode-context-parallel rank writes exactly its share of the tokens, each to its local slot",
    fields=(*_SLOT_MAPPINGS, *_POSITIONS, *_BLOCKS, "decode_context_parallel_size", "cp_kv_cache_interleave_size"),
    skips="ranks without decode context parallelism, state groups, redirected writes, and plans whose slots cannot be "
    "derived",
    yields_to=("write_outside_cache", "null_block_write", "write_slot_pad_on_real_token", "write_slot_collision"),
    meaning="A rank stores a token that another rank owns, or stores its own in the wrong local place.",
)
def dcp_local_slot_mismatch(plan: Plan) -> Iterator[Violation]:
    """Judge every slot, −1 of other ranks' tokens included, against the declaration."""
    if plan.parallel.dcp_size > 1:
        yield from _mismatches(plan, "dcp_local_slot_mismatch")


@rule(
    Plan,
    family="write",
    boundary="write",
    predicate="the gathered slots hold every planned token once",
    fields=("InputBatch.pcp", "PCPManager._padded_gather_idx", "PCPManager._gathered_kv_write_mask"),
    needs=("pcp_rows",),
    skips="ranks without prefill context parallelism",
    yields_to=("plan_request_set_mismatch", "plan_query_len_mismatch"),
    meaning="Splitting a prefill over the ranks loses a token's KV or writes it twice.",
)
def pcp_partition_mismatch(plan: Plan) -> Iterator[Violation]:
    """Judge that pcp_rows is a partition of the planned tokens."""
    if plan.parallel.pcp_size == 1 or plan.pcp_rows is None:
        return
    token = plan.pcp_rows.reshape(-1).astype(np.int64)
    total = max(plan.num_tokens, 0)
    if total > len(token):
        yield Violation("pcp_partition_mismatch", f"room for {total} tokens", f"{len(token)} gathered entries")
        return
    outside = np.flatnonzero((token < -1) | (token >= total))
    if len(outside):
        yield Violation(
            "pcp_partition_mismatch",
            f"token 0 to {total - 1} of the batch, or -1",
            f"token {token[outside[0]]} in gathered entry {outside[0]}" + more(len(outside), "entries"),
        )
    times = np.bincount(token[(token >= 0) & (token < total)], minlength=total)
    bad = np.flatnonzero(times != 1)
    owner = _owner(plan, total)[bad]
    for first, count in firsts(owner):
        i = int(bad[first])
        yield Violation(
            "pcp_partition_mismatch",
            "one gathered entry that writes the token",
            f"{times[i]} entries" + more(count, "tokens of this request"),
            request=name_of(plan, int(owner[first])),
            position=position_of(plan, i),
        )
    for group, slots in zip(plan.groups, plan.slots, strict=False):
        if slots is not None and group.slotted and slots.size != len(token):
            yield Violation(
                "pcp_partition_mismatch", f"{len(token)} gathered slots", f"{slots.size} slots", group=group.index
            )
