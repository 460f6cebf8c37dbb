"""The proof inside one engine: a control run, every fault in turn, and a control run again."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvproof.faults.catalogue import CATALOGUE
from kvproof.faults.model import Control, Expected, Fault, Outcome, catch
from kvproof.faults.rig import Rig
from kvproof.faults.stories import STORIES
from kvproof.findings.model import Status
from kvproof.oracles import registry
from kvproof.scenarios.modes import Prompts
from kvproof.scenarios.run import run_scenario

CLEAN = (Status.PASSED.value, Status.SKIPPED.value)


class BrokenEngineError(RuntimeError):
    """The engine cannot go on after a fault; the next one needs a fresh process."""


def prove(rig: Rig, names: list[str], progress: Callable[[str], None]) -> Iterator[Outcome | Control]:
    """Controls and outcomes as they come. ``BrokenEngineError`` where a fault left the engine unusable."""
    faults = [CATALOGUE[name] for name in names]
    stories = list(dict.fromkeys(fault.story for fault in faults))
    progress("control before")
    yield control(rig, stories, "before")
    yield from _each(rig, [f for f in faults if not f.may_stop], progress)
    progress("control after")
    yield control(rig, stories, "after")
    yield from _each(rig, [f for f in faults if f.may_stop], progress)


def _each(rig: Rig, faults: list[type[Fault]], progress: Callable[[str], None]) -> Iterator[Outcome]:
    for fault in faults:
        progress(f"fault {fault.name()}")
        yield prove_one(rig, fault())
        if not rig.idle():
            raise BrokenEngineError(f"fault {fault.name()}: the engine still holds requests or blocks")


def control(rig: Rig, stories: list[str], when: str) -> Control:
    """All stories with the rig in place and no fault planted."""
    begin = time.monotonic()
    transcript = _start(rig, None, f"control {when}")
    for story in stories:
        _tell(rig, f"control {when}/{story}", story, f"control {when}/{story}")
    results, findings = registry.judge(rig.pages.layout, transcript)
    clean = not findings and all(r.status.value in CLEAN for r in results)
    return Control(
        rig.model, when, clean, {r.oracle: r.status.value for r in results}, [f.message for f in findings],
        round(time.monotonic() - begin, 2),
    )  # fmt: skip


def _responsible(fault: Fault, expected: Expected | None) -> str:
    """The oracle that must report ``fault``. Damage to padding alone can be: groups with allocations of their own."""
    if expected is not None and expected.scenario is not None:
        return "lifecycle"
    return "footprint" if expected is not None and expected.is_padding else fault.oracle


def prove_one(rig: Rig, fault: Fault) -> Outcome:
    """One fault in its story: is it reported by its oracle, at the place where it did its damage?

    And is every other page it made wrong named by some finding, at its first wrong byte?
    """
    begin = time.monotonic()
    transcript = _start(rig, fault, fault.name())
    scenario = f"fault/{fault.name()}"
    _tell(rig, scenario, fault.story, fault.name())
    expected, mistake = rig.expected(fault), rig.mistake
    oracle = _responsible(fault, expected)
    wrong = rig.witness.wrong
    rig.plant(None)
    _, findings = registry.judge(rig.pages.layout, transcript)
    located = sum(any(w.place.is_at(f.location) for f in findings) for w in wrong)
    oracles: dict[str, int] = {}
    for finding in findings:
        oracles[finding.oracle] = oracles.get(finding.oracle, 0) + 1
    found = None if expected is None or mistake else catch(oracle, expected, findings)
    if mistake:
        reason = f"the fault itself failed: {mistake}"
    elif expected is None:
        reason = "never planted: the fault did not act in its story"
    elif found is None:
        reason = f"{oracle} did not report {expected}"
    elif located < len(wrong):
        reason = f"{len(wrong) - located} of {len(wrong)} wrong pages are not named by any finding"
    else:
        reason = ""
    return Outcome(
        fault.name(), not reason, oracle, expected.to_json() if found and expected else None,
        fault.stands_for, expected.to_json() if expected else None, True, reason, oracles,
        len(wrong), located,
        found.message if found else "", round(time.monotonic() - begin, 2), fault.model,
    )  # fmt: skip


def _start(rig: Rig, fault: Fault | None, seed_text: str) -> Any:
    """Fresh memory, transcript and order of blocks; independent of what ran before."""
    rig.plant(fault)
    rig.harness.start_over()
    rig.harness.rng = np.random.default_rng(_seed(seed_text))
    rig.harness.scramble()
    return rig.harness.transcript


def _tell(rig: Rig, scenario: str, story: str, seed_text: str) -> None:
    prompts = Prompts(_seed(seed_text))
    run_scenario(rig.harness, scenario, "faults", lambda: STORIES[story](rig.harness, prompts, rig.unit))


def _seed(text: str) -> int:
    return zlib.crc32(text.encode())
