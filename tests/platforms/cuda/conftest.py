"""These tests need vLLM's CUDA wheel (`make test-cuda`); elsewhere they are not collected."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path

import pytest

from kvproof.cli import main

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))


def _cuda_wheel() -> bool:
    try:
        return "cpu" not in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return False


collect_ignore_glob = [] if _cuda_wheel() else ["test_*.py"]


@pytest.fixture
def layout(capsys):
    """Runs ``kvproof layout`` and returns its exit code and JSON."""

    def run(model, capability, *options):
        code = main(["layout", model, "--platform", "cuda-sim", "--cuda-capability", capability, "--json", *options])
        return code, json.loads(capsys.readouterr().out)

    return run
