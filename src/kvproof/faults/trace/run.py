"""The whole proof: one child process per engine, restarted where a fault leaves something behind."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvproof.engine import traced
from kvproof.faults.run import BROKEN, FAULT, RESULT
from kvproof.faults.trace.catalogue import UNREACHABLE
from kvproof.faults.trace.model import Control, Outcome, Planted
from kvproof.findings.text import PROGRESS
from kvproof.scenarios.children import Watched, follow

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""The model is so small that threads cost more time, waiting for each other, than they save."""


@dataclass
class TraceProof:
    """Outcomes in catalogue order, controls in the order they ran."""

    faults: list[Outcome] = field(default_factory=list)
    controls: list[Control] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        """Every fault was caught, there was one, and every engine was clean before and after."""
        whole = {(f.engine, when) for f in self.faults for when in ("before", "after")}
        return (
            bool(self.faults)
            and all(f.caught for f in self.faults)
            and all(c.clean for c in self.controls)
            and whole <= {(c.engine, c.when) for c in self.controls}
        )

    @property
    def rules(self) -> set[str]:
        """Rules that caught a fault."""
        return {f.rule for f in self.faults if f.caught}

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": "kvproof.faults-trace/1",
            "holds": self.holds,
            "faults": [f.to_json() for f in self.faults],
            "controls": [c.to_json() for c in self.controls],
            "unreachable": [{"rule": rule, "reason": reason} for rule, reason in UNREACHABLE.items()],
            "seconds": self.seconds,
        }


def prove(faults: list[Planted], progress: Callable[[str], None]) -> TraceProof:
    """Plant every fault in its engine."""
    begin = time.monotonic()
    proof = TraceProof()
    found: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="kvproof-") as directory:
        for engine in dict.fromkeys(f.engine for f in faults):
            pending = [f for f in faults if f.engine == engine]
            while pending:
                outcomes, controls = _child(f"{directory}/model", engine, pending, progress)
                found |= {o.name: o for o in outcomes}
                proof.controls += controls
                pending = [f for f in pending if f.name not in found]
    proof.faults = [found[f.name] for f in faults]
    proof.seconds = round(time.monotonic() - begin, 1)
    return proof


def _child(
    model: str, engine: str, faults: list[Planted], progress: Callable[[str], None]
) -> tuple[list[Outcome], list[Control]]:
    """Run the faults in one child as far as it gets; at least one fault more has an outcome afterwards."""
    watched = follow(
        "kvproof.faults.trace", [model, engine, *(f.name for f in faults)],
        {**traced.environment(faults[0].runner), **ONE_THREAD}, lambda text: progress(f"{engine}: {text}"),
    )  # fmt: skip
    lines = [json.loads(line.removeprefix(RESULT)) for line in watched.lines if line.startswith(RESULT)]
    outcomes = [Outcome(**line["outcome"]) for line in lines if "outcome" in line]
    controls = [Control(**line["control"]) for line in lines if "control" in line]
    done = {o.name for o in outcomes}
    if watched.returncode not in (0, BROKEN):
        during = watched.last.removeprefix(FAULT) if watched.last.startswith(FAULT) else None
        outcomes += [
            Outcome(f.name, f.fault.rule, f.runner, engine, False, reason=_how(watched))
            for f in faults
            if f.name not in done and during in (None, f.name)
        ]
    return outcomes, controls


def _how(watched: Watched) -> str:
    said = [line.strip() for line in watched.lines if line.strip() and not line.startswith((RESULT, PROGRESS))]
    return f"the engine process ended with {watched.how} during {watched.last}: {said[-1] if said else ''}"
