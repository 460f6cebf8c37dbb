"""Faults of the hand-over: what leaves the scheduler is not what reaches the model runner."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvproof.faults.trace.model import V1, V2, Place, TraceFault
from kvproof.faults.trace.schedules import running
from kvproof.faults.trace.tap import Call


class RebuiltOutput(TraceFault):
    """The executor rebuilds the output from its fields, so that whatever else was attached to it is lost."""

    rule = "handover_missing_trace"

    def handed_over(self, call: Call) -> None:
        output = call.args[0]
        if len(running(output)) == len(output.num_scheduled_tokens) > 0:
            call.item(call.args, 0, dataclasses.replace(output))
            self.expected = Place()


class OutputRepeated(TraceFault):
    """The runner is handed the last step's output once more instead of this step's."""

    rule = "handover_duplicate_step"
    _last: Any = None

    def handed_over(self, call: Call) -> None:
        output, last = call.args[0], self._last
        self._last = output
        if last is not None and running(last) and not any(last.scheduled_cached_reqs.new_block_ids):
            call.item(call.args, 0, last)
            self.expected = Place()


class OutputLost(TraceFault):
    """A step is declared and never reaches the runner."""

    rule = "handover_sequence_gap"
    engines = (V2, V1)
    story = "lost_step"
    _on_its_way = 0

    def scheduled(self, call: Call) -> None:
        del call
        self._on_its_way += 1

    def handed_over(self, call: Call) -> None:
        del call
        self._on_its_way -= 1
        if self._on_its_way:
            self.expected = Place()


class BlocksExchanged(TraceFault):
    """Between scheduler and runner two new requests are given each other's last block."""

    rule = "handover_digest_mismatch"
    engines = (V2, V1)

    def handed_over(self, call: Call) -> None:
        new = call.args[0].scheduled_new_reqs
        if len(new) >= 2:
            ends = [n.block_ids[0][-1] for n in new[:2]]
            for i, block in enumerate(reversed(ends)):
                call.item(new, i, dataclasses.replace(new[i], block_ids=([*new[i].block_ids[0][:-1], block],)))
            self.expected = Place()


class NewBecomesCached(TraceFault):
    """A request reaches the runner as one it should know already; that it was new has been lost."""

    rule = "handover_unknown_request"
    engines = (V2, V1)
    story = "late"

    def handed_over(self, call: Call) -> None:
        output = call.args[0]
        cached, new = output.scheduled_cached_reqs, output.scheduled_new_reqs
        if new and cached.req_ids:
            call.attr(output, "scheduled_new_reqs", new[:-1])
            call.attr(
                output,
                "scheduled_cached_reqs",
                dataclasses.replace(
                    cached,
                    req_ids=[*cached.req_ids, new[-1].req_id],
                    new_block_ids=[*cached.new_block_ids, new[-1].block_ids],
                    num_computed_tokens=[*cached.num_computed_tokens, new[-1].num_computed_tokens],
                    num_output_tokens=[*cached.num_output_tokens, 0],
                ),
            )
            self.expected = Place(request=new[-1].req_id)


class RowTooLong(TraceFault):
    """A new request has more blocks than the runner's block table has columns."""

    rule = "handover_row_overflow"
    engines = (V2, V1)

    def handed_over(self, call: Call) -> None:
        new = call.args[0].scheduled_new_reqs
        if new:
            columns = self.stage.table_width()
            blocks = [*new[-1].block_ids[0], *[self.stage.free_block()] * columns]
            call.item(new, len(new) - 1, dataclasses.replace(new[-1], block_ids=(blocks,)))
            self.expected = Place(request=new[-1].req_id, group=0)


class RowShared(TraceFault):
    """The runner keeps two running requests in one row of its state."""

    rule = "handover_new_overwrites_live"
    engines = (V2, V1)

    def handed_over(self, call: Call) -> None:
        names = running(call.args[0])
        if len(names) >= 2:
            rows = self.stage.state_rows()
            earlier, later = list(call.args[0].num_scheduled_tokens)[:2]
            call.item(rows, later, rows[earlier])
            self.expected = Place(request=later)


FAULTS: tuple[type[TraceFault], ...] = (
    RebuiltOutput, OutputRepeated, OutputLost, BlocksExchanged, NewBecomesCached, RowTooLong, RowShared,
)  # fmt: skip
