"""Faults of speculation: what the sampler accepts and rejects does not add up to what was drafted."""

from __future__ import annotations

from kvproof.faults.trace.model import DRAFTS, Place, TraceFault
from kvproof.faults.trace.tap import Call

IDX, SAMPLED, REJECTED = 0, 2, 3
"""Places among the arguments of postprocess_sampled."""


class _Drafts(TraceFault):
    """Base of the faults in the sampler's counts of a request that had drafts."""

    engines = (DRAFTS,)
    story = "repeating"

    def drafted(self) -> tuple[int, str, int] | None:
        """(row, request, drafts) of the last request of the batch that was given drafts in this step."""
        taps = self.stage.taps
        drafts = taps.output.scheduled_spec_decode_tokens
        rows = [i for i, name in enumerate(taps.batch.req_ids) if drafts.get(name)]
        if not rows:
            return None
        name = taps.batch.req_ids[rows[-1]]
        return rows[-1], name, len(drafts[name])


class RowLost(_Drafts):
    """The counts of accepted tokens have one row less than the batch."""

    rule = "spec_row_count_mismatch"

    def sampled(self, call: Call) -> None:
        if self.drafted():
            call.item(call.args, SAMPLED, call.args[SAMPLED][:-1])
            self.expected = Place()


class StateOfAnother(_Drafts):
    """A request's accepted tokens are booked on a state row that is not its own."""

    rule = "spec_idx_mapping_invalid"

    def sampled(self, call: Call) -> None:
        if found := self.drafted():
            row, name, _ = found
            rows = call.args[IDX].clone()
            rows[row] = (int(rows[row]) + 1) % self.stage.runner.max_num_reqs
            call.item(call.args, IDX, rows)
            self.expected = Place(request=name)


class AcceptedTooMany(_Drafts):
    """More tokens are accepted than were drafted, and one."""

    rule = "spec_accept_out_of_range"

    def sampled(self, call: Call) -> None:
        if found := self.drafted():
            row, name, drafts = found
            call.item(call.args[SAMPLED], row, drafts + 2)
            self.expected = Place(request=name)


class RejectedTooMany(_Drafts):
    """More tokens are rejected than were drafted."""

    rule = "spec_reject_out_of_range"

    def sampled(self, call: Call) -> None:
        found = self.drafted()
        if found and int(call.args[SAMPLED][found[0]]) > 0:
            row, name, drafts = found
            call.item(call.args[REJECTED], row, drafts + 1)
            self.expected = Place(request=name)


class DraftUnaccounted(_Drafts):
    """One draft is neither accepted nor rejected."""

    rule = "spec_count_not_conserved"

    def sampled(self, call: Call) -> None:
        if found := self.drafted():
            row, name, drafts = found
            call.item(call.args[SAMPLED], row, 1)
            call.item(call.args[REJECTED], row, drafts - 1)
            self.expected = Place(request=name)


FAULTS: tuple[type[TraceFault], ...] = (RowLost, StateOfAnother, AcceptedTooMany, RejectedTooMany, DraftUnaccounted)
