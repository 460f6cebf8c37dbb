"""Stand-ins are built for the binaries here: every symbol is there, and one that nobody wrote ends the process."""

import ctypes
import shutil

import pytest
from runtime_user import CALLED, in_child

from kvproof.hostrt import build, elf, libraries


def test_no_symbol_of_a_user_is_missing(user, runtime):
    wanted = build.wanted(libraries.CUDA_RUNTIME_12, [user])
    assert wanted == set(CALLED)
    assert wanted <= elf.exports(runtime)


def test_what_nobody_wrote_ends_the_process_with_its_name(runtime):
    done = in_child(runtime, "lib.cudaFrobnicate()")
    assert done.returncode == -6
    assert "libcudart.so.12: cudaFrobnicate is not implemented" in done.stderr


def test_symbols_carry_the_version_their_users_ask_for(runtime):
    process = ctypes.CDLL(None)
    process.dlvsym.restype = ctypes.c_void_p
    handle = ctypes.c_void_p(ctypes.CDLL(str(runtime))._handle)
    assert process.dlvsym(handle, b"cudaMalloc", b"libcudart.so.12")
    assert not process.dlvsym(handle, b"cudaMalloc", b"libcudart.so.11")


def test_nothing_but_the_interface_is_exported(runtime):
    assert all(libraries.CUDA_RUNTIME_12.owns(name) for name in elf.exports(runtime) - {"libcudart.so.12"})


def test_built_once_per_content(user, runtime, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(runtime.parents[3]))
    monkeypatch.setattr(build, "_run", lambda *command: pytest.fail(f"compiled again: {command}"))
    assert build.build(libraries.CUDA_RUNTIME_12, [user]) == runtime


def test_another_user_gets_a_library_of_its_own(tmp_path, user, runtime, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    other = build.build(libraries.CUDA_RUNTIME_12, [])
    assert other.parent.name != runtime.parent.name
    assert "cudaFrobnicate" not in elf.exports(other)


def test_no_compiler_is_one_line(user, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(build.BuildError, match="no C compiler"):
        build.build(libraries.CUDA_RUNTIME_12, [user])
