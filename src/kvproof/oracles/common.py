"""Shared words of the oracles: locations, origins, sentences."""

from __future__ import annotations

from kvproof.findings.model import Finding, Location, Origin, Status
from kvproof.layout import Layout, Resource
from kvproof.oracles.transcript import Observation, Transcript

Resources = dict[int, Resource]


def by_id(layout: Layout) -> Resources:
    return {r.id: r for r in layout.resources}


def location(resources: Resources, o: Observation) -> Location:
    """Where the first wrong byte of an observation stands."""
    m = o.mismatch
    if m.resource is None:
        return Location(m.group, m.layer, "padding", m.block, m.page_byte, token=o.token, request=o.request)
    name = resources[m.resource].field_at(m.row_byte)
    return Location(m.group, m.layer, name, m.block, m.page_byte, row=m.row, token=o.token, request=o.request)


def origin(layout: Layout, resources: Resources, transcript: Transcript, o: Observation) -> Origin | None:
    """Whose byte the first wrong byte is, if it names anyone."""
    decoded = o.mismatch.decoded
    if decoded is None or decoded.content not in transcript.names:
        return None
    named = transcript.names[decoded.content]
    r = resources[decoded.resource]
    group = next(g for g in layout.groups if g.id == r.group)
    row = 0 if r.tokens_per_row == 0 else named.token % group.block_size // r.tokens_per_row
    return Origin(
        r.layer, r.field_at(decoded.row_byte), named.request, named.token, named.blocks.get(r.group),
        r.page_byte(row, decoded.row_byte),
    )  # fmt: skip


def finding(
    layout: Layout,
    transcript: Transcript,
    o: Observation,
    oracle: str,
    kind: str,
    what: str,
    next_step: str,
    nbytes: int | None = None,
) -> Finding:
    """A finding about one observation: place, fact, and whose bytes stand there."""
    resources = by_id(layout)
    place = location(resources, o)
    whose = origin(layout, resources, transcript, o)
    return Finding(
        oracle, kind, what, o.scenario, place, whose,
        o.mismatch.wrong_bytes if nbytes is None else nbytes, next_step,
    )  # fmt: skip


def outcome(findings: list[Finding], amount: int) -> Status:
    """FAILED with findings, VACUOUS when nothing was judged, else PASSED."""
    if findings:
        return Status.FAILED
    return Status.PASSED if amount else Status.VACUOUS
