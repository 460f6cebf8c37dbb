"""Faults of the schedule: the SchedulerOutput contradicts itself or the step before it."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvproof.faults.trace.model import V1, V2, Place, TraceFault
from kvproof.faults.trace.tap import Call


def running(output: Any) -> list[str]:
    """Requests of the step that were there before, in its order."""
    return list(output.scheduled_cached_reqs.req_ids)


def without(cached: Any, name: str) -> Any:
    """CachedRequestData without one request."""
    keep = [i for i, other in enumerate(cached.req_ids) if other != name]
    return picked(cached, keep)


def picked(cached: Any, rows: list[int]) -> Any:
    """CachedRequestData with the rows of these numbers."""
    names = ("req_ids", "new_block_ids", "num_computed_tokens", "num_output_tokens")
    return dataclasses.replace(cached, **{name: [getattr(cached, name)[i] for i in rows] for name in names})


class TotalTooLarge(TraceFault):
    """The declared sum of tokens is one more than the requests were given."""

    rule = "sched_total_mismatch"
    engines = (V2, V1)

    def scheduled(self, call: Call) -> None:
        output = call.result
        if output.total_num_scheduled_tokens:
            call.attr(output, "total_num_scheduled_tokens", output.total_num_scheduled_tokens + 1)
            self.expected = Place()


class BudgetOverdrawn(TraceFault):
    """A request is given a whole step's budget on top of its own tokens, and the sum says so."""

    rule = "sched_budget_exceeded"

    def scheduled(self, call: Call) -> None:
        output = call.result
        if output.total_num_scheduled_tokens:
            name, more = next(iter(output.num_scheduled_tokens)), self.stage.scheduler.max_num_scheduled_tokens
            call.item(output.num_scheduled_tokens, name, output.num_scheduled_tokens[name] + more)
            call.attr(output, "total_num_scheduled_tokens", output.total_num_scheduled_tokens + more)
            self.expected = Place()


class NoTokens(TraceFault):
    """A request is part of the step and has no token in it."""

    rule = "sched_nonpositive_tokens"

    def scheduled(self, call: Call) -> None:
        output = call.result
        if running(output):
            name = running(output)[0]
            tokens = output.num_scheduled_tokens[name]
            call.item(output.num_scheduled_tokens, name, 0)
            call.attr(output, "total_num_scheduled_tokens", output.total_num_scheduled_tokens - tokens)
            self.expected = Place(request=name)


class DeclaredTwice(TraceFault):
    """A running request stands twice among the cached ones."""

    rule = "sched_duplicate_request"

    def scheduled(self, call: Call) -> None:
        cached = call.result.scheduled_cached_reqs
        if cached.req_ids:
            call.attr(call.result, "scheduled_cached_reqs", picked(cached, [*range(len(cached.req_ids)), 0]))
            self.expected = Place(request=cached.req_ids[0])


class NotDeclared(TraceFault):
    """A running request has tokens, and its entry among the cached ones is missing."""

    rule = "sched_request_undeclared"
    engines = (V2, V1)

    def scheduled(self, call: Call) -> None:
        cached = call.result.scheduled_cached_reqs
        if cached.req_ids:
            name = cached.req_ids[-1]
            call.attr(call.result, "scheduled_cached_reqs", without(cached, name))
            self.expected = Place(request=name)


class FinishedAndScheduled(TraceFault):
    """A running request is also declared as finished."""

    rule = "sched_finished_scheduled"

    def scheduled(self, call: Call) -> None:
        output = call.result
        if running(output):
            name = running(output)[0]
            call.attr(output, "finished_req_ids", {*output.finished_req_ids, name})
            self.expected = Place(request=name)


class JumpForward(TraceFault):
    """A running request is declared one token further than any step has computed."""

    rule = "sched_computed_jump_forward"
    engines = (V2, V1)

    def scheduled(self, call: Call) -> None:
        cached = call.result.scheduled_cached_reqs
        if cached.req_ids:
            computed = cached.num_computed_tokens[0]
            call.item(cached.num_computed_tokens, 0, computed + 1)
            self.expected = Place(request=cached.req_ids[0], position=computed + 1)


class OnlyDrafts(TraceFault):
    """Every token a request was given is declared to be a draft."""

    rule = "sched_draft_exceeds_scheduled"

    def scheduled(self, call: Call) -> None:
        output = call.result
        if running(output):
            name = running(output)[0]
            drafts = {**output.scheduled_spec_decode_tokens, name: [1] * output.num_scheduled_tokens[name]}
            call.attr(output, "scheduled_spec_decode_tokens", drafts)
            self.expected = Place(request=name)


FAULTS: tuple[type[TraceFault], ...] = (
    TotalTooLarge, BudgetOverdrawn, NoTokens, DeclaredTwice, NotDeclared, FinishedAndScheduled, JumpForward, OnlyDrafts,
)  # fmt: skip
