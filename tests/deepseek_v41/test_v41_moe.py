"""Router, clamped SwiGLU and routed sum: golden values, ties and NaN, and a dense float64 sum."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproof.deepseek_v41.ops.moe import experts, route, swiglu

# ---------------------------------------------------------------------- router


def test_golden_router():
    weights, ids = route(torch.tensor([[0.0, 1, -1, 2]]), torch.tensor([0.6, 0, 0, -1]), 2, 1.5)
    assert ids.tolist() == [[0, 1]]
    assert ids.dtype == torch.int64
    torch.testing.assert_close(weights, torch.tensor([[0.6311916, 0.8688085]]), rtol=0, atol=1e-6)


def test_golden_scores():
    weights, ids = route(torch.tensor([[0.0, 1, -1, 2]]), torch.zeros(4), 4, 1.0, normalise=False)
    assert ids.tolist() == [[3, 1, 0, 2]]
    torch.testing.assert_close(weights, torch.tensor([[1.4583992, 1.1459763, 0.8325546, 0.5596978]]))


@given(st.lists(st.integers(-3, 3), min_size=2, max_size=40), st.data())
def test_ties_go_to_the_lowest_number(levels, data):
    k = data.draw(st.integers(1, len(levels)))
    _, ids = route(torch.tensor([levels], dtype=torch.float32), torch.zeros(len(levels)), k, 1.0)
    assert ids[0].tolist() == sorted(range(len(levels)), key=lambda expert: (-levels[expert], expert))[:k]


@given(st.integers(0, 2**31 - 1))
def test_weights_are_the_unbiased_scores(seed):
    torch.manual_seed(seed)
    logits, bias = 4 * torch.randn(6, 16), torch.randn(16)
    weights, ids = route(logits, bias, 5, 2.5)
    scores = torch.log1p(logits.double().exp()).sqrt()
    kept = scores.gather(1, ids)
    torch.testing.assert_close(weights.double(), 2.5 * kept / kept.sum(-1, keepdim=True), rtol=1e-5, atol=1e-6)
    choice = scores + bias
    assert (choice.gather(1, ids).min(-1).values >= choice.scatter(1, ids, -math.inf).max(-1).values - 1e-5).all()
    torch.testing.assert_close(weights.sum(-1), torch.full((6,), 2.5))


def test_large_logits_pass_softplus_unchanged():
    weights, _ = route(torch.tensor([[25.0, 10000.0, -50.0]]), torch.zeros(3), 3, 1.0, normalise=False)
    assert weights[0, :2].tolist() == [100, 5]
    assert 0 <= weights[0, 2] < 1e-10


def test_nan_never_wins():
    logits = torch.tensor([[math.nan, -20.0, -30.0, math.nan]])
    weights, ids = route(logits, torch.tensor([5.0, 0, 0, 0]), 2, 1.5)
    assert ids.tolist() == [[1, 2]]
    assert weights.isfinite().all()
    _, ids = route(torch.zeros(1, 3), torch.tensor([math.nan, -1.0, -2.0]), 2, 1.5)
    assert ids.tolist() == [[1, 2]]


def test_zero_sum_is_divided_by_one():
    weights, ids = route(torch.full((1, 4), -math.inf), torch.tensor([0.0, 1, 3, 2]), 2, 1.5)
    assert ids.tolist() == [[2, 3]]
    assert weights.tolist() == [[0, 0]]


def test_bias_of_each_row():
    logits = torch.zeros(2, 3)
    _, ids = route(logits, torch.tensor([[0.0, 0, 1], [1.0, 0, 0]]), 1, 1.0)
    assert ids.tolist() == [[2], [0]]


def test_routing_in_fp32_whatever_comes():
    logits = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    weights, ids = route(logits, torch.zeros(8), 2, 1.0)
    wide, wide_ids = route(logits.double(), torch.zeros(8), 2, 1.0)
    assert (weights.dtype, wide.dtype) == (torch.float32, torch.float64)
    assert torch.equal(ids, wide_ids)
    torch.testing.assert_close(weights.double(), wide, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("k", [0, 5])
def test_impossible_k(k):
    with pytest.raises(ValueError, match=f"k {k}.*1..4"):
        route(torch.zeros(1, 4), torch.zeros(4), k, 1.0)


# ---------------------------------------------------------------------- SwiGLU


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(("gate", "up", "limit", "expected"), [
    (2.0, 3.0, 0.5, 0.5 * sigmoid(0.5) * 0.5),
    (-2.0, -3.0, 0.5, -2 * sigmoid(-2) * -0.5),  # the gate has no lower clamp
    (0.25, 0.25, 0.5, 0.25 * sigmoid(0.25) * 0.25),
    (2.0, 3.0, None, 2 * sigmoid(2) * 3),
])  # fmt: skip
def test_clamp(gate, up, limit, expected):
    assert float(swiglu(torch.tensor(gate), torch.tensor(up), limit)) == pytest.approx(expected, rel=1e-6)


def test_swiglu_rounds_once():
    torch.manual_seed(6)
    gate, up = torch.randn(2, 4096).bfloat16()
    right = (torch.nn.functional.silu(gate.double()) * up.double()).bfloat16()
    got = swiglu(gate, up, 10.0)
    assert got.dtype == torch.bfloat16
    assert (got != right).float().mean() < 1e-3
    assert (torch.nn.functional.silu(gate) * up != right).float().mean() > 0.05


# ---------------------------------------------------------------------- experts


def network(count=8, width=32, inner=16, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    w13 = torch.randn(count, 2 * inner, width, dtype=torch.float64) / math.sqrt(width)
    return w13.to(dtype), (torch.randn(count, width, inner, dtype=torch.float64) / math.sqrt(inner)).to(dtype)


def dense(x, ids, weights, w13, w2, limit):
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            if expert < 0:
                continue
            gate, up = (w13[expert].double() @ x[token].double()).chunk(2)
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            out[token] += weight * (w2[expert].double() @ (torch.nn.functional.silu(gate) * up))
    return out


def batch(tokens, count=8, k=3, width=32, dtype=torch.float64, seed=1):
    torch.manual_seed(seed)
    weights, ids = route(torch.randn(tokens, count), torch.zeros(count), k, 1.5)
    return torch.randn(tokens, width, dtype=torch.float64).to(dtype), ids, weights


@pytest.mark.parametrize("tokens", [1, 2, 17])
def test_routed_sum(tokens):
    x, ids, weights = batch(tokens)
    w13, w2 = network()
    got = experts(x, ids, weights, w13, w2, 0.5)
    torch.testing.assert_close(got, dense(x, ids, weights, w13, w2, 0.5), rtol=1e-12, atol=1e-12)


def test_ranks_add_up_and_foreign_experts_give_nothing():
    x, ids, weights = batch(9)
    ids[2] = -1  # a padded row
    ids[4, 1] = -1
    w13, w2 = network()
    parts = [experts(x, ids, weights, w13[at : at + 4], w2[at : at + 4], 10.0, first=at) for at in (0, 4)]
    torch.testing.assert_close(sum(parts), dense(x, ids, weights, w13, w2, 10.0), rtol=1e-12, atol=1e-12)
    assert parts[0][2].eq(0).all()
    assert experts(x, ids, weights, w13, w2, 10.0, first=8).eq(0).all()


def test_only_experts_that_were_hit_are_read():
    x, ids, weights = batch(5)
    ids = ids % 3
    w13, w2 = network()
    w13[3:], w2[3:] = math.nan, math.nan
    assert experts(x, ids, weights, w13, w2, 10.0).isfinite().all()


def test_no_tokens():
    x, ids, weights = batch(3)
    assert experts(x[:0], ids[:0], weights[:0], *network(), 10.0).shape == (0, 32)


@settings(max_examples=25)
@given(st.integers(0, 2**31 - 1), st.integers(1, 12))
def test_a_token_does_not_depend_on_its_batch(seed, tokens):
    x, ids, weights = batch(tokens, dtype=torch.float32, seed=seed)
    w13, w2 = network(dtype=torch.float32)
    whole = experts(x, ids, weights, w13, w2, 10.0)
    order = torch.randperm(tokens)
    chosen = order[: tokens // 2 + 1]
    torch.testing.assert_close(
        experts(x[chosen], ids[chosen], weights[chosen], w13, w2, 10.0), whole[chosen], rtol=1e-5, atol=1e-5
    )


def test_bf16_products_and_an_fp32_sum():
    x, ids, weights = batch(33, dtype=torch.bfloat16)
    w13, w2 = network(dtype=torch.bfloat16)
    got = experts(x, ids, weights, w13, w2, 10.0)
    assert got.dtype == torch.float32
    expected = torch.zeros(33, 32, dtype=torch.float64)
    for token in range(33):
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            hidden = (w13[expert].double() @ x[token].double()).bfloat16().double()
            inner = (torch.nn.functional.silu(hidden[:16]) * hidden[16:]).bfloat16().double()
            expected[token] += weight * (w2[expert].double() @ inner).bfloat16().double()
    close = (got.double() - expected).abs() <= 1e-5 + 1e-5 * expected.abs()
    assert close.double().mean() > 0.95  # the rest is a rounding that fell to the other side
    torch.testing.assert_close(got.double(), expected, rtol=0.02, atol=0.02)
