"""Rules 64–69: the result that comes back belongs to the step that was asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from numbers import Integral

from kvproof.trace.records import Result
from kvproof.trace.rules.model import Violation, rule


def _row(r: Result, name: str) -> int | None:
    """The row the runner gives a request, None unless it is one of the reported rows."""
    row = r.index.get(name)
    return int(row) if isinstance(row, Integral) and 0 <= row < len(r.reported) else None


def _tokens(r: Result, name: str) -> int | None:
    """Tokens generated for a request that is still known, None where its row or count is missing."""
    row = _row(r, name)
    if r.counts is None or row is None or row >= len(r.counts) or name not in r.known:
        return None
    return int(r.counts[row])


@rule(
    Result,
    family="result",
    boundary="result",
    predicate="results come back in the order of their steps",
    fields=("update_from_output.scheduler_output", "update_from_output.model_runner_output"),
    needs=("awaited",),
    meaning="A step's tokens are booked on another step.",
)
def result_out_of_order(r: Result) -> Iterator[Violation]:
    """Judge the step against the oldest one without a result."""
    if r.step != r.awaited:
        yield Violation("result_out_of_order", f"the result of step {r.awaited}", f"the result of step {r.step}")


@rule(
    Result,
    family="result",
    boundary="result",
    predicate="the result reports exactly the scheduled requests, each once",
    fields=("ModelRunnerOutput.req_ids", "num_scheduled_tokens"),
    skips="requests that were scheduled without a token; what became of the request meanwhile does not matter",
    meaning="A request's result is missing, or one arrives for a request that was not run.",
)
def result_request_set_mismatch(r: Result) -> Iterator[Violation]:
    """Judge the ids."""
    rows = Counter(r.reported)
    for name, (tokens, _, _) in r.scheduled.items():
        if tokens > 0 and name not in rows:
            yield Violation("result_request_set_mismatch", f"a result for {tokens} tokens", "none", request=name)
    for name, count in rows.items():
        if name not in r.scheduled:
            yield Violation(
                "result_request_set_mismatch", "no result, as nothing was scheduled", f"{count} rows", request=name
            )
        elif count > 1:
            yield Violation("result_request_set_mismatch", "1 row", f"{count} rows", request=name)


@rule(
    Result,
    family="result",
    boundary="result",
    predicate="req_id_to_index leads each scheduled request to the row that carries its id",
    fields=("ModelRunnerOutput.req_id_to_index", "ModelRunnerOutput.req_ids"),
    skips="requests without a reported row",
    yields_to=("result_request_set_mismatch",),
    meaning="A request gets the tokens of another request.",
)
def result_index_mismatch(r: Result) -> Iterator[Violation]:
    """Judge the index, range first."""
    reported = set(r.reported)
    for name in r.scheduled:
        if name not in reported:
            continue
        row = _row(r, name)
        if row is None:
            yield Violation(
                "result_index_mismatch",
                f"a row from 0 to {len(r.reported) - 1}",
                f"row {r.index[name]}" if name in r.index else "no row",
                request=name,
            )
        elif r.reported[row] != name:
            yield Violation(
                "result_index_mismatch",
                f"row {r.reported.index(name)}",
                f"row {row}, which is request {r.reported[row]}'s",
                request=name,
            )


@rule(
    Result,
    family="result",
    boundary="result",
    predicate="there is a list of generated tokens per reported request",
    fields=("ModelRunnerOutput.sampled_token_ids", "ModelRunnerOutput.req_ids"),
    needs=("counts",),
    skips="results without tokens: pooling, or a rank that does not sample",
    meaning="Tokens are missing, or rows of two batches are mixed.",
)
def result_row_count_mismatch(r: Result) -> Iterator[Violation]:
    """Judge the number of rows."""
    assert r.counts is not None
    if len(r.counts) != len(r.reported):
        yield Violation("result_row_count_mismatch", f"{len(r.reported)} rows of tokens", f"{len(r.counts)} rows")


@rule(
    Result,
    family="result",
    boundary="result",
    predicate="a request gets at most its accepted drafts and the sampled token",
    fields=("ModelRunnerOutput.sampled_token_ids", "scheduled_spec_decode_tokens"),
    needs=("counts",),
    skips="requests that are no longer known, unfinished prompts (result_token_on_partial_prefill)",
    yields_to=("result_request_set_mismatch", "result_index_mismatch"),
    meaning="A request gets tokens that no position of this step can have produced.",
)
def result_too_many_tokens(r: Result) -> Iterator[Violation]:
    """Judge the number of tokens per request."""
    for name, (_, drafts, partial) in r.scheduled.items():
        tokens = _tokens(r, name)
        if tokens is not None and not partial and tokens > drafts + r.sampled_per_step:
            yield Violation(
                "result_too_many_tokens",
                f"at most {drafts + r.sampled_per_step} tokens ({drafts} drafts)",
                f"{tokens} tokens",
                request=name,
            )


@rule(
    Result,
    family="result",
    boundary="result",
    predicate="a prefill chunk that is not the last one generates nothing",
    fields=("ModelRunnerOutput.sampled_token_ids", "num_scheduled_tokens", "num_computed_tokens"),
    needs=("counts",),
    skips="requests that are no longer known",
    yields_to=("result_request_set_mismatch", "result_index_mismatch"),
    meaning="A token was sampled from the middle of a prompt.",
)
def result_token_on_partial_prefill(r: Result) -> Iterator[Violation]:
    """Judge requests whose prompt is not finished in this step."""
    for name, (_, _, partial) in r.scheduled.items():
        tokens = _tokens(r, name) if partial else None
        if tokens is not None and tokens > 0:
            yield Violation(
                "result_token_on_partial_prefill", "0 tokens for an unfinished prompt", f"{tokens} tokens", request=name
            )
