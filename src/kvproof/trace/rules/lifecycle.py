"""Rules of the block pool: who hands out, who gives back, and what is left when all is quiet.

Every finding of a pool call names the request whose call it was; another request that is hurt stands in the text.
The null block is not counted by anybody: vLLM touches and releases it without meaning it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvproof.trace.records import NULL_BLOCK, PoolChange, PoolState
from kvproof.trace.rules.model import Violation, rule

Mask = NDArray[np.bool_]


@rule(
    PoolChange,
    family="lifecycle",
    boundary="alloc",
    predicate="the pool hands out blocks that exist, are not the null block, and each only once in one call",
    fields=("BlockPool.get_new_blocks",),
    meaning="The pool's free list is damaged: it handed out a block that must not be handed out.",
)
def alloc_block_invalid(c: PoolChange) -> Iterator[Violation]:
    """Judge the ids themselves."""
    if c.action != "alloc":
        return
    bad = ~_real(c)
    for i in np.flatnonzero(bad):
        block = int(c.blocks[i])
        yield Violation(
            "alloc_block_invalid",
            f"a block from 1 to {c.num_blocks - 1}",
            f"block {block} (null)" if block == NULL_BLOCK else f"block {block} of {c.num_blocks} blocks",
            request=c.request,
            block=block,
        )
    blocks, times = np.unique(c.blocks[~bad], return_counts=True)
    for i in np.flatnonzero(times > 1):
        yield Violation(
            "alloc_block_invalid",
            "each block once in one call",
            f"block {blocks[i]} {times[i]} times",
            request=c.request,
            block=int(blocks[i]),
        )


@rule(
    PoolChange,
    family="lifecycle",
    boundary="alloc",
    predicate="a block that is handed out has no user",
    fields=("BlockPool.get_new_blocks", "KVCacheBlock.ref_cnt"),
    yields_to=("alloc_block_invalid",),
    meaning="The pool handed out a block that somebody still holds: two requests will write the same memory.",
)
def alloc_block_referenced(c: PoolChange) -> Iterator[Violation]:
    """Judge the count in the guard's books before the call."""
    if c.action != "alloc":
        return
    for i in _at(c, c.before, _real(c) & _true(c, c.before > 0)):
        yield Violation(
            "alloc_block_referenced",
            "0 references before it is handed out",
            f"{c.before[i]} references{_named(c.users, int(c.blocks[i]))}",
            request=c.request,
            block=int(c.blocks[i]),
        )


@rule(
    PoolChange,
    family="lifecycle",
    boundary="release",
    predicate="only references that exist are given back",
    fields=("BlockPool.free_blocks", "KVCacheBlock.ref_cnt"),
    meaning="A block was released once too often: it is free while its next user believes to own it.",
)
def release_unreferenced(c: PoolChange) -> Iterator[Violation]:
    """Judge the count before the call against how often the call gives the block back.

    A call may name a block twice when two of its users let go. ``before`` may then be counted before the call or
    before each mention; the largest of a block is the count before the call in both.
    """
    if c.action != "release":
        return
    at = _at(c, c.before, _real(c))
    blocks, place, times = np.unique(c.blocks[at], return_inverse=True, return_counts=True)
    before = np.full(len(blocks), np.iinfo(np.int64).min)
    np.maximum.at(before, place, c.before[at])
    for i in np.flatnonzero(times > before):
        yield Violation(
            "release_unreferenced",
            f"at least {times[i]} references before {times[i]} are given back",
            f"{before[i]} references",
            request=c.request,
            block=int(blocks[i]),
        )


@rule(
    PoolChange,
    family="lifecycle",
    boundary="release",
    predicate="a block becomes free only after the transfers into and out of it have ended",
    fields=("BlockPool.free_blocks", "KVConnectorOutput.finished_recving", "KVConnectorOutput.finished_sending"),
    meaning="A block went back to the pool while a connector may still write or read it.",
)
def release_block_in_flight(c: PoolChange) -> Iterator[Violation]:
    """Judge blocks that nobody refers to any more against the open transfers."""
    for i in _freed(c, c.loading):
        block = int(c.blocks[i])
        yield Violation(
            "release_block_in_flight",
            f"at least 1 reference until the transfer of request {c.loading[block]} has ended",
            f"{c.after[i]} references",
            request=c.request,
            block=block,
        )


@rule(
    PoolChange,
    family="lifecycle",
    boundary="release",
    predicate="a block becomes free only when no live request reads it any more",
    fields=("BlockPool.free_blocks", "KVCacheBlock.ref_cnt", "block_ids"),
    yields_to=("release_block_in_flight",),
    meaning="A block went back to the pool while a live request still reads it: the next owner overwrites its cache.",
)
def release_block_referenced(c: PoolChange) -> Iterator[Violation]:
    """Judge blocks that nobody refers to any more against the live block tables."""
    for i in _freed(c, c.users):
        block = int(c.blocks[i])
        yield Violation(
            "release_block_referenced",
            f"at least 1 reference while request {c.users[block]} reads it",
            f"{c.after[i]} references",
            request=c.request,
            block=block,
        )


@rule(
    PoolChange,
    family="lifecycle",
    boundary="pool",
    predicate="the pool counts as many users of a block as the guard's books",
    fields=("KVCacheBlock.ref_cnt",),
    yields_to=(
        "alloc_block_invalid",
        "alloc_block_referenced",
        "release_unreferenced",
        "release_block_in_flight",
        "release_block_referenced",
    ),
    meaning="A reference count was changed past the pool's own calls.",
)
def pool_refcount_mismatch(c: PoolChange) -> Iterator[Violation]:
    """Compare the counts after the call."""
    size = min(len(c.after), len(c.native))
    differ = _true(c, c.after[:size] != c.native[:size])
    for i in np.flatnonzero(_real(c) & differ):
        yield Violation(
            "pool_refcount_mismatch",
            f"{c.after[i]} references",
            f"{c.native[i]} references in the pool",
            request=c.request,
            block=int(c.blocks[i]),
        )


@rule(
    PoolState,
    family="lifecycle",
    boundary="pool",
    predicate="a request the scheduler has forgotten has no blocks",
    fields=("Scheduler.requests", "req_to_blocks"),
    meaning="A request has ended and its blocks were never given back: the cache shrinks with every such request.",
)
def finished_with_blocks(p: PoolState) -> Iterator[Violation]:
    """Judge what is still bound."""
    for name, count in p.leftover.items():
        if count > 0:
            yield Violation("finished_with_blocks", "0 blocks after its end", f"{count} blocks", request=name)


@rule(
    PoolState,
    family="lifecycle",
    boundary="pool",
    predicate="when no request is left, every block is free, kept on purpose, or the null block",
    fields=("BlockPool.get_num_free_blocks", "BlockPool.num_gpu_blocks"),
    skips="while a request is known, or a release or a transfer is open",
    meaning="Blocks were lost, or came back twice: the pool is not what it was before the first request.",
)
def pool_not_restored(p: PoolState) -> Iterator[Violation]:
    """Judge the sum of all blocks when all is quiet."""
    if p.idle and p.free + p.kept + 1 != p.total:
        yield Violation(
            "pool_not_restored",
            f"{p.total - 1 - p.kept} free blocks ({p.total} blocks less the null block and {p.kept} kept)",
            f"{p.free} free blocks",
        )


@rule(
    PoolState,
    family="lifecycle",
    boundary="pool",
    predicate="the prefix cache holds exactly the entries that its events announced",
    fields=("BlockPool.take_events", "BlockPool.cached_block_hash_to_block"),
    needs=("cached_by_events", "cached_in_pool"),
    skips="engines without KV-cache events",
    meaning="Whoever follows the KV-cache events believes something else to be cached than the pool does.",
)
def events_disagree_with_pool(p: PoolState) -> Iterator[Violation]:
    """Compare the number of entries, and the announced ones with those in the pool."""
    missing = p.missing_in_pool or 0
    if p.cached_by_events != p.cached_in_pool or missing:
        yield Violation(
            "events_disagree_with_pool",
            f"{p.cached_by_events} cached entries by the events, 0 of them missing in the pool",
            f"{p.cached_in_pool} cached entries in the pool, {missing} missing",
        )


def _real(c: PoolChange) -> Mask:
    """Blocks that exist and are not the null block."""
    return (c.blocks > NULL_BLOCK) & (c.blocks < c.num_blocks)


def _true(c: PoolChange, mask: Any) -> Mask:
    """``mask`` as long as ``blocks``: False where a count is missing."""
    full = np.zeros(len(c.blocks), np.bool_)
    size = min(len(mask), len(full))
    full[:size] = mask[:size]
    return full


def _at(c: PoolChange, counts: Any, mask: Mask) -> NDArray[np.intp]:
    """Places where ``mask`` holds and a count is there."""
    return np.flatnonzero(mask[: len(counts)])


def _freed(c: PoolChange, by_block: Mapping[int, str]) -> Iterator[int]:
    """One place of each released block that has no reference left and that ``by_block`` names."""
    if c.action != "release" or not by_block:
        return
    free = np.flatnonzero(_real(c) & _true(c, c.after <= 0))
    place = dict(zip(c.blocks[free].tolist(), free.tolist(), strict=True))
    for block in sorted(by_block.keys() & place.keys()):
        yield place[block]


def _named(by_block: Mapping[int, str], block: int) -> str:
    return f", one of request {by_block[block]}" if block in by_block else ""
