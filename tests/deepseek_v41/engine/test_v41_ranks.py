"""Two ranks, tensor or expert parallel, real processes: the tokens of one rank, the same selection on every rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[2] / "support"
sys.path.insert(0, str(SUPPORT))
from v41_play import ENGINE, SEED, TIMEOUT_S, checkpoint, prompt  # noqa: E402

pytestmark = pytest.mark.engine
PROMPTS = [prompt(n, n) for n in (3, 20, 41, 75)]
WAYS = {
    "one": {},
    "tensor": {"tensor_parallel_size": 2},
    "expert": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return checkpoint("deepseek-v41-tiny", tmp_path_factory.mktemp("v41") / "tiny")


@pytest.fixture(scope="module")
def served(tiny, tmp_path_factory):
    results = {}
    for way, options in WAYS.items():
        where = tmp_path_factory.mktemp(way)
        engine = {key: value for key, value in ENGINE.items() if key != "num_blocks"}
        engine |= {"num_gpu_blocks_override": ENGINE["num_blocks"], "kv_cache_memory_bytes": 1 << 28, **options}
        plan = {"model": str(tiny), "engine": engine, "prompts": PROMPTS, "n": 10}
        (where / "plan.json").write_text(json.dumps(plan))
        child = subprocess.run(
            [sys.executable, str(SUPPORT / "v41_ranks.py"), str(where / "plan.json"), str(where / "result.json")],
            env={
                **os.environ,
                "VLLM_PLUGINS": "kvproof_deepseek_v41",
                "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
            },
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert child.returncode == 0, child.stderr[-4000:]
        results[way] = json.loads((where / "result.json").read_text())
    print(f"seed {SEED}")
    return results


@pytest.mark.parametrize("way", ["tensor", "expert"])
def test_two_ranks_say_what_one_says(served, way):
    assert served[way]["tokens"] == served["one"]["tokens"]


@pytest.mark.parametrize("way", ["tensor", "expert"])
def test_every_rank_selects_the_same_rows(served, way):
    (only,), (first, second) = served["one"]["ranks"], served[way]["ranks"]
    assert first["selected"] == second["selected"]
    assert len(first["selected"]) > 3 * 10, "three index sources, more than ten steps"
    assert any(row != [-1] * len(row) for _, rows in only["selected"] for row in rows)


def test_the_ranks_hold_parts(served):
    (whole,) = served["one"]["ranks"]
    for rank in served["tensor"]["ranks"]:
        assert rank["experts"] == [whole["experts"][0], whole["experts"][1] // 2, whole["experts"][2]]
        assert rank["heads"] == [whole["heads"][0] // 2]
    for rank in served["expert"]["ranks"]:
        assert rank["experts"] == [whole["experts"][0] // 2, *whole["experts"][1:]]
