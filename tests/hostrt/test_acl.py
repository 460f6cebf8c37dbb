"""ACL's streams, events, callbacks and copies on host memory, called as compiled code calls them."""

import ctypes
import threading

import numpy as np
import pytest
from runtime_user import ACL_CALLED, PAGE, built_for, declared_pages, in_child

from kvproof.hostrt import libraries
from kvproof.platforms.native_copies import NativeCopies

SUCCESS, INVALID_PARAM, THREAD_SUBSCRIBE, REPORT_TIMEOUT = 0, 100000, 107012, 507012
TO_DEVICE, TO_HOST, INNER = 1, 2, 6
COMPLETE, NOT_READY = 0, 1
NOT_RECORDED, RECORDED = 0, 1
LATE = "20000"
"""Microseconds by which a stream begins its work later: who does not wait for it sees the bytes from before."""
ZEROS = np.zeros(PAGE, np.uint8)
"""What is loaded; it outlives every stream."""
CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return built_for(libraries.ACL, ACL_CALLED, tmp_path_factory)


@pytest.fixture(scope="module")
def acl(library):
    lib = ctypes.CDLL(str(library))
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    lib.aclrtMemcpyAsync.argtypes = [pointer, size, pointer, size, ctypes.c_int, pointer]
    lib.aclrtMemcpy.argtypes = lib.aclrtMemcpyAsync.argtypes[:5]
    lib.aclrtMemset.argtypes = [pointer, size, ctypes.c_int32, size]
    lib.aclrtMemsetAsync.argtypes = [*lib.aclrtMemset.argtypes, pointer]
    lib.aclrtSubscribeReport.argtypes = lib.aclrtUnSubscribeReport.argtypes = [ctypes.c_uint64, pointer]
    lib.aclrtLaunchCallback.argtypes = [CALLBACK, pointer, ctypes.c_int, pointer]
    lib.aclrtLaunchHostFunc.argtypes = [pointer, CALLBACK, pointer]
    lib.aclrtMapMem.argtypes = [pointer, size, size, pointer, ctypes.c_uint64]
    return lib


@pytest.fixture(scope="module")
def copies(library):
    return NativeCopies(str(library))


def made(create):
    """What a create function puts behind its pointer."""
    handle = ctypes.c_void_p()
    assert create(ctypes.byref(handle)) == SUCCESS
    return handle


@pytest.fixture
def stream(acl):
    handle = made(acl.aclrtCreateStream)
    yield handle
    assert acl.aclrtDestroyStream(handle) == SUCCESS


@pytest.fixture
def gate():
    """Opened when the stream that waits for it may go on."""
    opened = threading.Event()
    yield opened
    opened.set()


@pytest.fixture
def late_stream(acl, gate, monkeypatch):
    """A stream that does nothing before the gate is opened, and everything after it late."""
    monkeypatch.setenv("KVPROOF_STREAM_DELAY_US", LATE)
    handle = made(acl.aclrtCreateStream)
    wait = CALLBACK(lambda data: gate.wait() and None)
    assert acl.aclrtLaunchHostFunc(handle, wait, None) == SUCCESS
    yield handle
    gate.set()
    assert acl.aclrtDestroyStream(handle) == SUCCESS


@pytest.fixture
def event(acl):
    handle = made(acl.aclrtCreateEvent)
    yield handle
    assert acl.aclrtDestroyEvent(handle) == SUCCESS


@pytest.fixture
def kv(copies):
    return declared_pages(copies)


def load(acl, kv, page, stream):
    return acl.aclrtMemcpyAsync(kv.ctypes.data, PAGE, page.ctypes.data, PAGE, TO_DEVICE, stream)


def test_a_stream_works_in_order_and_is_waited_for(acl, stream, kv):
    pages = [np.full(PAGE, value, np.uint8) for value in range(20)]
    assert [load(acl, kv, page, stream) for page in pages] == [SUCCESS] * 20
    assert acl.aclrtSynchronizeStream(stream) == SUCCESS
    assert (kv[:PAGE] == 19).all()
    assert (kv[PAGE:] == 255).all()


@pytest.mark.parametrize("wait", ["stream", "device", "event"])
def test_a_copy_is_late_until_somebody_waits(acl, late_stream, gate, event, kv, wait):
    status = ctypes.c_int()
    assert load(acl, kv, ZEROS, late_stream) == SUCCESS
    assert acl.aclrtRecordEvent(event, late_stream) == SUCCESS
    assert acl.aclrtStreamQuery(late_stream, ctypes.byref(status)) == SUCCESS
    assert status.value == NOT_READY
    assert acl.aclrtQueryEventStatus(event, ctypes.byref(status)) == SUCCESS
    assert status.value == NOT_RECORDED
    assert (kv[:PAGE] == 255).all()
    gate.set()
    assert {
        "stream": lambda: acl.aclrtSynchronizeStream(late_stream),
        "device": acl.aclrtSynchronizeDevice,
        "event": lambda: acl.aclrtSynchronizeEvent(event),
    }[wait]() == SUCCESS
    assert (kv[:PAGE] == 0).all()
    assert acl.aclrtSynchronizeStream(late_stream) == SUCCESS
    assert acl.aclrtQueryEventStatus(event, ctypes.byref(status)) == SUCCESS
    assert status.value == RECORDED


def test_one_stream_waits_for_another_through_an_event(acl, stream, late_stream, gate, event, kv):
    back = np.full(PAGE, 9, np.uint8)
    assert load(acl, kv, ZEROS, late_stream) == SUCCESS
    assert acl.aclrtRecordEvent(event, late_stream) == SUCCESS
    assert acl.aclrtStreamWaitEvent(stream, event) == SUCCESS
    assert acl.aclrtMemcpyAsync(back.ctypes.data, PAGE, kv.ctypes.data, PAGE, TO_HOST, stream) == SUCCESS
    gate.set()
    assert acl.aclrtSynchronizeStream(stream) == SUCCESS
    assert (back == 0).all()


def test_an_event_may_be_destroyed_while_a_stream_still_waits_for_it(acl, stream, late_stream, gate, kv):
    event = made(acl.aclrtCreateEvent)
    assert load(acl, kv, ZEROS, late_stream) == SUCCESS
    assert acl.aclrtRecordEvent(event, late_stream) == acl.aclrtStreamWaitEvent(stream, event) == SUCCESS
    assert acl.aclrtDestroyEvent(event) == SUCCESS
    gate.set()
    assert acl.aclrtSynchronizeStream(stream) == acl.aclrtSynchronizeStream(late_stream) == SUCCESS


def test_an_event_recorded_where_nothing_is_under_way_is_reached_at_once(acl, stream, event):
    status = ctypes.c_int(NOT_RECORDED)
    assert acl.aclrtRecordEvent(event, stream) == SUCCESS
    assert acl.aclrtQueryEventStatus(event, ctypes.byref(status)) == SUCCESS
    assert status.value == RECORDED


def test_a_host_function_comes_after_the_work_before_it(acl, late_stream, gate, kv):
    seen = []
    function = CALLBACK(lambda data: seen.append((data, int(kv[0]))))
    assert load(acl, kv, ZEROS, late_stream) == SUCCESS
    assert acl.aclrtLaunchHostFunc(late_stream, function, 5) == SUCCESS
    assert seen == []
    gate.set()
    assert acl.aclrtSynchronizeStream(late_stream) == SUCCESS
    assert seen == [(5, 0)]


@pytest.mark.parametrize("blocking", [0, 1])
def test_a_callback_runs_on_the_thread_that_asks_for_reports(acl, stream, kv, blocking):
    """The stream goes on at once, or when a blocking callback has run."""
    seen, subscribed, ask = [], threading.Event(), threading.Event()

    def serve():
        seen.append(threading.get_ident())
        subscribed.set()
        ask.wait()
        while acl.aclrtProcessReport(10_000) != SUCCESS:
            pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    subscribed.wait()
    function = CALLBACK(lambda data: seen.append((threading.get_ident(), data)))
    assert acl.aclrtSubscribeReport(thread.ident, stream) == SUCCESS
    assert acl.aclrtLaunchCallback(function, 7, blocking, stream) == SUCCESS
    assert load(acl, kv, ZEROS, stream) == SUCCESS
    if not blocking:
        assert acl.aclrtSynchronizeStream(stream) == SUCCESS
        assert (kv[:PAGE] == 0).all()
    else:
        status = ctypes.c_int()
        assert acl.aclrtStreamQuery(stream, ctypes.byref(status)) == SUCCESS
        assert (status.value, set(kv[:PAGE])) == (NOT_READY, {255})
    ask.set()
    thread.join()
    assert seen == [thread.ident, (thread.ident, 7)]
    assert acl.aclrtSynchronizeStream(stream) == SUCCESS
    assert (kv[:PAGE] == 0).all()
    assert acl.aclrtUnSubscribeReport(thread.ident, stream) == SUCCESS
    assert acl.aclrtLaunchCallback(function, 7, blocking, stream) == INVALID_PARAM


def test_a_thread_without_reports_is_told(acl, stream):
    assert acl.aclrtProcessReport(0) == THREAD_SUBSCRIBE
    assert acl.aclrtSubscribeReport(threading.get_ident(), stream) == SUCCESS
    assert acl.aclrtProcessReport(1) == REPORT_TIMEOUT
    assert acl.aclrtUnSubscribeReport(threading.get_ident(), stream) == SUCCESS
    assert acl.aclrtUnSubscribeReport(threading.get_ident(), stream) == INVALID_PARAM


def test_copies_that_touch_declared_memory_are_collected_once(acl, stream, copies, kv):
    page = np.zeros(PAGE, np.uint8)
    assert load(acl, kv, page, stream) == SUCCESS
    assert acl.aclrtMemcpyAsync(page.ctypes.data, 50, kv.ctypes.data + PAGE, 50, TO_HOST, stream) == SUCCESS
    assert acl.aclrtSynchronizeStream(stream) == SUCCESS
    batch = copies.collect()
    assert batch.sources.tolist() == [page.ctypes.data, kv.ctypes.data + PAGE]
    assert batch.targets.tolist() == [kv.ctypes.data, page.ctypes.data]
    assert batch.sizes.tolist() == [PAGE, 50]
    assert batch.reads.tolist() == [False, True]
    assert copies.collect().sizes.tolist() == []


@pytest.mark.parametrize("wrong", ["past the end", "in no memory of the device", "unmapped source"])
def test_a_wrong_address_is_named_and_not_used(acl, stream, copies, kv, capfd, wrong):
    page, before = np.zeros(2 * PAGE, np.uint8), kv.copy()
    source, target = page.ctypes.data, kv.ctypes.data + PAGE
    if wrong == "in no memory of the device":
        target = page.ctypes.data + PAGE
    elif wrong == "unmapped source":
        source = 16
    size = 2 * PAGE if wrong == "past the end" else PAGE
    assert acl.aclrtMemcpyAsync(target, size, source, size, TO_DEVICE, stream) == SUCCESS  # fails when it is done
    assert acl.aclrtSynchronizeStream(stream) == INVALID_PARAM
    said = capfd.readouterr().err
    assert "libascendcl.so: aclrtMemcpyAsync" in said
    assert hex(source if wrong == "unmapped source" else target) in said
    assert (kv == before).all()
    assert copies.collect().sizes.tolist() == [size]
    assert acl.aclrtSynchronizeStream(stream) == SUCCESS


def test_a_kind_of_copy_nobody_knows_is_refused(acl, stream, kv, capfd):
    assert acl.aclrtMemcpyAsync(kv.ctypes.data, PAGE, kv.ctypes.data, PAGE, 8, stream) == INVALID_PARAM
    assert acl.aclrtMemcpy(kv.ctypes.data, PAGE, kv.ctypes.data + PAGE, PAGE, INNER) == SUCCESS
    assert "kind of copy 0..7, not 8" in capfd.readouterr().err


def test_a_fill_is_in_order_and_stays_inside(acl, stream, copies, kv):
    assert load(acl, kv, ZEROS, stream) == SUCCESS
    assert acl.aclrtMemsetAsync(kv.ctypes.data, PAGE, 3, PAGE, stream) == SUCCESS
    assert acl.aclrtSynchronizeStream(stream) == SUCCESS
    assert (kv[:PAGE] == 3).all()
    assert acl.aclrtMemset(kv.ctypes.data, 3 * PAGE, 4, 3 * PAGE) == INVALID_PARAM
    assert copies.collect().sizes.tolist() == [PAGE, PAGE, 3 * PAGE]


def test_ranges_mapped_side_by_side_are_one_and_allocations_are_not(acl, capfd):
    granule = 2 << 20
    address = ctypes.c_void_p()
    assert acl.aclrtReserveMemAddress(ctypes.byref(address), ctypes.c_size_t(2 * granule), 0, None, 0) == SUCCESS
    for part in range(2):
        handle = ctypes.c_void_p()
        assert acl.aclrtMallocPhysical(ctypes.byref(handle), ctypes.c_size_t(granule), None, 0) == SUCCESS
        assert acl.aclrtMapMem(address.value + part * granule, granule, 0, handle, 0) == SUCCESS
    page, target = np.full(PAGE, 6, np.uint8), address.value + granule - PAGE // 2
    assert acl.aclrtMemcpy(target, PAGE, page.ctypes.data, PAGE, TO_DEVICE) == SUCCESS
    assert ctypes.string_at(target, PAGE) == page.tobytes()
    assert acl.aclrtUnmapMem(ctypes.c_void_p(address.value + granule)) == SUCCESS
    assert acl.aclrtMemcpy(target, PAGE, page.ctypes.data, PAGE, TO_DEVICE) == INVALID_PARAM
    assert f"by {PAGE // 2} bytes" in capfd.readouterr().err
    allocated = ctypes.c_void_p()
    assert acl.aclrtMalloc(ctypes.byref(allocated), ctypes.c_size_t(PAGE), 0) == SUCCESS
    assert acl.aclrtMemcpy(allocated.value + PAGE // 2, PAGE, page.ctypes.data, PAGE, TO_DEVICE) == INVALID_PARAM
    assert acl.aclrtFree(allocated) == SUCCESS


def test_what_nobody_wrote_ends_the_process_with_its_name(library):
    done = in_child(library, "lib.aclrtFrobnicate()")
    assert done.returncode == -6
    assert "libascendcl.so: aclrtFrobnicate is not implemented" in done.stderr
