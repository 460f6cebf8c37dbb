"""The environment is pinned, complete, and says nothing about where packages come from."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements" / "cpu.lock"
INSTALL_FILES = [
    ROOT / "Makefile",
    ROOT / ".ci" / "run",
    *sorted((ROOT / "requirements").iterdir()),
    *sorted((ROOT / "scripts").glob("*.*")),
]

lock = runpy.run_path(str(ROOT / "scripts" / "lock.py"))
requirements = [req for line in LOCK.read_text().splitlines() if (req := lock["requirement"](line))]


def test_every_line_is_pinned_once() -> None:
    assert len(requirements) > 100
    for req in requirements:
        assert [spec.operator for spec in req.specifier] == ["=="], req
        assert req.url is None, req
    assert len({req.name for req in requirements}) == len(requirements)


def test_leaves_out_what_cannot_be_imported_beside_the_cpu_torch() -> None:
    assert not {req.name for req in requirements} & lock["LEFT_OUT"]


def test_holds_what_is_installed_and_needed_and_nothing_else() -> None:
    assert LOCK.read_text() == lock["render"](), "run `.venv/bin/python scripts/lock.py` and look at the difference"


@pytest.mark.parametrize("path", INSTALL_FILES, ids=lambda path: path.name)
def test_names_no_package_index(path: Path) -> None:
    text = path.read_text()
    assert "://" not in text
    assert "--index-url" not in text
    assert "--extra-index-url" not in text
