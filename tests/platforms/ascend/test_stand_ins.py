"""The stand-ins for CANN: nothing is missing, nothing succeeds in silence."""

import ctypes
import subprocess
import sys

import pytest

from kvproof.hostrt import elf, libraries
from kvproof.platforms.ascend_sim import cann

HOST_TO_HOST = 0


@pytest.fixture(scope="module")
def built():
    folder = cann.directory()
    return {library.soname: folder / library.soname for library in libraries.CANN}


def test_every_symbol_torch_npu_links_is_exported(built):
    offered = frozenset().union(*(elf.exports(path) for path in built.values()))
    wanted = {s for path in cann.users() for s in elf.imports(path).symbols}
    owned = {s for s in wanted if any(library.owns(s) for library in libraries.CANN)}
    assert owned
    # What remains undefined comes from the C and C++ libraries, Python, torch and torch_npu's own objects.
    assert owned - offered - frozenset().union(*(elf.exports(path) for path in cann.users())) == set()


def test_every_library_torch_npu_needs_of_cann_is_there(built):
    needed = frozenset().union(*(elf.imports(path).libraries for path in cann.users()))
    present = {"c10", "torch", "torch_cpu", "torch_python", "tensorpipe", "npu_profiler", "torch_npu"}
    system = {"c", "m", "dl", "rt", "pthread", "stdc++", "gcc_s", "ld-linux-x86-64"}
    others = {n for n in needed if n.partition(".so")[0].removeprefix("lib") not in present | system}
    assert others
    assert others <= set(built)


def test_an_entry_that_nobody_wrote_ends_the_process_with_its_name(built):
    code = f"import ctypes; ctypes.CDLL({str(built['libascendcl.so'])!r}).aclopCreateAttr()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode < 0
    assert done.stderr == "kvproof-hostrt: libascendcl.so: aclopCreateAttr is not implemented\n"


def test_no_soc_is_guessed(built):
    code = f"import ctypes; ctypes.CDLL({str(built['libascendcl.so'])!r}).aclrtGetSocName()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={})
    assert done.returncode < 0
    assert "KVPROOF_SOC is not set" in done.stderr


def test_a_copy_past_the_end_of_its_target_is_refused(built):
    acl = ctypes.CDLL(str(built["libascendcl.so"]))
    source, target = ctypes.create_string_buffer(b"12345678"), ctypes.create_string_buffer(4)
    copy = (ctypes.byref(target), ctypes.c_size_t(4), ctypes.byref(source))
    assert acl.aclrtMemcpy(*copy, ctypes.c_size_t(4), HOST_TO_HOST) == 0
    assert acl.aclrtMemcpy(*copy, ctypes.c_size_t(8), HOST_TO_HOST) != 0
    assert target.raw == b"1234"


def test_device_memory_ends_where_it_was_declared_to_end(built, monkeypatch):
    acl = ctypes.CDLL(str(built["libascendcl.so"]))
    monkeypatch.setenv("KVPROOF_DEVICE_BYTES", str(8 << 20))
    pointer = ctypes.c_void_p()
    assert acl.aclrtMalloc(ctypes.byref(pointer), ctypes.c_size_t(4 << 20), 0) == 0
    assert pointer.value % (2 << 20) == 0
    other = ctypes.c_void_p()
    assert acl.aclrtMalloc(ctypes.byref(other), ctypes.c_size_t(5 << 20), 0) != 0
    assert acl.aclrtFree(pointer) == 0
    assert acl.aclrtMalloc(ctypes.byref(other), ctypes.c_size_t(5 << 20), 0) == 0
    assert acl.aclrtFree(other) == 0
