"""The host copier: every byte moves, taps see and may change every batch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproof.platforms.hostcopy import CopyBatch, HostCopier


def batch(memory, moves):
    base = memory.ctypes.data
    return CopyBatch(
        np.array([base + source for source, _, _ in moves], np.uint64),
        np.array([base + target for _, target, _ in moves], np.uint64),
        np.array([size for _, _, size in moves], np.int64),
    )


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(100, 190), st.integers(0, 10)), max_size=20))
def test_copies_what_the_lists_say(moves):
    memory = np.arange(200, dtype=np.uint8)
    expected = memory.copy()
    for source, target, size in moves:
        expected[target : target + size] = expected[source : source + size]
    copier = HostCopier()
    copier.copy(batch(memory, moves))
    assert (memory == expected).all()
    assert copier.bytes == sum(size for _, _, size in moves)


def test_a_tap_decides_what_is_executed():
    memory = np.arange(20, dtype=np.uint8)
    copier = HostCopier()
    seen = []

    def tap(asked):
        seen.append(len(asked.sizes))
        return CopyBatch(asked.sources[:1], asked.targets[:1], asked.sizes[:1])

    copier.taps.append(tap)
    copier.copy(batch(memory, [(0, 10, 2), (4, 14, 2)]))
    assert seen == [2]
    assert memory[10:16].tolist() == [0, 1, 12, 13, 14, 15]


def test_lists_of_different_length_are_refused():
    with pytest.raises(ValueError, match="differ in length: 1, 2, 1"):
        CopyBatch(np.zeros(1, np.uint64), np.zeros(2, np.uint64), np.zeros(1, np.int64))
