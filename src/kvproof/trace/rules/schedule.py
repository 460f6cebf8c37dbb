"""Rules 1–8: the scheduler's numbers agree with each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from kvproof.trace.records import Schedule
from kvproof.trace.rules.model import Violation, rule


@rule(
    Schedule,
    family="schedule",
    boundary="bind",
    predicate="total_num_scheduled_tokens equals the sum over num_scheduled_tokens",
    fields=("total_num_scheduled_tokens", "num_scheduled_tokens"),
    meaning="The step's declared token count does not match what its requests were given.",
)
def sched_total_mismatch(s: Schedule) -> Iterator[Violation]:
    """Judge the declared sum."""
    total = int(s.tokens.sum())
    if s.total != total:
        yield Violation("sched_total_mismatch", f"{total} tokens in total", f"{s.total} tokens")


@rule(
    Schedule,
    family="schedule",
    boundary="bind",
    predicate="the sum over num_scheduled_tokens is at most the scheduler's token budget for one step",
    fields=("num_scheduled_tokens", "scheduler_config.max_num_scheduled_tokens"),
    needs=("budget",),
    skips="schedulers that show no budget",
    meaning="The step holds more tokens than the scheduler may give out, and than the runner's buffers are made for.",
)
def sched_budget_exceeded(s: Schedule) -> Iterator[Violation]:
    """Judge the real sum: a wrong declared sum is ``sched_total_mismatch``."""
    total = int(s.tokens.sum())
    if s.budget is not None and total > s.budget:
        yield Violation("sched_budget_exceeded", f"at most {s.budget} tokens in one step", f"{total} tokens")


@rule(
    Schedule,
    family="schedule",
    boundary="bind",
    predicate="every scheduled request has at least one token",
    fields=("num_scheduled_tokens",),
    meaning="A request is part of the step without a token to compute.",
)
def sched_nonpositive_tokens(s: Schedule) -> Iterator[Violation]:
    """Judge each request's share. A step without any request is legal."""
    for i in np.flatnonzero(s.tokens <= 0):
        yield Violation(
            "sched_nonpositive_tokens", "at least 1 scheduled token", f"{s.tokens[i]} tokens", request=s.ids[i]
        )


@rule(
    Schedule,
    family="schedule",
    boundary="bind",
    predicate="a request is declared once: as new or as cached",
    fields=("scheduled_new_reqs.req_id", "scheduled_cached_reqs.req_ids"),
    meaning="The step declares one request twice, so a worker applies its block ids twice.",
)
def sched_duplicate_request(s: Schedule) -> Iterator[Violation]:
    """Count the declarations; the loop runs only when some id repeats."""
    if len(set(s.declared)) == len(s.declared):
        return
    for name, times in Counter(s.declared).items():
        if times > 1:
            yield Violation("sched_duplicate_request", "1 declaration", f"{times} declarations", request=name)


@rule(
    Schedule,
    family="schedule",
    boundary="bind",
    predicate="every scheduled request is declared as new or cached, with its computed tokens",
    fields=(
        "num_scheduled_tokens",
        "scheduled_new_reqs.req_id",
        "scheduled_cached_reqs.req_ids",
        "num_computed_tokens",
    ),
    meaning="A request was given tokens, but the step does not say where it stands or which blocks it has.",
)
def sched_request_undeclared(s: Schedule) -> Iterator[Violation]:
    """Judge by membership and by the start, which is −1 for an id without a declaration."""
    missing = set(s.ids).difference(s.declared)
    bad = s.start < 0
    if missing:
        bad = bad | np.fromiter((name in missing for name in s.ids), np.bool_, len(s.ids))
    for i in np.flatnonzero(bad):
        name = s.ids[i]
        yield Violation(
            "sched_request_undeclared",
            "a declaration as new or cached with at least 0 computed tokens",
            "no declaration" if name in missing else f"{s.start[i]} computed tokens",
            request=name,
        )


@rule(
    Schedule,
    family="schedule",
    boundary="bind",
    predicate="a request that has finished is scheduled only when it is declared as new again",
    fields=("finished_req_ids", "num_scheduled_tokens", "scheduled_new_reqs.req_id"),
    skips="an id that was aborted and submitted again as new",
    meaning="The scheduler gives tokens to a request whose blocks it has already returned to the pool.",
)
def sched_finished_scheduled(s: Schedule) -> Iterator[Violation]:
    """Judge the overlap of finished and scheduled ids."""
    if s.finished.isdisjoint(s.index):
        return
    for name in s.ids:
        if name in s.finished and name not in s.new:
            yield Violation(
                "sched_finished_scheduled",
                "0 tokens for a finished request",
                f"{s.tokens[s.index[name]]} tokens",
                request=name,
            )


@rule(
    Schedule,
    family="schedule",
    boundary="bind",
    predicate="a running request starts at most where its last step ended",
    fields=("scheduled_cached_reqs.num_computed_tokens", "num_scheduled_tokens"),
    skips="new and resumed requests, and requests whose last step was not seen",
    meaning="The scheduler claims tokens as computed that no step has computed.",
)
def sched_computed_jump_forward(s: Schedule) -> Iterator[Violation]:
    """Judge the declared start against the guard's memory of the last step. Rejected drafts may lower it."""
    for i in np.flatnonzero((s.previous_end >= 0) & (s.start > s.previous_end)):
        yield Violation(
            "sched_computed_jump_forward",
            f"at most {s.previous_end[i]} computed tokens",
            f"{s.start[i]} computed tokens",
            request=s.ids[i],
            position=int(s.start[i]),
        )


@rule(
    Schedule,
    family="schedule",
    boundary="bind",
    predicate="a request's draft tokens are fewer than its scheduled tokens",
    fields=("scheduled_spec_decode_tokens", "num_scheduled_tokens"),
    skips="requests without drafts",
    yields_to=("sched_nonpositive_tokens",),
    meaning="A request is to verify more drafts than its share of the step has room for.",
)
def sched_draft_exceeds_scheduled(s: Schedule) -> Iterator[Violation]:
    """Judge the room for drafts: at least one scheduled token is not a draft."""
    for i in np.flatnonzero((s.drafts > 0) & (s.drafts >= s.tokens)):
        yield Violation(
            "sched_draft_exceeds_scheduled",
            f"fewer than {s.tokens[i]} draft tokens, the scheduled ones",
            f"{s.drafts[i]} draft tokens",
            request=s.ids[i],
        )
