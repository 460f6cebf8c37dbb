"""Index scores, top-k and candidate blocks against loops over single scores; ties, NaN, garbage, device checks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvproof.deepseek_v41.ops import indexer, selection
from kvproof.deepseek_v41.ops.selection import candidate_blocks, check_candidates, restrict, top_k

INF, NAN = math.inf, math.nan
SCORE = st.sampled_from([-INF, -2.0, -1e-45, -0.0, 0.0, 1e-45, 0.5, 1.0, 3e38, INF, NAN])


def before(a: float, b: float) -> bool:
    """Whether score ``a`` is strictly better than ``b``."""
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and not math.isnan(b)
    return a > b


def best_of(scores: list[float], k: int) -> list[int]:
    """Ascending indices of the k best present scores: one by one, the first of the best ones."""
    left = [i for i, s in enumerate(scores) if s != -INF]
    chosen: list[int] = []
    while left and len(chosen) < k:
        winner = left[0]
        for i in left:
            if before(scores[i], scores[winner]):
                winner = i
        chosen.append(winner)
        left.remove(winner)
    return sorted(chosen)


def padded(row: list[int], width: int) -> list[int]:
    return row + [-1] * (width - len(row))


@st.composite
def scored(draw: st.DrawFn) -> tuple[list[list[float]], list[int]]:
    rows, count = draw(st.integers(0, 4)), draw(st.integers(0, 9))
    scores = draw(st.lists(st.lists(SCORE, min_size=count, max_size=count), min_size=rows, max_size=rows))
    return scores, draw(st.lists(st.integers(0, count), min_size=rows, max_size=rows))


def tensors(scores: list[list[float]], visible: list[int]) -> tuple[Tensor, Tensor]:
    width = len(scores[0]) if scores else 0
    return torch.tensor(scores).view(len(visible), width), torch.tensor(visible, dtype=torch.int64)


@settings(max_examples=120)
@given(drawn=scored(), k=st.integers(1, 11), tile=st.sampled_from([1, 10, 1 << 22]))
def test_top_k_picks_one_after_the_other(drawn: tuple[list[list[float]], list[int]], k: int, tile: int) -> None:
    scores, visible = drawn
    whole, selection.TILE = selection.TILE, tile
    try:
        result = top_k(*tensors(scores, visible), k)
    finally:
        selection.TILE = whole
    assert result.dtype == torch.int32
    assert result.tolist() == [padded(best_of(row[:n], k), k) for row, n in zip(scores, visible, strict=True)]


@settings(max_examples=120)
@given(drawn=scored(), block=st.integers(1, 4), count=st.integers(1, 5), tile=st.sampled_from([1, 10, 1 << 22]))
def test_candidate_blocks_are_the_newest_and_the_best_others(
    drawn: tuple[list[list[float]], list[int]], block: int, count: int, tile: int
) -> None:
    scores, visible = drawn
    whole, selection.TILE = selection.TILE, tile
    try:
        result = candidate_blocks(*tensors(scores, visible), block, count)
    finally:
        selection.TILE = whole
    expected = []
    for row, n in zip(scores, visible, strict=True):
        blocks = [row[:n][b : b + block] for b in range(0, n, block)]
        best = [NAN if any(math.isnan(s) for s in some) else max(some) for some in blocks[:-1]]
        others = best_of(best, count - 1)
        expected.append(padded(sorted([*others, len(blocks) - 1]) if blocks else [], count))
    assert result.dtype == torch.int32
    assert result.tolist() == expected
    check_candidates(result, torch.tensor(visible, dtype=torch.int64), block)


@settings(max_examples=80)
@given(drawn=scored(), block=st.integers(1, 4), k=st.integers(1, 6), data=st.data())
def test_a_consumer_selects_inside_its_candidates(
    drawn: tuple[list[list[float]], list[int]], block: int, k: int, data: st.DataObject
) -> None:
    scores, visible = drawn
    blocks = -(-(len(scores[0]) if scores else 0) // block)
    row = st.lists(st.integers(-1, blocks - 1), min_size=3, max_size=3)
    candidates = data.draw(st.lists(row, min_size=len(visible), max_size=len(visible)))
    given_scores, seen = tensors(scores, visible)
    kept = given_scores.clone()
    narrowed = restrict(given_scores, torch.tensor(candidates, dtype=torch.int32).view(-1, 3), block)
    torch.testing.assert_close(given_scores, kept, rtol=0, atol=0, equal_nan=True)
    expected = [
        [s if j // block in allowed else -INF for j, s in enumerate(line)]
        for line, allowed in zip(scores, candidates, strict=True)
    ]
    torch.testing.assert_close(narrowed, tensors(expected, visible)[0], rtol=0, atol=0, equal_nan=True)
    selected = [padded(best_of(line[:n], k), k) for line, n in zip(expected, visible, strict=True)]
    assert top_k(narrowed, seen, k).tolist() == selected


def test_the_public_examples() -> None:
    scores = torch.tensor([[1.0, 7.0, 3.0, -INF, -INF]])
    assert top_k(scores, torch.tensor([3]), 4).tolist() == [[0, 1, 2, -1]]
    scores = torch.tensor([[9.0, 8.0, 7.0, 6.0, 5.0, 4.0, -INF, -INF]])
    assert candidate_blocks(scores, torch.tensor([6]), 2, 2).tolist() == [[0, 2]]


def test_a_long_row_with_many_ties_at_the_boundary() -> None:
    scores = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)).mul_(2).round_()
    visible = torch.tensor([5000, 4000, 700])
    result = top_k(scores, visible, 512)
    for row, line, n in zip(result.tolist(), scores.tolist(), visible.tolist(), strict=True):
        order = sorted(range(n), key=lambda i, line=line: (-line[i], i))
        assert row == sorted(order[:512])


def test_with_room_for_every_block_the_filter_changes_nothing() -> None:
    scores = torch.randn(4, 21, generator=torch.Generator().manual_seed(1))
    visible = torch.tensor([21, 13, 1, 0])
    candidates = candidate_blocks(scores, visible, 4, 6)
    assert torch.equal(top_k(restrict(scores, candidates, 4), visible, 5), top_k(scores, visible, 5))


@pytest.mark.parametrize("better", [INF, NAN, 3e38])
def test_nothing_displaces_the_newest_block(better: float) -> None:
    scores = torch.tensor([[better, better, better, -5.0, better]])
    assert candidate_blocks(scores, torch.tensor([4]), 1, 1).tolist() == [[3]]
    assert candidate_blocks(scores, torch.tensor([4]), 1, 2).tolist() == [[0, 3]]


def test_every_nan_ranks_the_same_whatever_its_sign_and_payload() -> None:
    bits = torch.tensor([[0x7F7FFFFF, 0x7FC00000, -0x400000, 0x7FC00001, 0x7F800000]], dtype=torch.int32)
    scores = bits.view(torch.float32)  # the largest number, three kinds of NaN, infinity
    assert scores.isnan().tolist() == [[False, True, True, True, False]]
    assert [top_k(scores, torch.tensor([5]), k).tolist()[0] for k in (1, 2, 3, 4)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 3, 4],
    ]
    assert candidate_blocks(scores, torch.tensor([5]), 1, 3).tolist() == [[1, 2, 4]]


CANDIDATES = torch.tensor([[0, 2, -1], [1, 0, -1]], dtype=torch.int32)
SEEN = torch.tensor([5, 4])


def test_candidates_within_range_are_accepted_in_any_order() -> None:
    check_candidates(CANDIDATES, SEEN, 2)
    check_candidates(CANDIDATES[:0], SEEN[:0], 2)


@pytest.mark.parametrize(
    ("candidates", "message"),
    [
        (CANDIDATES.where(CANDIDATES != 2, -2), r"candidates\[0, 1\] = -2 must be -1 or below 3 blocks"),
        (CANDIDATES.where(CANDIDATES != 2, 10**6), r"candidates\[0, 1\] = 1000000 must be -1 or below 3 blocks"),
        (CANDIDATES.flip(0), r"candidates\[1, 1\] = 2 must be -1 or below 2 blocks"),
        (CANDIDATES.long(), "dtype torch.int64 must be torch.int32"),
        (CANDIDATES.t().contiguous().t(), r"strides \[1, 2\] must be contiguous"),
        (CANDIDATES.to("meta"), "candidates on meta must be on cpu"),
        (CANDIDATES[:1], r"shape \[1, 3\] must be \[2, C\]"),
        (CANDIDATES[0], r"shape \[3\] must be \[2, C\]"),
    ],
)
def test_bad_candidates_are_named(candidates: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_candidates(candidates, SEEN, 2)


def test_bad_scores_are_named() -> None:
    scores, visible = torch.zeros(2, 3), torch.tensor([3, 1])
    for call in (lambda s, v: top_k(s, v, 2), lambda s, v: candidate_blocks(s, v, 2, 2)):
        with pytest.raises(ValueError, match="visible = 4 rows must be <= 3 scores"):
            call(scores, visible + 1)
        with pytest.raises(ValueError, match="visible on meta must be on cpu"):
            call(scores, visible.to("meta"))
        with pytest.raises(ValueError, match=r"scores of dtype torch.bfloat16 must be torch.float32"):
            call(scores.bfloat16(), visible)
        with pytest.raises(ValueError, match=r"scores \[2, 3\] and visible \[1\]"):
            call(scores, visible[:1])
    with pytest.raises(ValueError, match="k = 0 must be >= 1"):
        top_k(scores, visible, 0)
    with pytest.raises(ValueError, match="block = 0 must be >= 1"):
        candidate_blocks(scores, visible, 0, 2)


def test_shapes_are_known_without_values() -> None:
    scores, visible = torch.empty(2, 7, device="meta"), torch.empty(2, dtype=torch.int64, device="meta")
    blocks = candidate_blocks(scores, visible, 2, 3)
    for result, shape in (
        (top_k(scores, visible, 9), (2, 9)),
        (blocks, (2, 3)),
        (restrict(scores, blocks, 2), (2, 7)),
        (
            indexer.scores(
                torch.empty(2, 3, 4, 8, device="meta"),
                torch.empty(2, 3, 4, device="meta"),
                torch.empty(2, 5, 8, device="meta"),
            ),
            (2, 3, 5),
        ),
    ):
        assert (tuple(result.shape), result.device.type) == (shape, "meta")


def index_inputs(seed: int, batch: int, queries: int, heads: int, width: int, count: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(batch, queries, heads, width, generator=generator).bfloat16(),
        torch.randn(batch, queries, heads, generator=generator),
        torch.randn(batch, count, width, generator=generator).bfloat16(),
    )


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**20),
    batch=st.integers(0, 3),
    queries=st.integers(0, 3),
    heads=st.integers(1, 3),
    width=st.sampled_from([2, 8]),
    count=st.integers(0, 5),
    tile=st.sampled_from([1, 30, 1 << 20]),
    keys=st.sampled_from([1, 2, 2048]),
)
def test_index_scores_are_the_weighted_sums_of_clipped_products(
    seed: int, batch: int, queries: int, heads: int, width: int, count: int, tile: int, keys: int
) -> None:
    q, w, k = index_inputs(seed, batch, queries, heads, width, count)
    whole = indexer.TILE, indexer.KEYS
    indexer.TILE, indexer.KEYS = tile, keys
    try:
        result = indexer.scores(q, w, k)
    finally:
        indexer.TILE, indexer.KEYS = whole
    assert (result.dtype, tuple(result.shape)) == (torch.float32, (batch, queries, count))
    for b in range(batch):
        for t in range(queries):
            for j in range(count):
                total = sum(
                    float(w[b, t, h]) * max(0.0, float(q[b, t, h].double() @ k[b, j].double())) for h in range(heads)
                )
                assert float(result[b, t, j]) == pytest.approx(total / math.sqrt(width * heads), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(("heads", "width", "count"), [(2, 16, 37), (32, 128, 2100), (3, 8, 70)])
def test_an_index_score_depends_neither_on_other_queries_nor_on_later_keys(heads: int, width: int, count: int) -> None:
    q, w, k = index_inputs(2, 2, 5, heads, width, count)
    whole = indexer.scores(q, w, k)
    for t in range(5):
        assert torch.equal(whole[:, t : t + 1], indexer.scores(q[:, t : t + 1], w[:, t : t + 1], k))
    assert torch.equal(whole[1:], indexer.scores(q[1:], w[1:], k[1:]))
    for n in (1, 7, 16, count - 1):
        assert torch.equal(whole[:, :, :n], indexer.scores(q, w, k[:, :n]))


def test_index_scores_refuse_shapes_that_do_not_fit() -> None:
    q, w, k = index_inputs(3, 2, 3, 2, 8, 4)
    for wrong in ((q, w[:, :2], k), (q, w, k[:1]), (q, w, k[:, :, :7])):
        with pytest.raises(ValueError, match=r"w .* and keys .* do not fit q \[2, 3, 2, 8\]"):
            indexer.scores(*wrong)
