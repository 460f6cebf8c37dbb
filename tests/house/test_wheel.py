"""What is built is what is here: version, data files, entry point."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import kvproof

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    """The wheel, built offline."""
    directory = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = directory.glob("kvproof-*.whl")
    return zipfile.Path(path)


def test_version_is_said_once() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == kvproof.__version__


def test_wheel_carries_every_file_of_the_package(wheel: zipfile.Path) -> None:
    here = {
        str(path.relative_to(SOURCE))
        for path in (SOURCE / "kvproof").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert here <= set(wheel.root.namelist())


def test_wheel_carries_configurations_and_templates(wheel: zipfile.Path) -> None:
    names = wheel.root.namelist()
    assert sum(name.startswith("kvproof/zoo/configs/") and name.endswith(".json") for name in names) >= 9
    assert any(name.endswith(".html.j2") for name in names)
    assert "kvproof/py.typed" in names


def test_wheel_installs_the_command(wheel: zipfile.Path) -> None:
    entry_points = wheel / f"kvproof-{kvproof.__version__}.dist-info" / "entry_points.txt"
    assert "kvproof = kvproof.cli:main" in entry_points.read_text()
