"""Byte maps for the HTML page: the blocks of one request, as they stood when they were judged."""

from __future__ import annotations

from typing import Any

from kvproof.findings.model import ByteMap, PageMap
from kvproof.layout import Layout
from kvproof.oracles.transcript import Observation, Transcript

MAX_MAPS = 6
STRAY_MOMENTS = ("after_load", "at_rest")
Run = tuple[int, int, str]


def byte_maps(layout: Layout, transcript: Transcript) -> list[ByteMap]:
    """One map per request with observations (the first ``MAX_MAPS``), or of the longest hit when all is well."""
    tables = _tables(transcript)
    chosen: list[tuple[str, str]] = []
    for o in transcript.observations:
        key = (o.scenario, o.request or "")
        if key not in chosen:
            chosen.append(key)
    if not chosen:
        best = max(transcript.loads, key=lambda load: load.external, default=None)
        if best is not None and best.external:
            chosen = [(best.scenario, best.request)]
    maps = []
    for scenario, request in chosen[:MAX_MAPS]:
        mine = [o for o in transcript.observations if (o.scenario, o.request or "") == (scenario, request)]
        maps.append(_one_map(layout, scenario, request, tables.get(request), mine, _hit(transcript, request)))
    return maps


def _tables(transcript: Transcript) -> dict[str, list[list[int]]]:
    """Request -> block tables at its first computing step."""
    tables: dict[str, list[list[int]]] = {}
    for record in transcript.records:
        for r in record["requests"]:
            tables.setdefault(r["request"], r["tables"])
    return tables


def _hit(transcript: Transcript, request: str) -> tuple[int, int]:
    for load in transcript.loads:
        if load.request == request:
            return load.local, load.local + load.external
    return 0, 0


def _one_map(
    layout: Layout, scenario: str, request: str, tables: Any, observations: list[Observation], hit: tuple[int, int]
) -> ByteMap:
    groups: dict[int, list[int]] = {g.id: list(tables[g.id]) if tables else [] for g in layout.groups}
    for o in observations:
        if o.mismatch.block not in groups[o.mismatch.group]:
            groups[o.mismatch.group].append(o.mismatch.block)
    wrong: dict[tuple[int, int], list[Run]] = {}
    for o in observations:
        key = (_resource_of(layout, o), o.mismatch.block)
        wrong.setdefault(key, []).extend(_named(run, o) for run in o.mismatch.wrong)
    pages = []
    for group in layout.groups:
        for index, block in enumerate(groups[group.id]):
            token = index * group.block_size
            state = "restored" if hit[0] <= token < hit[1] else "computed"
            if group.rule == "state":
                state = "restored" if hit[1] > hit[0] and token + group.block_size == hit[1] else "computed"
            for r in layout.group_resources(group.id):
                base: list[Run] = [(0, r.page_bytes, "null" if block == 0 else state)]
                pages.append(PageMap(r.id, block, tuple(_overlay(base, sorted(wrong.get((r.id, block), []))))))
    return ByteMap(scenario, request or "memory of nobody", groups, pages)


def _resource_of(layout: Layout, o: Observation) -> int:
    if o.mismatch.resource is not None:
        return o.mismatch.resource
    return next((r.id for r in layout.resources if r.layer == o.mismatch.layer), 0)


def _named(run: Run, o: Observation) -> Run:
    start, length, state = run
    if o.moment in STRAY_MOMENTS:
        return start, length, "stray"
    return start, length, "poison" if state.startswith("poison") else "foreign"


def _overlay(base: list[Run], wrong: list[Run]) -> list[Run]:
    """Lay the wrong runs (sorted, may touch) over one base run."""
    (start, length, state), runs, at = base[0], [], base[0][0]
    end = start + length
    for begin, count, name in wrong:
        begin, stop = max(begin, at), min(begin + count, end)
        if stop <= begin:
            continue
        if begin > at:
            runs.append((at, begin - at, state))
        runs.append((begin, stop - begin, name))
        at = stop
    if at < end:
        runs.append((at, end - at, state))
    return runs
