"""Sockets fit into a child's temporary directory, wherever it is; what is worth keeping lies outside of it."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

from kvproof.engine import temporary


def test_sockets_fit_wherever_the_temporary_directory_is(tmp_path, monkeypatch):
    deep = tmp_path / ("deep" * 20)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with temporary.own_directory() as extra:
        directory = Path(extra["TMPDIR"])
        assert directory.parent == Path("/tmp")
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(directory / ("s" * (temporary.SOCKET_NAME - 1))))
    assert not directory.exists()


def test_without_a_place_for_sockets_a_child_writes_where_everybody_does(monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with temporary.own_directory() as extra:
        assert extra == {}


def test_compiled_code_outlives_the_run(monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    with temporary.own_directory() as extra:
        assert not extra["TORCHINDUCTOR_CACHE_DIR"].startswith(extra["TMPDIR"])
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/theirs")
    with temporary.own_directory() as extra:
        assert "TORCHINDUCTOR_CACHE_DIR" not in extra
