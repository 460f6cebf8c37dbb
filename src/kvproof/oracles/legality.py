"""Legality: does every address the connector uses lie in blocks it may touch?"""

from __future__ import annotations

from kvproof.findings.model import Finding, Location, OracleResult, Status
from kvproof.layout import Layout
from kvproof.oracles.common import outcome
from kvproof.oracles.transcript import Claim, Transcript

SOURCE = "vLLM's block tables and tensors"


def legality(layout: Layout, transcript: Transcript) -> tuple[OracleResult, list[Finding]]:
    """Loads may write blocks of requests that wait for them, saves may read blocks of requests; addresses in no page
    were not executed. Skipped when the connector's accesses cannot be seen (compiled code, a thread of its own)."""
    findings = []
    for claim in transcript.claims:
        illegal = sorted(set(claim.blocks) - set(claim.allowed))
        verb = "writes" if claim.direction == "load" else "reads"
        if illegal:
            findings.append(
                Finding(
                    "legality", "block_not_allowed",
                    f"a {claim.direction} {verb} block{'s' if len(illegal) > 1 else ''} {illegal}, allowed are "
                    f"{list(claim.allowed)}",
                    claim.scenario, _place(layout, claim, illegal[0]), None, 0,
                    "compare the block ids in the connector's metadata with vLLM's table",
                )
            )  # fmt: skip
        if claim.outside or claim.crossing:
            findings.append(
                Finding(
                    "legality", "address_outside_page",
                    f"a {claim.direction} {verb} {claim.outside} addresses in no page and {claim.crossing} ranges that "
                    f"leave their page; first: {claim.first_illegal or 'in a torch operation'}",
                    claim.scenario, None, None, 0, "check stride and size used for this tensor against the layout",
                )
            )  # fmt: skip
    addresses = sum(c.addresses for c in transcript.claims)
    nbytes = sum(c.nbytes for c in transcript.claims)
    directions = {c.direction for c in transcript.claims}
    if directions != {"load", "save"}:
        missing = " and ".join(sorted({"load", "save"} - directions))
        return (
            OracleResult(
                "legality", Status.FAILED if findings else Status.SKIPPED, SOURCE, nbytes, judged_items=addresses,
                findings=len(findings),
                reason=f"no {missing} of this connector could be seen: "
                "it copies in compiled code or a thread of its own",
            ),
            findings,
        )  # fmt: skip
    blocks = {b for c in transcript.claims for b in c.blocks}
    return (
        OracleResult(
            "legality", outcome(findings, addresses), SOURCE, nbytes, len(blocks), 0, addresses, len(findings)
        ),
        findings,
    )


def _place(layout: Layout, claim: Claim, block: int) -> Location | None:
    """Where the connector first touched ``block``, by the first resource whose page holds that byte."""
    storage, byte = claim.starts.get(block, (-1, 0))
    for r in layout.resources:
        page_byte = byte - r.offset - block * r.block_stride
        if r.storage == storage and 0 <= page_byte < r.page_bytes:
            located = r.locate(page_byte)
            name = "padding" if located is None else r.field_at(located[1])
            return Location(r.group, r.layer, name, block, page_byte)
    return None
