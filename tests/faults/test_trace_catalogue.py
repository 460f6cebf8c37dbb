"""The trace faults as a document: every rule is planted or listed, every fault is named, the JSON has its shape."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from kvproof.cli import main
from kvproof.faults.trace import run
from kvproof.faults.trace.catalogue import CATALOGUE, KINDS, UNREACHABLE, select
from kvproof.faults.trace.model import Control, Outcome, Place, Planted, TraceFault
from kvproof.faults.trace.run import TraceProof
from kvproof.faults.trace.stage import ENGINES, STORIES
from kvproof.faults.trace.tap import CONNECTOR, POOL, RUNNER, SCHEDULER, Call, Point, Taps
from kvproof.scenarios.children import Watched
from kvproof.trace.rules.catalogue import FAMILIES, RULES

PLANTED = {planted.fault.rule for planted in CATALOGUE.values()}
MOMENTS = {moment for point in (*SCHEDULER, *RUNNER, *POOL, *CONNECTOR) for moment in (point.before, point.after)}


def leaves(cls: type[TraceFault]) -> set[type[TraceFault]]:
    below = cls.__subclasses__()
    return {cls} if not below else set().union(*(leaves(c) for c in below))


def test_every_rule_is_planted_or_listed() -> None:
    assert PLANTED | set(UNREACHABLE) == set(RULES)
    assert not PLANTED & set(UNREACHABLE)
    assert len(PLANTED) >= 60
    assert all(len(reason) > 40 for reason in UNREACHABLE.values())


def test_no_fault_is_forgotten() -> None:
    assert leaves(TraceFault) == {fault for faults in KINDS.values() for fault in faults}
    assert {planted.fault for planted in CATALOGUE.values()} == leaves(TraceFault)
    assert set(KINDS) <= set(FAMILIES)


def test_both_runners_are_tried() -> None:
    rules = {runner: {p.fault.rule for p in CATALOGUE.values() if p.runner == runner} for runner in ("v1", "v2")}
    assert set(RULES) - set(UNREACHABLE) == rules["v1"] | rules["v2"]
    assert len(rules["v1"]) >= 45
    assert len(rules["v2"]) >= 60


@pytest.mark.parametrize("planted", CATALOGUE.values(), ids=list(CATALOGUE))
def test_a_fault_says_what_it_is(planted: Planted) -> None:
    fault = planted.fault
    assert re.fullmatch(r"[a-z]+(-[a-z0-9]+)*", planted.name)
    assert planted.name.startswith(fault.base_name())
    assert fault.summary().endswith(".")
    assert fault.story in STORIES
    assert fault.rule in RULES
    assert planted.engine in ENGINES
    assert set(fault.follows) <= MOMENTS


def test_every_moment_of_a_fault_is_tapped() -> None:
    """And no fault acts at a moment that never comes."""
    methods = {name for name, value in vars(TraceFault).items() if callable(value) and not name.startswith("_")}
    assert MOMENTS - {None} <= methods
    for planted in CATALOGUE.values():
        assert any(getattr(planted.fault, moment) is not getattr(TraceFault, moment) for moment in MOMENTS - {None})


def test_selection() -> None:
    assert select([]) == list(CATALOGUE.values())
    assert [p.name for p in select(["slot-masked-on-v1", "no-tokens"])] == ["no-tokens", "slot-masked-on-v1"]
    with pytest.raises(ValueError, match="--only slot-maskd: not one of the"):
        select(["slot-maskd"])


def test_the_tool_lists_the_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["faults", "--trace", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in listed] == list(CATALOGUE)
    assert set(listed[0]) == {"name", "summary", "rule", "runner", "engine"}
    assert main(["faults", "--trace", "--list"]) == 0
    shown = capsys.readouterr().out
    assert all(rule in shown for rule in RULES)


def test_a_wrong_name_is_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["faults", "--trace", "--only", "nothing"]) == 2
    assert "--only nothing" in capsys.readouterr().err


def test_the_catalogue_needs_no_engine() -> None:
    code = "import sys, kvproof.faults.trace.catalogue; sys.exit('vllm' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- what the child's lines become ------------------------------------------------------------------------------------

CLEAN = [Control("v2", "v2", when, True, 9, [], 1.0) for when in ("before", "after")]


def outcome(name: str = "slot-masked", caught: bool = True) -> Outcome:
    place = Place("r", 0, None, -1, 7).to_json()
    return Outcome(name, "write_slot_pad_on_real_token", "v2", "v2", caught, place if caught else None, place)


def test_when_a_proof_holds() -> None:
    assert TraceProof([outcome()], CLEAN).holds
    assert not TraceProof([], CLEAN).holds
    assert not TraceProof([outcome(caught=False)], CLEAN).holds
    assert not TraceProof([outcome()], CLEAN[:1]).holds, "an engine must be clean after its faults too"
    dirty = Control("v2", "v2", "after", False, 9, ["null_block_write: ..."], 1.0)
    assert not TraceProof([outcome()], [*CLEAN, dirty]).holds


def test_json_shape() -> None:
    proof = TraceProof([outcome()], CLEAN).to_json()
    assert set(proof) == {"schema", "holds", "faults", "controls", "unreachable", "seconds"}
    assert set(proof["faults"][0]) == {
        "name", "rule", "runner", "engine", "caught", "location", "expected_location", "also", "reason", "message",
        "seconds",
    }  # fmt: skip
    assert set(proof["faults"][0]["location"]) == {"request", "group", "block", "slot", "position"}
    assert [entry["rule"] for entry in proof["unreachable"]] == list(UNREACHABLE)


def _children(monkeypatch: pytest.MonkeyPatch, *watched: Watched) -> list[list[str]]:
    asked: list[list[str]] = []
    left = list(watched)

    def follow(module: str, arguments: list[str], *_: object) -> Watched:
        del module
        asked.append(list(arguments)[1:])  # the first one is the model's directory
        return left.pop(0)

    monkeypatch.setattr(run, "follow", follow)
    return asked


def _line(result: Outcome | Control) -> str:
    key = "control" if isinstance(result, Control) else "outcome"
    return run.RESULT + json.dumps({key: result.to_json()}) + "\n"


def test_a_broken_engine_is_started_again_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _children(
        monkeypatch,
        Watched(run.BROKEN, "fault no-tokens", (_line(CLEAN[0]), _line(outcome("no-tokens")))),
        Watched(0, "control after", (_line(CLEAN[0]), _line(outcome()), _line(CLEAN[1]))),
    )
    proof = run.prove(select(["no-tokens", "slot-masked"]), lambda text: None)
    assert asked == [["v2", "no-tokens", "slot-masked"], ["v2", "slot-masked"]]
    assert [f.name for f in proof.faults] == ["no-tokens", "slot-masked"]
    assert proof.holds


def test_a_dead_engine_is_a_miss_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _children(
        monkeypatch,
        Watched(-11, "fault no-tokens", (_line(CLEAN[0]), "Segmentation fault\n")),
        Watched(1, "start of v2", ("No space left on device\n",)),
    )
    proof = run.prove(select(["no-tokens", "slot-masked"]), lambda text: None)
    assert asked == [["v2", "no-tokens", "slot-masked"], ["v2", "slot-masked"]]
    assert not proof.holds
    assert "signal 11 during fault no-tokens: Segmentation fault" in proof.faults[0].reason
    assert "exit code 1 during start of v2: No space left on device" in proof.faults[1].reason


# -- taps -------------------------------------------------------------------------------------------------------------


class Native:
    """A method with a guard around it, as kvproof.trace wraps one."""

    def __init__(self) -> None:
        self.took: list[list[int]] = []
        self.seen: list[list[int]] = []
        native = self.work

        def guarded(numbers: list[int]) -> list[int]:
            self.seen.append(list(numbers))
            result = native(numbers)
            self.seen.append(list(result))
            return result

        self.work = guarded  # type: ignore[method-assign]

    def work(self, numbers: list[int]) -> list[int]:
        """Give back twice the numbers."""
        self.took.append(list(numbers))
        return [2 * n for n in numbers]


class Meddler:
    """A fault at both moments of a method; not derived, so that it is none of the catalogue's."""

    follows = ()
    expected: Place | None = None

    def reported(self, call: Call) -> None:
        call.item(call.args[0], 0, 77)

    def updated(self, call: Call) -> None:
        call.item(call.result, 1, 88)
        self.expected = Place()


def test_only_the_guard_sees_a_fault() -> None:
    class Tapped(Native):
        pass

    taps, points = Taps(), (Point("work", before="reported", after="updated"),)
    taps.below(Tapped, points)
    native = Tapped()
    taps.above(native, points)
    taps.fault = Meddler()  # type: ignore[assignment]
    numbers = [1, 2]
    assert native.work(numbers) == [2, 4]
    assert native.took == [[1, 2]]
    assert native.seen == [[77, 2], [2, 88]]
    assert numbers == [1, 2]
    assert native.work(numbers) == [2, 4]
    assert native.seen[2:] == [[1, 2], [2, 4]], "a planted fault does not act again"
