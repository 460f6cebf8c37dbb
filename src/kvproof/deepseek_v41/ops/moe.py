"""Mixture of experts: router, clamped SwiGLU and the routed sum of section 3.12."""

from __future__ import annotations

import torch
from torch.nn.functional import linear, silu, softplus


def route(
    logits: torch.Tensor, bias: torch.Tensor, k: int, scaling: float, normalise: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose k experts for every token.

    logits fp32 [T, E]; bias fp32 [E], or [T, E] where rows have different ones: it takes part in the choice only.
    ``score = sqrt(softplus(logits))``; the k largest ``score + bias`` win, of equal ones the lowest expert number, and
    a NaN counts as −1e30. Weights are the winners' scores, with ``normalise`` divided by their sum (by 1 where that is
    not > 0), times ``scaling``. Returns weights fp32 [T, k] and expert numbers int64 [T, k], best first.
    """
    if not 1 <= k <= logits.shape[-1]:
        raise ValueError(f"route: k {k}: must be in 1..{logits.shape[-1]} (experts)")
    scores = softplus(logits.to(torch.promote_types(logits.dtype, torch.float32))).sqrt()
    choice = scores + bias.to(scores.dtype)
    choice = torch.where(choice.isnan(), -1e30, choice)
    # A stable sort, since topk leaves the order of equal values open.
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(-1, ids)
    if normalise:
        total = weights.sum(dim=-1, keepdim=True)
        weights = weights / torch.where(total > 0, total, 1.0)
    return weights * scaling, ids


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float | None) -> torch.Tensor:
    """``silu(min(gate, limit)) · clamp(up, −limit, limit)``; no clamp when ``limit`` is None.

    gate and up [..., I] of one dtype; fp32 arithmetic (fp64 for fp64), one rounding to that dtype.
    """
    wide = torch.promote_types(gate.dtype, torch.float32)
    g, u = gate.to(wide), up.to(wide)
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return (silu(g) * u).to(gate.dtype)


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    limit: float | None,
    first: int = 0,
) -> torch.Tensor:
    """This rank's part of ``Σ_k weights[t, k] · expert_ids[t, k](x_t)``, fp32 [T, H].

    x [T, H]; ids int64 [T, k] global expert numbers; weights fp32 [T, k]; w13 [E, 2I, H] gate rows then up rows; w2
    [E, H, I]; experts ``first`` .. ``first + E − 1`` are held here, any other number (−1 of a padded row too)
    contributes nothing. Products and the SwiGLU are rounded to x's dtype; weighting and the sum are fp32 (fp64 for an
    fp64 x), in ascending expert order, so that a token's result does not depend on the others of its batch.
    """
    held = w13.shape[0]
    out = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    local = ids.flatten() - first
    pairs = ((local >= 0) & (local < held)).nonzero().squeeze(-1)
    pairs = pairs[local[pairs].sort(stable=True).indices]
    counts = local[pairs].bincount(minlength=held)
    hit = counts.nonzero().squeeze(-1)
    tokens, shares = pairs // ids.shape[-1], weights.flatten()[pairs].to(out.dtype).unsqueeze(-1)
    runs = counts[hit].tolist()
    by_expert = zip(hit.tolist(), tokens.split_with_sizes(runs), shares.split_with_sizes(runs), strict=True)
    for expert, token, share in by_expert:
        gate, up = linear(x[token], w13[expert]).chunk(2, dim=-1)
        y = linear(swiglu(gate, up, limit), w2[expert])
        out.index_add_(0, token, y.to(out.dtype) * share)
    return out
