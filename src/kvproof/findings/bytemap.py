"""What the HTML page needs to draw the byte maps, and nothing more.

A page's runs become one string, ``R2s0F1`` = 100 restored bytes and 1 foreign one (length in base 36). Pages with the
same runs share it, so 36 healthy layers cost as much as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvproof.findings.model import ByteMap, Finding, Location, PageMap, Report
from kvproof.findings.text import printable

STATES: tuple[tuple[str, str, str], ...] = (
    ("R", "restored", "written back by the connector, right value"),
    ("C", "computed", "written by the model itself"),
    ("P", "poison", "not written since the poison; a fault only where a restore was due"),
    ("F", "foreign", "holds a value that belongs elsewhere"),
    ("S", "stray", "changed outside the target ranges"),
    ("K", "canary", "guard bytes, untouched"),
    ("N", "null", "null block or padding, owned by nobody"),
    ("U", "unknown", "not recorded"),
)
"""(letter, name, meaning) of every state; the index is its number on the page."""

MAX_RUNS = 400_000
"""Distinct runs embedded in one page; byte maps beyond it stay in report.json, those with findings come first."""

_LETTERS = {name: letter for letter, name, _ in STATES}
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def encode(page: PageMap) -> str:
    """Runs of one page as a string; a hole becomes ``unknown``, runs that meet in one state become one."""
    runs: list[tuple[str, int]] = []
    end = 0
    for start, length, state in page.runs:
        for letter, count in (("U", start - end), (_LETTERS.get(state, "U"), length)):
            if count > 0 and runs and runs[-1][0] == letter:
                runs[-1] = (letter, runs[-1][1] + count)
            elif count > 0:
                runs.append((letter, count))
        end = start + length
    return "".join(letter + _base36(count) for letter, count in runs)


def resource_at(resources: Sequence[dict[str, Any]], location: Location) -> int | None:
    """Id of the resource a location speaks of: same group and layer, and the field of that name where there is one."""
    of_layer = [r for r in resources if r["group"] == location.group and r["layer"] == location.layer]
    named = [r for r in of_layer if any(field["name"] == location.resource for field in r["fields"])]
    return next((int(r["id"]) for r in named or of_layer), None)


def short_names(layers: Sequence[str]) -> tuple[str, dict[str, str]]:
    """What layer names have in common, and each name without it.

    ``model.layers.0.attn``, ``model.layers.7.attn`` -> ``model.layers.*.attn`` and ``0``, ``7``.
    """
    parts = [layer.split(".") for layer in dict.fromkeys(layers)]
    if len(parts) < 2:
        return "", {layer: layer for layer in layers}
    # At least one part stays, so that no name becomes empty.
    room = min(map(len, parts)) - 1
    head = _common([p[:room] for p in parts])
    tail = _common([p[::-1][: room - head] for p in parts])
    pattern = ".".join([*parts[0][:head], "*", *parts[0][len(parts[0]) - tail :]])
    return pattern, {".".join(p): ".".join(p[head : len(p) - tail]) for p in parts}


def payload(report: Report, findings: Sequence[Finding]) -> dict[str, Any]:
    """JSON-ready data of the page; ``findings`` are those it lists, referred to by their index."""
    resources = report.layout.get("resources", [])
    chosen = _within_budget(report.bytemaps, findings)
    patterns: dict[str, int] = {}
    maps = [_map_json(bytemap, patterns) for bytemap in chosen]
    targets = [_target(finding, chosen, resources) for finding in findings]
    drawn = {target["map"] for target in targets if target}
    for index, data in enumerate(maps):
        data["failing"] = index in drawn
    return {
        "states": [list(state) for state in STATES],
        "groups": [_group_json(group, resources) for group in report.layout.get("groups", [])],
        "resources": {str(r["id"]): _resource_json(r) for r in resources},
        "maps": maps,
        "patterns": list(patterns),
        "targets": targets,
        "owners": _owners(report.findings, chosen, resources),
        "left_out": len(report.bytemaps) - len(chosen),
    }


def _within_budget(bytemaps: Sequence[ByteMap], findings: Sequence[Finding]) -> list[ByteMap]:
    """The byte maps to embed, those with findings first; the first one always."""
    failing = {finding.scenario for finding in findings}
    chosen: list[ByteMap] = []
    seen: set[tuple[tuple[int, int, str], ...]] = set()
    runs = 0
    for bytemap in sorted(bytemaps, key=lambda b: b.scenario not in failing):
        new = {page.runs for page in bytemap.pages} - seen
        cost = sum(map(len, new))
        if not chosen or runs + cost <= MAX_RUNS:
            chosen.append(bytemap)
            seen |= new
            runs += cost
    return chosen


def _map_json(bytemap: ByteMap, patterns: dict[str, int]) -> dict[str, Any]:
    pages: list[int] = []
    for page in bytemap.pages:
        pages += (page.resource, page.block, patterns.setdefault(encode(page), len(patterns)))
    return {
        "scenario": printable(bytemap.scenario),
        "request": printable(bytemap.request),
        "groups": {str(group): blocks for group, blocks in bytemap.groups.items()},
        "pages": pages,
    }


def _target(
    finding: Finding, bytemaps: Sequence[ByteMap], resources: Sequence[dict[str, Any]]
) -> dict[str, int] | None:
    """Where on the page a finding is shown, or None if no byte map holds it."""
    location = finding.location
    if location is None or (resource := resource_at(resources, location)) is None:
        return None
    candidates = [i for i, b in enumerate(bytemaps) if b.scenario == finding.scenario]
    same_request = [i for i in candidates if bytemaps[i].request == location.request]
    for index in same_request or candidates:
        return {
            "map": index,
            "group": location.group,
            "resource": resource,
            "block": location.block,
            "byte": location.byte,
        }
    return None


def _owners(
    findings: Sequence[Finding], bytemaps: Sequence[ByteMap], resources: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Whose bytes stand in the bytes drawn, as far as a finding knows it, listed on the page or not."""
    owners: dict[tuple[int, ...], dict[str, Any]] = {}
    for finding in findings:
        target = _target(finding, bytemaps, resources) if finding.origin and finding.location else None
        if target is None or finding.location is None:
            continue
        # A block may hold other bytes in another request of the scenario: nothing is said of those.
        if finding.location.request in (None, bytemaps[target["map"]].request):
            owners.setdefault(tuple(target.values()), {**target, "holds": printable(str(finding.origin))})
    return list(owners.values())


def _group_json(group: dict[str, Any], resources: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rows = [r for r in resources if r["group"] == group["id"]]
    layers = [r["layer"] for r in rows]
    pattern, names = short_names(layers)
    several = {layer for layer in layers if layers.count(layer) > 1}
    labels = [names[r["layer"]] + (f" {_fields(r)}" if r["layer"] in several else "") for r in rows]
    return {
        "id": group["id"],
        "kind": printable(group["kind"]),
        "rule": printable(group["rule"]),
        "window": group["window"],
        "block_size": group["block_size"],
        "pattern": printable(pattern),
        "rows": [r["id"] for r in rows],
        "labels": [printable(label) for label in labels],
    }


def _resource_json(resource: dict[str, Any]) -> dict[str, Any]:
    axes = {key: [[a["count"], a["stride"]] for a in resource[key]] for key in ("row_axes", "cell_axes")}
    return {
        "layer": printable(resource["layer"]),
        "dtype": printable(resource["dtype"]),
        "storage": resource["storage"],
        "offset": resource["offset"],
        "block_stride": resource["block_stride"],
        "page": resource["page_bytes"],
        "tokens_per_row": resource["tokens_per_row"],
        "fields": [[printable(f["name"]), f["start"], f["end"]] for f in resource["fields"]],
    } | axes


def _fields(resource: dict[str, Any]) -> str:
    return "+".join(field["name"] for field in resource["fields"]) or f"resource {resource['id']}"


def _common(parts: Sequence[Sequence[str]]) -> int:
    """Length of the common prefix."""
    length = 0
    for column in zip(*parts, strict=False):
        if len(set(column)) > 1:
            break
        length += 1
    return length


def _base36(number: int) -> str:
    digits = ""
    while number:
        number, digit = divmod(number, 36)
        digits = _DIGITS[digit] + digits
    return digits
