"""Ratio-2 compression over rings against a loop that remembers every row: any split into steps, any batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvproof.deepseek_v41.ops.compressor import compress_pairs, pool_pairs, ring_capacity, ring_slots

D = 3
CAPACITY = 8


def rows_of(request: int, count: int) -> Tensor:
    """State rows of a request's positions 0..count-1."""
    return torch.randn(count, 2 * D, generator=torch.Generator().manual_seed(request))


def group_of(rows: Tensor, k: int) -> Tensor:
    """Group k of a request, number by number in float64."""
    pooled = []
    for channel in range(D):
        a0, a1 = rows[2 * k, channel].double(), rows[2 * k + 1, channel].double()
        g0, g1 = rows[2 * k, D + channel].double(), rows[2 * k + 1, D + channel].double()
        e0, e1 = (g0 - max(g0, g1)).exp(), (g1 - max(g0, g1)).exp()
        pooled.append((a0 * e0 + a1 * e1) / (e0 + e1))
    return torch.stack(pooled)


class Batch:
    """Feeds requests step by step and checks every group and every byte of the ring after each step."""

    def __init__(self, requests: int, capacity: int = CAPACITY, tokens: int = 64) -> None:
        self.capacity = capacity
        self.rows = [rows_of(r, tokens) for r in range(requests)]
        self.at = [0] * requests
        self.buffer = torch.full((requests + 2, capacity + 1, 2 * D), torch.nan)
        self.ring = self.buffer[:, :capacity]  # a page of the ring ends in a row of somebody else
        self.groups: list[dict[int, Tensor]] = [{} for _ in range(requests)]

    def step(self, chunks: list[tuple[int, int]], padding: int = 0) -> None:
        """``chunks``: (request, tokens); request -1 is a dummy with the null ring."""
        parts = [self.rows[r][self.at[r] : self.at[r] + n] if r >= 0 else torch.randn(n, 2 * D) for r, n in chunks]
        state = torch.cat([*parts, torch.full((padding, 2 * D), torch.nan)])
        starts = torch.tensor([0, *(n for _, n in chunks)]).cumsum(0)
        before = self.buffer.clone()
        pooled, emitting = compress_pairs(
            state,
            self.ring,
            torch.tensor([r + 1 if r >= 0 else 0 for r, _ in chunks], dtype=torch.int32),
            starts.to(torch.int32),
            torch.tensor([self.at[r] if r >= 0 else 3 for r, _ in chunks]),
        )
        expected_tokens = []
        for (r, n), start in zip(chunks, starts.tolist(), strict=False):
            for i in range(n if r >= 0 else 0):
                position = self.at[r] + i
                if position % 2:
                    expected_tokens.append(start + i)
                    self.groups[r][position // 2] = pooled[len(expected_tokens) - 1]
                before[r + 1, position % self.capacity] = self.rows[r][position]
            if r >= 0:
                self.at[r] += n
        assert pooled.dtype == torch.float32
        assert pooled.shape == (len(expected_tokens), D)
        assert emitting.tolist() == expected_tokens
        torch.testing.assert_close(self.buffer, before, rtol=0, atol=0, equal_nan=True)

    def check(self) -> None:
        for rows, at, groups in zip(self.rows, self.at, self.groups, strict=True):
            assert sorted(groups) == list(range(at // 2))
            if groups:
                pooled = torch.stack([groups[k] for k in range(at // 2)])
                assert torch.equal(pooled, pool_pairs(rows[: at // 2 * 2 : 2], rows[1 : at // 2 * 2 : 2]))


STEP = st.lists(st.tuples(st.integers(-1, 2), st.integers(0, 12)), max_size=4, unique_by=lambda c: c[0])


@settings(max_examples=60)
@given(steps=st.lists(STEP, max_size=5), padding=st.integers(0, 2))
def test_any_split_and_any_batch_gives_the_groups_of_the_whole_sequence(
    steps: list[list[tuple[int, int]]], padding: int
) -> None:
    batch = Batch(3)
    for chunks in steps:
        batch.step(chunks, padding)
    batch.check()


@pytest.mark.parametrize("first", range(1, 12))
def test_a_pair_is_found_wherever_a_prompt_is_cut(first: int) -> None:
    batch = Batch(1)
    batch.step([(0, first)])
    batch.step([(0, 24 - first)])  # longer than the ring: it must not overwrite its own predecessor first
    batch.check()
    assert len(batch.groups[0]) == 12


def test_groups_are_the_softmax_over_each_pair_channel_by_channel() -> None:
    rows = rows_of(5, 20) * 8
    pooled = pool_pairs(rows[::2], rows[1::2])
    expected = torch.stack([group_of(rows, k) for k in range(10)])
    torch.testing.assert_close(pooled.double(), expected, rtol=1e-6, atol=1e-6)


def test_the_golden_pair() -> None:
    pooled = pool_pairs(torch.tensor([[1.0, 2.0, 0.0, 1.0]]), torch.tensor([[3.0, 6.0, 0.0, 0.0]]))
    torch.testing.assert_close(pooled, torch.tensor([[2.0, 3.0757658]]), rtol=1e-7, atol=0)


def test_huge_gates_do_not_overflow() -> None:
    pooled = pool_pairs(torch.tensor([[1.0, 3e38]]), torch.tensor([[2.0, -3e38]]))
    assert pooled.item() == 1.0


@pytest.mark.parametrize(
    ("tokens", "rows"), [(0, 8), (1, 8), (5, 8), (6, 8), (7, 16), (14, 16), (15, 32), (30, 32), (31, 64)]
)
def test_ring_capacity(tokens: int, rows: int) -> None:
    assert ring_capacity(tokens) == rows


def test_ring_capacity_refuses_a_negative_number() -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens = -1 must be >= 0"):
        ring_capacity(-1)


def test_ring_slots() -> None:
    slots = ring_slots(torch.tensor([0, 1, 3, 3]), torch.tensor([5, 5, 7, 8]), 8)
    assert slots.tolist() == [-1, 13, 31, 24]


@pytest.mark.parametrize("spec", [1, 6, 7])
def test_whatever_a_verification_step_rejects_the_next_step_finds_its_predecessor(spec: int) -> None:
    rows = rows_of(9, 64)
    one = torch.tensor([1])
    for accepted in range(spec + 1):
        for start in (10, 11):
            ring = torch.full((2, ring_capacity(spec), 2 * D), torch.nan)
            compress_pairs(rows[:start], ring, one, torch.tensor([0, start]), torch.tensor([0]))
            drafts = torch.cat([rows[start : start + 1 + accepted], torch.randn(spec - accepted, 2 * D)])
            compress_pairs(drafts, ring, one, torch.tensor([0, spec + 1]), torch.tensor([start]))
            at = start + 1 + accepted
            rest = rows[at : at + spec + 1]
            pooled, emitting = compress_pairs(rest, ring, one, torch.tensor([0, spec + 1]), torch.tensor([at]))
            groups = [(at + i) // 2 for i in emitting.tolist()]
            assert groups == [p // 2 for p in range(at, at + spec + 1) if p % 2]
            assert torch.equal(pooled, pool_pairs(rows[[2 * k for k in groups]], rows[[2 * k + 1 for k in groups]]))


def test_a_reused_ring_block_needs_no_reset() -> None:
    ring = torch.full((2, CAPACITY, 2 * D), torch.nan)
    one, rows = torch.tensor([1]), rows_of(11, 30)
    compress_pairs(rows_of(12, 9), ring, one, torch.tensor([0, 9]), torch.tensor([0]))
    # The next owner starts at an even position, here behind a prefix hit of 16 tokens.
    first, _ = compress_pairs(rows[16:19], ring, one, torch.tensor([0, 3]), torch.tensor([16]))
    second, _ = compress_pairs(rows[19:21], ring, one, torch.tensor([0, 2]), torch.tensor([19]))
    assert torch.equal(torch.cat([first, second]), pool_pairs(rows[[16, 18]], rows[[17, 19]]))


def test_an_empty_step_and_a_step_of_dummies_leave_the_ring_alone() -> None:
    ring = torch.randn(2, CAPACITY, 2 * D)
    before = ring.clone()
    none = torch.zeros(0, dtype=torch.int64)
    pooled, emitting = compress_pairs(torch.zeros(4, 2 * D), ring, none, torch.tensor([0]), none)
    assert (pooled.shape, emitting.tolist()) == ((0, D), [])
    nulls = torch.tensor([0, 0])
    pooled, emitting = compress_pairs(torch.randn(4, 2 * D), ring, nulls, torch.tensor([0, 3, 4]), torch.tensor([0, 5]))
    assert (pooled.shape, emitting.tolist()) == ((0, D), [])
    assert torch.equal(ring, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state": torch.zeros(4, 2 * D, dtype=torch.bfloat16)}, "must be torch.float32, got torch.bfloat16"),
        ({"state": torch.zeros(4, 2 * D + 2)}, "state rows of 8 numbers .* ring rows of 6"),
        ({"ring_block": torch.tensor([1, 1])}, "2 ring blocks need 3 query starts and 2 start positions, got 2 and 1"),
        ({"ring_block": torch.tensor([2])}, r"ring_block = \[2\] must be within 0..1"),
        ({"ring_block": torch.tensor([-1])}, r"ring_block = \[-1\] must be within 0..1"),
        ({"query_start_loc": torch.tensor([0, 5])}, r"query_start_loc = \[0, 5\] must rise within 0..4 tokens"),
        ({"query_start_loc": torch.tensor([3, 1])}, r"query_start_loc = \[3, 1\] must rise"),
        ({"start_position": torch.tensor([-2])}, r"start_position = \[-2\] must be >= 0"),
    ],
)
def test_wrong_input_is_refused_before_the_ring_changes(change: dict[str, Tensor], message: str) -> None:
    ring = torch.zeros(2, CAPACITY, 2 * D)
    given_input = {
        "state": torch.ones(4, 2 * D),
        "ring_block": torch.tensor([1]),
        "query_start_loc": torch.tensor([0, 4]),
        "start_position": torch.tensor([0]),
    } | change
    with pytest.raises(ValueError, match=message):
        compress_pairs(ring=ring, **given_input)
    assert not ring.any()
