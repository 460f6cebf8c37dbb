"""Random traffic on real engines: no false alarm, no fault of the guard, and the same tokens as without it.

One child per model runner plays all its grounds, one engine each; every test here reads one ground's result.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvproof.engine import traced

SUPPORT = Path(__file__).parents[2] / "support"
sys.path.insert(0, str(SUPPORT))
from traced_soak import GROUNDS, Ground  # noqa: E402  imports neither torch nor vLLM

pytestmark = pytest.mark.engine
SEED = 7
TIMEOUT_S = 1200
IDENTICAL = ("plain", "preemption", "draft-async", "v2-plain")
"""Grounds that are also played without the guard: greedy tokens must be the same."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def order(ground: Ground) -> tuple[bool, bool]:
    """Stand-ins for connectors stay once they are in place; n-gram's numba must come last (vLLM trips over it)."""
    return "ngram" in ground.name, ground.connector is not None


def played_by(runner: str) -> list[tuple[str, str]]:
    """(ground, guard) of one child, in an order that vLLM can bear in one process."""
    mine = sorted((ground for ground in GROUNDS.values() if ground.runner == runner), key=order)
    plain = [(name, "off") for name in IDENTICAL if GROUNDS[name].runner == runner]
    disabled = [("mla", "disabled")] if runner == "v1" else []
    return [*plain, *disabled, *((ground.name, "on") for ground in mine)]


@cache
def played(runner: str, models: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Results by (ground, guard) of a runner's child."""
    wanted = {"grounds": played_by(runner), "seed": SEED, "models": str(models)}
    env = {**os.environ, **traced.environment(runner), "SOAK_RUNNER": runner, "OMP_NUM_THREADS": "1"}
    child = subprocess.run(
        [sys.executable, str(SUPPORT / "traced_soak.py"), json.dumps(wanted)],
        env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    results = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
    assert child.returncode == 0, child.stderr[-3000:]
    return {(result["ground"], result["guard"]): result for result in results}


def result_of(name: str, models: Path, guard: str = "on") -> dict[str, Any]:
    """The result of a ground."""
    return played(GROUNDS[name].runner, models)[name, guard]


@pytest.mark.parametrize("name", GROUNDS)
def test_legal_traffic_raises_no_alarm(name: str, models: Path) -> None:
    result = result_of(name, models)
    print({key: result.get(key) for key in ("requests", "steps", "start_s", "serve_s", "seen")}, f"seed {SEED}")
    assert not result["crash"], result["crash"]
    assert result["violations"] == {}, result["first"]
    assert result["errors"] == []
    assert result["missing"] == [], "this did not happen, so the ground proves nothing"
    assert result["requests"] >= GROUNDS[name].requests
    for counters in result["counters"].values():
        assert counters["guard_failures"] == counters["failed"] == {}
        assert counters["dropped"] == 0


def test_there_was_enough_traffic_and_every_step_was_judged(models: Path) -> None:
    results = [result_of(name, models) for name in GROUNDS]
    assert sum(result["requests"] for result in results) >= 2000
    for result in results:
        scheduler, worker = (Counter(c["judged"]) + Counter(c["fast"]) for c in result["counters"].values())
        assert scheduler["Schedule"] == scheduler["Result"] == worker["Handover"] == result["steps"]
        # A step without a token has no plan.
        assert 0.7 * result["steps"] < worker["Plan"] <= result["steps"]


@pytest.mark.parametrize("name", IDENTICAL)
def test_the_guard_changes_no_token(name: str, models: Path) -> None:
    """The same traffic with the guard on and off; which requests are where decides it, so schedules agree too."""
    off, on = result_of(name, models, "off"), result_of(name, models)
    assert not off["crash"], off["crash"]
    assert off["answers"] == on["answers"]
    assert sum(len(tokens) for tokens in off["answers"].values()) > 100


def test_without_an_entry_or_switched_off_nothing_is_wrapped(models: Path) -> None:
    for result in (*(result_of(name, models, "off") for name in IDENTICAL), result_of("mla", models, "disabled")):
        assert not result["crash"], result["crash"]
        assert (result["wrapped"], result["counters"], result["steps"]) == ([], {}, 0)
    assert {"class Scheduler", "Scheduler.schedule", "BlockPool.touch"} <= set(result_of("plain", models)["wrapped"])
