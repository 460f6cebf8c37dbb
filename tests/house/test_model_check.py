"""run_model_check.sh with a checker that says what the test wants: only the checker's own PASS line is a pass."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECKER = """#!/usr/bin/env bash
while (($#)); do
  case $1 in
    --mode) mode=$2 ;;
    --evidence) mkdir -p "$2"; touch "$2/case.json" ;;
  esac
  echo "argument $1"
  shift
done
answer=answer_$mode
read -r code line <<<"${!answer:-0 PASS  exit code 0}"
echo "$line"
exit "$code"
"""


@pytest.fixture
def check(tmp_path):
    """Runs the script with an answer (exit code, last line) per mode; returns (exit code, output, result directory)."""
    checker = tmp_path / "checker"
    checker.write_text(CHECKER)
    checker.chmod(0o755)

    def run(*arguments, **answers):
        environment = {f"answer_{mode}": answer for mode, answer in answers.items()}
        done = subprocess.run(
            [str(ROOT / "run_model_check.sh"), *arguments], capture_output=True, text=True, check=False,
            env={**os.environ, **environment, "KVPROOF": str(checker), "MODEL_CHECKS": str(tmp_path / "results")},
        )  # fmt: skip
        found = list((tmp_path / "results").glob("*/*/*"))
        return done.returncode, done.stdout + done.stderr, found[0] if found else None

    return run


def test_all_pass(check):
    code, output, results = check("tiny-qwen3", "cpu", "--runner", "v2")
    assert code == 0
    assert output.rstrip().endswith("PASS  tiny-qwen3 on cpu")
    table = [line.split()[:2] for line in output.splitlines() if line.startswith(("bulk ", "layout ", "layerwise "))]
    assert table == [["layout", "PASS"], ["bulk", "PASS"], ["layerwise", "PASS"]]
    assert results.parts[-3:-1] == ("tiny-qwen3", "cpu")
    for mode in ("layout", "bulk", "layerwise"):
        assert (results / mode / "evidence" / "case.json").exists()
        assert "argument v2" in (results / mode / "check.log").read_text()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("1 FAIL  exit code 1", (1, "FAIL")),
        ("4 PARTIALLY VERIFIED  exit code 4", (4, "PARTIALLY VERIFIED")),
        ("0 all is well, PASS", (1, "FAIL")),
        ("0 PASSED", (1, "FAIL")),
        ("1 PASS  exit code 0", (1, "FAIL")),
        ("137 killed", (1, "FAIL")),
    ],
)
def test_without_the_checkers_own_line_nothing_passed(check, answer, expected):
    code, output, _ = check("tiny-qwen3", "cpu", bulk=answer)
    assert (code, output.splitlines()[-1]) == (expected[0], f"{expected[1]}  tiny-qwen3 on cpu")
    assert "layerwise   PASS" in output


def test_the_worst_code_counts(check):
    code, _, _ = check("tiny-qwen3", "cpu", bulk="4 PARTIALLY VERIFIED", layerwise="1 FAIL")
    assert code == 1


def test_what_is_not_staged_is_asked_once(check):
    code, output, results = check("/models/mine", "cuda-sim", layout="3 UNSUPPORTED  exit code 3")
    assert code == 3
    assert output.count("NOT RUN") == 2
    assert results.parts[-3:-1] == ("mine", "cuda-sim")
    assert not (results / "bulk").exists()


def test_too_few_arguments(check):
    code, output, _ = check("tiny-qwen3")
    assert (code, output.count("\n")) == (2, 1)
    assert "expected MODEL PLATFORM" in output


@pytest.mark.parametrize("there", ["", "results", "results/mine", "results/mine/cpu"])
def test_what_is_refused_is_asked_once_and_leaves_nothing(check, tmp_path, there):
    (tmp_path / there).mkdir(parents=True, exist_ok=True)
    before = sorted(path for path in tmp_path.rglob("*"))
    code, output, _ = check("/models/mine", "cpu", layout="2 kvproof check: no")
    assert code == 2
    assert "    kvproof check: no\n" in output
    assert output.count("NOT RUN") == 2
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_what_ran_before_a_refusal_is_kept(check):
    code, _, results = check("tiny-qwen3", "cpu", bulk="2 kvproof check: no")
    assert code == 2
    assert [path.name for path in results.iterdir()] == ["layout"]
    assert (results / "layout" / "check.log").exists()
