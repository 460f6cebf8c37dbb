"""What counts as caught, what counts as proved, and how both are shown."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from kvproof.cli import main
from kvproof.cli.faults import render
from kvproof.faults import run
from kvproof.faults.catalogue import CATALOGUE, select
from kvproof.faults.model import Control, Expected, Outcome, catch
from kvproof.faults.pages import Place
from kvproof.faults.run import BROKEN, REFUSED, RESULT, USAGE, Proof, not_applicable
from kvproof.findings.case import Case
from kvproof.findings.model import Finding, Location
from kvproof.findings.text import PROGRESS
from kvproof.scenarios import children

PLACE = Place(1, "layer.3", "V", 7, 130)
HERE = Location(1, "layer.3", "V", 7, 130, row=0, request="story/again#2")


def finding(oracle: str = "placement", **location: object) -> Finding:
    return Finding(oracle, "foreign", "story/again#2: text", "story", dataclasses.replace(HERE, **location))


def outcome(name: str = "bit-flipped", **values: object) -> Outcome:
    fault = CATALOGUE[name]
    place = dict(vars(PLACE))
    known = Outcome(name, True, fault.oracle, place, fault.stands_for, place, oracles={fault.oracle: 1, "equality": 2})
    return dataclasses.replace(known, **values)


CLEAN = Control("tiny-qwen3", "before", True, {"placement": "passed"}, [], 0.1)


def test_the_exact_place_is_a_catch() -> None:
    assert catch("placement", Expected(place=PLACE), [finding()]) is not None


@pytest.mark.parametrize(
    "other", [{"group": 0}, {"layer": "layer.2"}, {"resource": "K"}, {"block": 8}, {"byte": 131}], ids=str
)
def test_a_place_beside_it_is_none(other: dict[str, object]) -> None:
    assert catch("placement", Expected(place=PLACE), [finding(**other)]) is None


def test_another_oracle_is_none() -> None:
    assert catch("placement", Expected(place=PLACE), [finding("equality")]) is None
    assert catch("placement", Expected(place=PLACE), [Finding("placement", "x", "text", "story")]) is None


def test_requests_and_scenarios_are_exact_too() -> None:
    found = [Finding("hit_length", "shorter", "story/again#12: hit of 1", "story")]
    assert catch("hit_length", Expected(request="story/again#12"), found) is not None
    assert catch("hit_length", Expected(request="story/again#1"), found) is None
    assert catch("hit_length", Expected(scenario="story"), found) is not None
    assert catch("hit_length", Expected(scenario="stor"), found) is None


def test_expected_reads_itself_back() -> None:
    for expected in (Expected(place=PLACE), Expected(request="r"), Expected(scenario="s")):
        assert Expected.from_json(json.loads(json.dumps(expected.to_json()))) == expected


def test_a_proof_needs_a_fault_a_control_and_no_miss() -> None:
    assert Proof("X", [outcome()], [CLEAN]).holds
    assert not Proof("X", [], [CLEAN]).holds
    assert not Proof("X", [outcome()], []).holds
    assert not Proof("X", [outcome(), outcome(caught=False)], [CLEAN]).holds
    assert not Proof("X", [outcome()], [dataclasses.replace(CLEAN, clean=False)]).holds
    assert not Proof("X", [not_applicable(CATALOGUE["bit-flipped"], "why")], [CLEAN]).holds
    assert Proof("X", [outcome(), not_applicable(CATALOGUE["swap-at-251"], "why")], [CLEAN]).holds


def test_json_has_the_public_fields_and_docs_describe_them() -> None:
    data = Proof("X", [outcome()], [CLEAN], 1.0).to_json()
    assert {"name", "caught", "oracle", "location"} <= set(data["faults"][0])
    assert data["control"]["clean"] is True
    page = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
    known = set(re.findall(r"`(\w+)`", page[page.index("## kvproof faults --json") :]))
    assert {*data, *data["faults"][0], *data["control"], *data["control"]["runs"][0]} <= known


def shown(proof: Proof) -> str:
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    render(proof, console)
    return console.export_text()


def test_the_table_shows_who_caught_it_and_where() -> None:
    text = shown(Proof("X", [outcome()], [CLEAN], 61.2))
    row = next(line for line in text.splitlines() if line.strip().startswith("bit-flipped"))
    assert "● placement" in row
    assert "group 1 layer.3 V block 7 byte 130" in row
    assert text[: text.index("must report it")].count("○") == 1
    assert "PROVED  X on cpu: 1 of 1 planted faults caught at their exact place, 61 s" in text


def test_the_table_shows_what_was_missed() -> None:
    missed = outcome(caught=False, location=None, reason="placement did not report it")
    unclean = dataclasses.replace(CLEAN, clean=False, findings=["a finding\x1b[31m"])
    skipped = not_applicable(CATALOGUE["swap-at-251"], "no such moment")
    text = shown(Proof("X", [missed, skipped], [unclean]))
    assert "✗" in text
    assert "NOT CAUGHT: placement did not report it" in text
    assert "not applicable: no such moment" in text
    assert "NOT CLEAN" in text
    assert "\x1b" not in text
    assert "NOT PROVED  X on cpu: 0 of 1" in text


def test_list_needs_no_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["faults", "--list", "--json"]) == 0
    assert [f["name"] for f in json.loads(capsys.readouterr().out)] == list(CATALOGUE)
    assert main(["faults", "--list"]) == 0
    assert "two-heads-taken-for-planes" in capsys.readouterr().out


def test_an_unknown_fault_is_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["faults", "--only", "no-such-fault"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvproof faults: --only no-such-fault: not one of the ")
    assert error.count("\n") == 1


# ---------------------------------------------------------------------- the parent, with a child of three lines


def child(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Replace the child process by ``script``; its arguments are those of the real one."""

    def popen(command: list[str], **options: object) -> object:
        return production([sys.executable, "-c", script, *command[command.index("kvproof.faults") + 1 :]], **options)

    production = children.subprocess.Popen
    monkeypatch.setattr(children.subprocess, "Popen", popen)


def line(kind: str, data: object) -> str:
    return f"print({RESULT + json.dumps({kind: data})!r}, flush=True)\n"


def test_a_child_that_dies_leaves_its_fault_uncaught_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import os, sys, json\n"
        "names = sys.argv[2:]\n"
        f"print({PROGRESS!r} + 'fault ' + names[0], flush=True)\n"
        "if names[0] == 'bit-flipped': os.kill(os.getpid(), 11)\n"
        f"out = {outcome().to_json()!r}\n"
        f"print({RESULT!r} + json.dumps({{'outcome': out | {{'name': names[0]}}}}), flush=True)\n"
    ) + line("control", CLEAN.to_json())
    child(monkeypatch, script)
    proof = run.prove("SimpleCPUOffloadConnector", select(["bit-flipped", "zeros-loaded"]), lambda text: None)
    assert [(f.name, f.caught) for f in proof.faults] == [("bit-flipped", False), ("zeros-loaded", True)]
    assert "the engine process ended with signal 11 during fault bit-flipped" in proof.faults[0].reason


def test_a_broken_engine_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import sys, json\n"
        "names = sys.argv[2:]\n"
        f"out = {outcome().to_json()!r}\n"
        f"print({RESULT!r} + json.dumps({{'outcome': out | {{'name': names[0]}}}}), flush=True)\n"
        f"sys.exit({BROKEN})\n"
    )
    child(monkeypatch, script)
    proof = run.prove("SimpleCPUOffloadConnector", select(["bit-flipped", "zeros-loaded"]), lambda text: None)
    assert [f.caught for f in proof.faults] == [True, True]
    assert not proof.holds, "no control ran"


def test_a_model_vllm_refuses_is_not_applicable(monkeypatch: pytest.MonkeyPatch) -> None:
    child(monkeypatch, line("refused", "engine start: ValueError: no") + f"import sys; sys.exit({REFUSED})")
    proof = run.prove("ExampleConnector", select(["padding-written"]), lambda text: None)
    assert not proof.faults[0].applicable
    assert proof.faults[0].reason.endswith("with ExampleConnector: engine start: ValueError: no")
    assert not proof.holds


def test_a_fault_that_does_not_fit_starts_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    child(monkeypatch, "raise SystemExit(1)")
    proof = run.prove("ExampleConnector", select(["key-collision"]), lambda text: None)
    assert not proof.faults[0].applicable
    assert proof.controls == []


def test_a_case_knows_nothing_of_faults() -> None:
    assert "fault" not in {field.name for field in dataclasses.fields(Case)}


@pytest.mark.parametrize("connector", ["UCM", "UCMLayerwise"])
def test_a_connector_that_moves_bytes_by_itself_is_refused_in_one_line(connector, capsys):
    assert main(["faults", "--connector", connector]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"kvproof faults: --connector {connector}: its own binaries move the bytes")
    assert said.count("\n") == 1
    assert "SimpleCPUOffloadConnector" in said


def test_wrong_input_found_by_the_child_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    child(monkeypatch, line("usage", "--connector X: not registered") + f"import sys; sys.exit({USAGE})")
    with pytest.raises(ValueError, match="--connector X: not registered"):
        run.prove("OffloadingConnector", select(["bit-flipped"]), lambda text: None)
