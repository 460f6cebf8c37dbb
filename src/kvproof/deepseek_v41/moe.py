"""The mixture of experts (specification, sections 3.12, 10.1): router, routed experts, shared expert.

Tensor parallel: every rank holds a part of each expert's intermediate dimension. Expert parallel: a rank holds whole
experts. Either way a rank's result is a partial sum, and the sum over ranks is taken in fp32 and rounded once.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)

from kvproof.deepseek_v41.config import TextConfig
from kvproof.deepseek_v41.ops.moe import experts, route
from kvproof.deepseek_v41.parameters import parameter


class MoE(nn.Module):
    """Routed and shared experts of one layer."""

    def __init__(self, config: TextConfig, *, expert_parallel: bool) -> None:
        super().__init__()
        ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        self.k = config.num_experts_per_tok
        self.scaling = config.routed_scaling_factor
        self.normalise = config.norm_topk_prob
        self.limit = config.swiglu_limit
        self.gate = Router(config.n_routed_experts, config.hidden_size)
        held = config.n_routed_experts // ranks if expert_parallel else config.n_routed_experts
        self.first = rank * held if expert_parallel else 0
        shards = 1 if expert_parallel else ranks
        self.experts = Experts(
            held, config.hidden_size, config.moe_intermediate_size // shards, self.first, rank % shards, shards
        )
        inner = config.n_shared_experts * config.moe_intermediate_size // ranks
        self.shared_experts = Experts(1, config.hidden_size, inner, 0, rank, ranks) if inner else None
        self.reduces = ranks > 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] → [T, H] in x's dtype: the fp32 sum of routed and shared experts over all ranks, rounded once."""
        weights, ids = route(self.gate(x), self.gate.bias, self.k, self.scaling, self.normalise)
        out = experts(x, ids, weights, self.experts.w13, self.experts.w2, self.limit, self.first)
        if self.shared_experts is not None:
            everyone = torch.zeros(len(x), 1, dtype=torch.int64)
            out += experts(
                x, everyone, torch.ones(len(x), 1), self.shared_experts.w13, self.shared_experts.w2, self.limit
            )
        if self.reduces:
            out = tensor_model_parallel_all_reduce(out)
        return out.to(x.dtype)


class Router(nn.Module):
    """fp32 logits [T, E]; ``bias`` [E] takes part in the choice of experts, never in their weights."""

    def __init__(self, count: int, hidden: int) -> None:
        super().__init__()
        self.weight = parameter(count, hidden, dtype=torch.float32)
        self.bias = parameter(count, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x.float(), self.weight)


class Experts(nn.Module):
    """Weights of the experts ``first`` … ``first + count − 1``, or of the ``rank``-th of ``ranks`` parts of each.

    w13 [count, 2·inner, hidden]: gate rows (``w1``) above up rows (``w3``); w2 [count, hidden, inner].
    """

    def __init__(self, count: int, hidden: int, inner: int, first: int, rank: int, ranks: int) -> None:
        super().__init__()
        self.first, self.count = first, count
        self.rank, self.ranks = rank, ranks
        self.w13 = parameter(count, 2 * inner, hidden)
        self.w2 = parameter(count, hidden, inner)

    def load(self, expert: int, matrix: str, whole: torch.Tensor) -> None:
        """Take this rank's part of matrix w1, w2 or w3 of an expert; of an expert held elsewhere, nothing.

        Raises:
            ValueError: the shape is not the configured one.
        """
        index = expert - self.first
        if not 0 <= index < self.count:
            return
        target = self.w2[index] if matrix == "w2" else self.w13[index].chunk(2)[matrix == "w3"]
        split = 1 if matrix == "w2" else 0
        shape = list(target.shape)
        shape[split] *= self.ranks
        if list(whole.shape) != shape:
            raise ValueError(f"shape {list(whole.shape)}: must be {shape}")
        target.data.copy_(whole.chunk(self.ranks, dim=split)[self.rank])
