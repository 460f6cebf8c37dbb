"""Ratio-2 compression: pairs of tokens pooled channel by channel, and the ring that holds open pairs (deepseek_v41.md
3.5, 3.6, A.7, A.8).

The state row of a token is ``[a | g]``, two fp32 vectors of D channels: ``a = wkv x`` and ``g = wgate x``. Group k is
the pair of positions 2k, 2k + 1 and is emitted by the token at the odd one. Each request owns one block of the ring
cache ``[blocks, capacity, 2D]``; the row of position p is ``p mod capacity``. Block 0 is null: a request that has it
(padding, a dummy run) is not compressed at all, so its rows are neither read nor written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvproof.deepseek_v41.ops.paging import read_rows, write_rows


def ring_capacity(num_speculative_tokens: int) -> int:
    """Rows of a ring: the smallest power of two, at least 8, that holds a verification step and its predecessor.

    A step verifies ``num_speculative_tokens + 1`` tokens, and the row before them stays distinct from theirs.
    """
    if num_speculative_tokens < 0:
        raise ValueError(f"num_speculative_tokens = {num_speculative_tokens} must be >= 0")
    return max(8, 1 << (num_speculative_tokens + 1).bit_length())


def ring_slots(ring_block: Tensor, position: Tensor, capacity: int) -> Tensor:
    """Slot in the ring cache of each position: ``ring_block * capacity + position mod capacity``, -1 in the null block.

    ``ring_block`` int and ``position`` int64 (token positions) of one shape -> int64 of that shape.
    """
    return torch.where(ring_block > 0, ring_block * capacity + position % capacity, -1)


def pool_pairs(first: Tensor, second: Tensor) -> Tensor:
    """Pool state rows of even positions with those that follow: fp32 [P, 2D], fp32 [P, 2D] -> fp32 [P, D].

    Per channel, the softmax over the two gates weighs the two values; all in fp32, no rounding. Written with exp, which
    torch computes alike wherever a number stands in a tensor (its softmax does not): a pair pools to the same bits in
    any batch.
    """
    (a0, g0), (a1, g1) = first.float().chunk(2, dim=-1), second.float().chunk(2, dim=-1)
    top = torch.maximum(g0, g1)
    e0, e1 = (g0 - top).exp(), (g1 - top).exp()
    return (a0 * e0 + a1 * e1) / (e0 + e1)


def compress_pairs(
    state: Tensor, ring: Tensor, ring_block: Tensor, query_start_loc: Tensor, start_position: Tensor
) -> tuple[Tensor, Tensor]:
    """One step of a ratio-2 compressor over a ragged batch: pool every pair that the step completes, keep open ones.

    ``state`` fp32 [T, 2D]: state rows of the step's tokens; request r has tokens ``query_start_loc[r]`` up to
    ``query_start_loc[r + 1]`` at positions from ``start_position[r]`` on, tokens after the last request are padding.
    ``ring`` fp32 [blocks, capacity, 2D], updated in place; ``ring_block`` int [R], 0 = null.

    Returns ``(pooled fp32 [P, D], emitting int64 [P])``: the pooled groups in token order, and the token that emits
    each. A pair that began in an earlier step takes its first row from the ring. Every read happens before the first
    write, so a chunk longer than the ring does not overwrite its own predecessor; then the last ``capacity`` tokens of
    each request are written. ValueError, before anything is written, for shapes, dtypes or numbers out of range.
    """
    _check(state, ring, ring_block, query_start_loc, start_position)
    capacity = ring.shape[1]
    starts = query_start_loc.long()
    lengths = starts.diff()
    request = torch.repeat_interleave(torch.arange(len(lengths), device=state.device), lengths)
    token = torch.arange(len(request), device=state.device) + starts[0]
    in_chunk = token - starts[request]
    position = start_position.long()[request] + in_chunk
    block = ring_block.long()[request]

    at = ((position % 2 == 1) & (block > 0)).nonzero().flatten()
    emitting = token[at]
    from_ring = (in_chunk[at] == 0).nonzero().flatten()
    first = state[(emitting - 1).clamp(min=0)]
    crossing = at[from_ring]
    first[from_ring] = read_rows(ring, ring_slots(block[crossing], position[crossing] - 1, capacity))
    pooled = pool_pairs(first, state[emitting])

    survives = lengths[request] - in_chunk <= capacity
    kept = torch.where(survives, ring_slots(block, position, capacity), -1)
    write_rows(ring, kept, state[token])
    return pooled, emitting


def _check(state: Tensor, ring: Tensor, ring_block: Tensor, query_start_loc: Tensor, start_position: Tensor) -> None:
    requests = len(ring_block)
    if state.dtype != torch.float32 or ring.dtype != torch.float32:
        raise ValueError(f"state and ring must be torch.float32, got {state.dtype} and {ring.dtype}")
    if state.shape[-1] != ring.shape[-1] or state.shape[-1] % 2:
        raise ValueError(
            f"state rows of {state.shape[-1]} numbers must be even and as wide as ring rows of {ring.shape[-1]}"
        )
    if len(query_start_loc) != requests + 1 or len(start_position) != requests:
        raise ValueError(
            f"{requests} ring blocks need {requests + 1} query starts and {requests} start positions, "
            f"got {len(query_start_loc)} and {len(start_position)}"
        )
    if bool((query_start_loc.diff() < 0).any()) or not 0 <= int(query_start_loc[0]) <= int(query_start_loc[-1]) <= len(
        state
    ):
        raise ValueError(f"query_start_loc = {query_start_loc.tolist()} must rise within 0..{len(state)} tokens")
    if bool((start_position < 0).any()):
        raise ValueError(f"start_position = {start_position.tolist()} must be >= 0")
    if bool(((ring_block < 0) | (ring_block >= ring.shape[0])).any()):
        raise ValueError(f"ring_block = {ring_block.tolist()} must be within 0..{ring.shape[0] - 1}")
