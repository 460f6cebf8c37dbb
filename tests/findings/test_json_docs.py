"""docs/json.md describes every field of the public JSON."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import ModuleType

import pytest

from kvproof import layout
from kvproof.engine import doctor
from kvproof.findings import bytemap, case, compare, evidence, model
from kvproof.layout import diff
from kvproof.oracles import engine_answers, registry
from kvproof.trace.reader import explain, summary

DOCUMENT = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")


def public(module: ModuleType) -> list[type]:
    """Dataclasses that a module defines."""
    own = [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]
    return [value for value in own if dataclasses.is_dataclass(value) and not value.__name__.startswith("_")]


CLASSES = [
    model.Report,
    model.OracleResult,
    model.Finding,
    model.Location,
    model.Origin,
    model.GroupPolicy,
    model.ScenarioSummary,
    model.Substitution,
    model.ByteMap,
    model.PageMap,
    *(getattr(layout, name) for name in layout.__all__),
    case.Case,
    case.ConnectorSpec,
    compare.Comparison,
    compare.Criterion,
    diff.Fact,
    diff.Change,
    *(value for module in (summary, explain) for value in public(module)),
]


def section(name: str) -> str:
    """The table of one class: under its heading, or below its ``| Name field |`` header."""
    title = {"Report": "## report.json"}.get(name, f"### {name}")
    start = DOCUMENT.find(f"\n{title}\n")
    if start < 0:
        start = DOCUMENT.index(f"| {name} field |")
    end = re.search(r"\n\n(?=#|\| \w+ field)", DOCUMENT[start + 5 :])
    return DOCUMENT[start : start + 5 + end.start()] if end else DOCUMENT[start:]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_field_is_described_in_its_own_table(cls):
    known = set(re.findall(r"`(\w+)`", section(cls.__name__)))
    assert {field.name for field in dataclasses.fields(cls)} <= known


def test_everything_the_doctor_says_is_described():
    start = DOCUMENT.index("\n## kvproof doctor --json\n")
    known = set(re.findall(r"`(\w+)`", DOCUMENT[start : DOCUMENT.index("\n## ", start + 1)]))
    kinds = (doctor.Diagnosis, doctor.Package, doctor.Compiler, doctor.Platform, doctor.Probe, doctor.Connector)
    assert {field.name for kind in kinds for field in dataclasses.fields(kind)} <= known


def test_no_public_dataclass_is_forgotten():
    public = {value for module in (model, case) for value in vars(module).values() if dataclasses.is_dataclass(value)}
    assert public <= set(CLASSES)


def test_files_schemas_and_states():
    for name in evidence.FILES:
        assert f"`{name}`" in DOCUMENT
    files = ("case", "layout", "report", "findings", "counters")
    for schema in (*files, "compare", "layout-diff", "ablate", "platforms", "doctor"):
        assert f"`kvproof.{schema}/1`" in DOCUMENT
    for _, state, _ in bytemap.STATES:
        assert f"`{state}`" in DOCUMENT or state == "unknown"
    for key in compare.VOLATILE_KEYS:
        assert f"`{key}`" in DOCUMENT


def test_every_oracle_id_is_documented():
    for oracle in ("layout", *registry.ORACLES, *engine_answers.ORACLES):
        assert f"`{oracle}`" in DOCUMENT
