"""What may import what, and what an import may cost. Time is for `make bench`; here only the causes are looked at."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PURE = ("kvproof.layout", "kvproof.bytecode", "kvproof.findings", "kvproof.oracles")
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def python(code: str) -> str:
    """What a fresh interpreter prints; its own process, since this one has imported far too much to tell."""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def imported(statement: str, *heavy: str) -> set[str]:
    return set(python(f"import sys; {statement}; print(*(set(sys.modules) & {set(heavy)}))").split())


@pytest.mark.parametrize("package", PURE)
def test_pure_packages_are_light(package: str) -> None:
    assert imported(f"import {package}", "torch", "vllm", "transformers", "jinja2", "rich") == set()


def test_the_parser_needs_no_engine() -> None:
    assert imported("from kvproof.cli import build_parser; build_parser()", "torch", "vllm", "transformers") == set()


def test_the_layer_contract_holds() -> None:
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_no_package_stands_outside_the_layers() -> None:
    (layers,) = (contract["layers"] for contract in CONTRACTS if contract["type"] == "layers")
    packages = {f"kvproof.{path.parent.name}" for path in (ROOT / "src" / "kvproof").glob("*/__init__.py")}
    assert packages == {name for level in layers for name in level.split(" | ")}
