"""Which compressed rows a token attends to: top-k and the two-level candidate blocks (deepseek_v41.md 3.9, 3.10).

One deterministic order everywhere: the higher score first, then the lower index. A visible NaN ranks above every real
score, at both levels: level one demands it, and at level two it keeps the row defined. -inf is "not there" and is never
selected. Scores from the visible length on are ignored, whatever they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 1 << 22
"""Most scores ranked at once; ranks are int64: 32 MiB."""

_NAN = 0x7F800001
"""Rank of NaN, just above the rank of +inf."""

_NEWEST = 0x7FFFFFFF
"""Rank of the newest visible block, above everything."""

_ABSENT = -0x7F800001
"""Rank of -inf, the least there is."""


def top_k(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """The ``k`` best rows among the first ``visible`` of each query, in ascending order, then -1.

    ``scores`` fp32 [Q, N], ``visible`` int64 [Q] (rows; 0 for a padded token) -> int32 [Q, k]; ``k`` may exceed N.
    ValueError for shapes, dtypes and a visible length above N.
    """
    _check(scores, visible, k=k)
    tile = max(1, TILE // max(1, scores.shape[1]))
    parts = zip(torch.split(scores, tile), torch.split(visible, tile), strict=True)
    return torch.cat([_best(_ranks(_masked(some, seen)), k) for some, seen in parts])


def candidate_blocks(scores: Tensor, visible: Tensor, block: int, count: int) -> Tensor:
    """The ``count`` best blocks of ``block`` rows of each query, in ascending order, then -1; the newest is always in.

    ``scores`` fp32 [Q, N], ``visible`` int64 [Q] (rows) -> int32 [Q, count] block numbers. A block is as good as its
    best visible row. ValueError as for :func:`top_k`, and for a block or a count below 1.
    """
    _check(scores, visible, block=block, count=count)
    tile = max(1, TILE // max(1, scores.shape[1]))
    parts = zip(torch.split(scores, tile), torch.split(visible, tile), strict=True)
    return torch.cat([_best(_block_ranks(_masked(some, seen), seen, block), count) for some, seen in parts])


def restrict(scores: Tensor, candidates: Tensor, block: int) -> Tensor:
    """``scores`` [Q, N] with -inf at every row whose block is not in the query's ``candidates`` int32 [Q, C]; a copy.

    Negative entries are ignored. An entry beyond the last block is torch's RuntimeError; :func:`check_candidates`
    says it better.
    """
    queries, rows = scores.shape
    blocks = -(-rows // block)
    allowed = torch.zeros((queries, blocks + 1), dtype=torch.bool, device=scores.device)
    allowed.scatter_(1, torch.where(candidates < 0, blocks, candidates).long(), True)
    of_rows = allowed[:, :blocks].repeat_interleave(block, dim=1)[:, :rows]
    return scores.masked_fill(~of_rows, -torch.inf)


def check_candidates(candidates: Tensor, visible: Tensor, block: int) -> None:
    """ValueError unless ``candidates`` are contiguous int32 [Q, C], on the device of ``visible`` int64 [Q] (rows), and
    each entry is -1 or a block number below ``ceil(visible / block)`` of its query."""
    if candidates.dim() != 2 or candidates.shape[0] != len(visible):
        raise ValueError(f"candidates of shape {list(candidates.shape)} must be [{len(visible)}, C]")
    if candidates.dtype != torch.int32:
        raise ValueError(f"candidates of dtype {candidates.dtype} must be torch.int32")
    if candidates.device != visible.device:
        raise ValueError(f"candidates on {candidates.device} must be on {visible.device}, the device of visible")
    if not candidates.is_contiguous():
        raise ValueError(f"candidates of strides {list(candidates.stride())} must be contiguous")
    blocks = ((visible + block - 1) // block).unsqueeze(1)
    wrong = (candidates < -1) | (candidates >= blocks)
    if bool(wrong.any()):
        query, column = (int(i) for i in wrong.nonzero()[0])
        raise ValueError(
            f"candidates[{query}, {column}] = {int(candidates[query, column])} must be -1 or below "
            f"{int(blocks[query])} blocks"
        )


def _check(scores: Tensor, visible: Tensor, **at_least_one: int) -> None:
    for name, value in at_least_one.items():
        if value < 1:
            raise ValueError(f"{name} = {value} must be >= 1")
    if scores.dim() != 2 or visible.shape != scores.shape[:1]:
        raise ValueError(f"scores {list(scores.shape)} and visible {list(visible.shape)} must be [Q, N] and [Q]")
    if scores.dtype != torch.float32:
        raise ValueError(f"scores of dtype {scores.dtype} must be torch.float32")
    if visible.device != scores.device:
        raise ValueError(f"visible on {visible.device} must be on {scores.device}, the device of scores")
    if not visible.is_meta and bool((visible > scores.shape[1]).any()):
        raise ValueError(f"visible = {int(visible.max())} rows must be <= {scores.shape[1]} scores")


def _masked(scores: Tensor, visible: Tensor) -> Tensor:
    rows = torch.arange(scores.shape[1], device=scores.device)
    return scores.masked_fill(rows >= visible.unsqueeze(1), -torch.inf)


def _ranks(scores: Tensor) -> Tensor:
    """Integers in the order of the scores: int64, equal exactly where the scores are."""
    # Adding +0 makes -0 the same bits as +0. The bits of a negative float grow as it falls: flip them below the sign.
    bits = (scores + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return torch.where(scores.isnan(), _NAN, ordered.long())


def _block_ranks(scores: Tensor, visible: Tensor, block: int) -> Tensor:
    blocks = -(-scores.shape[1] // block)
    padded = torch.nn.functional.pad(scores, (0, blocks * block - scores.shape[1]), value=-torch.inf)
    ranks = _ranks(torch.unflatten(padded, 1, (blocks, block)).amax(dim=2))
    newest = ((visible - 1) // block).unsqueeze(1)
    return torch.where(torch.arange(blocks, device=scores.device) == newest, _NEWEST, ranks)


def _best(ranks: Tensor, k: int) -> Tensor:
    """Columns of the ``k`` highest ranks of each row that are present, ascending, then -1: int32 [Q, k]."""
    queries, count = ranks.shape
    found = min(k, count)
    # The column in the low bits makes every key unique, so topk has no ties left to break as it likes.
    keys = (ranks << 32) | (count - 1 - torch.arange(count, device=ranks.device))
    best = keys.topk(found, dim=1, sorted=False).values
    columns = torch.where(best >> 32 > _ABSENT, count - 1 - (best & 0xFFFFFFFF), count).sort(dim=1).values
    result = torch.full((queries, k), -1, dtype=torch.int32, device=ranks.device)
    result[:, :found] = torch.where(columns < count, columns, -1)
    return result
