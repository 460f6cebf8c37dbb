"""Tensors of a device are cloned, copied beside the step, and judged where the engine has waited for its result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CHILD = Path(__file__).parents[2] / "support" / "traced_deferred.py"


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    command = [sys.executable, str(CHILD), str(tmp_path_factory.mktemp("model"))]
    child = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert child.returncode == 0, child.stderr[-3000:]
    result: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return result


@pytest.mark.engine
def test_a_clean_run_is_judged_and_raises_nothing(answer: dict[str, Any]) -> None:
    assert answer["clean"] == []
    assert answer["plans"] >= 40


@pytest.mark.engine
def test_a_wrong_slot_is_found_at_its_place_although_the_shadow_has_moved_on(answer: dict[str, Any]) -> None:
    (found,) = answer["found"]
    assert (found["rule"], found["request"], found["group"]) == ("write_target_mismatch", "victim", 0)
    assert found["position"] == 0
    assert found["slot"] % 128 == 0
    assert found["trace"] is not None
