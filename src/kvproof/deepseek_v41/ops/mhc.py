"""Manifold-constrained hyper-connections: the M-fold residual stream of section 3.2.

A sublayer computes its mixes from the stream it receives, uses ``post`` and ``comb`` itself and hands ``pre`` to the
sublayer after it. Everything is fp32 (fp64 for an fp64 stream) except the two stated roundings to the stream's dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import linear


class Mixes(NamedTuple):
    """What a sublayer makes of a stream, fp32: pre [T, M], post [T, M], comb [T, M, M] (from copy, to copy)."""

    pre: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor


def mixes(
    stream: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
) -> Mixes:
    """The mixes of one sublayer from the stream [T, M, H] before it.

    fn fp32 [2M + M², M·H] and base fp32 [2M + M²], rows: M of pre, M of post, M² of comb (source-major); scale fp32
    [3]. The RMS factor multiplies the projected values, not the input. fp32 throughout; nothing is rounded to bf16.
    """
    copies = stream.shape[1]
    flat = stream.flatten(1).to(torch.promote_types(stream.dtype, torch.float32))
    fn, base, scale = fn.to(flat.dtype), base.to(flat.dtype), scale.to(flat.dtype)
    projected = linear(flat, fn) * torch.rsqrt(flat.square().mean(dim=-1, keepdim=True) + norm_eps)
    sizes = [copies, copies, copies * copies]
    offsets = base.split_with_sizes(sizes)
    pre, post, comb = (
        part * scale[kind] + offsets[kind] for kind, part in enumerate(projected.split_with_sizes(sizes, dim=-1))
    )
    return Mixes(
        pre.sigmoid() + hc_eps,
        2 * post.sigmoid(),
        sinkhorn(comb.view(-1, copies, copies), hc_eps, iterations),
    )


def sinkhorn(logits: torch.Tensor, eps: float, iterations: int) -> torch.Tensor:
    """Make each M×M matrix of ``logits`` fp32 [..., M, M] nearly doubly stochastic; same shape and dtype.

    The first row normalisation is a softmax; each of ``iterations`` (>= 1, else ValueError) ends by normalising
    columns, so the sums over dim −2 are 1 while those over dim −1 only converge.
    """
    if iterations < 1:
        raise ValueError(f"sinkhorn iterations {iterations}: must be >= 1")
    matrix = logits.softmax(dim=-1) + eps
    matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(dim=-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + eps)
    return matrix


def collapse(stream: torch.Tensor, pre: torch.Tensor | None) -> torch.Tensor:
    """The one row [T, H] a sublayer (or the head) works on: ``Σ_i pre[i] · stream[:, i]``.

    stream [T, M, H]; pre fp32 [T, M] from the sublayer before, or None for the first sublayer of a model, whose copies
    are all equal: then the first copy, bit for bit. fp32 sum, one rounding to the stream's dtype, before any norm.
    """
    if pre is None:
        return stream[:, 0]
    wide = torch.promote_types(stream.dtype, torch.float32)
    return (pre.to(wide).unsqueeze(-1) * stream.to(wide)).sum(dim=1).to(stream.dtype)


def expand(stream: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """The stream [T, M, H] after a sublayer: copy j is ``post[j] · y + Σ_i comb[i, j] · stream[:, i]``.

    stream [T, M, H] as it was before the sublayer, y [T, H] its result, post fp32 [T, M], comb fp32 [T, M, M].
    fp32 sum, one rounding per copy to the stream's dtype.
    """
    wide = torch.promote_types(stream.dtype, torch.float32)
    carried = torch.matmul(comb.to(wide).transpose(-1, -2), stream.to(wide))
    return (post.to(wide).unsqueeze(-1) * y.to(wide).unsqueeze(1) + carried).to(stream.dtype)
