"""RMSNorm and the rotary embedding against float64 formulas and by their defining properties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvproof.deepseek_v41.ops.norm import rms_norm
from kvproof.deepseek_v41.ops.rope import Rope, rotate

RELEASED = Rope(64, 160000.0, 16.0, 65536, 32, 1, True)
TINY = Rope(8, 160000.0, 4.0, 64, 32, 1, True)
PLAIN = Rope(64, 10000.0, 1.0, 65536, 32, 1, False)

# ---------------------------------------------------------------------- norm


def norm64(x, weight, eps):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def ulps(a, b):
    """Distance in bf16 steps of two bf16 tensors of equal signs."""
    return (a.view(torch.int16).int() - b.view(torch.int16).int()).abs()


@pytest.mark.parametrize("eps", [1e-20, 1e-6])
def test_norm_rounds_once(eps):
    torch.manual_seed(0)
    x, weight = torch.randn(64, 512).bfloat16(), (1 + 0.1 * torch.randn(512)).bfloat16()
    right = norm64(x, weight, eps).bfloat16()
    twice = norm64(x, torch.ones(512), eps).bfloat16() * weight
    got = rms_norm(x, weight, eps)
    assert got.dtype == torch.bfloat16
    assert ulps(got, right).max() <= 1
    assert (got != right).float().mean() < 1e-3
    assert (twice != right).float().mean() > 0.1  # the other rounding order is told apart


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_norm_in_wider_types(dtype, tolerance):
    torch.manual_seed(1)
    x, weight = torch.randn(3, 5, 32, dtype=dtype), torch.randn(32)
    got = rms_norm(x, weight, 1e-6)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), norm64(x, weight, 1e-6), rtol=tolerance, atol=tolerance)


def test_norm_of_zero_row_is_zero_with_the_released_eps():
    x = torch.stack((torch.zeros(32), torch.full((32,), 1e-3))).bfloat16()
    got = rms_norm(x, torch.ones(32), 1e-20)
    assert got[0].eq(0).all()
    torch.testing.assert_close(got[1], torch.ones(32).bfloat16())


# ---------------------------------------------------------------------- frequencies


@pytest.mark.parametrize(("rope", "bounds"), [(RELEASED, (15, 25)), (TINY, (0, 1))])
def test_ramp_bounds_of_the_specification(rope, bounds):
    assert rope.ramp_bounds() == bounds


@pytest.mark.parametrize("rope", [RELEASED, TINY, PLAIN], ids=["released", "tiny", "plain"])
def test_frequencies_are_the_formula(rope):
    got = rope.inverse_frequencies()
    assert got.dtype == torch.float32
    expected = []
    for pair in range(rope.dim // 2):
        plain = rope.theta ** (-2 * pair / rope.dim)
        low, high = rope.ramp_bounds()
        ramp = min(max((pair - low) / (high - low), 0), 1) if rope.scaled else 0
        expected.append(plain * (1 - ramp) + plain / rope.factor * ramp)
    torch.testing.assert_close(got.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0)


def test_scaling_leaves_fast_pairs_and_divides_slow_ones():
    plain = Rope(64, 160000.0, 16.0, 65536, 32, 1, False).inverse_frequencies()
    scaled = RELEASED.inverse_frequencies()
    assert torch.equal(scaled[:16], plain[:16])
    assert torch.equal(scaled[25:], plain[25:] / 16)
    between = scaled[16:25] / plain[16:25]
    assert (between.diff() < 0).all()
    assert 1 / 16 < between.min() < between.max() < 1


def test_equal_ramp_bounds_do_not_divide_by_zero():
    rope = Rope(8, 160000.0, 4.0, 2, 32, 1, True)
    assert rope.ramp_bounds() == (0, 0)
    assert torch.equal(rope.inverse_frequencies(), torch.tensor([1, 0.25 * 20**-1, 0.25 / 400, 0.25 / 8000]))


def test_table_is_cosine_and_sine_of_an_fp32_angle():
    positions = torch.tensor([0, 1, 7, 65537, 1048575])
    cos, sin = RELEASED.cos_sin(positions)
    assert cos.shape == sin.shape == (5, 32)
    assert cos.dtype == sin.dtype == torch.float32
    angle = (positions.float()[:, None] * RELEASED.inverse_frequencies()).double()
    torch.testing.assert_close(cos.double(), angle.cos(), rtol=0, atol=2e-7)
    torch.testing.assert_close(sin.double(), angle.sin(), rtol=0, atol=2e-7)
    assert cos[0].eq(1).all()
    assert sin[0].eq(0).all()


@pytest.mark.parametrize(("change", "name"), [
    ({"dim": 7}, "dim 7"), ({"dim": 0}, "dim 0"), ({"theta": 1.0}, "theta 1.0"), ({"factor": 0.5}, "factor 0.5"),
    ({"original_max_position": 0}, "original_max_position 0"), ({"beta_slow": 32}, "beta_slow 32"),
    ({"beta_slow": 0}, "beta_slow 0"), ({"theta": math.nan}, "theta nan"),
])  # fmt: skip
def test_impossible_ropes(change, name):
    fields = dict(vars(RELEASED)) | change
    with pytest.raises(ValueError, match=name):
        Rope(**fields)


# ---------------------------------------------------------------------- rotation


def as_complex(x, width):
    return torch.view_as_complex(x[..., -width:].double().unflatten(-1, (-1, 2)).contiguous())


@pytest.mark.parametrize("shape", [(6, 16), (6, 3, 16), (6, 2, 3, 16)], ids=str)
@pytest.mark.parametrize("inverse", [False, True])
def test_rotation_is_a_product_of_complex_numbers(shape, inverse):
    torch.manual_seed(2)
    x = torch.randn(shape, dtype=torch.float64)
    positions = torch.randint(0, 200, (6,))
    cos, sin = TINY.cos_sin(positions)
    got = rotate(x, cos, sin, inverse=inverse)
    turn = torch.complex(cos.double(), -sin.double() if inverse else sin.double())
    turn = turn.reshape(6, *[1] * (len(shape) - 2), 4)
    torch.testing.assert_close(as_complex(got, 8), as_complex(x, 8) * turn, rtol=1e-14, atol=1e-14)
    assert torch.equal(got[..., :8], x[..., :8])


def test_pairs_are_neighbours():
    x = torch.tensor([[9.0, 9.0, 1.0, 0.0, 0.0, 1.0]])
    cos, sin = torch.tensor([[0.5, 0.25]]), torch.tensor([[0.125, 2.0]])
    assert rotate(x, cos, sin).tolist() == [[9, 9, 0.5, 0.125, -2.0, 0.25]]
    assert rotate(x, cos, sin, inverse=True).tolist() == [[9, 9, 0.5, -0.125, 2.0, 0.25]]


@given(st.integers(0, 4000), st.integers(0, 4000), st.integers(0, 4000), st.integers(0, 2**31 - 1))
def test_products_depend_on_distances_only(query, key, shift, seed):
    torch.manual_seed(seed)
    q, k = torch.randn(2, 1, 8, dtype=torch.float64)
    positions = torch.tensor([query, key, query + shift, key + shift])
    angles = positions.double()[:, None] * TINY.inverse_frequencies().double()
    turned = rotate(torch.cat((q, k, q, k)), angles.cos(), angles.sin())
    torch.testing.assert_close(turned[0] @ turned[1], turned[2] @ turned[3], rtol=1e-9, atol=1e-9)
    back = rotate(turned, angles.cos(), angles.sin(), inverse=True)
    torch.testing.assert_close(back, torch.cat((q, k, q, k)), rtol=1e-12, atol=1e-12)


def test_rotation_rounds_once():
    torch.manual_seed(3)
    x = torch.randn(128, 4, 64).bfloat16()
    cos, sin = RELEASED.cos_sin(torch.arange(1000, 1128))
    got = rotate(x, cos, sin)
    right = rotate(x.double(), cos, sin).bfloat16()
    assert got.dtype == torch.bfloat16
    assert (got != right).float().mean() < 1e-3
    even, odd = x[..., 0::2], x[..., 1::2]
    thrice = even * cos.bfloat16()[:, None] - odd * sin.bfloat16()[:, None]
    assert (thrice != right[..., 0::2]).float().mean() > 0.1


@pytest.mark.parametrize(("x", "rows"), [((3, 8), 2), ((3, 6), 3)])
def test_rotation_of_a_misfit(x, rows):
    table = torch.ones(rows, 4)
    with pytest.raises(ValueError, match="do not fit"):
        rotate(torch.ones(x), table, table)
