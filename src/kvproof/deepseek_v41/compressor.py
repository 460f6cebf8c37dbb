"""The compressor of a kv source (specification, sections 3.5, 3.6): one latent of every ``ratio`` tokens."""

from __future__ import annotations

import torch
from torch import nn

from kvproof.deepseek_v41.caches import Cache
from kvproof.deepseek_v41.config import TextConfig
from kvproof.deepseek_v41.ops.compressor import compress_pairs, ring_capacity
from kvproof.deepseek_v41.parameters import Norm, replicated
from kvproof.deepseek_v41.specs import ring_spec


class Compressor(nn.Module):
    """Pools ``ratio`` tokens into one latent of ``head_dim`` values; at ratio 2 the open pair waits in a ring.

    The projections are kept in fp32: their results, the gates' softmax and the pooled value are fp32 by contract, and
    a bf16 weight is exact in fp32.
    """

    def __init__(self, config: TextConfig, ratio: int, *, speculative_tokens: int, prefix: str) -> None:
        super().__init__()
        width = config.head_dim
        self.wkv = replicated(config.hidden_size, width, f"{prefix}.wkv", torch.float32)
        self.norm = Norm(width, config.rms_norm_eps)
        self.ring: Cache | None = None
        if ratio == 2:
            self.wgate = replicated(config.hidden_size, width, f"{prefix}.wgate", torch.float32)
            spec = ring_spec(capacity=ring_capacity(speculative_tokens), width=2 * width)
            self.ring = Cache(spec, f"{prefix}.state_cache")

    def forward(self, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The latents of the groups that this step completes, before their rotation.

        Args:
            u: [T, H], the normed input of the layer.

        Returns:
            latent [P, D], normed in fp32 and rounded once to u's dtype, and emitting int64 [P], the token that
            completes each group.
        """
        wide = u.float()
        pooled, emitting = self.wkv(wide), torch.arange(len(u))
        if self.ring is not None:
            step = self.ring.step
            state = torch.cat([pooled, self.wgate(wide)], dim=-1)
            pooled, emitting = compress_pairs(
                state, self.ring.rows, step.block_table[:, 0], step.query_start, step.start
            )
        return self.norm(pooled).to(u.dtype), emitting
