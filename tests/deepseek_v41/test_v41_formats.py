"""FP8 block, MXFP8 row and MXFP4 formats: every code by hand, scales as bytes, round trips."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproof.deepseek_v41.ops.formats import (
    dequantise_fp8_block,
    dequantise_mxfp4,
    dequantise_rows_fp8,
    e8m0_values,
    quantise_fp8_block,
    quantise_mxfp4,
)

ONE = 127  # the E8M0 byte of 2^0


def e4m3(code):
    sign, exponent, fraction = code >> 7, code >> 3 & 15, code & 7
    value = fraction / 8 * 2**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
    return math.nan if exponent == 15 and fraction == 7 else (-1) ** sign * value


def e2m1(code):
    sign, exponent, fraction = code >> 3, code >> 1 & 3, code & 1
    value = fraction / 2 if exponent == 0 else (1 + fraction / 2) * 2.0 ** (exponent - 1)
    return (-1) ** sign * value


def fp8(codes):
    return torch.as_tensor(codes, dtype=torch.uint8).view(torch.float8_e4m3fn)


# ---------------------------------------------------------------------- scales


def test_every_scale_byte():
    values = e8m0_values(torch.arange(255, dtype=torch.uint8))
    assert values.tolist() == [math.ldexp(1.0, byte - 127) for byte in range(255)]


def test_scales_are_reinterpreted_not_converted():
    stored = torch.arange(255, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert torch.equal(e8m0_values(stored), stored.to(torch.float32))  # torch's own reading of the type
    weight = fp8(torch.full((1, 32), 0x38))  # ones
    for scale in (torch.tensor([[130]], dtype=torch.uint8), torch.tensor([[8.0]]).to(torch.float8_e8m0fnu)):
        assert dequantise_fp8_block(weight, scale).unique().tolist() == [8.0]


@pytest.mark.parametrize("read", [
    lambda scale: dequantise_fp8_block(fp8(torch.zeros(2, 64)), scale.view(1, 2)),
    lambda scale: dequantise_rows_fp8(fp8(torch.zeros(1, 64)), scale.view(1, 2)),
    lambda scale: dequantise_mxfp4(torch.zeros(1, 32, dtype=torch.uint8), scale.view(1, 2)),
], ids=["block", "rows", "mxfp4"])  # fmt: skip
def test_nan_scale(read):
    with pytest.raises(ValueError, match=r"byte 255 \(NaN\) in 1 of 2"):
        read(torch.tensor([127, 255], dtype=torch.uint8))
    assert read(torch.tensor([0, 254], dtype=torch.uint8)).eq(0).all()


# ---------------------------------------------------------------------- FP8


def test_every_fp8_code():
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32)
    got = dequantise_rows_fp8(fp8(codes), torch.arange(124, 132, dtype=torch.uint8).view(8, 1))
    expected = [[e4m3(32 * row + column) * 2.0 ** (row - 3) for column in range(32)] for row in range(8)]
    torch.testing.assert_close(got, torch.tensor(expected), rtol=0, atol=0, equal_nan=True)


@given(st.integers(1, 70), st.integers(1, 70), st.integers(0, 2**31 - 1))
def test_each_value_takes_the_scale_of_its_block(rows, columns, seed):
    torch.manual_seed(seed)
    weight = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    scale = torch.randint(100, 150, (-(-rows // 32), -(-columns // 32)), dtype=torch.uint8)
    got = dequantise_fp8_block(weight, scale)
    assert got.shape == weight.shape
    plain = weight.to(torch.float64)
    for row in {0, rows // 2, rows - 1, min(31, rows - 1), min(32, rows - 1)}:
        for column in {0, columns // 2, columns - 1, min(31, columns - 1), min(32, columns - 1)}:
            factor = 2.0 ** (int(scale[row // 32, column // 32]) - 127)
            assert float(got[row, column]) == float(plain[row, column]) * factor


def test_fp32_scales_of_fp8_experts():
    weight = fp8(torch.full((2, 4), 0x40))  # twos
    got = dequantise_fp8_block(weight, torch.tensor([[0.75, 3.0]]), (2, 2))
    assert got.tolist() == [[1.5, 1.5, 6, 6]] * 2
    with pytest.raises(ValueError, match="not finite"):
        dequantise_fp8_block(weight, torch.tensor([[0.75, math.inf]]), (2, 2))


@given(st.integers(1, 70), st.integers(1, 70), st.sampled_from([(32, 32), (1, 32), (128, 128)]), st.integers(0, 999))
def test_fp8_round_trip(rows, columns, block, seed):
    torch.manual_seed(seed)
    weight = torch.randn(rows, columns) * 10 ** (4 * torch.rand(rows, 1) - 2)
    values, scale = quantise_fp8_block(weight, block)
    assert (values.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.uint8)
    back = dequantise_fp8_block(values, scale, block)
    spread = e8m0_values(scale).repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:rows, :columns]
    # Half a step of the format: 2^-4 of a normal value, 2^-10 of the scale below those.
    assert ((back - weight).abs() <= torch.maximum(weight.abs() / 16, spread / 1024)).all()
    # What was read is written back as it was.
    again, same = quantise_fp8_block(back, block)
    assert torch.equal(dequantise_fp8_block(again, same, block), back)


def test_fp8_scale_is_the_smallest_power_of_two_that_fits():
    for amax, byte in [(448.0, 127), (448.1, 128), (447.9, 127), (224.0, 126), (224.1, 127), (1e-4, 105), (0, 105)]:
        weight = torch.zeros(32, 32)
        weight[3, 5] = -amax
        values, scale = quantise_fp8_block(weight)
        assert scale.tolist() == [[byte]], amax
        assert float(dequantise_fp8_block(values, scale)[3, 5]) == pytest.approx(-amax, rel=1 / 16)


def test_row_form_is_exact_in_bf16():
    torch.manual_seed(7)
    values, scale = quantise_fp8_block(torch.randn(6, 256), (1, 32))
    assert scale.shape == (6, 8)
    rows = dequantise_rows_fp8(values, scale)
    assert torch.equal(rows, dequantise_fp8_block(values, scale, (1, 32)))
    assert torch.equal(rows.bfloat16().float(), rows)
    looked_up = torch.tensor([[5, 0], [2, 2]])
    got = dequantise_rows_fp8(values.view(torch.uint8)[looked_up].view(values.dtype), scale[looked_up])
    assert torch.equal(got, rows[looked_up])


# ---------------------------------------------------------------------- MXFP4


def test_every_pair_of_nibbles():
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16)
    got = dequantise_mxfp4(packed, torch.full((16, 1), ONE + 1, dtype=torch.uint8))
    expected = [[2 * e2m1(code) for byte in range(16 * row, 16 * row + 16) for code in (byte & 15, byte >> 4)]
                for row in range(16)]  # fmt: skip
    assert got.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.int8, torch.float4_e2m1fn_x2])
def test_packed_bytes_of_any_name(dtype):
    packed, scale = quantise_mxfp4(torch.randn(3, 2, 64))
    assert torch.equal(dequantise_mxfp4(packed.view(dtype), scale), dequantise_mxfp4(packed, scale))


def test_scale_of_each_group():
    packed = torch.full((1, 32), 0x22, dtype=torch.uint8)  # ones
    got = dequantise_mxfp4(packed, torch.tensor([[ONE, ONE + 3]], dtype=torch.uint8))
    assert got[0].tolist() == [1] * 32 + [8] * 32


@settings(max_examples=40)
@given(st.integers(0, 2**31 - 1))
def test_mxfp4_round_trip(seed):
    torch.manual_seed(seed)
    weight = torch.randn(4, 3, 96) * 10 ** (8 * torch.rand(4, 3, 1) - 4)
    packed, scale = quantise_mxfp4(weight)
    assert (packed.shape, scale.shape) == ((4, 3, 48), (4, 3, 3))
    back = dequantise_mxfp4(packed, scale)
    spread = e8m0_values(scale).repeat_interleave(32, -1)
    grid = torch.tensor([e2m1(code) for code in range(16)])
    nearest = ((weight / spread).unsqueeze(-1) - grid).abs().min(-1).values
    torch.testing.assert_close(((back - weight) / spread).abs(), nearest, rtol=0, atol=1e-6)
    top = (weight / spread).abs().view(4, 3, 3, 32).amax(-1)
    assert ((top > 3) & (top <= 6)).all()
    again, same = quantise_mxfp4(back)
    assert torch.equal(dequantise_mxfp4(again, same), back)


def test_codes_survive_a_round_trip():
    torch.manual_seed(8)
    packed = torch.randint(0, 256, (5, 32), dtype=torch.uint8)
    packed[:, 0] = packed[:, 16] = 0x77  # the largest value pins the scale
    scale = torch.randint(60, 200, (5, 2), dtype=torch.uint8)
    again, same = quantise_mxfp4(dequantise_mxfp4(packed, scale))
    assert torch.equal(again, packed)
    assert torch.equal(same, scale)


def test_ties_go_to_the_even_code():
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    weight = torch.zeros(1, 32)
    weight[0, :7], weight[0, 7:14], weight[0, 14] = torch.tensor(ties), -torch.tensor(ties), 6
    got = dequantise_mxfp4(*quantise_mxfp4(weight))[0, :14].tolist()
    assert got == [0, 1, 1, 2, 2, 4, 4, 0, -1, -1, -2, -2, -4, -4]


def test_zeros():
    packed, scale = quantise_mxfp4(torch.zeros(2, 32))
    assert scale.tolist() == [[1], [1]]
    assert dequantise_mxfp4(packed, scale).eq(0).all()


# ---------------------------------------------------------------------- refusals

BYTE = torch.uint8


@pytest.mark.parametrize(("call", "message"), [
    (lambda: dequantise_fp8_block(torch.zeros(32, 32), torch.zeros(1, 1, dtype=BYTE)), "weight torch.float32"),
    (lambda: dequantise_fp8_block(fp8(torch.zeros(32)), torch.zeros(1, dtype=BYTE)), "must be float8_e4m3fn .O, I."),
    (lambda: dequantise_fp8_block(fp8(torch.zeros(33, 32)), torch.zeros(1, 1, dtype=BYTE)), r"must be \(2, 1\)"),
    (lambda: dequantise_fp8_block(fp8(torch.zeros(32, 32)), torch.zeros(1, 1, dtype=torch.int32)), "dtype torch.int32"),
    (lambda: dequantise_fp8_block(fp8(torch.zeros(32, 32)), torch.zeros(1, 1).half()), "dtype torch.float16"),
    (lambda: dequantise_rows_fp8(fp8(torch.zeros(1, 32)), torch.ones(1, 1)), "dtype torch.float32"),
    (lambda: dequantise_rows_fp8(fp8(torch.zeros(1, 48)), torch.zeros(1, 1, dtype=BYTE)), "one byte per 32"),
    (lambda: dequantise_rows_fp8(fp8(torch.zeros(2, 64)), torch.zeros(2, 1, dtype=BYTE)), "one byte per 32"),
    (lambda: dequantise_rows_fp8(torch.zeros(1, 32), torch.zeros(1, 1, dtype=BYTE)), "rows dtype"),
    (lambda: dequantise_mxfp4(torch.zeros(1, 16), torch.zeros(1, 1, dtype=BYTE)), "packed dtype"),
    (lambda: dequantise_mxfp4(torch.zeros(1, 32, dtype=BYTE), torch.zeros(1, 1, dtype=BYTE)), "one byte per 32"),
    (lambda: quantise_fp8_block(torch.full((2, 2), math.nan)), "not finite"),
    (lambda: quantise_fp8_block(torch.zeros(2)), "must be .O, I."),
    (lambda: quantise_mxfp4(torch.zeros(2, 33)), "multiple of 32"),
    (lambda: quantise_mxfp4(torch.full((1, 32), math.inf)), "not finite"),
])  # fmt: skip
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()
