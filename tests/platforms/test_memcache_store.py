"""The stand-in for MemCache's client answers as MemCache does, and copies exactly the lists it is given."""

import numpy as np
import pytest

from kvproof.platforms.ascend_sim import memcache_store
from kvproof.platforms.ascend_sim.memcache_store import MISSING, OTHER_SIZE, STORED, DistributedObjectStore
from kvproof.platforms.hostcopy import HOST_COPIER

PUT, GET = 0, 1


@pytest.fixture
def memory(monkeypatch):
    monkeypatch.setattr(memcache_store, "_POOL", {})
    return np.arange(4096, dtype=np.uint16).view(np.uint8)


@pytest.fixture
def batches(monkeypatch):
    seen = []
    monkeypatch.setattr(HOST_COPIER, "taps", [lambda batch: seen.append(batch) or batch])
    return seen


def parts(memory, *ranges):
    return [memory.ctypes.data + first for first, _ in ranges], [size for _, size in ranges]


def test_the_parts_of_an_object_come_back_in_their_order_in_one_batch(memory, batches):
    store, before = DistributedObjectStore(), memory.copy()
    a, b = parts(memory, (0, 64), (512, 32)), parts(memory, (128, 96))
    assert store.batch_put_from_layers(["a", "b"], [a[0], b[0]], [a[1], b[1]], PUT) == [STORED, STORED]
    assert [batch.sizes.tolist() for batch in batches] == [[64, 32, 96]]
    to_b, to_a = parts(memory, (4096, 96)), parts(memory, (2048, 64), (3072, 32))
    assert DistributedObjectStore().batch_get_into_layers(["b", "a"], [to_b[0], to_a[0]], [to_b[1], to_a[1]], GET) == [
        STORED, STORED,
    ]  # fmt: skip
    assert batches[1].targets.tolist() == [*to_b[0], *to_a[0]]
    for first, size, source in ((4096, 96, 128), (2048, 64, 0), (3072, 32, 512)):
        assert (memory[first : first + size] == before[source : source + size]).all()


def test_a_key_that_is_there_keeps_what_it_has(memory, batches):
    store = DistributedObjectStore()
    first, other, to = (parts(memory, (at, 64)) for at in (0, 256, 1024))
    kept = memory[:64].copy()
    store.batch_put_from_layers(["k"], [first[0]], [first[1]], PUT)
    assert store.batch_put_from_layers(["k"], [other[0]], [other[1]], PUT) == [STORED]
    assert len(batches) == 1
    store.batch_get_into_layers(["k"], [to[0]], [to[1]], GET)
    assert (memory[1024:1088] == kept).all()


def test_what_is_not_there_or_of_another_size_is_not_copied(memory, batches):
    store = DistributedObjectStore()
    where = parts(memory, (0, 64))
    store.batch_put_from_layers(["k"], [where[0]], [where[1]], PUT)
    assert store.batch_is_exist(["k", "x"]) == [1, 0]
    short = parts(memory, (1024, 32))
    before = memory.copy()
    assert store.batch_get_into_layers(["x", "k"], [where[0], short[0]], [where[1], short[1]], GET) == [
        MISSING, OTHER_SIZE,
    ]  # fmt: skip
    assert (memory == before).all()
    assert len(batches) == 1


def test_what_has_no_host_twin_says_so():
    with pytest.raises(AttributeError, match=r"DistributedObjectStore\.batch_alloc has no host twin"):
        DistributedObjectStore().batch_alloc(["k"], [8], 1, 0)
    assert getattr(DistributedObjectStore(), "batch_write_finish", None) is None
