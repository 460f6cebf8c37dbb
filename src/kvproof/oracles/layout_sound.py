"""Layout: do no two block ids share a byte?

That every address of vLLM's placement is the runner's own is proved before, while the layout is read.
"""

from __future__ import annotations

from kvproof.findings.model import Finding, OracleResult, Status
from kvproof.layout import Layout
from kvproof.layout.frames import frame_families

SOURCE = "vLLM's placement (KVCacheTensor) against the runner's own views, every layer; no byte of two block ids"


def layout_sound(layout: Layout) -> tuple[OracleResult, list[Finding]]:
    """One finding when pages of different block ids overlap (public kind A08), else everything counted."""
    findings = []
    try:
        frame_families(layout)
    except ValueError as error:
        findings.append(
            Finding("layout", "blocks_overlap", str(error), "layout", next_step="compare page size and block stride")
        )
    result = OracleResult(
        "layout", Status.FAILED if findings else Status.PASSED, SOURCE, sum(s.nbytes for s in layout.storages),
        layout.num_blocks, len(layout.resources), len(layout.groups), len(findings),
    )  # fmt: skip
    return result, findings
