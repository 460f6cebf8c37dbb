"""Sparse attention against a float64 loop over tokens and heads; what is absent, independence, strided caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvproof.deepseek_v41.ops import attention
from kvproof.deepseek_v41.ops.attention import sparse_attention


def cache_of(seed: int, blocks: int, rows: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A cache whose pages are followed by rows of NaN that belong to somebody else."""
    buffer = torch.full((blocks, rows + 1, width), torch.nan, dtype=dtype)
    buffer[:, :rows] = torch.randn(blocks, rows, width, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return buffer[:, :rows]


def case(seed: int, tokens: int, heads: int, width: int, window: int, long: int, dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "q": torch.randn(tokens, heads, width, generator=generator).to(dtype),
        "window_cache": cache_of(seed + 1, 3, 4, width, dtype),
        "window_slots": torch.randint(-1, 12, (tokens, window), generator=generator),
        "long_cache": cache_of(seed + 2, 5, 2, width, dtype),
        "long_slots": torch.randint(-1, 10, (tokens, long), generator=generator),
        "sink": torch.randn(heads, generator=generator),
        "scale": width**-0.5,
    }


def dense(
    q: Tensor, window_cache: Tensor, window_slots: Tensor, long_cache: Any, long_slots: Any, sink: Tensor, scale: float
) -> Tensor:
    result = torch.zeros(q.shape, dtype=torch.float64)
    for t in range(q.shape[0]):
        rows = [window_cache[s // window_cache.shape[1], s % window_cache.shape[1]] for s in window_slots[t] if s >= 0]
        if long_cache is not None:
            rows += [long_cache[s // long_cache.shape[1], s % long_cache.shape[1]] for s in long_slots[t] if s >= 0]
        for h in range(q.shape[1]):
            logits = [scale * float(q[t, h].double() @ row.double()) for row in rows]
            top = max([*logits, float(sink[h])])
            if top == -torch.inf:
                continue
            weights = [torch.tensor(x - top, dtype=torch.float64).exp() for x in logits]
            total = sum(weights) + torch.tensor(float(sink[h]) - top, dtype=torch.float64).exp()
            for weight, row in zip(weights, rows, strict=True):
                result[t, h] += weight / total * row.double()
    return result


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**20),
    tokens=st.integers(0, 5),
    heads=st.integers(1, 4),
    width=st.sampled_from([2, 8, 24]),
    window=st.integers(1, 6),
    long=st.integers(0, 5),
    tile=st.sampled_from([1, 200, 1 << 20]),
)
def test_attention_is_the_dense_softmax_over_the_named_rows(
    seed: int, tokens: int, heads: int, width: int, window: int, long: int, tile: int
) -> None:
    arguments = case(seed, tokens, heads, width, window, long, torch.float32)
    whole, attention.TILE = attention.TILE, tile
    try:
        result = sparse_attention(**arguments)
    finally:
        attention.TILE = whole
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), dense(**arguments), rtol=2e-5, atol=2e-6)


def test_bf16_is_widened_and_rounded_once() -> None:
    arguments = case(3, 9, 4, 32, 8, 4, torch.bfloat16)
    result = sparse_attention(**arguments)
    assert result.dtype == torch.bfloat16
    exact = dense(**arguments)
    # Half a unit in the last place of bf16 (8 bits), and a little for fp32 sums.
    assert ((result.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()
    wide = sparse_attention(
        **arguments | {name: arguments[name].float() for name in ("q", "window_cache", "long_cache")}
    )
    assert torch.equal(result, wide.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "width"), [(4, 32), (64, 512), (3, 8)])
def test_a_token_does_not_depend_on_the_others(heads: int, width: int, dtype: torch.dtype) -> None:
    arguments = case(4, 7, heads, width, 6, 5, dtype)
    together = sparse_attention(**arguments)
    for t in range(7):
        alone = {name: arguments[name][t : t + 1] for name in ("q", "window_slots", "long_slots")}
        assert torch.equal(together[t : t + 1], sparse_attention(**arguments | alone))


def test_without_a_long_cache_only_the_window_counts() -> None:
    arguments = case(5, 4, 2, 8, 6, 3, torch.float32) | {"long_cache": None, "long_slots": None}
    torch.testing.assert_close(sparse_attention(**arguments).double(), dense(**arguments), rtol=2e-5, atol=2e-6)


def test_nothing_to_attend_to_is_zero_with_any_sink() -> None:
    arguments = case(6, 3, 4, 8, 6, 3, torch.float32)
    arguments |= {"window_slots": torch.full((3, 6), -1), "long_slots": torch.full((3, 3), -1)}
    arguments["sink"] = torch.tensor([-torch.inf, 0.0, 80.0, -80.0])
    arguments["window_cache"][0] = torch.nan  # what an absent slot must not read
    assert torch.equal(sparse_attention(**arguments), torch.zeros(3, 4, 8))


def test_absent_rows_are_skipped_even_where_the_cache_holds_nan() -> None:
    arguments = case(7, 3, 2, 8, 6, 3, torch.float32)
    arguments["window_slots"] = torch.tensor([[5, -1, 6, -1, -1, 7]] * 3)
    expected = sparse_attention(**arguments)
    arguments["window_cache"][0] = torch.nan
    assert torch.equal(sparse_attention(**arguments), expected)
    assert not expected.isnan().any()


def test_a_row_in_both_sets_counts_twice() -> None:
    q = torch.zeros(1, 1, 2)
    window, long = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[1.0, 0.0], [0.0, 4.0]]])
    result = sparse_attention(
        q, window, torch.tensor([[0]]), long, torch.tensor([[0, 1]]), torch.tensor([0.0]), 1.0
    )  # four equal weights: two rows (1, 0), one row (0, 4) and the sink
    assert result.flatten().tolist() == [0.5, 1.0]


def test_the_sink_takes_weight_and_gives_no_value() -> None:
    q = torch.zeros(1, 2, 2)
    cache = torch.tensor([[[2.0, 4.0]]])
    sink = torch.tensor([-torch.inf, float(torch.tensor(3.0).log())])
    result = sparse_attention(q, cache, torch.tensor([[0]]), None, None, sink, 1.0)
    torch.testing.assert_close(result[0], torch.tensor([[2.0, 4.0], [0.5, 1.0]]))


def test_large_logits_do_not_overflow() -> None:
    cache = torch.tensor([[[1e4, 0.0], [-1e4, 1.0]]])
    q = torch.tensor([[[1e4, 0.0]]])
    result = sparse_attention(q, cache, torch.tensor([[0, 1]]), None, None, torch.tensor([0.0]), 1.0)
    assert result.flatten().tolist() == [1e4, 0.0]


def test_it_reads_only_the_named_rows() -> None:
    arguments = case(8, 2, 2, 8, 3, 2, torch.float32)
    long = arguments["long_cache"][:1]
    expected = sparse_attention(**arguments | {"long_cache": long, "long_slots": torch.tensor([[0, 1], [1, -1]])})
    huge = long.expand(10**12, *long.shape[1:])  # a copy of it would take petabytes
    slots = torch.tensor([[2 * 10**11, 1], [10**12 + 1, -1]])
    assert torch.equal(sparse_attention(**arguments | {"long_cache": huge, "long_slots": slots}), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"long_slots": None}, "long_cache and long_slots must be given together"),
        ({"long_cache": None}, "long_cache and long_slots must be given together"),
        ({"window_slots": torch.zeros(2, 6, dtype=torch.int64)}, "slots of 2 tokens .* must match q: 3, 8"),
        ({"long_cache": torch.zeros(5, 2, 7)}, "rows of 7 channels must match q: 3, 8"),
        ({"sink": torch.zeros(3)}, r"sink of shape \[3\] must be \[2\]"),
    ],
)
def test_wrong_shapes_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sparse_attention(**case(9, 3, 2, 8, 6, 3, torch.float32) | change)
