from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import accumulate

import pytest
import report_fakes as fakes
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproof.findings import bytemap
from kvproof.findings.bytemap import encode, payload, resource_at, short_names
from kvproof.findings.model import ByteMap, Location, PageMap

NAMES = {letter: name for letter, name, _ in bytemap.STATES}


def decode(text: str) -> list[tuple[int, int, str]]:
    """Inverse of encode, as the page's script does it."""
    runs = [(int(digits, 36), NAMES[letter]) for letter, digits in re.findall(r"([A-Z])([0-9a-z]+)", text)]
    starts = [0, *accumulate(length for length, _ in runs)]
    return [(start, length, state) for start, (length, state) in zip(starts, runs, strict=False)]


def per_byte(runs):
    return [state for _, length, state in runs for _ in range(length)]


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 5000), st.sampled_from(sorted(NAMES.values())))))
def test_every_byte_survives_the_encoding(pieces):
    starts = [0, *accumulate(length for length, _ in pieces)]
    runs = tuple((start, length, state) for start, (length, state) in zip(starts, pieces, strict=False))
    assert per_byte(decode(encode(PageMap(0, 0, runs)))) == per_byte(runs)


def test_runs_that_meet_become_one_and_holes_are_unknown():
    runs = ((0, 10, "restored"), (10, 5, "restored"), (20, 1, "foreign"), (21, 1, "a state of the future"))
    assert decode(encode(PageMap(0, 0, runs))) == [
        (0, 15, "restored"),
        (15, 5, "unknown"),
        (20, 1, "foreign"),
        (21, 1, "unknown"),
    ]


def test_pages_alike_share_one_pattern():
    report = fakes.passing()
    data = payload(report, [])
    assert len(data["patterns"]) == 2
    assert len(data["maps"][0]["pages"]) == 3 * 36 * 8
    assert data["groups"][0]["labels"] == [str(i) for i in range(36)]
    assert data["groups"][0]["pattern"] == "model.layers.*.self_attn.attn"


def test_findings_point_at_their_cell():
    report = fakes.failing()
    data = payload(report, report.findings)
    assert data["targets"] == [
        {"map": 0, "group": 0, "resource": 9, "block": 14, "byte": 256},
        {"map": 0, "group": 0, "resource": 20, "block": 11, "byte": 4097},
    ]
    # The scenario with findings comes first though it ran second.
    assert [(m["scenario"], m["failing"]) for m in data["maps"]] == [
        ("bulk/8 blocks", True),
        ("layerwise/8 blocks", False),
    ]


def test_owners_are_known_where_a_finding_names_them_listed_or_not():
    report = fakes.failing()
    owned = report.findings[0]
    owner = {"map": 0, "group": 0, "resource": 9, "block": 14, "byte": 256,
             "holds": "model.layers.9.self_attn.attn K block 14 byte 0 (token 0 of A)"}  # fmt: skip
    assert payload(report, report.findings)["owners"] == [owner]
    # Placement and provenance name one owner: it is told once. The page may list neither.
    report.findings = [owned, replace(owned, oracle="provenance")]
    assert payload(report, [])["owners"] == [owner | {"map": 1}]
    # The same block in another request may hold something else.
    report.findings = [replace(owned, location=replace(owned.location, request="Z"))]
    assert payload(report, report.findings)["owners"] == []


@pytest.mark.parametrize("change", [{"layer": "elsewhere"}, {"group": 7}])
def test_a_finding_without_a_page_has_no_target(change):
    report = fakes.failing()
    location = Location(**{**report.findings[0].location.__dict__, **change})
    findings = [type(report.findings[0])("placement", "foreign", "x", "bulk/8 blocks", location)]
    assert payload(report, findings)["targets"] == [None]


def test_a_finding_of_another_request_still_finds_its_scenario():
    report = fakes.failing()
    report.findings[0] = type(report.findings[0])(
        "placement",
        "foreign",
        "x",
        "bulk/8 blocks",
        Location(0, "model.layers.3.self_attn.attn", "K", 5, 0, request="Z"),
    )
    assert payload(report, report.findings)["targets"][0]["map"] == 0


def test_the_resource_of_a_layer_with_two_is_found_by_its_field():
    base = {"group": 0, "layer": "a"}
    resources = [
        base | {"id": 4, "fields": [{"name": "conv"}]},
        base | {"id": 5, "fields": [{"name": "ssm"}]},
    ]
    assert resource_at(resources, Location(0, "a", "ssm", 1, 0)) == 5
    assert resource_at(resources, Location(0, "a", "state", 1, 0)) == 4
    assert resource_at(resources, Location(1, "a", "ssm", 1, 0)) is None


@pytest.mark.parametrize(
    ("layers", "pattern", "short"),
    [
        (["m.layers.0.attn", "m.layers.10.attn"], "m.layers.*.attn", ["0", "10"]),
        (["m.layers.0.attn"], "", ["m.layers.0.attn"]),
        (["a", "b"], "*", ["a", "b"]),
        (["x.a", "x.a.b"], "x.*", ["a", "a.b"]),
        (["m.0.attn", "m.0.mixer"], "m.0.*", ["attn", "mixer"]),
    ],
)
def test_short_names(layers, pattern, short):
    assert short_names(layers) == (pattern, dict(zip(layers, short, strict=True)))


@settings(max_examples=25)
@given(st.lists(st.text(alphabet="ab.", min_size=1, max_size=8), min_size=1, max_size=5, unique=True))
def test_short_names_stay_distinct(layers):
    _, names = short_names(layers)
    assert set(names) == set(layers)
    assert len(set(names.values())) == len(layers)


def test_byte_maps_beyond_the_budget_are_left_out_healthy_ones_first(monkeypatch):
    report = fakes.failing()
    report.bytemaps += [ByteMap(f"extra {i}", "B", {0: [1]}, [PageMap(0, 1, fakes.whole(100 + i))]) for i in range(3)]
    monkeypatch.setattr(bytemap, "MAX_RUNS", 2 + 256 + 3 + 8)
    data = payload(report, report.findings)
    assert data["maps"][0]["scenario"] == "bulk/8 blocks"
    assert data["left_out"] == 5 - len(data["maps"]) > 0


def test_the_payload_is_small_and_plain():
    data = payload(fakes.heavy(12), [])
    assert len(json.dumps(data)) < 200_000
