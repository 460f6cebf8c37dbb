"""The indexer (specification, sections 3.8 to 3.10): which compressed rows each token attends to.

An index source scores the index keys of its kv source and selects; later layers reuse the selection. The candidate
source also names the blocks of rows that later index sources may select from.
"""

from __future__ import annotations

import torch
from torch import nn

from kvproof.deepseek_v41.caches import Cache
from kvproof.deepseek_v41.config import TextConfig
from kvproof.deepseek_v41.metadata import CacheStep, Rectangle
from kvproof.deepseek_v41.ops.indexer import scores
from kvproof.deepseek_v41.ops.paging import read_pages
from kvproof.deepseek_v41.ops.rope import rotate
from kvproof.deepseek_v41.ops.selection import candidate_blocks, restrict, top_k
from kvproof.deepseek_v41.parameters import Norm, replicated
from kvproof.deepseek_v41.plan import LayerRole
from kvproof.deepseek_v41.shared import Shared

TILE = 1 << 24
"""Most index-key values, or scores, held at once: 64 MiB in fp32."""


class Indexer(nn.Module):
    """Query side of an index source; of a kv source also the key side.

    All of it is replicated over tensor-parallel ranks: every rank scores with every head and selects the same rows.
    """

    def __init__(self, config: TextConfig, role: LayerRole, keys: Cache, *, prefix: str) -> None:
        super().__init__()
        self.layer = role.layer
        self.is_candidate_source = role.is_candidate_source
        self.filtered = role.filtered
        self.heads, self.width = config.index_n_heads, config.index_head_dim
        self.top = config.index_topk
        self.block, self.blocks = config.candidate_block_size, config.candidate_topk_blocks
        self.keys = keys
        self.wq_b = replicated(config.q_lora_rank, self.heads * self.width, f"{prefix}.wq_b")
        self.weights_proj = replicated(config.hidden_size, self.heads, f"{prefix}.weights_proj")
        if role.is_kv_source:
            self.wk = replicated(config.head_dim, self.width, f"{prefix}.wk")
            self.k_norm = Norm(self.width, config.rms_norm_eps)

    def key(self, latent: torch.Tensor) -> torch.Tensor:
        """Index keys [P, Di] of latents [P, D], before their rotation."""
        return self.k_norm(self.wk(latent))

    def forward(self, u: torch.Tensor, qr: torch.Tensor, shared: Shared) -> None:
        """Select for every token of the step and leave the selection, int64 [T, k] rows, in ``shared``.

        Args:
            u: [T, H], the normed input of the layer.
            qr: [T, q_lora_rank], the normed query latent, shared with attention.

        Raises:
            RuntimeError: a filtered index source runs before the candidate source has.
        """
        step = self.keys.step
        if self.filtered and shared.candidates is None:
            raise RuntimeError(f"layer {self.layer}: selects among candidates, and no layer has named any in this step")
        q = rotate(self.wq_b(qr).unflatten(-1, (self.heads, self.width)), shared.long.cos, shared.long.sin)
        weights = self.weights_proj(u).float()
        visible = (step.position + 1) // step.ratio
        selection = torch.full((step.tokens, self.top), -1, dtype=torch.int32)
        candidates = torch.full((step.tokens, self.blocks), -1, dtype=torch.int32) if self.is_candidate_source else None
        for part in step.rectangles:
            for tile in _tiles(part, step, int(visible[part.tokens].max()), self.width):
                allowed = shared.candidates[tile.tokens.flatten()] if self.filtered else None
                rows, blocks = self._select(q, weights, visible, step, tile, allowed)
                selection[tile.tokens.flatten()] = rows
                if candidates is not None:
                    candidates[tile.tokens.flatten()] = blocks
        shared.selection = selection
        if candidates is not None:
            shared.candidates = candidates

    def _select(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        visible: torch.Tensor,
        step: CacheStep,
        part: Rectangle,
        allowed: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        seen = visible[part.tokens.flatten()]
        longest = int(seen.max())
        pages = -(-longest * step.ratio // step.block_size)
        keys = read_pages(self.keys.rows, step.block_table[part.requests, :pages])[:, :longest]
        found = scores(q[part.tokens], weights[part.tokens], keys).flatten(0, 1)
        blocks = candidate_blocks(found, seen, self.block, self.blocks) if self.is_candidate_source else None
        if allowed is not None:
            found = restrict(found, allowed, self.block)
        return top_k(found, seen, self.top), blocks


def _tiles(part: Rectangle, step: CacheStep, longest: int, width: int) -> list[Rectangle]:
    """Cut a rectangle so that neither the gathered keys nor the scores of a piece exceed ``TILE`` values."""
    requests = max(1, TILE // max(1, longest * max(width, part.tokens.shape[1])))
    tokens = max(1, TILE // max(1, longest))
    return [
        Rectangle(r, t)
        for some, columns in zip(part.requests.split(requests), part.tokens.split(requests), strict=True)
        for r, t in ((some, c) for c in columns.split(tokens, dim=1))
    ]
