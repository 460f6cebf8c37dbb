"""The whole proof: one child process per model, restarted where a fault breaks its engine."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvproof import zoo
from kvproof.engine import connectors
from kvproof.faults.model import Control, Fault, Outcome
from kvproof.findings.case import Case
from kvproof.findings.text import PROGRESS
from kvproof.platforms.registry import platform
from kvproof.scenarios.children import watch

RESULT = "kvproof fault: "
"""How the child marks a line of JSON that is an outcome or a control."""
USAGE, REFUSED, BROKEN = 2, 3, 4
"""Exit codes of the child: the case is wrong input; vLLM does not stage it; the engine broke and the rest needs a fresh
one."""
MAX_MODEL_LEN = 1024
FAULT = "fault "
PLANTABLE = sorted(name for name, profile in connectors.PROFILES.items() if profile.module_path is None)
"""Connectors of vLLM and vllm-ascend: their copies are made by the one host copier, or by torch operators."""


@dataclass
class Proof:
    """Outcomes in catalogue order, controls in the order they ran."""

    connector: str
    faults: list[Outcome] = field(default_factory=list)
    controls: list[Control] = field(default_factory=list)
    seconds: float = 0.0
    platform: str = "cpu"

    @property
    def holds(self) -> bool:
        """Every applicable fault was caught, there was one, and every control was clean."""
        judged = [f for f in self.faults if f.applicable]
        return bool(judged and self.controls) and all(f.caught for f in judged) and all(c.clean for c in self.controls)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": "kvproof.faults/1",
            "connector": self.connector,
            "platform": self.platform,
            "faults": [f.to_json() for f in self.faults],
            "control": {
                "clean": bool(self.controls) and all(c.clean for c in self.controls),
                "runs": [c.to_json() for c in self.controls],
            },
            "seconds": self.seconds,
        }


ON_CPU = Case("", "")


def prove(
    connector: str, faults: list[type[Fault]], progress: Callable[[str], None], where: Case = ON_CPU
) -> Proof:
    """Plant every fault in ``connector``. ``where`` says the platform and runner, its model counts for nothing.

    ValueError for a connector that is not here or whose transfers no fault can reach, and where a platform cannot run.
    """
    if connector not in PLANTABLE:
        raise ValueError(
            f"--connector {connector}: its own binaries move the bytes, no fault can be planted between; "
            f"limit {', '.join(PLANTABLE)}"
        )
    begin = time.monotonic()
    proof = Proof(connector, platform=where.platform)
    found: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="kvproof-") as directory:
        for model in dict.fromkeys(f.model for f in faults):
            mine = [f for f in faults if f.model == model]
            unfit = {f.name(): f.unfit[connector] for f in mine if connector in f.unfit}
            found |= {f.name(): not_applicable(f, unfit[f.name()]) for f in mine if f.name() in unfit}
            pending = [f for f in mine if f.name() not in unfit]
            while pending:
                outcomes, controls = _child(connector, replace(where, model=model), pending, Path(directory), progress)
                found |= {o.name: o for o in outcomes}
                proof.controls += controls
                pending = [f for f in pending if f.name() not in found]
    proof.faults = [found[f.name()] for f in faults]
    proof.seconds = round(time.monotonic() - begin, 1)
    return proof


def not_applicable(fault: type[Fault], reason: str) -> Outcome:
    """A fault that cannot be planted: neither caught nor missed."""
    return Outcome(
        fault.name(), False, fault.oracle, None, fault.stands_for, applicable=False, reason=reason, model=fault.model
    )


def _child(
    connector: str, where: Case, faults: list[type[Fault]], workdir: Path, progress: Callable[[str], None]
) -> tuple[list[Outcome], list[Control]]:
    """Run the faults in one child as far as it gets; at least one fault more has an outcome afterwards."""
    model = where.model
    with tempfile.TemporaryDirectory(dir=workdir) as directory:
        place = Path(directory)
        (place / "store").mkdir()
        case = replace(
            where, model_dir=str(zoo.resolve(model, place)),
            connector=connectors.parse(connector, str(place / "store")), max_model_len=MAX_MODEL_LEN,
            store=str(place / "store"),
        )  # fmt: skip
        platform(case.platform).require(case)
        (place / "case.json").write_text(case.dumps(), encoding="utf-8")
        names = [f.name() for f in faults]
        watched = watch(
            "kvproof.faults", [str(place / "case.json"), *names], case, lambda text: progress(f"{model}: {text}")
        )
    lines = [json.loads(line.removeprefix(RESULT)) for line in watched.lines if line.startswith(RESULT)]
    outcomes = [Outcome(**_tupled(line["outcome"])) for line in lines if "outcome" in line]
    controls = [Control(**line["control"]) for line in lines if "control" in line]
    done = {o.name for o in outcomes}
    if watched.returncode == USAGE:
        raise ValueError(lines[-1]["usage"])
    if watched.returncode == REFUSED:
        why = lines[-1]["refused"]
        return [not_applicable(f, f"vLLM does not stage {model} with {connector}: {why}") for f in faults], []
    if watched.returncode not in (0, BROKEN):
        last = watched.last
        said = [line.strip() for line in watched.lines if line.strip() and not line.startswith((RESULT, PROGRESS))]
        during = last.removeprefix(FAULT) if last.startswith(FAULT) else None
        for fault in faults:
            if fault.name() not in done and (during is None or fault.name() == during):
                outcomes.append(
                    Outcome(
                        fault.name(), False, fault.oracle, None, fault.stands_for, model=model,
                        reason=f"the engine process ended with {watched.how} during {last}: {said[-1] if said else ''}",
                    )
                )  # fmt: skip
    return outcomes, controls


def _tupled(outcome: dict[str, Any]) -> dict[str, Any]:
    return outcome | {"public_kind": tuple(outcome["public_kind"])}
