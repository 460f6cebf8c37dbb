"""What the guard sees at each boundary, as small numpy records. Pure: neither torch nor vLLM.

A record holds only what the engine itself declared or planned, plus the guard's own shadow of earlier declarations.
``None`` means that the installed vLLM does not show the field here; a rule that needs it is skipped and counted.
Nothing in a record has been used as an index before it was range-checked.

Units: positions, lengths and starts are tokens; columns are manager blocks of one request; blocks are manager-block
ids of one group; slots are ``block * block_size + offset`` (−1 = write nothing).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvproof.trace.shadow import Shadow

Ints = NDArray[np.integer[Any]]

NULL_BLOCK = 0
PAD_SLOT = -1

CONTEXT = 1 << 26
"""Tokens; no context is this long."""

FULL, SLIDING, CHUNKED, STATE, OTHER = "full", "sliding", "chunked", "state", "other"


@dataclass(frozen=True, slots=True)
class Group:
    """One KV-cache group: the layers that share a block table.

    ``kind``: full | sliding | chunked | state (Mamba and other recurrent state) | other (cross attention, rings).
    ``block_size`` is tokens per manager block on this rank. ``num_blocks`` counts the null block. ``window`` is tokens
    (sliding: the window; chunked: the chunk), None elsewhere. ``width`` is the block table's columns, None: unknown.
    """

    index: int
    kind: str
    block_size: int
    num_blocks: int
    window: int | None = None
    width: int | None = None
    layers: tuple[str, ...] = ()

    @property
    def slotted(self) -> bool:
        """Whether a token's slot follows from its position and the block table alone."""
        return self.kind in (FULL, SLIDING, CHUNKED)

    def first_live_column(self, computed: Ints) -> Ints:
        """First column that attention still reads once ``computed`` tokens are in the cache (vector, per request)."""
        if self.kind == SLIDING and self.window:
            return np.maximum(computed - self.window + 1, 0) // self.block_size
        if self.kind == CHUNKED and self.window:
            return computed // self.window * self.window // self.block_size
        return np.zeros_like(computed)


@dataclass(frozen=True, slots=True)
class Parallel:
    """Context-parallel coordinates of this rank. ``interleave`` is tokens."""

    dcp_size: int = 1
    dcp_rank: int = 0
    interleave: int = 1
    pcp_size: int = 1
    pcp_rank: int = 0


@dataclass(slots=True)
class Cells:
    """Block-table cells of several requests and groups, flat. ``who`` indexes the record's ``ids``.

    ``block`` is −1 where the declaration has no block for that column.
    """

    who: Ints
    group: Ints
    column: Ints
    block: Ints

    def __len__(self) -> int:
        return len(self.who)


@dataclass
class Schedule:
    """kv.bind: one SchedulerOutput, after the shadow has taken its block deltas.

    R scheduled requests in the order of ``num_scheduled_tokens``.
    ``start`` is the declared ``num_computed_tokens`` (−1: neither new nor cached). ``previous_end`` is start +
    scheduled of the request's previous step (−1: first step, resumed, or unknown). ``drafts`` counts draft tokens,
    which ``tokens`` includes. ``declared`` lists new and then cached ids as they stand, repeats included.
    ``group_counts`` is (id, number of groups in its block ids) where blocks were declared.
    ``appended`` are the cells declared in this step; ``write`` the cells this step's tokens fall into (slotted groups).
    ``references`` are the pool's own counts for ``write`` (None: pool not seen here). ``held`` are the counts in the
    guard's books of the pool for the same cells.
    """

    step: int
    ids: list[str]
    rows: Ints
    tokens: Ints
    total: int
    budget: int | None
    start: Ints
    previous_end: Ints
    drafts: Ints
    declared: list[str]
    new: frozenset[str]
    resumed: frozenset[str]
    finished: frozenset[str]
    preempted: frozenset[str]
    group_counts: list[tuple[str, int]]
    appended: Cells
    groups: tuple[Group, ...]
    shadow: Shadow
    zero: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    copies: Ints = field(default_factory=lambda: np.empty((0, 2), np.int64))
    references: Ints | None = None
    held: Ints | None = None
    redirected: bool = False

    @cached_property
    def index(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.ids)}

    @cached_property
    def end(self) -> Ints:
        """Tokens in the cache after this step, drafts included (start + tokens)."""
        return self.start + self.tokens

    @cached_property
    def write(self) -> Cells:
        return write_cells(self.rows, self.start, self.tokens, self.groups, self.shadow)


@dataclass
class Handover:
    """What reached a worker, against what left the scheduler. ``step`` is the scheduler's sequence number.

    ``trace`` False: the output carried no trace (made by an unguarded scheduler). ``digest_sent`` and ``digest_found``
    cover token counts and block deltas. ``unknown`` are cached ids this worker was never given. ``overflow`` are
    (id, group, columns needed, columns there are). ``rows`` are the worker's own request-state rows of the scheduled
    ids (−1: none yet), in the order of ``ids``, before this step.
    """

    step: int | None
    previous: int | None
    trace: bool
    digest_sent: int | None
    digest_found: int | None
    ids: list[str]
    unknown: list[str]
    overflow: list[tuple[str, int, int, int]]
    rows: Ints | None = None


@dataclass
class Plan:
    """kv.write and kv.read: what the worker is about to run. R requests in batch order, T tokens, G groups.

    ``declared_ids`` are the ids the scheduler gave tokens to; ``tokens``, ``start`` and ``rows`` are that declaration
    in batch order (−1 for an id that was not declared). ``slack`` is how many tokens the real start may lie below the
    declared one (drafts of the previous step under async scheduling, else 0).
    ``query_start`` [R_padded + 1], ``positions`` [T], ``seq_lens`` [R_padded] and per group ``slots`` [T_padded] and
    ``tables`` [R_padded, W] are the worker's own arrays; a group without token slots or without a table has None.
    ``num_tokens`` is the worker's token count without padding. ``whole`` asks for whole rows to be compared; otherwise
    ``fresh`` [R] marks the rows with newly appended blocks.
    """

    step: int
    ids: list[str]
    declared_ids: Sequence[str]
    rows: Ints
    tokens: Ints
    start: Ints
    slack: Ints
    num_tokens: int
    query_start: Ints
    positions: Ints | None
    seq_lens: Ints | None
    slots: list[Ints | None]
    tables: list[Ints | None]
    groups: tuple[Group, ...]
    shadow: Shadow
    parallel: Parallel = field(default_factory=Parallel)
    local_seq_lens: Ints | None = None
    redirected: bool = False
    whole: bool = True
    fresh: NDArray[np.bool_] | None = None
    pcp_rows: Ints | None = None

    @property
    def count(self) -> int:
        return len(self.ids)

    @cached_property
    def owner(self) -> Ints:
        """For each of the ``num_tokens`` planned tokens the batch row it belongs to, from ``query_start`` clipped."""
        lengths = np.clip(np.diff(self.query_start[: self.count + 1]), 0, max(self.num_tokens, 0))
        return np.repeat(np.arange(len(lengths)), lengths)[: max(self.num_tokens, 0)]

    @cached_property
    def sound(self) -> bool:
        """Whether query_start, positions and rows fit each other, so that slots can be derived from them."""
        lengths = np.diff(self.query_start[: self.count + 1])
        return bool(
            self.positions is not None
            and len(self.query_start) > self.count
            and len(self.rows) == self.count
            and len(self.positions) >= self.num_tokens >= 0
            and (lengths >= 0).all()
            and lengths.sum() == self.num_tokens
            and (self.rows >= 0).all()
        )

    def expected_slots(self, group: Group) -> Ints | None:
        """[num_tokens] slots that follow from the declaration and the worker's positions; PAD where not local.

        −2 marks a token whose column the declaration does not cover. None when the plan is not sound or the group
        has no token slots.
        """
        if not (group.slotted and self.sound) or self.positions is None:
            return None
        position = self.positions[: self.num_tokens].astype(np.int64)
        local, offset, column = locate(position, group.block_size, self.parallel)
        block = self.shadow.lookup(group.index, self.rows[self.owner], column)
        slot = np.where(block >= 0, block * group.block_size + offset, -2)
        return np.where(local, slot, PAD_SLOT)


@dataclass
class Dummy:
    """A dummy run: profiling, warm-up, graph capture or an idle data-parallel rank.

    ``slots`` per group [tokens of the run]; ``buffers`` per group the whole persistent slot buffer; ``tables`` per
    group [requests, W]. ``state_rows`` True: the caller asked for distinct state slots 1…R in column 0.
    ``connector_disabled`` None: no connector.
    """

    slots: list[Ints | None]
    buffers: list[Ints | None]
    tables: list[Ints | None]
    state_rows: bool = False
    connector_disabled: bool | None = None


@dataclass
class Verification:
    """Speculation results on the worker, batch order. Only the first ``count`` rows count.

    ``indices`` [≥ count] request-state rows (−1 = masked), ``expected_indices`` [count]; ``num_sampled``,
    ``num_rejected`` and ``drafts`` [≥ count] tokens; ``partial`` [count] True for a prefill chunk that is not the last.
    ``width`` is the columns of the sampled array, ``states`` the number of request-state rows.
    """

    ids: list[str]
    count: int
    indices: Ints
    expected_indices: Ints
    num_sampled: Ints
    num_rejected: Ints | None
    drafts: Ints
    partial: NDArray[np.bool_]
    width: int
    states: int


@dataclass
class Match:
    """Answer of get_num_new_matched_tokens. ``matched`` None: not known yet. All counts are tokens."""

    request: str
    matched: Any
    is_async: Any
    local: int
    total: int


@dataclass
class LoadTarget:
    """Blocks handed to update_state_after_alloc. Per group lists of block ids.

    ``bound`` is what the manager itself says of the request. ``external`` and ``local`` are tokens.
    """

    request: str
    blocks: list[list[int]]
    bound: list[list[int]]
    external: int
    local: int
    groups: tuple[Group, ...]


@dataclass
class Metadata:
    """Connector metadata on its way. Type names, None for no metadata. ``received`` None on the scheduler's side."""

    configured: bool
    sent: str | None
    received: str | None = None
    worker: bool = False


@dataclass
class Transfers:
    """What the worker's connector reported, as update_from_output got it, judged after the scheduler has acted.

    ``known`` are ids the scheduler knew before it acted. ``loading`` and ``sending`` are ids with an open transfer by
    the guard's books before this report (None: books not kept). ``computed`` is tokens still counted as computed per
    failed id, after the scheduler has acted. ``bound`` are blocks bound to any request (None: not looked up).
    """

    finished_sending: Sequence[str]
    finished_recving: Sequence[str]
    failed_recving: Sequence[str]
    invalid_blocks: Ints
    known: frozenset[str]
    repeated_sending: frozenset[str]
    repeated_recving: frozenset[str]
    computed: Mapping[str, int]
    num_blocks: int
    bound: frozenset[int] | None = None


@dataclass
class Result:
    """A step's result as update_from_output gets it. ``scheduled`` maps id to (tokens, drafts, partial).

    ``awaited`` is the oldest step without a result. ``reported`` and ``index`` are the runner's req_ids and
    req_id_to_index; ``counts`` [rows] generated tokens per row (None: pooling, nothing sampled, or not on this rank).
    ``known`` are the scheduled ids the scheduler still knows and has not finished. ``sampled_per_step`` is tokens.
    """

    step: int
    awaited: int | None
    scheduled: Mapping[str, tuple[int, int, bool]]
    reported: list[str]
    index: Mapping[str, int]
    counts: Ints | None
    known: frozenset[str]
    sampled_per_step: int = 1


@dataclass
class PoolChange:
    """One call of the block pool. ``action``: alloc | touch | release.

    ``before`` and ``after`` are reference counts in the guard's books, ``native`` the pool's own after the call (same
    order as ``blocks``). ``users`` maps a block to a live request whose table still names it inside the part that is
    read. ``loading`` maps a block to a request whose transfer is open.
    ``request`` is whose blocks these are, when known.
    """

    action: str
    blocks: Ints
    before: Ints
    after: Ints
    native: Ints
    num_blocks: int
    request: str | None = None
    users: Mapping[int, str] = field(default_factory=dict)
    loading: Mapping[int, str] = field(default_factory=dict)


@dataclass
class PoolState:
    """The pool between steps. ``idle``: no request is known and nothing is deferred or in flight.

    ``free`` and ``total`` are blocks (total counts the null block); ``kept`` are blocks somebody other than a request
    holds on purpose. ``leftover`` maps a request the scheduler has forgotten to the number of blocks still bound to it.
    ``cached_by_events`` and ``cached_in_pool`` count prefix-cache entries, ``missing_in_pool`` those that were
    announced and are not there (None: events are off).
    """

    idle: bool
    free: int
    total: int
    kept: int
    leftover: Mapping[str, int]
    cached_by_events: int | None = None
    cached_in_pool: int | None = None
    missing_in_pool: int | None = None


@dataclass
class Content:
    """Content mode, before a read. Stamps are chain values (64 bit); 0 = unknown origin.

    One entry per (request, group, block) that will be read: ``expected`` and ``found`` chain value of the last token
    in the block that is read; ``writers`` maps a found stamp to the request that wrote the block ("" unknown).
    ``sums_expected`` and ``sums_found`` are checksums of sampled blocks: ``sum_blocks`` [(group, block, layer)].
    """

    ids: list[str]
    who: Ints
    group: Ints
    column: Ints
    block: Ints
    expected: NDArray[np.uint64]
    found: NDArray[np.uint64]
    writers: dict[int, str]
    sum_blocks: Sequence[tuple[int, int, str]] = ()
    sums_expected: Sequence[int] = ()
    sums_found: Sequence[int] = ()


def locate(position: Ints, block_size: int, parallel: Parallel) -> tuple[NDArray[np.bool_], Ints, Ints]:
    """(is local, offset in the local block, column) of each token position.

    Without context parallelism the column is position // block_size. With DCP a column covers block_size · dcp_size
    tokens, dealt to the ranks in runs of ``interleave`` tokens.
    """
    if parallel.dcp_size == 1:
        column = position // block_size
        return np.ones(len(position), np.bool_), position - column * block_size, column
    virtual = block_size * parallel.dcp_size
    column = position // virtual
    offset = position - column * virtual
    run = parallel.interleave
    local = offset // run % parallel.dcp_size == parallel.dcp_rank
    return local, offset // (run * parallel.dcp_size) * run + offset % run, column


def write_cells(rows: Ints, start: Ints, tokens: Ints, groups: Sequence[Group], shadow: Shadow) -> Cells:
    """Cells that tokens [start, start + tokens) of each request fall into, for the groups with token slots."""
    parts = []
    # A corrupt count must not become an allocation: what is beyond any context is left to the rules on the counts.
    ok = (start >= 0) & (tokens > 0) & (rows >= 0) & (start < CONTEXT) & (tokens < CONTEXT)
    for group in groups:
        if not group.slotted:
            continue
        first = start // group.block_size
        last = (start + tokens - 1) // group.block_size
        if (ok & (first == last)).all():  # a decoding batch: one cell each
            who, column = np.arange(len(rows)), first
        else:
            count = np.where(ok, last - first + 1, 0)
            who = np.repeat(np.arange(len(rows)), count)
            column = np.arange(len(who)) - np.repeat(np.cumsum(count) - count, count) + first[who]
        parts.append((who, np.full(len(who), group.index), column, shadow.lookup(group.index, rows[who], column)))
    if not parts:
        empty = np.empty(0, np.int64)
        return Cells(empty, empty, empty, empty)
    if len(parts) == 1:
        return Cells(*parts[0])
    return Cells(*(np.concatenate(part) for part in zip(*parts, strict=True)))
