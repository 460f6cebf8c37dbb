"""Real engines of DeepSeek V4.1 for tests: one child process per engine plays many cases (``v41_engine.py``)."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvproof.engine import traced
from kvproof.zoo import deepseek_v41

DRIVER = Path(__file__).parent / "v41_engine.py"
SEED = 41
BLOCK = 16
ENGINE = {
    "block_size": BLOCK,
    "dtype": "float32",
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
    "num_blocks": 400,
}
TIMEOUT_S = 1800


def prompt(length: int, number: int = 0) -> list[int]:
    """A reproducible prompt of ordinary token ids."""
    generator = random.Random(SEED * 1000 + number)
    return [generator.randrange(3, 280) for _ in range(length)]


def checkpoint(name: str, directory: Path, **options: Any) -> Path:
    """A checkpoint of the zoo, in fp32: two ways to one sum then differ in the seventh digit, not in the third."""
    return deepseek_v41.make(name, directory, **{"dtype": "float32", "seed": SEED, **options})


def play(
    model: Path, cases: list[dict[str, Any]], *, runner: str = "v1", record: Sequence[str] = ("hidden",), **engine: Any
) -> dict[str, dict[str, Any]]:
    """Play cases on an engine of their own: results by name of the case."""
    with tempfile.TemporaryDirectory() as where:
        plan, result = Path(where, "plan.json"), Path(where, "result.pt")
        wanted = {"model": str(model), "runner": runner, "record": list(record), "cases": cases}
        plan.write_text(json.dumps({**wanted, "engine": {**ENGINE, **engine}}))
        child = subprocess.run(
            [sys.executable, str(DRIVER), str(plan), str(result)],
            env={
                **os.environ,
                **traced.environment(runner),
                "VLLM_PLUGINS": "kvproof_trace,kvproof_deepseek_v41",
                "OMP_NUM_THREADS": "1",
            },
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        print(f"seed {SEED}")
        if child.returncode:
            raise RuntimeError(f"the engine ended with {child.returncode}: {child.stderr[-4000:]}")
        return torch.load(result)


def differs(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest expected value; infinite for NaN."""
    if found.shape != expected.shape:
        raise ValueError(f"shapes {list(found.shape)} and {list(expected.shape)}: must agree")
    if not expected.numel():
        return 0.0
    difference = float((found - expected).abs().max() / expected.abs().max())
    return math.inf if math.isnan(difference) else difference
