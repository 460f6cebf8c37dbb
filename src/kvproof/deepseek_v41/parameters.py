"""Parameters, named as the checkpoint names them: vLLM's layers where it has one, plain ones where it has none.

Each knows, as vLLM's own do, how to take its part of a whole checkpoint tensor (``weight_loader``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from vllm.model_executor.layers.linear import ReplicatedLinear

from kvproof.deepseek_v41.ops.norm import rms_norm


class Shard(NamedTuple):
    """A rank's share of a tensor: the ``rank``-th of ``ranks`` equal parts of its first dimension."""

    rank: int
    ranks: int


WHOLE = Shard(0, 1)


def parameter(*shape: int, dtype: torch.dtype | None = None, shard: Shard = WHOLE) -> nn.Parameter:
    """An uninitialised parameter, of the model's dtype unless ``dtype`` says otherwise.

    ``shape`` is what this rank holds; a checkpoint tensor has ``shard.ranks`` times as many rows, else ValueError.
    """
    made = nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)

    def load(param: nn.Parameter, whole: torch.Tensor) -> None:
        expected = (shape[0] * shard.ranks, *shape[1:])
        if whole.shape != expected:
            raise ValueError(f"shape {list(whole.shape)}: must be {list(expected)}")
        param.data.copy_(whole.chunk(shard.ranks)[shard.rank])

    made.weight_loader = load  # type: ignore[attr-defined]
    return made


def replicated(inputs: int, outputs: int, prefix: str, dtype: torch.dtype | None = None) -> ReplicatedLinear:
    """vLLM's linear inputs → outputs without bias, held whole by every rank."""
    return ReplicatedLinear(
        inputs, outputs, bias=False, params_dtype=dtype, quant_config=None, return_bias=False, prefix=prefix
    )


class Norm(nn.Module):
    """RMSNorm over the last ``width`` values. The weight is kept in fp32, where it multiplies."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = parameter(width, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)
