"""Placement: does any byte that should have been loaded hold a value that does not belong there?

Three states per byte: restored, still poison (never loaded), foreign (something else was put there).
"""

from __future__ import annotations

from kvproof.findings.model import Finding, OracleResult
from kvproof.layout import Layout
from kvproof.oracles.common import finding, outcome
from kvproof.oracles.transcript import LOADED, OPTIONAL, Transcript

SOURCE = "the byte code, computed from token prefixes"


def placement(layout: Layout, transcript: Transcript) -> tuple[OracleResult, list[Finding]]:
    """Covers every group, also rows a group's policy does not require (those may be poison, nothing else)."""
    findings = []
    for o in transcript.observations:
        if o.moment != "read" or o.region not in (LOADED, OPTIONAL):
            continue
        counts = o.mismatch.counts
        poison = counts.get("poison_target", 0)
        wrong = o.mismatch.wrong_bytes - poison - counts.get("poison_uncomputed", 0)
        if poison:
            findings.append(
                finding(
                    layout, transcript, o, "placement", "still_poison",
                    f"{poison} bytes were never loaded although the hit covers them",
                    "check that this layer and block are part of the load, and that it was finished before the read",
                    poison,
                )
            )  # fmt: skip
        if wrong:
            findings.append(
                finding(
                    layout, transcript, o, "placement", "zero" if counts.get("zero") == wrong else "foreign",
                    f"{wrong} bytes were loaded that do not belong here",
                    "compare the address arithmetic of save and load for the place named",
                    wrong,
                )
            )  # fmt: skip
    restored = sum(transcript.restored_bytes.values())
    seen = transcript.judged.get("read")
    result = OracleResult(
        "placement", outcome(findings, restored), SOURCE, restored, len(seen.blocks) if seen else 0,
        len([r for r, n in transcript.restored_bytes.items() if n]), seen.pages if seen else 0, len(findings),
    )  # fmt: skip
    return result, findings


