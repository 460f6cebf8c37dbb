"""Rotary position embedding of the last channels, interleaved pairs, with YaRN's frequencies: section 3.4."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rope:
    """The frequencies of one kind of layer.

    ``dim`` rotated channels; ``theta`` the base; with ``scaled`` the frequencies are YaRN's, of which ``factor``,
    ``original_max_position`` (positions), ``beta_fast`` and ``beta_slow`` (rotations over that length) are the
    parameters. Cosines and sines are never scaled (mscale is off in this model).
    """

    dim: int
    theta: float
    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    scaled: bool

    def __post_init__(self) -> None:
        if self.dim <= 0 or self.dim % 2:
            raise ValueError(f"rope dim {self.dim}: must be even and > 0")
        if not self.theta > 1:
            raise ValueError(f"rope theta {self.theta}: must be > 1")
        if not self.scaled:
            return
        if not self.factor >= 1:
            raise ValueError(f"rope factor {self.factor}: must be >= 1")
        if self.original_max_position <= 0:
            raise ValueError(f"rope original_max_position {self.original_max_position}: must be > 0")
        if not self.beta_fast > self.beta_slow > 0:
            raise ValueError(f"rope beta_fast {self.beta_fast}, beta_slow {self.beta_slow}: must be fast > slow > 0")

    def ramp_bounds(self) -> tuple[int, int]:
        """Index of the last pair YaRN leaves as it is, and of the first it divides by ``factor`` entirely."""

        def pair(rotations: float) -> float:
            return (
                self.dim * math.log(self.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))
            )

        return max(math.floor(pair(self.beta_fast)), 0), min(math.ceil(pair(self.beta_slow)), self.dim - 1)

    def inverse_frequencies(self) -> torch.Tensor:
        """Radians per position of each pair: fp32 [dim/2], computed in fp32 as the released tables are."""
        wavelengths = self.theta ** (torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)
        plain = 1.0 / wavelengths
        if not self.scaled:
            return plain
        low, high = self.ramp_bounds()
        width = high - low or 0.001
        ramp = ((torch.arange(self.dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
        kept = 1 - ramp
        return (1.0 / (self.factor * wavelengths)) * (1 - kept) + plain * kept

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, fp32 [T, dim/2] each, at ``positions`` int64 [T]; the angle is an fp32 product."""
        angles = positions.to(torch.float32).unsqueeze(-1) * self.inverse_frequencies().to(positions.device)
        return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """Rotate the last ``2 · cos.shape[-1]`` channels of x; the channels before them pass unchanged.

    x [T, ..., D] in bf16, fp32 or fp64; cos and sin [T, P/2] as ``Rope.cos_sin`` gives them, the same for every head of
    a token. Channels (2i, 2i+1) of the rotated part are pair i. ``inverse`` turns back. fp32 arithmetic (fp64 for an
    fp64 x), one rounding to x's dtype. A new tensor; ValueError when the shapes do not fit.
    """
    pairs = cos.shape[-1]
    if cos.shape != sin.shape or cos.shape[0] != x.shape[0] or 2 * pairs > x.shape[-1]:
        raise ValueError(f"rotate: x {tuple(x.shape)}, cos {tuple(cos.shape)}, sin {tuple(sin.shape)} do not fit")
    wide = torch.promote_types(x.dtype, torch.float32)
    per_token = (cos.shape[0], *(1,) * (x.dim() - 2), pairs)
    c = cos.to(wide).reshape(per_token)
    s = (-sin if inverse else sin).to(wide).reshape(per_token)
    even, odd = torch.unflatten(x[..., -2 * pairs :].to(wide), -1, (pairs, 2)).unbind(-1)
    turned = torch.stack((even * c - odd * s, odd * c + even * s), dim=-1).flatten(-2)
    return torch.cat((x[..., : -2 * pairs], turned.to(x.dtype)), dim=-1)
