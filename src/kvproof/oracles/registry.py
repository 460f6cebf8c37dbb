"""The oracles, each a plain function; :func:`judge` runs them all over one transcript."""

from __future__ import annotations

from collections.abc import Callable

from kvproof.findings.model import Finding, OracleResult
from kvproof.layout import Layout
from kvproof.oracles.equality import equality
from kvproof.oracles.footprint import footprint
from kvproof.oracles.hit_length import hit_length
from kvproof.oracles.inventory import inventory
from kvproof.oracles.legality import legality
from kvproof.oracles.lifecycle import lifecycle
from kvproof.oracles.placement import placement
from kvproof.oracles.provenance import provenance
from kvproof.oracles.source_footprint import source_footprint
from kvproof.oracles.transcript import Transcript

Oracle = Callable[[Layout, Transcript], tuple[OracleResult, list[Finding]]]

ORACLES: dict[str, Oracle] = {
    "equality": equality,
    "placement": placement,
    "provenance": provenance,
    "legality": legality,
    "footprint": footprint,
    "source_footprint": source_footprint,
    "hit_length": hit_length,
    "inventory": inventory,
    "lifecycle": lifecycle,
}


def judge(layout: Layout, transcript: Transcript) -> tuple[list[OracleResult], list[Finding]]:
    """Run every oracle. A passed one that judged nothing becomes VACUOUS."""
    results, findings = [], []
    for oracle in ORACLES.values():
        result, found = oracle(layout, transcript)
        results.append(result)
        findings += found
    return results, findings


