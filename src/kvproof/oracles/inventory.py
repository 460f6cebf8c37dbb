"""Inventory: is every registered resource saved and restored, or declared recomputed?"""

from __future__ import annotations

from kvproof.findings.model import Finding, Location, OracleResult, Status
from kvproof.layout import Layout
from kvproof.oracles.common import outcome
from kvproof.oracles.transcript import Transcript

SOURCE = "the layout: every resource vLLM registered"


def inventory(layout: Layout, transcript: Transcript) -> tuple[OracleResult, list[Finding]]:
    """A resource of a group that must be restored, and never was, is a finding: it was left behind."""
    if transcript.errors and not transcript.restored_bytes:
        return OracleResult("inventory", Status.SKIPPED, SOURCE, reason="the engine stopped before a hit"), []
    groups = {g.id: g for g in layout.groups}
    findings = []
    for r in layout.resources:
        group = groups[r.group]
        if group.rule == "recomputed" or transcript.restored_bytes.get(r.id):
            continue
        name = r.fields[0].name if r.fields else "row"
        fields = ", ".join(f.name for f in r.fields)
        findings.append(
            Finding(
                "inventory", "never_restored", f"never restored right in any scenario ({fields})", "all",
                Location(r.group, r.layer, name, 0, 0), None, 0,
                "check that the connector registers this tensor and transfers it both ways",
            )
        )  # fmt: skip
    result = OracleResult(
        "inventory", outcome(findings, len(layout.resources)), SOURCE,
        judged_resources=len(layout.resources), judged_items=sum(1 for g in groups.values()), findings=len(findings),
    )  # fmt: skip
    return result, findings
