"""Lifecycle: does every scenario end? An idle scheduler, no block held back, no exception on the way."""

from __future__ import annotations

from kvproof.findings.model import Finding, OracleResult
from kvproof.layout import Layout
from kvproof.oracles.common import outcome
from kvproof.oracles.transcript import Transcript

SOURCE = "vLLM's engine: requests finish, the scheduler is idle, reset_prefix_cache answers True"


def lifecycle(layout: Layout, transcript: Transcript) -> tuple[OracleResult, list[Finding]]:
    """An exception out of a connector hook, a request that never finishes, and blocks never released are findings."""
    del layout
    findings = [
        Finding(
            "lifecycle", "engine_stopped", f"the engine stopped in {scenario}: {error}", scenario,
            next_step="read log.txt around this scenario; no later scenario was run",
        )
        for scenario, error in transcript.errors
    ]  # fmt: skip
    amount = len(transcript.loads)
    result = OracleResult(
        "lifecycle", outcome(findings, amount), SOURCE, judged_items=amount, findings=len(findings)
    )
    return result, findings
