"""Index scores: how much each token wants each compressed row (deepseek_v41.md 3.8)."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

TILE = 1 << 20
"""Most fp32 logits [requests, queries, heads, keys] held at once: 4 MiB."""

KEYS = 2048
"""Keys per tile: widened to fp32 they stay in a core's cache, so the cost of a key does not grow with their number."""

_ROUND = 64
"""Tiles are filled up with zero keys to a multiple of this, so no key is computed by a library's remainder code."""


def scores(q: Tensor, w: Tensor, keys: Tensor) -> Tensor:
    """Score of every key for every query: ``Di^-1/2 * Hi^-1/2 * sum_h w_h * relu(q_h . key)``.

    ``q`` [B, Q, Hi, Di], ``w`` fp32 [B, Q, Hi], ``keys`` [B, N, Di] -> fp32 [B, Q, N]. ``q`` and ``keys`` are widened
    to fp32, so bf16 products are exact; sums, weights and scale are fp32. Keys that a query may not see get a score as
    well: the selection cuts at the visible length. Each query is a matrix product of its own over tiles of ``KEYS``
    keys, so a score does not depend on the other queries nor on how many keys follow; logits stay within ``TILE``, or
    one query's. ValueError when the shapes do not belong together.
    """
    batch, queries, heads, width = q.shape
    count = keys.shape[1]
    if w.shape != q.shape[:3] or keys.shape != (batch, count, width):
        raise ValueError(f"w {list(w.shape)} and keys {list(keys.shape)} do not fit q {list(q.shape)}")
    weight = w.float() * (width**-0.5 * heads**-0.5)
    result = torch.empty((batch, queries, count), dtype=torch.float32, device=q.device)
    tile = max(1, TILE // (heads * KEYS))
    # One query each: many requests make one batch of products. Several: one request at a time, its keys shared.
    requests = tile if queries == 1 else 1
    for n, b in product(range(0, count, KEYS), range(0, batch, requests)):
        row, column = slice(b, b + requests), slice(n, n + KEYS)
        block = keys[row, column].float()
        filled = torch.nn.functional.pad(block, (0, 0, 0, -block.shape[1] % _ROUND)).transpose(1, 2)
        for t in range(0, queries, tile):
            query = slice(t, t + tile)
            part = q[row, query].float().flatten(0, 1)
            logits = torch.bmm(part, filled.expand(len(part), -1, -1)).relu_()
            summed = torch.bmm(weight[row, query].flatten(0, 1).unsqueeze(1), logits)[:, 0, : block.shape[1]]
            result[row, query, column] = summed.view(len(block), -1, block.shape[1])
    return result
