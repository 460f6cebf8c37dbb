"""Random layouts live beside the tests of the layout; a fixture for runs that must leave no temporary file."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "layout"))


@pytest.fixture
def nothing_left(tmp_path, monkeypatch):
    """The temporary directory of a test's runs; they must have emptied it in the end."""
    del tmp_path  # pytest's own, made elsewhere before
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as directory:  # short enough for sockets
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield directory
        assert not list(Path(directory).iterdir())
