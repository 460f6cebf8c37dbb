"""Faults of the write plan: the runner runs other tokens than declared, or sends them to another slot."""

from __future__ import annotations

from kvproof.faults.trace.bindings import bind, newcomer
from kvproof.faults.trace.model import V1, V2, Place, TraceFault
from kvproof.faults.trace.plan import NativePlan
from kvproof.faults.trace.schedules import running
from kvproof.faults.trace.tap import Call


class RequestLeftOut(TraceFault):
    """The runner's batch ends before its last request."""

    rule = "plan_request_set_mismatch"
    engines = (V2, V1)

    def planned(self, plan: NativePlan) -> None:
        if len(plan.ids) >= 2:
            plan.leave_out_last()
            self.expected = Place(request=plan.ids[-1])


class QueryTooLong(TraceFault):
    """The last request's query ends one token too late."""

    rule = "plan_query_len_mismatch"
    engines = (V2, V1)

    def planned(self, plan: NativePlan) -> None:
        count = len(plan.ids)
        if count >= 2:
            plan.put(plan.query_start, count, int(plan.query_start[count]) + 1)
            self.expected = Place(request=plan.ids[-1])


class TokenLeftOut(TraceFault):
    """The batch says that it has one token less than was declared."""

    rule = "plan_token_count_mismatch"
    engines = (V2, V1)

    def planned(self, plan: NativePlan) -> None:
        if plan.num_tokens > len(plan.ids) >= 2:
            plan.claim_tokens(plan.num_tokens - 1)
            self.expected = Place()


class PositionSkipped(TraceFault):
    """The last token of a prompt chunk is one position too far."""

    rule = "plan_position_not_contiguous"
    engines = (V2, V1)

    def planned(self, plan: NativePlan) -> None:
        row = len(plan.ids) - 1
        token = plan.last(row)
        if token > plan.first(row):
            position = plan.position(token) + 1
            plan.put(plan.positions, token, position)
            self.expected = Place(request=plan.ids[row], position=position)


class PositionAhead(TraceFault):
    """A decoding request goes on one position further than declared."""

    rule = "plan_position_start_mismatch"
    engines = (V2, V1)

    def planned(self, plan: NativePlan) -> None:
        row = len(plan.ids) - 1
        token = plan.first(row)
        if token == plan.last(row):
            position = plan.position(token) + 1
            plan.put(plan.positions, token, position)
            self.expected = Place(request=plan.ids[row], position=position)


class _OneSlot(TraceFault):
    """Base of the faults that change one token's slot; the token is the last request's first one."""

    engines = (V2, V1)

    def wrong(self, plan: NativePlan, row: int) -> int | None:
        """The slot to write to instead, None to wait for another step."""
        raise NotImplementedError

    def planned(self, plan: NativePlan) -> None:
        row = len(plan.ids) - 1
        slot = self.wrong(plan, row)
        if slot is not None:
            token = plan.first(row)
            plan.put(plan.slots, token, slot)
            block = slot // self.stage.block_size if slot >= 0 else None
            self.expected = Place(plan.ids[row], 0, block, slot, plan.position(token))


class SlotBehindCache(_OneSlot):
    """A token's slot lies behind the end of the cache."""

    rule = "write_outside_cache"

    def wrong(self, plan: NativePlan, row: int) -> int | None:
        return len(self.stage.pool.blocks) * self.stage.block_size + 3


class SlotInNullBlock(_OneSlot):
    """A token is written to the null block."""

    rule = "null_block_write"

    def wrong(self, plan: NativePlan, row: int) -> int | None:
        return 5


class SlotMasked(_OneSlot):
    """A real token is taken for padding and not written."""

    rule = "write_slot_pad_on_real_token"

    def wrong(self, plan: NativePlan, row: int) -> int | None:
        return -1


class SlotOfAnother(_OneSlot):
    """A token of the last request is written to the slot of the first request's token."""

    rule = "write_slot_collision"

    def wrong(self, plan: NativePlan, row: int) -> int | None:
        if row == 0:
            return None
        name = plan.ids[0]
        position = plan.position(plan.first(0))
        return self.stage.slot(name, position)


class SlotInFreeBlock(_OneSlot):
    """A token is written to the right place of a wrong block, which belongs to nobody."""

    rule = "write_target_mismatch"

    def wrong(self, plan: NativePlan, row: int) -> int | None:
        size = self.stage.block_size
        return self.stage.free_block() * size + plan.position(plan.first(row)) % size


class PaddingWritten(TraceFault):
    """The slot mapping has a padding entry, and it names a slot of the first request."""

    rule = "pad_slot_not_masked"
    engines = (V2, V1)

    def planned(self, plan: NativePlan) -> None:
        block = self.stage.blocks(plan.ids[0])[0]
        slot = block * self.stage.block_size + 1
        plan.pad_slots(slot)
        self.expected = Place(None, 0, block, slot)


class ContextOverwritten(TraceFault):
    """A new request is declared to own, and writes to, a block that another one reads in this very step."""

    rule = "write_block_read_by_other"
    engines = (V2, V1)
    story = "late"
    follows = ("planned",)

    def scheduled(self, call: Call) -> None:
        new = newcomer(call)
        if new and running(call.result):
            block = self.stage.blocks(running(call.result)[0])[0]
            bind(call, ([new.block_ids[0][0], block, *new.block_ids[0][2:]],))
            self.expected = Place(new.req_id, 0, block)

    def planned(self, plan: NativePlan) -> None:
        if self.expected is None or self.expected.request not in plan.ids or self.expected.block is None:
            return
        row, size = plan.ids.index(self.expected.request), self.stage.block_size
        for token in range(plan.first(row), plan.last(row) + 1):
            if plan.position(token) // size == 1:
                plan.put(plan.slots, token, self.expected.block * size + plan.position(token) % size)


FAULTS: tuple[type[TraceFault], ...] = (
    RequestLeftOut, QueryTooLong, TokenLeftOut, PositionSkipped, PositionAhead, SlotBehindCache, SlotInNullBlock,
    SlotMasked, SlotOfAnother, SlotInFreeBlock, PaddingWritten, ContextOverwritten,
)  # fmt: skip
