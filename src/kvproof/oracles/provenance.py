"""Provenance: whose byte is it? Every restored block must name itself, every foreign byte is traced to its owner."""

from __future__ import annotations

from kvproof.findings.model import Finding, OracleResult
from kvproof.layout import Layout
from kvproof.oracles.common import finding, outcome
from kvproof.oracles.transcript import Transcript

SOURCE = "inverse of the byte code: names read out of the observed bytes"


def provenance(layout: Layout, transcript: Transcript) -> tuple[OracleResult, list[Finding]]:
    """One finding per wrong place whose bytes name an owner; restored blocks are decoded as the positive control."""
    findings = [
        finding(
            layout, transcript, o, "provenance", "foreign_owner", "bytes of somebody else stand here",
            "follow the owner named: that is the place the connector read from or computed its address for",
        )
        for o in transcript.observations
        if o.mismatch.decoded is not None and o.mismatch.counts.get("foreign")
    ]  # fmt: skip
    if transcript.origins_wrong:
        findings.append(
            Finding(
                "provenance", "misnamed", f"{transcript.origins_wrong} restored blocks do not name themselves",
                "all", None, None, 0, "report this: byte code and ledger disagree",
            )
        )  # fmt: skip
    foreign = sum(bool(o.mismatch.counts.get("foreign")) for o in transcript.observations)
    amount = transcript.origins_checked + foreign
    result = OracleResult(
        "provenance", outcome(findings, amount), SOURCE, judged_items=amount,
        judged_resources=len(transcript.restored_bytes), findings=len(findings),
    )  # fmt: skip
    return result, findings
