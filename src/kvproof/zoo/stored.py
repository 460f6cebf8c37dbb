"""Tensors as a checkpoint stores them: number formats (specification 9.3) and the safetensors file, in numpy.

numpy has neither bfloat16 nor an 8-bit float, so a stored tensor is its codes: unsigned integers of the format's
width. Rounding is to nearest, ties to the even code, everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SCALE_BIAS = 127
"""An E8M0 byte b means 2^(b - 127)."""
_CODES = np.arange(0x7F)
E4M3 = np.where(_CODES < 8, _CODES * 2.0**-9, (1 + _CODES % 8 / 8) * 2.0 ** (_CODES // 8 - 7))
"""The non-negative values of e4m3fn by code, 0 … 448 (code 0x7F is NaN). Bit 7 of a byte is the sign."""
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
"""The non-negative values of e2m1 by code. Bit 3 of a nibble is the sign."""
MXFP4_GROUP = 32
"""Consecutive values of a row under one scale."""


@dataclass(frozen=True, eq=False)
class Stored:
    """One tensor of a file."""

    dtype: str
    """As a safetensors header names it: F32, BF16, F8_E4M3, F8_E8M0, U8."""
    codes: np.ndarray
    """Shape of the tensor; float32 or unsigned integers of the dtype's width."""


def float32(values: np.ndarray) -> Stored:
    """``values`` as float32; one rounding where they are wider."""
    return Stored("F32", values.astype("<f4"))


def bfloat16(values: np.ndarray) -> Stored:
    """``values`` (finite) rounded to float32 and then to bfloat16."""
    bits = values.astype("<f4").view("<u4")
    return Stored("BF16", ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2"))


def fp8_blocks(values: np.ndarray, block: tuple[int, int]) -> tuple[Stored, Stored]:
    """``values`` [O, I] (finite) as e4m3fn [O, I] and one E8M0 scale per block [ceil(O/b0), ceil(I/b1)].

    A block's scale is the smallest power of two that brings its largest value within ±448, and 1 for zeros.
    """
    rows, columns = values.shape
    padded = np.pad(values.astype(np.float64), ((0, -rows % block[0]), (0, -columns % block[1])))
    blocks = padded.reshape(padded.shape[0] // block[0], block[0], padded.shape[1] // block[1], block[1])
    exponents = _exponents(np.abs(blocks).max(axis=(1, 3)), E4M3[-1])
    codes = _nearest(np.ldexp(blocks, -exponents[:, None, :, None]), E4M3, sign=0x80)
    return Stored("F8_E4M3", codes.reshape(padded.shape)[:rows, :columns]), _scale(exponents)


def mxfp4(values: np.ndarray) -> tuple[Stored, Stored]:
    """``values`` [O, I] (finite) as e2m1, two to a byte [O, I/2], and one E8M0 scale per 32 of a row [O, I/32].

    The low nibble is the even index. A group's scale is the smallest power of two that brings its largest value
    within ±6, and 1 for zeros. ValueError where I is no multiple of 32.
    """
    rows, columns = values.shape
    if columns % MXFP4_GROUP:
        raise ValueError(f"MXFP4 row of {columns} values, must be a multiple of {MXFP4_GROUP}")
    groups = values.astype(np.float64).reshape(rows, columns // MXFP4_GROUP, MXFP4_GROUP)
    exponents = _exponents(np.abs(groups).max(axis=2), E2M1[-1])
    codes = _nearest(np.ldexp(groups, -exponents[:, :, None]), E2M1, sign=0x8).reshape(rows, columns)
    return Stored("U8", codes[:, ::2] | codes[:, 1::2] << 4), _scale(exponents)


def write(path: Path, tensors: Mapping[str, Stored]) -> int:
    """Write ``tensors`` as a safetensors file; returns the bytes of its tensors, without the header."""
    # Wide elements first: every tensor then begins at a multiple of its element's width.
    names = sorted(tensors, key=lambda name: (-tensors[name].codes.itemsize, name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.codes.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": tensor.codes.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(tensors[name].codes.tobytes())
    return end


def _exponents(largest: np.ndarray, limit: float) -> np.ndarray:
    """The smallest exponents e with largest ≤ limit · 2^e, not below an E8M0 scale's range."""
    mantissa, exponent = np.frexp(largest / limit)
    exponents: np.ndarray = np.maximum(exponent - (mantissa == 0.5), -SCALE_BIAS)
    return exponents


def _scale(exponents: np.ndarray) -> Stored:
    return Stored("F8_E8M0", (exponents + SCALE_BIAS).astype(np.uint8))


def _nearest(values: np.ndarray, grid: np.ndarray, sign: int) -> np.ndarray:
    """Codes of the values of ``grid`` (ascending from 0) nearest to ``values``, with the bit ``sign`` for minus."""
    size = np.abs(values)
    above = np.clip(np.searchsorted(grid, size), 1, len(grid) - 1)
    middle = (grid[above - 1] + grid[above]) / 2
    down = (size < middle) | ((size == middle) & (above % 2 == 1))
    codes: np.ndarray = above - down + sign * np.signbit(values)
    return codes.astype(np.uint8)
