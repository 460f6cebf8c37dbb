"""Equality: is every block that must be restored equal to what was there?"""

from __future__ import annotations

from kvproof.findings.model import Finding, Location, OracleResult
from kvproof.layout import Layout
from kvproof.oracles.common import outcome
from kvproof.oracles.transcript import LOADED, Transcript

SOURCE = "digests of the source blocks, taken through the runner's own views before the save"
NEXT = "compare the save and the load path of this layer; the placement finding of the same block names the bytes"


def equality(layout: Layout, transcript: Transcript) -> tuple[OracleResult, list[Finding]]:
    """Independent of the byte code and of our addressing: two digests of production views must agree.

    A block the byte code already found wrong was not digested again; it is counted here as unequal.
    """
    findings = []
    judged = transcript.digests
    for check in judged:
        if not check.equal:
            findings.append(
                Finding(
                    "equality", "restored_differs",
                    "restored bytes differ from the bytes that were saved, although the byte code matches",
                    check.scenario, Location(check.group, check.layer, "page", check.block, 0, request=check.request),
                    None, check.nbytes, NEXT,
                )
            )  # fmt: skip
    unequal = [o for o in transcript.observations if o.moment == "read" and o.region == LOADED]
    resources = {r.id: r for r in layout.resources}
    for o in unequal:
        m = o.mismatch
        name = resources[m.resource].field_at(m.row_byte) if m.resource is not None else "padding"
        place = Location(m.group, m.layer, name, m.block, m.page_byte, row=m.row, token=o.token, request=o.request)
        findings.append(
            Finding(
                "equality", "restored_differs",
                f"{m.wrong_bytes} bytes of this block are not what was saved",
                o.scenario, place, None, m.wrong_bytes, NEXT,
            )
        )  # fmt: skip
    nbytes = sum(c.nbytes for c in judged)
    result = OracleResult(
        "equality", outcome(findings, len(judged)), SOURCE, nbytes,
        len({(c.scenario, c.request, c.block) for c in judged}), len({c.layer for c in judged}),
        len(judged) + len(unequal), len(findings),
    )  # fmt: skip
    return result, findings
