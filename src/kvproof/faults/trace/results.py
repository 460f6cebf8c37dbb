"""Faults of the result: what comes back belongs to other requests, other rows or another step."""

from __future__ import annotations

from typing import Any

from kvproof.faults.trace.model import DRAFTS, V1, V2, Place, TraceFault
from kvproof.faults.trace.tap import Call


class ResultsExchanged(TraceFault):
    """The results of two steps in flight come back in the wrong order."""

    rule = "result_out_of_order"
    engines = (DRAFTS,)
    follows = ("reported",)
    _owed: Any = None

    def reported(self, call: Call) -> None:
        if self.expected is not None:
            if self._owed is not None:
                call.item(call.args, 0, self._owed)
                self._owed = None
            return
        output, queue = call.args[0], self.stage.engine.core.batch_queue
        if queue and queue[-1][1].num_scheduled_tokens.keys() == output.num_scheduled_tokens.keys():
            call.item(call.args, 0, queue[-1][1])
            self._owed = output
            self.expected = Place()


class ResultNeverCame(TraceFault):
    """The result of an earlier step is still out when the next one comes back."""

    rule = "result_out_of_order"
    engines = (V2, V1)
    story = "lost_step"
    _out = 0

    def scheduled(self, call: Call) -> None:
        del call
        self._out += 1

    def reported(self, call: Call) -> None:
        del call
        self._out -= 1
        if self._out:
            self.expected = Place()


class RequestMissing(TraceFault):
    """The result leaves out its last request."""

    rule = "result_request_set_mismatch"
    engines = (V2, V1)

    def reported(self, call: Call) -> None:
        result = call.args[1]
        if len(result.req_ids) >= 2:
            self.expected = Place(request=result.req_ids[-1])
            call.attr(result, "req_ids", result.req_ids[:-1])


class RowOfAnother(TraceFault):
    """A request is led to the row of another one."""

    rule = "result_index_mismatch"
    engines = (V2, V1)

    def reported(self, call: Call) -> None:
        result = call.args[1]
        if len(result.req_ids) >= 2:
            first, second = result.req_ids[:2]
            call.item(result.req_id_to_index, second, result.req_id_to_index[first])
            self.expected = Place(request=second)


class RowTooMany(TraceFault):
    """There is one list of tokens more than there are requests."""

    rule = "result_row_count_mismatch"
    engines = (V2, V1)

    def reported(self, call: Call) -> None:
        result = call.args[1]
        if result.req_ids:
            call.attr(result, "sampled_token_ids", [*result.sampled_token_ids, [1]])
            self.expected = Place()


class TokenTooMany(TraceFault):
    """A request gets two tokens in a step that computes one."""

    rule = "result_too_many_tokens"
    engines = (V2, V1)

    def reported(self, call: Call) -> None:
        result = call.args[1]
        if result.req_ids and result.sampled_token_ids[0]:
            call.item(result.sampled_token_ids, 0, [*result.sampled_token_ids[0], 1])
            self.expected = Place(request=result.req_ids[0])


class TokenOfUnfinishedPrompt(TraceFault):
    """A token is sampled from the middle of a prompt."""

    rule = "result_token_on_partial_prefill"
    engines = (V2, V1)
    story = "chunked"

    def reported(self, call: Call) -> None:
        result = call.args[1]
        if result.req_ids:
            call.item(result.sampled_token_ids, 0, [1])
            self.expected = Place(request=result.req_ids[0])


FAULTS: tuple[type[TraceFault], ...] = (
    ResultsExchanged, ResultNeverCame, RequestMissing, RowOfAnother, RowTooMany, TokenTooMany, TokenOfUnfinishedPrompt,
)  # fmt: skip
