"""Hit length: do lookup, load and scheduler agree on how many tokens came from outside?"""

from __future__ import annotations

from kvproof.findings.model import Finding, OracleResult
from kvproof.layout import Layout
from kvproof.oracles.common import outcome
from kvproof.oracles.transcript import Load, Transcript

SOURCE = "scheduler's token counts; prefixes computed before; the rule declared for the connector"


def hit_length(layout: Layout, transcript: Transcript) -> tuple[OracleResult, list[Finding]]:
    """Each admission is judged against what was really computed before and, where declared, the connector's rule."""
    del layout
    findings = [f for load in transcript.loads for f in _judge(load)]
    hits = [load for load in transcript.loads if load.external]
    if not hits and not findings and transcript.loads and not transcript.errors:
        findings.append(
            Finding(
                "hit_length", "never_hit",
                f"none of {len(transcript.loads)} requests was hit, {_repeated(transcript)} repeated a prompt",
                "all", next_step="check the connector's keys between save and lookup, and its chunk size",
            )
        )  # fmt: skip
    result = OracleResult(
        "hit_length", outcome(findings, len(hits)), SOURCE, judged_items=len(transcript.loads), findings=len(findings)
    )
    return result, findings


def _repeated(transcript: Transcript) -> int:
    return sum(load.stored > 0 for load in transcript.loads)


def _judge(load: Load) -> list[Finding]:
    found = []

    def add(kind: str, what: str, step: str) -> None:
        found.append(Finding("hit_length", kind, f"{load.request}: {what}", load.scenario, next_step=step))

    total = load.local + load.external
    if load.external < 0:
        add("negative_hit", f"external hit of {load.external} tokens", "a lookup must answer 0 or more")
    if load.claimed is not None and load.claimed != load.external:
        add(
            "claim_ignored", f"lookup answered {load.claimed} tokens, scheduler used {load.external}",
            "the answer must be block aligned and not reach the prompt's end",
        )  # fmt: skip
    if total > load.stored:
        add(
            "longer_than_stored", f"hit of {total} tokens, but only {load.stored} of this prompt were ever computed",
            "cap the lookup at the number of tokens saved",
        )  # fmt: skip
    # After an asynchronous load of the whole prompt vLLM itself goes back by one token.
    if total >= load.prompt + load.asynchronous:
        add(
            "whole_prompt_hit", f"hit of {total} tokens leaves nothing of {load.prompt} to compute",
            "leave at least the last token to be computed",
        )  # fmt: skip
    if load.expected is not None and total < load.expected:
        add(
            "shorter_than_stored", f"hit of {total} tokens, {load.expected} are stored by the declared rule",
            "check the connector's alignment: a block is lost between save and lookup",
        )  # fmt: skip
    return found
