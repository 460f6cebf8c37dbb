"""The proof inside one engine: a control run, every fault in turn, and a control run again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvproof.faults.trace.catalogue import CATALOGUE
from kvproof.faults.trace.model import Control, Outcome, Place, Planted
from kvproof.faults.trace.stage import Stage


class BrokenEngineError(RuntimeError):
    """The engine or the guard is not what it was after a fault; the next one needs a fresh process."""


def prove(model: Path, engine: str, names: list[str], progress: Callable[[str], None]) -> Iterator[Outcome | Control]:
    """Controls and outcomes as they come. ``BrokenEngineError`` where a fault left something behind."""
    progress(f"start of {engine}")
    stage = Stage(engine, model)
    faults = [CATALOGUE[name] for name in names]
    stories = list(dict.fromkeys(planted.fault.story for planted in faults))
    progress("control before")
    yield control(stage, engine, stories, "before")
    for planted in faults:
        progress(f"fault {planted.name}")
        outcome, healthy = prove_one(stage, planted)
        yield outcome
        if not healthy:
            raise BrokenEngineError(f"fault {planted.name}: {outcome.reason}")
    progress("control after")
    yield control(stage, engine, stories, "after")
    stage.engine.close()


def control(stage: Stage, engine: str, stories: list[str], when: str) -> Control:
    """All stories to their end, without a fault."""
    begin, steps = time.monotonic(), stage.steps
    stage.engine.findings()
    for story in stories:
        stage.begin(f"control-{when}-{story}")
        stage.tell(story, lambda: False)
        stage.drain()
    findings = [_words(event) for event in stage.engine.findings()]
    return Control(
        engine, engine[:2], when, not findings, stage.steps - steps, findings, round(time.monotonic() - begin, 2)
    )


def prove_one(stage: Stage, planted: Planted) -> tuple[Outcome, bool]:
    """One fault in its story, and whether engine and guard are as before afterwards."""
    begin = time.monotonic()
    stage.begin(planted.name)
    stage.engine.findings()
    fault = planted.fault(stage)
    stage.taps.fault = fault
    found: list[dict[str, Any]] = []
    broken = ""
    try:
        stage.tell(fault.story, lambda: fault.expected is not None)
        found = stage.engine.findings()
        stage.drain()
    except Exception as error:  # whatever vLLM says to it is part of the outcome
        broken = f"the engine stopped: {type(error).__name__}: {error}"[:500]
    finally:
        stage.taps.fault = None
    rest = stage.engine.findings()
    dirty = "" if broken else _after(stage, planted)
    mine = [event for event in found if event.get("rule") == fault.rule]
    places = {Place.of(event) for event in mine}
    guard = [event for event in [*found, *rest] if event["event"] == "kv.error" and event["guard"]]
    if broken:
        reason = broken
    elif guard:
        reason = f"the guard failed: {_words(guard[0])}"
    elif fault.expected is None:
        reason = "never planted: the moment it waits for did not come in its story"
    elif not mine:
        reason = f"{fault.rule} did not fire"
    elif places != {fault.expected}:
        reason = f"{fault.rule} fired at {'; '.join(map(str, places))} instead of {fault.expected}"
    else:
        reason = dirty
    others = {event["rule"] for event in [*found, *rest] if event["event"] == "kv.violation"} - {fault.rule}
    return Outcome(
        planted.name,
        fault.rule,
        planted.runner,
        planted.engine,
        not reason,
        Place.of(mine[0]).to_json() if mine else None,
        None if fault.expected is None else fault.expected.to_json(),
        sorted(others),
        reason,
        mine[0]["message"] if mine else "",
        round(time.monotonic() - begin, 2),
    ), not (broken or dirty or guard)  # fmt: skip


def _after(stage: Stage, planted: Planted) -> str:
    """A request without a fault: what the guard still reports, "" for nothing."""
    stage.begin(f"after-{planted.name}")
    stage.add("clean", stage.prompt(20), max_tokens=1)
    try:
        stage.engine.run(60)
    except Exception as error:
        return f"the engine does not go on afterwards: {type(error).__name__}: {error}"[:500]
    left = stage.engine.findings()
    return f"afterwards the guard still reports: {_words(left[0])}" if left else ""


def _words(event: dict[str, Any]) -> str:
    if event["event"] == "kv.violation":
        return str(event["message"])
    return f"{event['where']}: {event['type']}: {event['message']}"[:500]
