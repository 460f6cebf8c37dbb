"""Rules 18–24: what left the scheduler is what reached the worker, once, in order, and fits the worker's rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvproof.findings.text import counted
from kvproof.trace.records import Handover
from kvproof.trace.rules.model import Violation, rule


@rule(
    Handover,
    family="handover",
    boundary="handover",
    predicate="every scheduler output carries the guard's trace",
    fields=("SchedulerOutput",),
    meaning="The output comes from a scheduler that the guard does not watch: the step is judged only in the worker.",
)
def handover_missing_trace(h: Handover) -> Iterator[Violation]:
    """Judge the presence of the trace."""
    if not h.trace:
        yield Violation("handover_missing_trace", "an output with a trace", "an output without one")


@rule(
    Handover,
    family="handover",
    boundary="handover",
    predicate="a worker executes each step at most once, and never an older one after a newer one",
    fields=("SchedulerOutput",),
    skips="outputs without a trace, and a worker's first step",
    meaning="The worker was handed a step that it has already executed or passed.",
)
def handover_duplicate_step(h: Handover) -> Iterator[Violation]:
    """Judge the sequence number against the worker's last one."""
    if h.trace and h.step is not None and h.previous is not None and h.step <= h.previous:
        yield Violation("handover_duplicate_step", f"step {h.previous + 1}, after step {h.previous}", f"step {h.step}")


@rule(
    Handover,
    family="handover",
    boundary="handover",
    predicate="a worker executes the scheduler's steps without a gap",
    fields=("SchedulerOutput",),
    skips="outputs without a trace, and a worker's first step",
    meaning="Steps that the scheduler declared never reached this worker, so its block tables miss their block ids.",
)
def handover_sequence_gap(h: Handover) -> Iterator[Violation]:
    """Judge the sequence number against the worker's last one."""
    if h.trace and h.step is not None and h.previous is not None and h.step > h.previous + 1:
        yield Violation(
            "handover_sequence_gap",
            f"step {h.previous + 1}, after step {h.previous}",
            f"step {h.step}, {counted(h.step - h.previous - 1, 'step')} missing",
        )


@rule(
    Handover,
    family="handover",
    boundary="handover",
    predicate="token counts and block deltas are the same on both sides",
    fields=(
        "num_scheduled_tokens",
        "scheduled_new_reqs.block_ids",
        "scheduled_cached_reqs.new_block_ids",
    ),
    needs=("digest_sent", "digest_found"),
    skips="outputs without a trace",
    meaning="The step's token counts or block ids changed between scheduler and worker.",
)
def handover_digest_mismatch(h: Handover) -> Iterator[Violation]:
    """Compare the checksum made at the scheduler with one made of what arrived."""
    if h.digest_sent is not None and h.digest_found is not None and h.digest_sent != h.digest_found:
        yield Violation(
            "handover_digest_mismatch",
            f"digest {h.digest_sent:#010x} of token counts and block ids",
            f"digest {h.digest_found:#010x}",
        )


@rule(
    Handover,
    family="handover",
    boundary="handover",
    predicate="a request reaches a worker as cached only after it was given to that worker as new",
    fields=("scheduled_cached_reqs.req_ids",),
    meaning="The worker is to continue a request that it does not know, so it has no block table for it.",
)
def handover_unknown_request(h: Handover) -> Iterator[Violation]:
    """List the cached ids this worker was never given."""
    for name in h.unknown:
        yield Violation(
            "handover_unknown_request", "a request this worker was given before", "an unknown request", request=name
        )


@rule(
    Handover,
    family="handover",
    boundary="handover",
    predicate="a request's block ids fit into its row of the worker's block table",
    fields=("block_ids", "new_block_ids", "BlockTables.block_tables"),
    meaning="The scheduler declares more blocks than the worker's block table has columns for.",
)
def handover_row_overflow(h: Handover) -> Iterator[Violation]:
    """Judge the needed columns against those there are."""
    for name, group, needed, there in h.overflow:
        yield Violation(
            "handover_row_overflow",
            f"at most {there} blocks in one row",
            f"{needed} blocks",
            request=name,
            group=int(group),
        )


@rule(
    Handover,
    family="handover",
    boundary="handover",
    predicate="each scheduled request has a request-state row of its own",
    fields=("num_scheduled_tokens", "req_states.req_id_to_index"),
    needs=("rows",),
    skips="requests without a row",
    meaning="Two requests of the step share one row of the worker, so one writes through the other's block table.",
)
def handover_new_overwrites_live(h: Handover) -> Iterator[Violation]:
    """Find rows that stand for two scheduled ids; the later one is named."""
    if h.rows is None:
        return
    order = np.argsort(h.rows, kind="stable")
    rows = h.rows[order]
    for i in np.flatnonzero((rows[1:] == rows[:-1]) & (rows[1:] >= 0)):
        earlier, later = _name(h, int(order[i])), _name(h, int(order[i + 1]))
        yield Violation(
            "handover_new_overwrites_live",
            f"a row of its own, beside request {earlier}",
            f"row {rows[i]}, the row of request {earlier}",
            request=later,
        )


def _name(h: Handover, i: int) -> str:
    return h.ids[i] if i < len(h.ids) else "?"
