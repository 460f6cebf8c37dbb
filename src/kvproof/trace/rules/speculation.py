"""Rules 51–55: what the sampler accepts and rejects adds up to what was drafted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvproof.trace.records import Ints, Verification
from kvproof.trace.rules.model import Violation, rule
from kvproof.trace.rules.writes import fit

MASKED = -1
UNKNOWN = -(2**62)
"""Stands for an entry an array is too short for: spec_row_count_mismatch reports that, the others leave it alone."""

_SAMPLED = ("postprocess_sampled.num_sampled",)
_REJECTED = ("postprocess_sampled.num_rejected",)


@dataclass(slots=True)
class Rows:
    """The first ``count`` rows; ``judged`` are those that are neither masked nor missing."""

    sampled: Ints
    rejected: Ints
    drafts: Ints
    partial: NDArray[np.bool_]
    judged: NDArray[np.bool_]


def _rows(v: Verification) -> Rows:
    count = max(v.count, 0)
    count = min(count, max(len(v.ids), v.indices.size, v.num_sampled.size))
    sampled, index = fit(v.num_sampled, count, UNKNOWN), fit(v.indices, count, UNKNOWN)
    rejected = np.full(count, UNKNOWN) if v.num_rejected is None else fit(v.num_rejected, count, UNKNOWN)
    drafts = fit(v.drafts, count, UNKNOWN)
    partial = fit(v.partial, count, 0) != 0
    return Rows(sampled, rejected, drafts, partial, (index != MASKED) & (sampled != UNKNOWN))


def _name(v: Verification, i: int) -> str | None:
    return v.ids[i] if i < len(v.ids) else None


@rule(
    Verification,
    family="speculation",
    boundary="speculation",
    predicate="every array of the result has a row per request of the batch",
    fields=("postprocess_sampled.idx_mapping", *_SAMPLED, *_REJECTED, "InputBatch.num_reqs"),
    meaning="Some requests' accepted tokens are not there, or rows of two batches are mixed.",
)
def spec_row_count_mismatch(v: Verification) -> Iterator[Violation]:
    """Judge the lengths; a longer tail (captured graphs) is legal."""
    for name, array in (("idx_mapping", v.indices), ("num_sampled", v.num_sampled), ("num_rejected", v.num_rejected)):
        if array is not None and array.size < v.count:
            yield Violation("spec_row_count_mismatch", f"at least {v.count} rows", f"{array.size} rows of {name}")


@rule(
    Verification,
    family="speculation",
    boundary="speculation",
    predicate="each row updates its own request's state, or none (−1)",
    fields=("postprocess_sampled.idx_mapping", "InputBatch.idx_mapping"),
    meaning="One request's accepted tokens are booked on another request.",
)
def spec_idx_mapping_invalid(v: Verification) -> Iterator[Violation]:
    """Judge range and target of every row."""
    count = min(max(v.count, 0), v.indices.size)
    index = fit(v.indices, count)
    expected = fit(v.expected_indices, count, UNKNOWN)
    wrong = (index < 0) | (index >= v.states) | ((index != expected) & (expected != UNKNOWN))
    for i in np.flatnonzero(wrong & (index != MASKED)):
        inside = 0 <= index[i] < v.states
        yield Violation(
            "spec_idx_mapping_invalid",
            f"state row {expected[i]}, or -1" if inside else f"state row 0 to {v.states - 1}, or -1",
            f"state row {index[i]}",
            request=_name(v, int(i)),
        )


@rule(
    Verification,
    family="speculation",
    boundary="speculation",
    predicate="a request gets 0 to drafts + 1 tokens, and none while its prompt is not finished",
    fields=(*_SAMPLED, "InputBatch.num_draft_tokens_per_req", "postprocess_sampled.sampled"),
    skips="masked rows and rows behind the batch",
    meaning="More tokens are accepted than were drafted, or tokens are accepted for an unfinished prompt.",
)
def spec_accept_out_of_range(v: Verification) -> Iterator[Violation]:
    """Judge the number of tokens each request got."""
    r = _rows(v)
    high = np.where(r.drafts >= 0, np.minimum(r.drafts + 1, v.width), v.width)
    high = np.where(r.partial, 0, high)
    for i in np.flatnonzero(r.judged & ((r.sampled < 0) | (r.sampled > high))):
        yield Violation(
            "spec_accept_out_of_range", f"0 to {high[i]} tokens", f"{r.sampled[i]} tokens", request=_name(v, int(i))
        )


@rule(
    Verification,
    family="speculation",
    boundary="speculation",
    predicate="a request loses 0 to drafts tokens, and none while its prompt is not finished",
    fields=(*_REJECTED, "InputBatch.num_draft_tokens_per_req"),
    needs=("num_rejected",),
    skips="masked rows and rows behind the batch",
    meaning="The computed tokens of a request are rolled back too far, or forward.",
)
def spec_reject_out_of_range(v: Verification) -> Iterator[Violation]:
    """Judge the roll-back of each request. A row without any token also rejects the one that was not a draft."""
    r = _rows(v)
    high = np.where(r.partial, 0, np.where(r.sampled == 0, r.drafts + 1, r.drafts))
    known = r.judged & (r.rejected != UNKNOWN) & (r.drafts >= 0)
    for i in np.flatnonzero(known & ((r.rejected < 0) | (r.rejected > high))):
        yield Violation(
            "spec_reject_out_of_range",
            f"0 to {high[i]} rejected tokens",
            f"{r.rejected[i]} rejected tokens",
            request=_name(v, int(i)),
        )


@rule(
    Verification,
    family="speculation",
    boundary="speculation",
    predicate="accepted + rejected tokens = drafts + 1",
    fields=(*_SAMPLED, *_REJECTED, "InputBatch.num_draft_tokens_per_req"),
    needs=("num_rejected",),
    skips="masked rows, rows behind the batch, unfinished prompts and requests that got no token",
    yields_to=("spec_accept_out_of_range", "spec_reject_out_of_range"),
    meaning="The next step starts at a position that does not follow from what was accepted.",
)
def spec_count_not_conserved(v: Verification) -> Iterator[Violation]:
    """Judge the sum."""
    r = _rows(v)
    known = r.judged & (r.rejected != UNKNOWN) & (r.drafts >= 0) & ~r.partial & (r.sampled > 0)
    for i in np.flatnonzero(known & (r.sampled + r.rejected != r.drafts + 1)):
        yield Violation(
            "spec_count_not_conserved",
            f"{int(r.drafts[i]) + 1} tokens accepted or rejected",
            f"{r.sampled[i]} accepted and {r.rejected[i]} rejected tokens",
            request=_name(v, int(i)),
        )
