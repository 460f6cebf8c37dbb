"""Faults of the binding: the blocks that are declared for a request are not, or no longer, its own."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvproof.faults.trace.model import V1, V2, Place, TraceFault
from kvproof.faults.trace.schedules import running
from kvproof.faults.trace.tap import Call


def bind(call: Call, blocks: tuple[list[int], ...]) -> None:
    """Declare other block ids for the step's last new request."""
    new = call.result.scheduled_new_reqs
    call.item(new, len(new) - 1, dataclasses.replace(new[-1], block_ids=blocks))


def newcomer(call: Call, columns: int = 2) -> Any:
    """The step's last new request, if it has at least so many blocks and computes them all."""
    new = call.result.scheduled_new_reqs
    fits = new and len(new[-1].block_ids[0]) >= columns and new[-1].num_computed_tokens == 0
    return new[-1] if fits else None


class GroupTooMany(TraceFault):
    """Block ids for two groups are declared where the cache has one."""

    rule = "bind_group_count_mismatch"

    def scheduled(self, call: Call) -> None:
        if new := newcomer(call):
            bind(call, (new.block_ids[0], [self.stage.free_block()]))
            self.expected = Place(request=new.req_id)


class BlockOutOfRange(TraceFault):
    """The last declared block of a new request lies behind the end of the cache."""

    rule = "bind_block_out_of_range"
    engines = (V2, V1)

    def scheduled(self, call: Call) -> None:
        if new := newcomer(call):
            end = len(self.stage.pool.blocks)
            blocks = [*new.block_ids[0][:-1], end]
            bind(call, (blocks,))
            self.expected = Place(new.req_id, 0, end, position=(len(blocks) - 1) * self.stage.block_size)


class NullBlockBound(TraceFault):
    """A new request is to write its first tokens into the null block."""

    rule = "bind_null_block_in_write_range"
    engines = (V2, V1)

    def scheduled(self, call: Call) -> None:
        if new := newcomer(call):
            bind(call, ([0, *new.block_ids[0][1:]],))
            self.expected = Place(new.req_id, 0, 0, position=0)


class BlockTwiceInRow(TraceFault):
    """The second block of a new request is its first one again."""

    rule = "bind_duplicate_block_in_request"

    def scheduled(self, call: Call) -> None:
        if new := newcomer(call):
            first = new.block_ids[0][0]
            bind(call, ([first, first, *new.block_ids[0][2:]],))
            self.expected = Place(new.req_id, 0, first, position=self.stage.block_size)


class LastBlockMissing(TraceFault):
    """A new request is declared without the block its last tokens belong to."""

    rule = "bind_insufficient_blocks"
    engines = (V2, V1)

    def scheduled(self, call: Call) -> None:
        if new := newcomer(call):
            blocks = new.block_ids[0][:-1]
            bind(call, (blocks,))
            self.expected = Place(new.req_id, 0, position=len(blocks) * self.stage.block_size)


class BlockOfAnother(TraceFault):
    """A new request is given the first block of one that is decoding."""

    rule = "bind_write_block_shared"
    engines = (V2, V1)
    story = "late"

    def scheduled(self, call: Call) -> None:
        new = newcomer(call)
        if new and running(call.result):
            block = self.stage.blocks(running(call.result)[0])[0]
            bind(call, ([block, *new.block_ids[0][1:]],))
            self.expected = Place(new.req_id, 0, block, position=0)


class ReleasedTooEarly(TraceFault):
    """The block a decoding request writes next has been given back to the pool."""

    rule = "used_after_release"
    engines = (V2, V1)

    def scheduled(self, call: Call) -> None:
        stage, output = self.stage, call.result
        if running(output):
            name = running(output)[-1]
            start = stage.starts(output)[name]
            block = stage.pool.blocks[stage.blocks(name)[start // stage.block_size]]
            stage.pool.free_blocks([block])
            call.later(lambda: stage.pool.touch([block]))
            self.expected = Place(name, 0, block.block_id, position=start)


class CountLost(TraceFault):
    """The pool has forgotten that somebody uses the second block of a new request."""

    rule = "bind_block_not_referenced"

    def scheduled(self, call: Call) -> None:
        if new := newcomer(call):
            block = new.block_ids[0][1]
            call.attr(self.stage.pool.blocks[block], "ref_cnt", 0)
            self.expected = Place(new.req_id, 0, block, position=self.stage.block_size)


class ZeroBehindCache(TraceFault):
    """A block behind the end of the cache is to be zeroed."""

    rule = "zero_block_invalid"

    def scheduled(self, call: Call) -> None:
        if call.result.scheduled_new_reqs:
            end = len(self.stage.pool.blocks)
            call.attr(call.result, "new_block_ids_to_zero", [*(call.result.new_block_ids_to_zero or ()), end])
            self.expected = Place(block=end)


class CopyToNullBlock(TraceFault):
    """A copy-on-write copy has the null block as its target."""

    rule = "copy_block_invalid"

    def scheduled(self, call: Call) -> None:
        from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy

        if new := newcomer(call):
            call.attr(call.result, "kv_cache_block_copies", [KVCacheBlockCopy(new.block_ids[0][0], 0)])
            self.expected = Place(block=0)


FAULTS: tuple[type[TraceFault], ...] = (
    GroupTooMany, BlockOutOfRange, NullBlockBound, BlockTwiceInRow, LastBlockMissing, BlockOfAnother, ReleasedTooEarly,
    CountLost, ZeroBehindCache, CopyToNullBlock,
)  # fmt: skip
