"""Faults of the block pool: blocks are handed out, given back or counted wrongly.

The books of the guard follow the pool's calls, so a call that was told wrongly is told right afterwards, withheld from
the pool: the faults stay, and the books of guard and pool agree again.
"""

from __future__ import annotations

from kvproof.faults.trace.model import CONTENT, OFFLOAD, V1, V2, Place, TraceFault
from kvproof.faults.trace.tap import Call


class _HandedOut(TraceFault):
    """Base of the faults in what a waiting request is handed out while another one decodes."""

    engines = (V2, V1)
    story = "late"

    def waiting(self, call: Call) -> str | None:
        """The request whose prompt these blocks are for."""
        waiting = [name for name, r in self.stage.scheduler.requests.items() if r.status.name == "WAITING"]
        return waiting[0] if len(call.result) >= 2 and waiting and self.stage.running() else None


class NullBlockHandedOut(_HandedOut):
    """The pool hands out the null block."""

    rule = "alloc_block_invalid"

    def allocated(self, call: Call) -> None:
        if name := self.waiting(call):
            stage, missed = self.stage, call.result[-1]
            call.show([*call.result[:-1], stage.pool.null_block])
            call.later(lambda: told(self, touched=[missed]))
            self.expected = Place(request=name, block=0)


class UsedBlockHandedOut(_HandedOut):
    """The pool hands out a block that a decoding request holds."""

    rule = "alloc_block_referenced"

    def allocated(self, call: Call) -> None:
        if name := self.waiting(call):
            stage, missed = self.stage, call.result[-1]
            block = stage.pool.blocks[stage.blocks(stage.running()[0])[0]]
            call.show([*call.result[:-1], block])
            call.later(lambda: told(self, touched=[missed], freed=[block]))
            self.expected = Place(request=name, block=block.block_id)


class CountTooHigh(_HandedOut):
    """A block that is handed out has two users by the pool's count."""

    rule = "pool_refcount_mismatch"

    def allocated(self, call: Call) -> None:
        if name := self.waiting(call):
            call.attr(call.result[0], "ref_cnt", call.result[0].ref_cnt + 1)
            self.expected = Place(request=name, block=call.result[0].block_id)


class ReleasedTwice(TraceFault):
    """A request that ends gives one of its blocks back twice."""

    rule = "release_unreferenced"
    engines = (V2, V1)
    story = "single"

    def released(self, call: Call) -> None:
        blocks = call.args[0]
        if len(self.stage.scheduler.requests) == 1 and blocks:
            twice = blocks[0]
            blocks.append(twice)
            call.later(lambda: told(self, touched=[twice]))
            self.expected = Place(request=next(iter(self.stage.scheduler.requests)), block=twice.block_id)


class ReleasedWhileRead(TraceFault):
    """A block of a decoding request goes back to the pool."""

    rule = "release_block_referenced"
    engines = (V2, V1)

    def handed_over(self, call: Call) -> None:
        if len(self.stage.running()) >= 2:
            early(self, call, self.stage.running()[0])


class ReleasedWhileLoaded(TraceFault):
    """A block goes back to the pool while the connector still loads into it."""

    rule = "release_block_in_flight"
    engines = (OFFLOAD, CONTENT)
    story = "offloaded"

    def handed_over(self, call: Call) -> None:
        for name, request in self.stage.scheduler.requests.items():
            if request.status.name == "WAITING_FOR_REMOTE_KVS" and self.expected is None:
                early(self, call, name)


class BlocksKeptAfterEnd(TraceFault):
    """The block managers still have blocks of a request that has ended."""

    rule = "finished_with_blocks"
    engines = (V2, V1)
    story = "single"

    def updated(self, call: Call) -> None:
        output, stage = call.args[0], self.stage
        ended = [name for name in output.num_scheduled_tokens if name not in stage.scheduler.requests]
        if ended:
            manager = stage.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
            block = stage.pool.blocks[stage.free_block()]
            manager.req_to_blocks[ended[0]] = [block]
            call.later(lambda: manager.req_to_blocks.pop(ended[0], None))
            self.expected = Place(request=ended[0])


class BlockLost(TraceFault):
    """When the last request has ended, one block is not in the free list."""

    rule = "pool_not_restored"
    engines = (V2, V1)
    story = "single"

    def updated(self, call: Call) -> None:
        queue = self.stage.pool.free_block_queue
        if not self.stage.scheduler.requests:
            call.attr(queue, "num_free_blocks", queue.num_free_blocks - 1)
            self.expected = Place()


class EntryWithoutEvent(TraceFault):
    """An entry of the prefix cache disappears and no event says so."""

    rule = "events_disagree_with_pool"
    engines = (CONTENT,)
    story = "single"

    def updated(self, call: Call) -> None:
        entries = self.stage.pool.cached_block_hash_to_block._cache
        if not self.stage.scheduler.requests and entries:
            key, value = next(iter(entries.items()))
            del entries[key]
            call.later(lambda: entries.update({key: value}))
            self.expected = Place()


class EntryUnderAnotherHash(TraceFault):
    """An entry of the prefix cache stands under another hash than the event that announced it: the counts agree."""

    rule = "events_disagree_with_pool"
    engines = (CONTENT,)
    story = "single"

    def updated(self, call: Call) -> None:
        entries = self.stage.pool.cached_block_hash_to_block._cache
        if not self.stage.scheduler.requests and entries:
            key, value = next(iter(entries.items()))
            other = bytes([key[0], *(byte ^ 1 for byte in key[1:-4]), *key[-4:]])
            entries[other] = entries.pop(key)
            call.later(lambda: (entries.pop(other), entries.update({key: value})))
            self.expected = Place()


def early(fault: TraceFault, call: Call, name: str) -> None:
    """Give the first block of ``name`` back to the pool, and take it again when the guard has looked.

    A connector may hold a reference of its own during a transfer; the block is free when that is gone too.
    """
    pool = fault.stage.pool
    block = pool.blocks[fault.stage.blocks(name)[0]]
    users = [block] * block.ref_cnt
    pool.free_blocks(users)
    call.later(lambda: pool.touch(users))
    fault.expected = Place(block=block.block_id)


def told(fault: TraceFault, touched: list[object], freed: list[object] | None = None) -> None:
    """Tell the guard what it was not told, without the pool."""
    with fault.stage.taps.withheld():
        fault.stage.pool.touch(touched)
        if freed:
            fault.stage.pool.free_blocks(freed)


FAULTS: tuple[type[TraceFault], ...] = (
    NullBlockHandedOut, UsedBlockHandedOut, CountTooHigh, ReleasedTwice, ReleasedWhileRead, ReleasedWhileLoaded,
    BlocksKeptAfterEnd, BlockLost, EntryWithoutEvent, EntryUnderAnotherHash,
)  # fmt: skip
