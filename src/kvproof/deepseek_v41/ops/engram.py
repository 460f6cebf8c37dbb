"""Engram's token map, n-gram hashes and gate: section 5 of the specification.

Raw token ids become values of a smaller vocabulary (``TokenMap``); the last few values before and at a token are hashed
into rows of a table (``HashLayout``, ``hashes``); what the table gives is let into the stream through one gate per copy
(``gate_update``). A value of ``BARRIER`` is no token: an image, or a place before the request's first token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Regex, normalizers

from kvproof.deepseek_v41.primes import primes

BARRIER = -1
"""Value of a token that no n-gram may cross."""

_LONE_SPACE = "\ue000"
_NORMALISER = normalizers.Sequence(
    [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        # A token that is one space must outlive the strip.
        normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
        normalizers.Strip(),
        normalizers.Replace(_LONE_SPACE, " "),
    ]
)


def compressed_token_map(decode: Callable[[int], str], tokens: Sequence[str | None]) -> tuple[torch.Tensor, int]:
    """Number raw tokens so that those that read alike share a number, in order of first appearance.

    ``decode(id)`` is the text of one id, special tokens kept and spaces not cleaned up; ``tokens[id]`` its raw string,
    which tells pieces of incomplete UTF-8 apart. Returns the map int64 [V] and how many distinct numbers it has.
    """
    numbers: dict[str | None, int] = {}
    values = []
    for token, raw in enumerate(tokens):
        text = decode(token)
        key = raw if "\ufffd" in text else _NORMALISER.normalize_str(text) or text
        values.append(numbers.setdefault(key, len(numbers)))
    return torch.tensor(values, dtype=torch.int64), len(numbers)


@dataclass(frozen=True, eq=False)
class TokenMap:
    """What hashing knows of the tokenizer: ``values`` int64 [V], the value of the pad token, the barrier token ids."""

    values: torch.Tensor
    pad: int
    barriers: tuple[int, ...]

    @classmethod
    def of(
        cls,
        decode: Callable[[int], str],
        tokens: Sequence[str | None],
        *,
        compressed_vocab_size: int,
        pad_token_id: int,
        barriers: Iterable[int] = (),
    ) -> TokenMap:
        """Build and check the map of a tokenizer (arguments of ``compressed_token_map``).

        ``barriers`` are raw ids that no n-gram crosses (the image token). ValueError when the number of distinct values
        is not the configured one, an id is outside the map, or the pad token is a barrier.
        """
        barriers = tuple(barriers)
        for name, token in (("engram_pad_token_id", pad_token_id), *(("barrier token id", b) for b in barriers)):
            if not 0 <= token < len(tokens):
                raise ValueError(f"{name} {token}: must be in 0..{len(tokens) - 1} (tokens)")
        if pad_token_id in barriers:
            raise ValueError(f"engram_pad_token_id {pad_token_id}: must not be one of the barrier tokens {barriers}")
        values, distinct = compressed_token_map(decode, tokens)
        if distinct != compressed_vocab_size:
            raise ValueError(f"engram_compressed_vocab_size {compressed_vocab_size}: the tokenizer has {distinct}")
        return cls(values, int(values[pad_token_id]), barriers)

    def compress(self, tokens: torch.Tensor, placeholders: Iterable[int] = ()) -> torch.Tensor:
        """Values int64 of raw ``tokens`` (any integer type and shape); BARRIER for barrier tokens and ``placeholders``.

        ``placeholders`` are the ids by which the caller says "no token here" (−1 of a lookback or of a padded row). Any
        other id outside the map is a ValueError: it would silently take another token's place.
        """
        ids = tokens.to(torch.int64)
        blocked = torch.isin(ids, torch.tensor((*self.barriers, *placeholders), dtype=torch.int64, device=ids.device))
        ids = ids.masked_fill(blocked, 0)
        strange = (ids < 0) | (ids >= len(self.values))
        if strange.any():
            raise ValueError(f"token id {int(ids[strange][0])}: must be in 0..{len(self.values) - 1} (tokens)")
        return self.values.to(ids.device)[ids].masked_fill(blocked, BARRIER)


def multipliers(layer_id: int, max_ngram: int, compressed_vocab_size: int) -> list[int]:
    """Odd factors of the values at distance 0, 1, … of a layer (its id, not its slot); a product stays below 2^63."""
    bound = max(1, (2**63 - 1) // compressed_vocab_size // 2)
    drawn = np.random.default_rng(10007 * layer_id).integers(0, bound, size=max_ngram, dtype=np.int64)
    return [2 * int(value) + 1 for value in drawn]


@dataclass(frozen=True, eq=False)
class HashLayout:
    """How the Engram layers hash, int64: ``primes`` and ``offsets`` [L, orders, heads], ``multipliers`` [L, max_ngram].

    Columns of a layer are counted order by order (2-grams first), heads within. Column c of layer slot s owns the table
    rows offsets[s, c] .. offsets[s, c] + primes[s, c] − 1.
    """

    primes: torch.Tensor
    offsets: torch.Tensor
    multipliers: torch.Tensor

    @classmethod
    def of(
        cls,
        *,
        layer_ids: Sequence[int],
        num_embeddings: Sequence[int],
        max_ngram_size: int,
        n_heads: int,
        vocab_size: int,
        compressed_vocab_size: int,
    ) -> HashLayout:
        """The layout of a configuration's ``engram_*`` fields; ValueError when a layer's table has too few rows."""
        if len(layer_ids) != len(num_embeddings):
            raise ValueError(f"engram_num_embeddings: {len(num_embeddings)} entries, must be {len(layer_ids)} (layers)")
        for name, value, least in (
            ("number of engram_layer_ids", len(layer_ids), 1),
            ("engram_max_ngram_size", max_ngram_size, 2),
            ("engram_n_heads", n_heads, 1),
            ("engram_vocab_size", vocab_size, 1),
            ("engram_compressed_vocab_size", compressed_vocab_size, 1),
        ):
            if value < least:
                raise ValueError(f"{name} {value}: must be >= {least}")
        orders = max_ngram_size - 1
        buckets = torch.tensor(primes(vocab_size, len(layer_ids), orders, n_heads), dtype=torch.int64)
        ends = buckets.flatten(1).cumsum(-1)
        for layer, needed, rows in zip(layer_ids, ends[:, -1].tolist(), num_embeddings, strict=True):
            if needed > rows:
                raise ValueError(
                    f"engram_num_embeddings {rows} of layer {layer}: must be >= {needed} (sum of its primes)"
                )
        factors = [multipliers(layer, max_ngram_size, compressed_vocab_size) for layer in layer_ids]
        return cls(buckets, ends.view_as(buckets) - buckets, torch.tensor(factors, dtype=torch.int64))


def hashes(
    layout: HashLayout, values: torch.Tensor, query_start: torch.Tensor, lookback: torch.Tensor, pad: int
) -> torch.Tensor:
    """Table rows of every token's n-grams: int64 [T, L, columns], −1 in the rows of padding.

    values int64 [T] from ``TokenMap.compress``; request r has tokens query_start[r] .. query_start[r + 1] − 1
    (query_start int64 [R + 1], ascending from 0), tokens from query_start[R] on are padding. lookback int64 [R,
    max_ngram − 1]: column j is the value of the token 1 + j places before the request's first one here, BARRIER where
    there is none. From a BARRIER on, backwards, an n-gram reads ``pad`` instead, also when the token itself is one.
    int64 arithmetic, exact. ValueError when the shapes do not fit.
    """
    total, requests, distances = values.shape[0], query_start.shape[0] - 1, layout.multipliers.shape[1]
    if tuple(lookback.shape) != (requests, distances - 1):
        raise ValueError(f"lookback shape {tuple(lookback.shape)}: must be {(requests, distances - 1)} [R, tokens]")
    if requests < 0 or query_start[0] != 0 or (query_start.diff() < 0).any() or query_start[-1] > total:
        raise ValueError(f"query_start {query_start.tolist()}: must ascend from 0 to at most {total} (tokens)")
    query_start = query_start.to(torch.int64)
    used = int(query_start[-1])
    out = values.new_full((total, len(layout.primes), layout.primes[0].numel()), -1)
    index = torch.arange(used, device=values.device)
    request = torch.searchsorted(query_start[1:].contiguous(), index, right=True)
    distance = torch.arange(distances, device=values.device)
    before_start = distance - (index - query_start[request]).unsqueeze(-1)
    history = torch.where(
        before_start <= 0,
        values[(index.unsqueeze(-1) - distance).clamp(min=0)],
        lookback[request.unsqueeze(-1), (before_start - 1).clamp(min=0)],
    )
    history = torch.where((history != BARRIER).cumprod(dim=-1) == 1, history, pad)
    factors = layout.multipliers.to(values.device)
    rolling = history[:, None, 0] * factors[:, 0]
    ngrams = []
    for far in range(1, distances):
        rolling = rolling ^ (history[:, None, far] * factors[:, far])
        ngrams.append(rolling)
    rows = torch.stack(ngrams, dim=-1).unsqueeze(-1) % layout.primes.to(values.device)
    out[:used] = (rows + layout.offsets.to(values.device)).flatten(2)
    return out


def gate(agreement: torch.Tensor) -> torch.Tensor:
    """How far a copy opens, in (0, 1): ``sigmoid(± sqrt(max(|d|, 1e-6)))``, + at zero of either sign; fp32."""
    root = agreement.abs().clamp(min=1e-6).sqrt()
    return torch.where(agreement < 0, -root, root).sigmoid()


def gate_update(
    stream: torch.Tensor,
    projected: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    keep: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """The stream [T, M, H] with each token's memory added: ``x + gate(d) · value`` for every copy x.

    projected [T, (M + 1)·H]: M keys, then one value, of a token; q_weight and k_weight [M, H]; keep bool [T], False for
    barriers and padding, whose rows stay bit for bit. d is the dot product of copy and key, both RMS-normalised with
    ``eps`` and weighted, over sqrt(H). fp32 arithmetic (fp64 for an fp64 stream), one rounding to the stream's dtype.
    """
    tokens, copies, width = stream.shape
    if tuple(projected.shape) != (tokens, (copies + 1) * width):
        raise ValueError(f"projected shape {tuple(projected.shape)}: must be {(tokens, (copies + 1) * width)}")
    wide = torch.promote_types(stream.dtype, torch.float32)
    x = stream.to(wide)
    memory = projected.to(wide).reshape(tokens, copies + 1, width)
    key, value = memory[:, :copies], memory[:, copies:]
    dot = (x * q_weight.to(wide) * k_weight.to(wide) * key).sum(dim=-1)
    scale = torch.rsqrt(x.square().mean(dim=-1) + eps) * torch.rsqrt(key.square().mean(dim=-1) + eps)
    opened = gate(dot * scale * width**-0.5).unsqueeze(-1)
    return torch.where(keep.view(-1, 1, 1), (x + opened * value).to(stream.dtype), stream)
