"""The order in which free blocks are handed out, and common prefixes."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvproof.engine.sequences import common_prefix, scattered


@given(st.sets(st.integers(1, 500)), st.integers(0, 10))
def test_every_block_once_and_no_neighbours(blocks, seed):
    order = scattered(sorted(blocks), np.random.default_rng(seed))
    assert sorted(order) == sorted(blocks)
    if len(blocks) > 6:
        assert all(abs(a - b) > 1 for a, b in itertools.pairwise(order))


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def testcommon_prefix(a, b):
    n = common_prefix(a, b)
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]
