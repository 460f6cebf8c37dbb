"""Parameters vLLM ships no layer for, named as the checkpoint names them.

Each knows, as vLLM's own do, how to take its part of a whole checkpoint tensor (``weight_loader``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from kvproof.deepseek_v41.ops.norm import rms_norm


def parameter(
    *shape: int, dtype: torch.dtype | None = None, part: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> nn.Parameter:
    """An uninitialised parameter, of the model's dtype unless ``dtype`` says otherwise.

    ``part`` makes of a whole checkpoint tensor what this rank holds; without it the tensor is held whole.
    """
    made = nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)

    def load(param: nn.Parameter, whole: torch.Tensor) -> None:
        mine = whole if part is None else part(whole)
        if mine.shape != param.shape:
            raise ValueError(f"shape {list(mine.shape)}: must be {list(param.shape)}")
        param.data.copy_(mine)

    made.weight_loader = load  # type: ignore[attr-defined]
    return made


class Norm(nn.Module):
    """RMSNorm over the last ``width`` values. The weight is kept in fp32, where it multiplies."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = parameter(width, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)
