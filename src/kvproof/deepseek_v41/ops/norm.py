"""RMSNorm: section 3.13 of the specification."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``weight · x / sqrt(mean(x²) + eps)`` over the last dimension.

    x [..., C] in bf16, fp32 or fp64; weight [C] in any floating type, a plain multiplier (no + 1).
    Statistics and both products in fp32 (fp64 for an fp64 x), one rounding to x's dtype. ``eps`` is added in that wide
    type: the released 1e-20 keeps an all-zero row at 0 · 1e10 = 0.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (normed * weight.to(wide.dtype)).to(x.dtype)
