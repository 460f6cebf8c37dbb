"""Rules 56–63: what crosses the KV connector names known requests, bound blocks and possible numbers of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Integral

import numpy as np

from kvproof.trace.records import NULL_BLOCK, LoadTarget, Match, Metadata, Transfers
from kvproof.trace.rules.model import Violation, rule
from kvproof.trace.rules.writes import more

_REPORTS = (
    "KVConnectorOutput.finished_sending",
    "KVConnectorOutput.finished_recving",
    "KVConnectorOutput.failed_recving",
)
_HUGE = 2**62
_LOAD = ("update_state_after_alloc.blocks", "update_state_after_alloc.num_external_tokens")


@rule(
    Transfers,
    family="connector",
    boundary="transfers",
    predicate="every request whose transfer is reported as finished or failed is known to the scheduler",
    fields=_REPORTS,
    meaning="The worker's connector speaks of a request that does not exist; vLLM asserts, or frees nothing.",
)
def connector_unknown_request(t: Transfers) -> Iterator[Violation]:
    """Judge the ids of all three reports."""
    for what, ids in (
        ("finished_sending", t.finished_sending),
        ("finished_recving", t.finished_recving),
        ("failed_recving", t.failed_recving),
    ):
        for name in ids:
            if name not in t.known:
                yield Violation(
                    "connector_unknown_request", "a known request", f"an unknown id in {what}", request=name
                )


@rule(
    LoadTarget,
    family="connector",
    boundary="load_target",
    predicate="every block the connector is given to load into belongs to the request",
    fields=(_LOAD[0], "KVCacheManager.get_blocks"),
    skips="null blocks",
    meaning="A load would overwrite a block of another request.",
)
def connector_load_block_not_bound(t: LoadTarget) -> Iterator[Violation]:
    """Judge the blocks against what the manager itself says, group by group."""
    for group, blocks in enumerate(t.blocks):
        bound = set(t.bound[group]) if group < len(t.bound) else set()
        strange = [(column, block) for column, block in enumerate(blocks) if block != NULL_BLOCK and block not in bound]
        if strange:
            column, block = strange[0]
            yield Violation(
                "connector_load_block_not_bound",
                "a block bound to the request",
                f"block {block} in column {column}" + more(len(strange), "blocks"),
                request=t.request,
                group=group,
                block=block,
            )


@rule(
    LoadTarget,
    family="connector",
    boundary="load_target",
    predicate="every column that is loaded and will be read holds a block of the cache other than the null block",
    fields=(*_LOAD, "num_computed_tokens"),
    skips="columns outside the loaded tokens or below the window; null blocks of state and cross-attention groups",
    meaning="Loaded KV goes to the null block or outside the cache, and the request reads something else.",
)
def connector_load_null_or_out_of_range(t: LoadTarget) -> Iterator[Violation]:
    """Judge the columns of tokens [local, local + external); windowed groups from the first live column on."""
    if t.external <= 0:
        return
    end = min(max(t.local, 0) + t.external, _HUGE)
    for group, blocks in zip(t.groups, t.blocks, strict=False):
        if group.slotted:
            live = int(group.first_live_column(np.array([end], np.int64))[0])
            first, last = max(max(t.local, 0) // group.block_size, live), -(-end // group.block_size)
        else:
            first, last = 0, len(blocks)
        lowest = NULL_BLOCK + 1 if group.slotted else NULL_BLOCK
        bad = [c for c in range(first, min(last, len(blocks))) if not lowest <= blocks[c] < group.num_blocks]
        if bad:
            yield Violation(
                "connector_load_null_or_out_of_range",
                f"block {lowest} to {group.num_blocks - 1} in column {bad[0]}",
                f"block {blocks[bad[0]]}" + more(len(bad), "columns"),
                request=t.request,
                group=group.index,
                block=blocks[bad[0]],
                position=bad[0] * group.block_size if group.slotted else None,
            )
        elif first < last and len(blocks) < last:
            yield Violation(
                "connector_load_null_or_out_of_range",
                f"{last} blocks for {end} tokens",
                f"{len(blocks)} blocks",
                request=t.request,
                group=group.index,
                position=len(blocks) * group.block_size,
            )


@rule(
    Transfers,
    family="connector",
    boundary="transfers",
    predicate="each transfer is reported as finished once",
    fields=_REPORTS[:2],
    meaning="A transfer ends a second time: the blocks it frees may be another request's by now.",
)
def connector_finish_twice(t: Transfers) -> Iterator[Violation]:
    """Judge by the guard's books of open transfers."""
    for what, ids in (("finished_sending", t.repeated_sending), ("finished_recving", t.repeated_recving)):
        for name in sorted(ids):
            yield Violation("connector_finish_twice", "one report", f"another one in {what}", request=name)


@rule(
    Transfers,
    family="connector",
    boundary="transfers",
    predicate="no tokens of a failed receive stay counted as computed",
    fields=(_REPORTS[2], "Request.num_computed_tokens"),
    skips="requests the scheduler counts no tokens for any more; that a failed receive is also reported as finished is "
    "the contract",
    meaning="The scheduler takes blocks as loaded that the connector could not load.",
)
def connector_recv_and_failed(t: Transfers) -> Iterator[Violation]:
    """Judge what is left after the scheduler has acted."""
    for name in t.failed_recving:
        computed = t.computed.get(name, 0)
        if computed > 0:
            yield Violation(
                "connector_recv_and_failed",
                "0 computed tokens after the failed receive",
                f"{computed} computed tokens",
                request=name,
                position=computed,
            )


@rule(
    Transfers,
    family="connector",
    boundary="transfers",
    predicate="every block reported as not loaded is a block of the cache that a request holds",
    fields=("KVConnectorOutput.invalid_block_ids",),
    skips="whether it is held, where the bound blocks were not looked up",
    meaning="A load error cannot be assigned to a request, so its tokens stay counted as computed.",
)
def connector_invalid_block_unknown(t: Transfers) -> Iterator[Violation]:
    """Judge range, then binding."""
    for block in t.invalid_blocks.reshape(-1).tolist():
        if not NULL_BLOCK < block < t.num_blocks:
            yield Violation(
                "connector_invalid_block_unknown", f"block 1 to {t.num_blocks - 1}", f"block {block}", block=block
            )
        elif t.bound is not None and block not in t.bound:
            yield Violation(
                "connector_invalid_block_unknown",
                "a block bound to a request",
                f"block {block}, held by nobody",
                block=block,
            )


@rule(
    Metadata,
    family="connector",
    boundary="metadata",
    predicate="a step carries metadata exactly when a connector is configured, and the worker gets what was sent",
    fields=("SchedulerOutput.kv_connector_metadata", "build_connector_meta"),
    meaning="The worker's connector does not learn what the scheduler's side decided, so loads or saves are left out.",
)
def connector_metadata_mismatch(m: Metadata) -> Iterator[Violation]:
    """Judge presence and type: what is inside is the connector's own."""
    if m.configured and m.sent is None:
        yield Violation("connector_metadata_mismatch", "metadata, as a connector is configured", "none")
    elif not m.configured and m.sent is not None:
        yield Violation("connector_metadata_mismatch", "no metadata, as no connector is configured", m.sent)
    elif m.worker and m.received != m.sent:
        yield Violation("connector_metadata_mismatch", m.sent or "no metadata", m.received or "no metadata")


def _count(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


@rule(
    Match,
    family="connector",
    boundary="match",
    predicate="the connector offers None or 0 to (length − local hit) tokens, and True only with tokens to load",
    fields=("get_num_new_matched_tokens", "Request.num_tokens"),
    meaning="The connector claims tokens the request does not have, or announces a load of nothing.",
)
def connector_matched_tokens_invalid(m: Match) -> Iterator[Violation]:
    """Judge the answer.

    (None, either) means "ask again" and is legal. (0, True) is not: the contract forbids it, and the scheduler asserts
    that an asynchronous load has tokens.
    """
    name = "connector_matched_tokens_invalid"
    if m.matched is not None:
        if not _count(m.matched):
            yield Violation(name, "a number of tokens, or None", f"{_words(m.matched)}", request=m.request)
        elif m.matched < 0:
            yield Violation(name, "0 tokens or more", f"{m.matched} tokens", request=m.request)
        elif m.local + m.matched > m.total:
            yield Violation(
                name,
                f"at most {m.total - m.local} tokens ({m.total} in all, {m.local} local)",
                f"{m.matched} tokens",
                request=m.request,
                position=m.local,
            )
    if not isinstance(m.is_async, bool):
        yield Violation(name, "True or False for an asynchronous load", _words(m.is_async), request=m.request)
    elif m.is_async and _count(m.matched) and m.matched == 0:
        yield Violation(name, "no asynchronous load of 0 tokens", "0 tokens, asynchronously", request=m.request)


def _words(value: object) -> str:
    """An unexpected value: its type, and no more of it than fits a log line."""
    return f"{type(value).__name__} {value!r}"[:80]
