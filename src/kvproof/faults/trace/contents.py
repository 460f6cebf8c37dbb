"""Faults of the content: every plan agrees, and the bytes in the cache are somebody else's or have changed."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvproof.faults.trace.model import CONTENT, Place, TraceFault
from kvproof.faults.trace.plan import NativePlan
from kvproof.faults.trace.tap import Call


class PrefixOfAnother(TraceFault):
    """A prefix hit is given a block that holds another request's tokens, consistently for scheduler and runner.

    It is the one fault that stays: the runner reads the wrong block, as it would in production.
    """

    rule = "content_stale_reference"
    engines = (CONTENT,)
    story = "shared"

    def scheduled(self, call: Call) -> None:
        new, running = call.result.scheduled_new_reqs, self.stage.running()
        if new and new[-1].num_computed_tokens >= self.stage.block_size and len(running) >= 2:
            block = self.stage.blocks(next(name for name in running if name != new[-1].req_id))[0]
            new[-1] = dataclasses.replace(new[-1], block_ids=([block, *new[-1].block_ids[0][1:]],))
            self.expected = Place(new[-1].req_id, 0, block)


class ByteFlipped(TraceFault):
    """Between two steps a byte of a block that both read changes."""

    rule = "content_changed"
    engines = (CONTENT,)

    def planned(self, plan: NativePlan) -> None:
        row = len(plan.ids) - 1
        # Its first block must have been read by a step before this one: that is when checksums are taken.
        if plan.first(row) < plan.last(row) or plan.position(plan.first(row)) < 48:
            return
        block = self.stage.blocks(plan.ids[row])[0]
        for layer in self.stage.runner.kv_caches:
            page = self.block_of(layer, block)
            plan.put(page, 3, page[3] + 1)
        self.expected = Place(group=0, block=block)

    def block_of(self, layer: Any, block: int) -> Any:
        """The numbers of one block of a layer's cache, flat, in place."""
        axis = list(layer.shape).index(len(self.stage.pool.blocks))
        return layer.select(axis, block).view(-1)


FAULTS: tuple[type[TraceFault], ...] = (PrefixOfAnother, ByteFlipped)
