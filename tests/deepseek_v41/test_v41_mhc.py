"""Hyper-connections: golden values, a float64 formula written out index by index, and what stays equal bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvproof.deepseek_v41.ops.mhc import collapse, expand, mixes, sinkhorn

SETTINGS = {"norm_eps": 1e-20, "hc_eps": 1e-6, "iterations": 20}


def parameters(copies, width, seed=0):
    torch.manual_seed(seed)
    rows = 2 * copies + copies * copies
    fn = torch.randn(rows, copies * width) / math.sqrt(copies * width)
    return fn, 0.1 * torch.randn(rows), (0.5 * torch.randn(3)).abs() + 0.5


@pytest.mark.parametrize(("iterations", "golden"), [
    (1, [[0.2475267, 0.8002955], [0.7524724, 0.1997034]]),
    (3, [[0.2249676, 0.7795492], [0.7750314, 0.2204497]]),
    (20, [[0.2227005, 0.7772985], [0.7772986, 0.2227005]]),
])  # fmt: skip
def test_golden_sinkhorn(iterations, golden):
    got = sinkhorn(torch.tensor([[0.0, 1.0], [2.0, 0.5]]), 1e-6, iterations)
    torch.testing.assert_close(got, torch.tensor(golden), rtol=0, atol=2e-7)


@given(st.integers(1, 5), st.integers(1, 30), st.integers(0, 2**31 - 1))
def test_sinkhorn_ends_with_columns(copies, iterations, seed):
    torch.manual_seed(seed)
    got = sinkhorn(2 * torch.rand(7, copies, copies) - 1, 1e-6, iterations)  # eps shows where a column is starved
    assert (got > 0).all()
    torch.testing.assert_close(got.sum(-2), torch.ones(7, copies), rtol=0, atol=2e-5)


def test_sinkhorn_rows_converge():
    torch.manual_seed(0)
    logits = torch.randn(50, 4, 4, dtype=torch.float64)
    off = [float((sinkhorn(logits, 1e-6, n).sum(-1) - 1).abs().max()) for n in (1, 2, 4, 20)]
    assert off == sorted(off, reverse=True)
    assert off[0] > 0.1
    assert off[-1] < 1e-4


def test_sinkhorn_needs_an_iteration():
    with pytest.raises(ValueError, match="iterations 0"):
        sinkhorn(torch.zeros(2, 2), 1e-6, 0)


@pytest.mark.parametrize("copies", [1, 2, 4])
@pytest.mark.parametrize("norm_eps", [1e-20, 1e-6])
def test_mixes_index_by_index(copies, norm_eps):
    stream = torch.randn(5, copies, 24, generator=torch.Generator().manual_seed(copies)).bfloat16()
    fn, base, scale = parameters(copies, 24)
    got = mixes(stream, fn, base, scale, norm_eps=norm_eps, hc_eps=1e-6, iterations=3)
    assert {part.dtype for part in got} == {torch.float32}
    for token in range(5):
        flat = [float(value) for value in stream[token].flatten()]
        inverse = 1 / math.sqrt(sum(value * value for value in flat) / len(flat) + norm_eps)
        m = [inverse * sum(f * float(w) for f, w in zip(flat, row, strict=True)) for row in fn]
        for i in range(copies):
            pre = 1 / (1 + math.exp(-(m[i] * float(scale[0]) + float(base[i])))) + 1e-6
            at = copies + i
            post = 2 / (1 + math.exp(-(m[at] * float(scale[1]) + float(base[at]))))
            assert float(got.pre[token, i]) == pytest.approx(pre, rel=1e-4, abs=1e-5)
            assert float(got.post[token, i]) == pytest.approx(post, rel=1e-4, abs=1e-5)
        cells = [[2 * copies + i * copies + j for j in range(copies)] for i in range(copies)]
        logits = [[m[cell] * float(scale[2]) + float(base[cell]) for cell in row] for row in cells]
        comb = sinkhorn(torch.tensor(logits, dtype=torch.float64), 1e-6, 3)
        torch.testing.assert_close(got.comb[token].double(), comb, rtol=1e-4, atol=1e-5)


def test_eps_is_added_to_pre_alone():
    stream = torch.randn(2, 4, 8)
    base = torch.full((24,), -100.0)
    got = mixes(stream, torch.zeros(24, 32), base, torch.ones(3), **SETTINGS)
    assert torch.equal(got.pre, torch.full((2, 4), 1e-6))
    assert torch.equal(got.post, torch.zeros(2, 4))
    torch.testing.assert_close(got.comb, torch.full((2, 4, 4), 0.25), rtol=0, atol=1e-6)


def test_zero_stream_mixes_by_base_alone():
    fn, base, scale = parameters(4, 8)
    got = mixes(torch.zeros(1, 4, 8).bfloat16(), fn, base, scale, **SETTINGS)
    torch.testing.assert_close(got.pre[0], base[:4].sigmoid() + 1e-6)
    torch.testing.assert_close(got.post[0], 2 * base[4:8].sigmoid())


def test_equal_copies_see_the_sum_of_the_blocks():
    fn, base, scale = parameters(4, 32)
    token = torch.randn(6, 32).bfloat16()
    full = mixes(token.unsqueeze(1).repeat(1, 4, 1), fn, base, scale, **SETTINGS)
    summed = mixes(token.unsqueeze(1), fn.view(24, 4, 32).sum(1)[:3], base[:3], scale, **SETTINGS)
    torch.testing.assert_close(full.pre[:, :1], summed.pre, rtol=1e-5, atol=1e-6)


def test_mixes_of_a_float64_stream():
    fn, base, scale = parameters(4, 16)
    stream = torch.randn(3, 4, 16, dtype=torch.float64)
    wide = mixes(stream, fn, base, scale, **SETTINGS)
    narrow = mixes(stream.float(), fn, base, scale, **SETTINGS)
    assert wide.comb.dtype == torch.float64
    for a, b in zip(wide, narrow, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------- collapse and expand


def test_first_sublayer_reads_the_embedding():
    embedding = torch.randn(7, 64).bfloat16()
    stream = embedding.unsqueeze(1).repeat(1, 4, 1)
    assert torch.equal(collapse(stream, None), embedding)


def test_collapse_rounds_once():
    torch.manual_seed(4)
    stream, pre = torch.randn(64, 4, 128).bfloat16(), torch.rand(64, 4)
    right = torch.einsum("tm,tmh->th", pre.double(), stream.double()).bfloat16()
    got = collapse(stream, pre)
    assert got.dtype == torch.bfloat16
    assert (got != right).float().mean() < 1e-3
    narrow = (pre.bfloat16().unsqueeze(-1) * stream).sum(1)
    assert (narrow != right).float().mean() > 0.1


@given(st.integers(1, 9), st.integers(1, 70), st.integers(0, 2**31 - 1))
def test_collapse_of_chosen_tokens_is_the_chosen_collapse(tokens, width, seed):
    torch.manual_seed(seed)
    stream, pre = torch.randn(tokens, 4, width).bfloat16(), torch.rand(tokens, 4)
    chosen = torch.randint(0, tokens, (3,))
    assert torch.equal(collapse(stream, pre)[chosen], collapse(stream[chosen], pre[chosen]))


def test_comb_goes_from_its_first_to_its_second_index():
    stream = torch.arange(1, 5.0).view(1, 4, 1)
    comb = torch.zeros(1, 4, 4)
    comb[0, 0, 2] = comb[0, 3, 1] = 1
    got = expand(stream, torch.tensor([[10.0]]), torch.tensor([[1.0, 0, 2, 0]]), comb)
    assert got.flatten().tolist() == [10, 4, 21, 0]


def test_expand_rounds_once_per_copy():
    torch.manual_seed(5)
    stream, y = torch.randn(32, 4, 96).bfloat16(), torch.randn(32, 96).bfloat16()
    post, comb = 2 * torch.rand(32, 4), sinkhorn(torch.randn(32, 4, 4), 1e-6, 20)
    right = post.double().unsqueeze(-1) * y.double().unsqueeze(1)
    right = (right + torch.einsum("tij,tih->tjh", comb.double(), stream.double())).bfloat16()
    got = expand(stream, y, post, comb)
    assert got.dtype == torch.bfloat16
    assert (got != right).float().mean() < 1e-3


def test_delayed_hand_over():
    """Two sublayers by hand: the second is fed by the first one's pre, computed from the stream before the first."""
    stream = torch.randn(3, 4, 32, dtype=torch.float64)
    first, second = parameters(4, 32, 1), parameters(4, 32, 2)
    one = mixes(stream, *first, **SETTINGS)
    after = expand(stream, collapse(stream, None).tanh(), one.post, one.comb)
    two = mixes(after, *second, **SETTINGS)
    fed = collapse(after, one.pre)
    expected = sum(one.pre[:, i, None] * after[:, i] for i in range(4))
    torch.testing.assert_close(fed, expected)
    assert not torch.allclose(fed, collapse(after, two.pre))
