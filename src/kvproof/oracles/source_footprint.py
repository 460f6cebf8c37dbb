"""Source footprint: did a save read bytes that were not computed yet?

Blocks of a request that computes its own tokens are poisoned with a value of their own when they are allocated. If that
value ever comes back in a load, a save has read what nobody had written.
"""

from __future__ import annotations

from kvproof.findings.model import Finding, OracleResult
from kvproof.layout import Layout
from kvproof.oracles.common import finding, outcome
from kvproof.oracles.transcript import Transcript

SOURCE = "poison 0xFE in rows not computed yet, which no save may carry"


def source_footprint(layout: Layout, transcript: Transcript) -> tuple[OracleResult, list[Finding]]:
    """Judged: bytes that were not computed in blocks a save could read, and all restored bytes."""
    findings = [
        finding(
            layout, transcript, o, "source_footprint", "uncomputed_bytes_restored",
            f"{o.mismatch.counts['poison_uncomputed']} bytes are from rows that were not computed when they were saved",
            "save a block only after its last token is computed; with chunked prefill that is a later step",
            o.mismatch.counts["poison_uncomputed"],
        )
        for o in transcript.observations
        if o.moment == "read" and o.mismatch.counts.get("poison_uncomputed")
    ]  # fmt: skip
    restored = sum(transcript.restored_bytes.values())
    amount = min(transcript.uncomputed_bytes, restored) if not findings else 1
    result = OracleResult(
        "source_footprint", outcome(findings, amount), SOURCE, transcript.uncomputed_bytes,
        judged_resources=len(transcript.saved_bytes), judged_items=len(findings), findings=len(findings),
    )  # fmt: skip
    return result, findings
