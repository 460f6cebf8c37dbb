"""Number formats of the checkpoint: FP8 blocks, MXFP8 rows, MXFP4 experts (section 9.3), and their inverses.

A scale is an E8M0 byte b and means 2^(b − 127). It is always *reinterpreted*: a tensor of bytes and a tensor of type
``float8_e8m0fnu`` are the same thing here. Byte 255 is NaN and refused. Everything is exact but the rounding of a
quantised value.
"""

from __future__ import annotations

import torch

GROUP = 32
"""Consecutive values along the input dimension that share one scale in the MX formats."""

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Value of each 3-bit magnitude; bit 3 is the sign."""


def e8m0_values(scale: torch.Tensor) -> torch.Tensor:
    """2^(b − 127) as fp32 for every byte of ``scale`` (uint8 or float8_e8m0fnu, any shape).

    ValueError for another dtype and for byte 255. Byte 0 is 2^−127, a subnormal fp32 number.
    """
    if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise ValueError(f"scale dtype {scale.dtype}: must be uint8 or float8_e8m0fnu")
    exponent = scale.view(torch.uint8).to(torch.int32)
    if bad := int((exponent == 255).sum()):
        raise ValueError(f"scale: E8M0 byte 255 (NaN) in {bad} of {scale.numel()} entries: must be <= 254")
    # fp32 has the same exponent field; its subnormal 2^−127 is the upper bit of the fraction.
    return torch.where(exponent == 0, 1 << 22, exponent << 23).view(torch.float32)


def dequantise_fp8_block(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] = (32, 32)) -> torch.Tensor:
    """fp32 [O, I] of a block-scaled e4m3 matrix.

    weight float8_e4m3fn [O, I]; scale E8M0 [ceil(O/b0), ceil(I/b1)], or fp32 of that shape (the form of FP8 experts);
    blocks at the edges may be partial. Exact. ValueError when dtypes or shapes do not fit.
    """
    if weight.dtype != torch.float8_e4m3fn or weight.dim() != 2:
        raise ValueError(f"weight {weight.dtype} {tuple(weight.shape)}: must be float8_e4m3fn [O, I]")
    rows, columns = weight.shape
    expected = (-(-rows // block[0]), -(-columns // block[1]))
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"scale shape {tuple(scale.shape)}: must be {expected} for weight {(rows, columns)}, block {block}"
        )
    factors = scale if scale.dtype == torch.float32 else e8m0_values(scale)
    if not factors.isfinite().all():
        raise ValueError("scale: has values that are not finite")
    spread = factors.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return weight.to(torch.float32) * spread


def dequantise_rows_fp8(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """fp32 [..., D] of rows with one scale per 32 values: the Engram table and the MXFP8 run-time form.

    rows float8_e4m3fn [..., D]; scale E8M0 [..., D/32]. Exact, also in bf16 where the result is a normal
    number. ValueError on a misfit.
    """
    if rows.dtype != torch.float8_e4m3fn:
        raise ValueError(f"rows dtype {rows.dtype}: must be float8_e4m3fn")
    return _scale_groups(rows.to(torch.float32), scale)


def dequantise_mxfp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """fp32 [..., I] of packed e2m1 numbers with one scale per 32 of them along the input.

    packed [..., I/2] of a one-byte type (uint8, int8 or float4_e2m1fn_x2), the low nibble is the even index; scale E8M0
    [..., I/32]. Exact. ValueError when dtypes or shapes do not fit.
    """
    if packed.dtype not in (torch.uint8, torch.int8, torch.float4_e2m1fn_x2):
        raise ValueError(f"packed dtype {packed.dtype}: must be uint8, int8 or float4_e2m1fn_x2")
    table = torch.tensor((*E2M1, *(-value for value in E2M1)), device=packed.device)
    codes = packed.view(torch.uint8).to(torch.int32)
    return _scale_groups(table[torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)], scale)


def quantise_fp8_block(weight: torch.Tensor, block: tuple[int, int] = (32, 32)) -> tuple[torch.Tensor, torch.Tensor]:
    """The e4m3 matrix and uint8 E8M0 scales that ``dequantise_fp8_block`` reads; block (1, 32) for rows.

    weight [O, I] of any floating type, finite (else ValueError). Scale of a block: 2^ceil(log2(max(amax, 1e-4) / 448));
    values are rounded to nearest even.
    """
    if weight.dim() != 2:
        raise ValueError(f"weight shape {tuple(weight.shape)}: must be [O, I]")
    rows, columns = weight.shape
    high, wide = -(-rows // block[0]), -(-columns // block[1])
    padded = torch.zeros(high * block[0], wide * block[1], device=weight.device)
    padded[:rows, :columns] = weight
    tiles = padded.view(high, block[0], wide, block[1])
    scale = _power_of_two(tiles.abs().amax(dim=(1, 3)), 1e-4, E4M3_MAX)
    scaled = tiles / e8m0_values(scale)[:, None, :, None]
    return scaled.reshape(padded.shape)[:rows, :columns].to(torch.float8_e4m3fn).contiguous(), scale


def quantise_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The packed uint8 [..., I/2] and uint8 E8M0 scales [..., I/32] that ``dequantise_mxfp4`` reads.

    weight [..., I] of any floating type, I a multiple of 32, finite (else ValueError). Scale of a group:
    2^ceil(log2(amax / 6)) with amax at least 6 · 2^−126; values are rounded to nearest even.
    """
    if weight.shape[-1] % GROUP:
        raise ValueError(f"weight shape {tuple(weight.shape)}: last dimension must be a multiple of {GROUP}")
    groups = torch.unflatten(weight.to(torch.float32), -1, (-1, GROUP))
    scale = _power_of_two(groups.abs().amax(dim=-1), E2M1_MAX * 2.0**-126, E2M1_MAX)
    scaled = (groups / e8m0_values(scale).unsqueeze(-1)).flatten(-2)
    values = torch.tensor(E2M1, device=weight.device)
    middles = (values[1:] + values[:-1]) / 2
    # A value on a middle goes to the even code: below the middle for codes 0, 2, 4, 6, above it for the odd ones.
    middles[1::2] = torch.nextafter(middles[1::2], torch.zeros(()))
    codes = torch.bucketize(scaled.abs(), middles).to(torch.uint8) | (scaled.signbit().to(torch.uint8) << 3)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scale


def _scale_groups(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    expected = (*values.shape[:-1], values.shape[-1] // GROUP)
    if values.shape[-1] % GROUP or tuple(scale.shape) != expected:
        raise ValueError(f"scale shape {tuple(scale.shape)}: must give one byte per {GROUP} of {tuple(values.shape)}")
    return (torch.unflatten(values, -1, (-1, GROUP)) * e8m0_values(scale).unsqueeze(-1)).flatten(-2)


def _power_of_two(amax: torch.Tensor, floor: float, largest: float) -> torch.Tensor:
    """E8M0 byte of 2^ceil(log2(max(amax, floor) / largest)), without the rounding of a logarithm."""
    if not amax.isfinite().all():
        raise ValueError("weight: has values that are not finite")
    fraction, exponent = torch.frexp(amax.clamp(min=floor) / largest)
    return (exponent - (fraction == 0.5).to(exponent.dtype) + 127).clamp(0, 254).to(torch.uint8)
