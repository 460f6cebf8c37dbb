"""These tests need vllm-ascend and torch_npu (`make test-ascend`); elsewhere they are not collected."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest

from kvproof import zoo
from kvproof.cli import main
from kvproof.findings.case import Case


def _vllm_ascend() -> bool:
    try:
        return bool(importlib.metadata.version("vllm_ascend"))
    except importlib.metadata.PackageNotFoundError:
        return False


collect_ignore_glob = [] if _vllm_ascend() else ["test_*.py"]
DECLARED = ("--platform", "ascend-sim", "--declare-soc", "--soc")


@pytest.fixture
def layout(capsys):
    """Runs ``kvproof layout`` and returns its exit code and JSON."""

    def run(model, soc, *options):
        code = main(["layout", str(model), *DECLARED, soc, "--json", *options])
        return code, json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def check(tmp_path):
    """Runs ``kvproof check`` and returns its exit code and report."""

    def run(model, soc, *options):
        code = main(["check", str(model), *DECLARED, soc, *options, "--evidence", str(tmp_path / "evidence")])
        return code, json.loads((tmp_path / "evidence" / "report.json").read_text())

    return run


@pytest.fixture
def four_layers(tmp_path):
    """Qwen3-8B cut to four layers, as the facts were taken."""
    directory = zoo.write("qwen3-8b", tmp_path / "qwen3")
    config = json.loads((directory / "config.json").read_text())
    config["num_hidden_layers"] = 4
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def interpreter(tmp_path):
    """Runs Python code as a run would: stand-ins on the library path, the SoC declared before anything is imported."""
    from kvproof.engine.staging import environment
    from kvproof.platforms.declaration import declared

    case = Case("none", str(tmp_path), platform="ascend-sim", soc="ascend910b", declare_soc=True)

    def run(code):
        with declared(case) as extra:
            return subprocess.run(
                [sys.executable, "-c", code],
                env={**os.environ, **environment(case), **extra},
                capture_output=True,
                text=True,
                timeout=300,
            )

    return run
