"""The CUDA runtime on host memory, called as compiled code calls it; and what Python sees of its copies."""

import ctypes

import numpy as np
import pytest
from runtime_user import PAGE, declared_pages, in_child

from kvproof.hostrt import build, elf, libraries
from kvproof.platforms import ucm
from kvproof.platforms.native_copies import NativeCopies

UCM = ucm.shared_objects()
SUCCESS, INVALID_VALUE, INVALID_DEVICE = 0, 1, 101
TO_DEVICE, TO_HOST, ON_DEVICE = 1, 2, 3


@pytest.fixture(scope="module")
def cuda(runtime):
    lib = ctypes.CDLL(str(runtime))
    lib.cudaMemcpyAsync.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    lib.cudaMemcpy.argtypes = lib.cudaMemcpyAsync.argtypes[:4]
    lib.cudaMemset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    return lib


@pytest.fixture(scope="module")
def copies(runtime):
    return NativeCopies(str(runtime))


@pytest.fixture
def stream(cuda):
    made = ctypes.c_void_p()
    assert cuda.cudaStreamCreateWithFlags(ctypes.byref(made), 1) == SUCCESS
    yield made
    assert cuda.cudaStreamDestroy(made) == SUCCESS


@pytest.fixture
def kv(copies):
    return declared_pages(copies)


def test_allocations_are_memory(cuda):
    device, host = ctypes.c_void_p(), ctypes.c_void_p()
    assert cuda.cudaMalloc(ctypes.byref(device), ctypes.c_size_t(PAGE)) == SUCCESS
    assert cuda.cudaMallocHost(ctypes.byref(host), ctypes.c_size_t(PAGE)) == SUCCESS
    ctypes.memset(host, 7, PAGE)
    assert cuda.cudaMemcpy(device, host, PAGE, TO_DEVICE) == SUCCESS
    ctypes.memset(host, 0, PAGE)
    assert cuda.cudaMemcpy(host, device, PAGE, TO_HOST) == SUCCESS
    assert ctypes.string_at(host, PAGE) == b"\7" * PAGE
    assert cuda.cudaFree(device) == cuda.cudaFreeHost(host) == SUCCESS
    assert cuda.cudaMemcpy(device, host, PAGE, TO_DEVICE) == INVALID_VALUE


def test_there_is_one_device(cuda):
    assert cuda.cudaSetDevice(0) == SUCCESS
    assert cuda.cudaSetDevice(1) == INVALID_DEVICE
    assert cuda.cudaGetLastError() == INVALID_DEVICE
    assert cuda.cudaGetLastError() == SUCCESS


def test_a_stream_works_in_order_and_is_waited_for(cuda, stream, kv):
    pages = [np.full(PAGE, value, np.uint8) for value in range(20)]
    for page in pages:
        assert cuda.cudaMemcpyAsync(kv.ctypes.data, page.ctypes.data, PAGE, TO_DEVICE, stream) == SUCCESS
    assert cuda.cudaStreamSynchronize(stream) == SUCCESS
    assert (kv[:PAGE] == 19).all()
    assert (kv[PAGE:] == 255).all()


def test_a_copy_nobody_waited_for_is_late(cuda, kv, monkeypatch):
    monkeypatch.setenv("KVPROOF_STREAM_DELAY_US", "200000")
    stream, page = ctypes.c_void_p(), np.zeros(PAGE, np.uint8)
    assert cuda.cudaStreamCreate(ctypes.byref(stream)) == SUCCESS
    assert cuda.cudaMemcpyAsync(kv.ctypes.data, page.ctypes.data, PAGE, TO_DEVICE, stream) == SUCCESS
    assert (kv[:PAGE] == 255).all()
    assert cuda.cudaStreamDestroy(stream) == SUCCESS  # work already submitted is done first
    assert (kv[:PAGE] == 0).all()


def test_a_callback_comes_after_the_work_before_it(cuda, stream, kv):
    seen = []
    page = np.zeros(PAGE, np.uint8)

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    def done(stream_, status, data):
        seen.append((status, data, int(kv[0])))

    assert cuda.cudaMemcpyAsync(kv.ctypes.data, page.ctypes.data, PAGE, TO_DEVICE, stream) == SUCCESS
    assert cuda.cudaStreamAddCallback(stream, done, ctypes.c_void_p(5), 0) == SUCCESS
    assert cuda.cudaStreamSynchronize(stream) == SUCCESS
    assert seen == [(SUCCESS, 5, 0)]


def test_copies_that_touch_declared_memory_are_collected_once(cuda, stream, copies, kv):
    page = np.zeros(PAGE, np.uint8)
    assert cuda.cudaMemcpyAsync(kv.ctypes.data + PAGE, page.ctypes.data, 100, TO_DEVICE, stream) == SUCCESS
    assert cuda.cudaMemcpyAsync(page.ctypes.data, kv.ctypes.data, 50, TO_HOST, stream) == SUCCESS
    assert cuda.cudaStreamSynchronize(stream) == SUCCESS
    batch = copies.collect()
    assert batch.sources.tolist() == [page.ctypes.data, kv.ctypes.data]
    assert batch.targets.tolist() == [kv.ctypes.data + PAGE, page.ctypes.data]
    assert batch.sizes.tolist() == [100, 50]
    assert batch.reads.tolist() == [False, True]
    assert copies.collect().sizes.tolist() == []


def test_many_copies_are_all_collected_in_order(cuda, stream, copies, kv):
    page = np.zeros(PAGE, np.uint8)
    for size in range(1, 9000):
        cuda.cudaMemcpyAsync(kv.ctypes.data, page.ctypes.data, size % PAGE, TO_DEVICE, stream)
    cuda.cudaStreamSynchronize(stream)
    # A copy of nothing is none.
    assert copies.collect().sizes.tolist() == [size % PAGE for size in range(1, 9000) if size % PAGE]


def test_copies_elsewhere_are_the_connectors_own_business(cuda, copies, kv):
    staging, page = ctypes.c_void_p(), np.zeros(PAGE, np.uint8)
    assert cuda.cudaMalloc(ctypes.byref(staging), ctypes.c_size_t(PAGE)) == SUCCESS
    assert cuda.cudaMemcpy(staging, page.ctypes.data, PAGE, TO_DEVICE) == SUCCESS
    assert cuda.cudaMemcpy(kv.ctypes.data, staging, PAGE, ON_DEVICE) == SUCCESS
    assert copies.collect().targets.tolist() == [kv.ctypes.data]
    cuda.cudaFree(staging)


@pytest.mark.parametrize("wrong", ["past the end", "in no memory of the device", "unmapped source"])
def test_a_wrong_address_is_named_and_not_used(cuda, stream, copies, kv, capfd, wrong):
    page, before = np.zeros(2 * PAGE, np.uint8), kv.copy()
    source, target = page.ctypes.data, kv.ctypes.data + PAGE
    if wrong == "in no memory of the device":
        target = page.ctypes.data + PAGE
    elif wrong == "unmapped source":
        source = 16
    size = 2 * PAGE if wrong == "past the end" else PAGE
    assert cuda.cudaMemcpyAsync(target, source, size, TO_DEVICE, stream) == SUCCESS  # fails when it is done
    assert cuda.cudaStreamSynchronize(stream) == INVALID_VALUE
    said = capfd.readouterr().err
    assert "cudaMemcpyAsync" in said
    assert hex(source if wrong == "unmapped source" else target) in said
    assert str(size) in said
    assert (kv == before).all()
    assert copies.collect().sizes.tolist() == [size]
    assert cuda.cudaStreamSynchronize(stream) == SUCCESS


def test_a_fill_stays_inside_too(cuda, copies, kv):
    assert cuda.cudaMemset(kv.ctypes.data, 3, PAGE) == SUCCESS
    assert cuda.cudaMemset(kv.ctypes.data, 4, 3 * PAGE) == INVALID_VALUE
    assert kv[:PAGE].tolist() == [3] * PAGE
    assert copies.collect().sizes.tolist() == [PAGE, 3 * PAGE]


def test_a_kernel_that_would_run_ends_the_process_with_its_name(runtime):
    launch = (
        "lib.__getattr__('__cudaRegisterFunction')(None, ctypes.c_void_p(99), None, b'CopyKernel', -1,"
        " None, None, None, None, None); lib.cudaLaunchKernel(ctypes.c_void_p(99))"
    )
    done = in_child(runtime, launch)
    assert done.returncode == -6
    assert "cudaLaunchKernel: kernel CopyKernel cannot run on a host" in done.stderr


@pytest.mark.skipif(not UCM, reason="UCM is not installed here")
def test_no_symbol_of_ucm_is_missing():
    built = build.build(libraries.CUDA_RUNTIME_12, UCM)
    wanted = build.wanted(libraries.CUDA_RUNTIME_12, UCM)
    assert len(wanted) == 29
    assert wanted <= elf.exports(built)


@pytest.mark.skipif(not UCM, reason="UCM is not installed here")
@pytest.mark.parametrize("path", [p for p in UCM if libraries.CUDA_RUNTIME_12.soname in elf.imports(p).libraries])
def test_the_linker_resolves_every_symbol_of_ucm_at_once(path):
    built = build.build(libraries.CUDA_RUNTIME_12, UCM)
    done = in_child(built, f"ctypes.CDLL({str(path)!r}, mode=2)  # RTLD_NOW")
    assert done.returncode == 0, done.stderr
