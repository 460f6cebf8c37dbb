"""Sparse attention over cached latent rows: a window, selected compressed rows and a sink (deepseek_v41.md 3.11)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvproof.deepseek_v41.ops.paging import read_rows

TILE = 1 << 20
"""Most fp32 numbers of gathered rows, or of logits, held at once: 4 MiB."""


def sparse_attention(
    q: Tensor,
    window_cache: Tensor,
    window_slots: Tensor,
    long_cache: Tensor | None,
    long_slots: Tensor | None,
    sink: Tensor,
    scale: float,
) -> Tensor:
    """Attention of each token over the rows at its slots, which are keys and values in one.

    ``q`` [T, Hq, D]; ``window_cache`` and ``long_cache`` [blocks, n, D] with ``window_slots`` int64 [T, W] and
    ``long_slots`` int64 [T, K] (-1: skipped; W >= 1); ``sink`` fp32 [Hq], a logit that counts in the denominator only;
    -> [T, Hq, D] in q's dtype. The two sets are joined, not deduplicated. Queries and rows are widened to fp32; logits,
    softmax and the sum of values are fp32; one rounding to q's dtype at the end. A token with no row and a sink of
    -inf gets 0. Each token is a matrix product of its own, so its result does not depend on the others; tiled over
    tokens within ``TILE``. ValueError when only one of ``long_cache`` and ``long_slots`` is given, and for shapes.
    """
    sources = [(window_cache, window_slots)]
    if (long_cache is None) != (long_slots is None):
        raise ValueError("long_cache and long_slots must be given together, one of them is None")
    if long_cache is not None and long_slots is not None:
        sources.append((long_cache, long_slots))
    tokens, heads, width = q.shape
    for cache, slots in sources:
        if len(slots) != tokens or cache.shape[-1] != width:
            raise ValueError(
                f"slots of {len(slots)} tokens and rows of {cache.shape[-1]} channels must match q: {tokens}, {width}"
            )
    if sink.shape != (heads,):
        raise ValueError(f"sink of shape {list(sink.shape)} must be [{heads}], one logit per head")

    rows_per_token = sum(slots.shape[1] for _, slots in sources)
    tile = max(1, TILE // max(1, rows_per_token * max(width, heads)))
    result = torch.empty_like(q)
    for t in range(0, tokens, tile):
        some = slice(t, t + tile)
        rows = torch.cat([read_rows(cache, slots[some]).float() for cache, slots in sources], dim=1)
        empty = torch.cat([slots[some] < 0 for _, slots in sources], dim=1)
        result[some] = _attend(q[some].float(), rows, empty, sink.float(), scale)
    return result


def _attend(q: Tensor, rows: Tensor, empty: Tensor, sink: Tensor, scale: float) -> Tensor:
    """fp32 attention of ``q`` [t, Hq, D] over ``rows`` [t, S, D], without those that are ``empty`` [t, S]."""
    absent = torch.zeros(empty.shape, device=q.device).masked_fill_(empty, -torch.inf).unsqueeze(1)
    logits = torch.baddbmm(absent, q, rows.transpose(1, 2), alpha=scale)
    sinks = sink.unsqueeze(1)
    top = torch.maximum(logits.amax(dim=2, keepdim=True), sinks)
    # With nothing to attend to and no sink, any finite shift leaves every weight at 0; -inf would make them NaN.
    top = top.masked_fill(top == -torch.inf, 0.0)
    weights = logits.sub_(top).exp_()
    total = weights.sum(dim=2, keepdim=True) + (sinks - top).exp()
    return (weights @ rows) / total.masked_fill(total == 0, 1.0)
