"""Footprint: did a load or a save change any byte it had no business with?"""

from __future__ import annotations

from kvproof.findings.model import Finding, OracleResult
from kvproof.layout import Layout
from kvproof.oracles.common import finding, outcome
from kvproof.oracles.transcript import (
    CACHED,
    COMPUTED,
    FOREIGN_BLOCK,
    FREE,
    LOADED,
    NULL,
    OPTIONAL,
    PADDING,
    Transcript,
)

SOURCE = "all KV memory compared with the ledger, after loads were started and when the engine is idle"
KINDS = {
    NULL: ("null_block_written", "the null block was written; it is read as padding by everybody"),
    PADDING: ("padding_written", "padding between pages was written"),
    FREE: ("free_block_written", "a block that belongs to nobody was written"),
    CACHED: ("cached_block_rewritten", "a block that was already computed was changed"),
    COMPUTED: ("computed_block_changed", "rows of a running request were changed behind the model's back"),
    FOREIGN_BLOCK: ("other_block_written", "a block of another request, live or cached, was written"),
    LOADED: ("loaded_block_changed", "rows a load had filled were changed after they were read"),
    OPTIONAL: ("loaded_block_changed", "rows a load had filled were changed after they were read"),
}


def footprint(layout: Layout, transcript: Transcript) -> tuple[OracleResult, list[Finding]]:
    """Everything outside the rows a load must fill counts: null block, padding, free, cached and foreign blocks."""
    findings = []
    for o in transcript.observations:
        if o.moment == "read" and o.region in (LOADED, OPTIONAL):
            continue  # placement judges these
        kind, what = KINDS[o.region]
        when = {"after_load": "by a load", "read": "by a load", "at_rest": "by a save or a late load"}[o.moment]
        findings.append(
            finding(
                layout, transcript, o, "footprint", kind, f"{what} ({when}), {o.mismatch.wrong_bytes} bytes",
                "check block ids, strides and sizes of the transfers of this step",
            )
        )  # fmt: skip
    steps = transcript.judged.get("at_rest")
    loads = transcript.judged.get("after_load")
    nbytes = (steps.bytes if steps else 0) + (loads.bytes if loads else 0)
    seen = steps or loads
    result = OracleResult(
        "footprint", outcome(findings, nbytes), SOURCE, nbytes, len(seen.blocks) if seen else 0,
        len(seen.resources) if seen else 0, (steps.pages if steps else 0) + (loads.pages if loads else 0),
        len(findings),
    )  # fmt: skip
    return result, findings
