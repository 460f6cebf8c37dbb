"""Paged caches: which slot holds a row, reading rows and writing them (deepseek_v41.md 3.7, 4.4).

A cache is ``[blocks, n, D]``: ``n`` rows per page, and a page may be followed by bytes of other resources, so only
``cache[block, row]`` is meaningful, never a flat view. A slot is ``block * n + row``; -1 is no slot. Block 0 is the
null block and belongs to nobody, so none of its rows has a slot either.
"""

from __future__ import annotations

import torch
from torch import Tensor


def slots_of(block_table: Tensor, request: Tensor, position: Tensor, block_size: int, ratio: int = 1) -> Tensor:
    """Slot of the group of ``ratio`` tokens that each position belongs to, in the pages of its request.

    ``block_table`` int [R, B] (block numbers), ``request`` int [T], ``position`` int [T, ...] (token positions) ->
    int64 like ``position``. A page covers ``block_size`` tokens and holds ``block_size // ratio`` rows. -1 where there
    is nothing to address: a negative position (an unused entry), a negative request (a padded token), the null block.
    Group ``j`` is found through any of its positions, ``j * ratio`` for one. A position beyond the table is torch's
    IndexError. ValueError when ``ratio`` does not divide ``block_size``.
    """
    if ratio < 1 or block_size < 1 or block_size % ratio:
        raise ValueError(f"block_size = {block_size} tokens must be a positive multiple of ratio = {ratio}")
    request = request.view(-1, *(1,) * (position.dim() - 1)).expand_as(position)
    real = (position >= 0) & (request >= 0)
    position = torch.where(real, position, 0).long()
    block = block_table[torch.where(real, request, 0).long(), position // block_size].long()
    slot = block * (block_size // ratio) + position % block_size // ratio
    return slot.masked_fill_(~real | (block <= 0), -1)


def read_rows(cache: Tensor, slots: Tensor) -> Tensor:
    """The rows at ``slots`` int64 [...] of ``cache`` [blocks, n, D] -> [..., D], a copy; zeros where a slot is -1.

    A slot beyond the cache is torch's IndexError.
    """
    at = slots.flatten()
    held = at.clamp(min=0)
    rows = cache[held // cache.shape[1], held % cache.shape[1]]
    # Zeroing the listed rows costs what they are; a mask over all channels costs more than the gather.
    rows.index_fill_(0, (at < 0).nonzero().flatten(), 0)
    return rows.view(*slots.shape, cache.shape[-1])


def read_pages(cache: Tensor, block_table: Tensor) -> Tensor:
    """Whole pages: ``cache`` [blocks, n, D], ``block_table`` int [R, B] -> [R, B * n, D], a copy in table order.

    A negative entry reads the null block 0. What lies beyond a request's last row is whatever the pages hold.
    """
    pages = cache.index_select(0, block_table.flatten().clamp(min=0))
    return pages.view(len(block_table), -1, cache.shape[-1])


def write_rows(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write ``rows`` [T, D] to ``slots`` int64 [T] of ``cache`` [blocks, n, D] in place; -1 writes nothing.

    Rows are rounded to the cache's dtype. Slots other than -1 must be distinct. ValueError, before anything is
    written, when the shapes do not belong together or a slot lies beyond the cache.
    """
    if rows.shape != (*slots.shape, cache.shape[-1]):
        raise ValueError(
            f"rows of shape {list(rows.shape)} do not fit slots {list(slots.shape)} of {cache.shape[-1]} channels"
        )
    limit = cache.shape[0] * cache.shape[1]
    if bool((slots >= limit).any()):
        raise ValueError(f"slot {int(slots.max())} must be below {limit}, the rows of the cache")
    kept = slots >= 0
    slots = slots[kept]
    cache[slots // cache.shape[1], slots % cache.shape[1]] = rows[kept].to(cache.dtype)
