"""``action: raise`` in a real engine: the step ends at the boundary where the rule broke, and says which and where."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvproof.engine import traced

pytestmark = pytest.mark.engine
CHILD = Path(__file__).parents[2] / "support" / "traced_raise.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@cache
def faults(runner: str, model: Path) -> dict[str, dict[str, Any]]:
    """What the child reports, by fault."""
    child = subprocess.run(
        [sys.executable, str(CHILD), str(model), runner],
        env={**os.environ, **traced.environment(runner), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-3000:]
    return {r["fault"]: r for r in (json.loads(line) for line in child.stdout.splitlines() if line.startswith("{"))}


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_wrong_declaration_stops_schedule(runner: str, model: Path) -> None:
    result = faults(runner, model)["total"]
    assert result["clean"] == []
    raised = result["raised"]
    assert raised["type"] == "TraceViolation"
    assert "sched_total_mismatch" in raised["message"]
    assert "expected 60 tokens in total, found 61 tokens" in raised["message"]
    assert raised["violations"][0]["rule"] == "sched_total_mismatch"
    assert [event["rule"] for event in result["logged"]] == ["sched_total_mismatch"]
    assert result["logged"][0]["action"] == "raise"
    assert result["logged"][0]["trace"] in raised["message"]


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_wrong_slot_stops_the_worker_before_the_forward_pass(runner: str, model: Path) -> None:
    result = faults(runner, model)["slot"]
    assert result["clean"] == []
    raised = result["raised"]
    assert raised["type"] == "TraceViolation"
    found = raised["violations"][0]
    # The slot belongs to a later token of the same prompt.
    assert found["rule"] == "write_slot_collision"
    assert (found["request"], found["group"]) == ("victim-slot", 0)
    for part in ("write_slot_collision", "victim-slot", f"block {found['block']}", found["expected"], found["found"]):
        assert part in raised["message"]
    assert result["logged"][0]["rule"] == "write_slot_collision"
    assert "kv.error" not in {event["event"] for event in result["logged"]}
