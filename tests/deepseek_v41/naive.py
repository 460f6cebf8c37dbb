"""The DeepSeek V4.1 text model a second time, in float64 and as slowly as the formulas read.

Written from facts/deepseek_v41.md alone (sections 2, 3 and 5): no caches, no pages, no chunks. The whole sequence
goes through the layers at once, attention is dense behind an explicit mask, and nothing is rounded. T = tokens,
M = copies of the residual stream, H = hidden size, D = latent width, n = complete groups of a compressed layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

Rows = list[list[int]]
INF = math.inf


@dataclass
class Forward:
    """What one pass produced. Dictionaries are by layer; every real number is float64.

    `selection`, `candidates` and `experts` are the oracle's own choices, also where `forced` replaced them in the
    computation: a comparison sees both, and the gap (last kept minus first dropped, inf when nothing was dropped)
    says whether a difference was a near tie.
    """

    logits: Tensor = field(default_factory=lambda: torch.empty(0))  # [T, V]
    streams: list[Tensor] = field(default_factory=list)  # after each layer: [T, M, H]
    swa: dict[int, Tensor] = field(default_factory=dict)  # every layer: roped latent [T, D]
    long: dict[int, Tensor] = field(default_factory=dict)  # kv sources: roped compressed rows [n, D]
    index_keys: dict[int, Tensor] = field(default_factory=dict)  # kv sources: [n, index_head_dim]
    ring: dict[int, Tensor] = field(default_factory=dict)  # ratio-2 kv sources: [a | g] [T, 2D]
    index_scores: dict[int, Tensor] = field(default_factory=dict)  # index sources: unfiltered [T, n], invisible -inf
    selection: dict[int, Rows] = field(default_factory=dict)  # index sources: ascending rows of each token
    selection_gap: dict[int, Tensor] = field(default_factory=dict)  # index sources: [T]
    candidates: Rows | None = None  # ascending blocks of each token
    candidate_gap: Tensor | None = None  # [T]
    experts: dict[int, Tensor] = field(default_factory=dict)  # int64 [T, k], best choice first
    expert_choice: dict[int, Tensor] = field(default_factory=dict)  # score + bias [T, E]
    expert_gap: dict[int, Tensor] = field(default_factory=dict)  # [T]
    engram_rows: dict[int, Tensor] = field(default_factory=dict)  # engram layers: int64 table rows [T, columns]


# --- section 2: who reads whose cache


def latest(sources: Iterable[int], layer: int) -> int:
    """The source that `layer` reads: the newest one at or before it."""
    return max(source for source in sources if source <= layer)


# --- 3.13 and 3.4: norm and rope


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def yarn_range(dim: int, theta: float, original: int, beta_fast: float, beta_slow: float) -> tuple[int, int]:
    """Frequency numbers between which YaRN blends: below the first nothing is scaled, above the second everything."""

    def corrected(beta: float) -> float:
        return dim * math.log(original / (beta * 2 * math.pi)) / (2 * math.log(theta))

    return max(math.floor(corrected(beta_fast)), 0), min(math.ceil(corrected(beta_slow)), dim - 1)


def inverse_frequencies(config: Mapping[str, Any], ratio: int) -> Tensor:
    """[P/2]: plain for sliding-window layers, scaled (when a scaling is configured) for compressed ones."""
    dim = config["qk_rope_head_dim"]
    theta = config["rope_theta"] if ratio == 0 else config["compress_rope_theta"]
    plain = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {"rope_type": "default"}
    rope = rope.get("compress", rope)
    if ratio == 0 or rope["rope_type"] == "default":
        return torch.tensor(plain, dtype=torch.float64)
    factor = rope.get("factor", 1.0)
    original = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
    low, high = yarn_range(dim, theta, original, rope.get("beta_fast", 32), rope.get("beta_slow", 1))
    width = (high - low) or 0.001
    blended = []
    for i, frequency in enumerate(plain):
        ramp = min(max((i - low) / width, 0.0), 1.0)
        blended.append(frequency * (1 - ramp) + frequency / factor * ramp)
    return torch.tensor(blended, dtype=torch.float64)


def rotate(x: Tensor, positions: Sequence[int], frequencies: Tensor, inverse: bool = False) -> Tensor:
    """x [T, ..., D]: turns the last P channels, pairs (2i, 2i + 1), by position times frequency."""
    angles = torch.tensor(list(positions), dtype=torch.float64)[:, None] * frequencies * (-1 if inverse else 1)
    shape = [len(x)] + [1] * (x.dim() - 2) + [len(frequencies)]
    cos, sin = angles.cos().reshape(shape), angles.sin().reshape(shape)
    out, first = x.clone(), x.shape[-1] - 2 * len(frequencies)
    even, odd = x[..., first::2], x[..., first + 1 :: 2]
    out[..., first::2] = even * cos - odd * sin
    out[..., first + 1 :: 2] = odd * cos + even * sin
    return out


# --- 3.2: hyper-connections


def sinkhorn(logits: Tensor, eps: float, iterations: int) -> Tensor:
    c = torch.softmax(logits, -1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c


def mixes(
    stream: Tensor, fn: Tensor, base: Tensor, scale: Tensor, config: Mapping[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """pre [T, M], post [T, M], comb [T, M, M] of a stream [T, M, H]."""
    tokens, copies, _ = stream.shape
    flat = stream.reshape(tokens, -1)
    m = flat @ fn.T / torch.sqrt((flat * flat).mean(-1, keepdim=True) + config["rms_norm_eps"])
    pre = torch.sigmoid(m[:, :copies] * scale[0] + base[:copies]) + config["hc_eps"]
    post = 2 * torch.sigmoid(m[:, copies : 2 * copies] * scale[1] + base[copies : 2 * copies])
    logits = (m[:, 2 * copies :] * scale[2] + base[2 * copies :]).reshape(tokens, copies, copies)
    return pre, post, sinkhorn(logits, config["hc_eps"], config["hc_sinkhorn_iters"])


def collapse(stream: Tensor, pre: Tensor | None) -> Tensor:
    """[T, H]. `pre` comes from the sublayer before; the first sublayer has none and takes one copy as it is."""
    if pre is None:
        return stream[:, 0]
    return sum(pre[:, i, None] * stream[:, i] for i in range(stream.shape[1]))  # type: ignore[return-value]


def expand(stream: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """[T, M, H]: destination j takes comb[i, j] of source i and post[j] of the sublayer's output."""
    copies = range(stream.shape[1])
    return torch.stack(
        [post[:, j, None] * y + sum(comb[:, i, j, None] * stream[:, i] for i in copies) for j in copies], 1
    )


# --- 3.5: compressor


def pool_pair(first: Tensor, second: Tensor) -> Tensor:
    """State rows [a | g] of an even position and its successor -> pooled [D]; softmax per channel over the two."""
    a, g = torch.stack([first, second]).chunk(2, -1)
    return (torch.softmax(g, 0) * a).sum(0)


# --- 3.8 to 3.10: indexer, top-k, candidates


def visible(position: int, ratio: int) -> int:
    """Complete groups that a token sees, its own included when it closes one."""
    return (position + 1) // ratio


def best(scores: Mapping[int, float], count: int) -> tuple[list[int], float]:
    """The `count` best keys, best first, ties to the lower key, -inf never; and the gap to the first one dropped."""
    ranked = sorted((key for key, score in scores.items() if score > -INF), key=lambda key: (-scores[key], key))
    gap = scores[ranked[count - 1]] - scores[ranked[count]] if len(ranked) > count else INF
    return ranked[:count], gap


def top_k(scores: Sequence[float], n_vis: int, k: int) -> tuple[list[int], float]:
    """Ascending rows selected among the first `n_vis`, and the gap at the boundary."""
    rows, gap = best(dict(enumerate(scores[:n_vis])), k)
    return sorted(rows), gap


def candidate_blocks(scores: Sequence[float], n_vis: int, block: int, count: int) -> tuple[list[int], float]:
    """Ascending blocks kept among those with a visible row, and the gap at the boundary; the newest always stays."""
    blocks = {b: max(scores[b * block : min((b + 1) * block, n_vis)]) for b in range(math.ceil(n_vis / block))}
    if blocks:
        blocks[max(blocks)] = INF
    kept, gap = best(blocks, count)
    return sorted(kept), gap


def restrict(scores: Sequence[float], candidates: Iterable[int], block: int) -> list[float]:
    allowed = set(candidates)
    return [score if j // block in allowed else -INF for j, score in enumerate(scores)]


# --- 3.11: attention


def attend(q: Tensor, keys: Tensor, mask: Tensor, sink: Tensor, scale: float) -> Tensor:
    """q [T, Hq, D], keys (= values) [K, D], mask bool [T, K], sink [Hq] -> [T, Hq, D]; sees nothing at all: 0."""
    logits = torch.einsum("thd,kd->thk", q, keys) * scale
    logits = logits.masked_fill(~mask[:, None, :], -INF)
    top = torch.maximum(logits.amax(-1), sink)
    top = torch.where(top > -INF, top, 0.0)
    weights = torch.exp(logits - top[..., None])
    denominator = weights.sum(-1) + torch.exp(sink - top)
    out = torch.einsum("thk,kd->thd", weights, keys)
    return torch.where(denominator[..., None] > 0, out / denominator[..., None], 0.0)


# --- 3.12: mixture of experts


def router_scores(logits: Tensor) -> Tensor:
    softplus = torch.where(logits > 20, logits, torch.log1p(torch.exp(logits.clamp(max=20))))
    return torch.sqrt(softplus)


def router_weights(scores: Tensor, ids: Sequence[int], scaling: float, normalise: bool = True) -> Tensor:
    """scores [E] of one token -> weights of the chosen experts."""
    chosen = scores[list(ids)]
    total = chosen.sum() if normalise else torch.tensor(1.0)
    return chosen / (total if total > 0 else 1.0) * scaling


def swiglu(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate) * up


# --- section 5: Engram


def is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def engram_primes(start: int, layers: int, max_ngram: int, heads: int) -> list[list[list[int]]]:
    """[layer][order - 2][head]: all different, each the smallest unused one not below `start`."""
    used: set[int] = set()

    def following() -> int:
        number = start
        while number in used or not is_prime(number):
            number += 1
        used.add(number)
        return number

    return [[[following() for _ in range(heads)] for _ in range(max_ngram - 1)] for _ in range(layers)]


def engram_offsets(primes: Sequence[Sequence[int]]) -> list[int]:
    """First table row of every column of one layer, order-major."""
    flat = [prime for order in primes for prime in order]
    return [sum(flat[:column]) for column in range(len(flat))]


def engram_multipliers(layer: int, compressed_vocab: int, max_ngram: int) -> list[int]:
    bound = max(1, (2**63 - 1) // compressed_vocab // 2)
    drawn = np.random.default_rng(10007 * layer).integers(0, bound, size=max_ngram, dtype=np.int64)
    return [2 * int(value) + 1 for value in drawn]


def engram_hash(
    window: Sequence[int | None], primes: Sequence[Sequence[int]], multipliers: Sequence[int], pad: int
) -> list[int]:
    """Table rows of one token; window[s] is the compressed id s places before it, None when missing or dead."""
    rows: list[int] = []
    offsets = engram_offsets(primes)
    rolling, blocked = 0, False
    for s, multiplier in enumerate(multipliers):
        value = window[s] if s < len(window) else None
        blocked = blocked or value is None
        rolling ^= (pad if blocked or value is None else value) * multiplier
        if s >= 1:
            rows += [rolling % prime + offsets[len(rows) + h] for h, prime in enumerate(primes[s - 1])]
    return rows


def engram_hashes(
    compressed: Sequence[int | None], primes: Sequence[Sequence[int]], multipliers: Sequence[int], pad: int
) -> list[list[int]]:
    """engram_hash of every token of one request; None marks a dead token."""
    return [engram_hash(compressed[t::-1], primes, multipliers, pad) for t in range(len(compressed))]


def engram_gate(d: Tensor) -> Tensor:
    sign = torch.where(d < 0, -1.0, 1.0)
    return torch.sigmoid(sign * torch.sqrt(d.abs().clamp(min=1e-6)))


# --- the whole model


class _Pass:
    def __init__(
        self,
        config: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        ids: Sequence[int],
        token_map: Sequence[int] | None,
        forced: Mapping[str, Any],
    ) -> None:
        self.c, self.tensors, self.ids, self.token_map, self.forced = config, tensors, list(ids), token_map, forced
        self.positions = range(len(self.ids))
        self.out = Forward()
        self.selected: dict[int, Rows] = {}  # what attention uses; differs from out.selection where forced
        self.candidates: Rows | None = None

    def w(self, name: str) -> Tensor:
        return self.tensors[name].to(torch.float64)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.w(name), self.c["rms_norm_eps"])

    def run(self) -> Forward:
        stream = self.w("embed.weight")[self.ids][:, None].repeat(1, self.c["hc_mult"], 1)
        pre: Tensor | None = None
        for layer in range(self.c["num_hidden_layers"]):
            if layer in self.c.get("engram_layer_ids", []):
                stream = self.engram(layer, stream)
            for name, sublayer in (("attn", self.attention), ("ffn", self.ffn)):
                own = f"layers.{layer}.hc_{name}_"
                own_pre, post, comb = mixes(
                    stream, self.w(own + "fn"), self.w(own + "base"), self.w(own + "scale"), self.c
                )
                u = self.norm(collapse(stream, pre), f"layers.{layer}.{name}_norm.weight")
                stream, pre = expand(stream, sublayer(layer, u), post, comb), own_pre
            self.out.streams.append(stream)
        self.out.logits = self.norm(collapse(stream, pre), "norm.weight") @ self.w("head.weight").T
        return self.out

    def attention(self, layer: int, u: Tensor) -> Tensor:
        c, at = self.c, f"layers.{layer}.attn."
        heads, width, groups = c["num_attention_heads"], c["head_dim"], c["o_groups"]
        ratio = c["compress_ratios"][layer]
        frequencies = inverse_frequencies(c, ratio)
        qr = self.norm(u @ self.w(at + "wq_a.weight").T, at + "q_norm.weight")
        q = rotate((qr @ self.w(at + "wq_b.weight").T).reshape(-1, heads, width), self.positions, frequencies)
        kv = rotate(self.norm(u @ self.w(at + "wkv.weight").T, at + "kv_norm.weight"), self.positions, frequencies)
        self.out.swa[layer] = keys = kv
        mask = [[p - c["sliding_window"] < j <= p for j in self.positions] for p in self.positions]
        if ratio > 0:
            if layer in c["kv_source_layer_ids"]:
                self.compress(layer, ratio, u, frequencies)
            if layer in c["index_source_layer_ids"]:
                self.index(layer, ratio, u, qr, frequencies)
            rows = self.out.long[latest(c["kv_source_layer_ids"], layer)]
            chosen = [set(own) for own in self.selected[latest(c["index_source_layer_ids"], layer)]]
            keys = torch.cat([kv, rows])
            mask = [window + [j in own for j in range(len(rows))] for window, own in zip(mask, chosen, strict=True)]
        o = attend(q, keys, torch.tensor(mask), self.w(at + "attn_sink"), width**-0.5)
        o = rotate(o, self.positions, frequencies, inverse=True).reshape(len(o), groups, -1)
        wo_a = self.w(at + "wo_a.weight").reshape(groups, c["o_lora_rank"], -1)
        z = torch.cat([o[:, g] @ wo_a[g].T for g in range(groups)], -1)
        return z @ self.w(at + "wo_b.weight").T

    def compress(self, layer: int, ratio: int, u: Tensor, frequencies: Tensor) -> None:
        at = f"layers.{layer}.attn."
        pooled = u @ self.w(at + "compressor.wkv.weight").T
        if ratio == 2:
            ring = torch.cat([pooled, u @ self.w(at + "compressor.wgate.weight").T], -1)
            self.out.ring[layer] = ring
            pairs = [pool_pair(ring[2 * j], ring[2 * j + 1]) for j in range(len(ring) // 2)]
            pooled = torch.stack(pairs) if pairs else pooled[:0]
        latent = self.norm(pooled, at + "compressor.norm.weight")
        starts = [ratio * j for j in range(len(latent))]
        key = self.norm(latent @ self.w(at + "indexer.wk.weight").T, at + "indexer.k_norm.weight")
        self.out.long[layer] = rotate(latent, starts, frequencies)
        self.out.index_keys[layer] = rotate(key, starts, frequencies)

    def index(self, layer: int, ratio: int, u: Tensor, qr: Tensor, frequencies: Tensor) -> None:
        c, at = self.c, f"layers.{layer}.attn.indexer."
        heads, width = c["index_n_heads"], c["index_head_dim"]
        q = rotate((qr @ self.w(at + "wq_b.weight").T).reshape(-1, heads, width), self.positions, frequencies)
        keys = self.out.index_keys[latest(c["kv_source_layer_ids"], layer)]
        per_head = torch.relu(torch.einsum("thd,nd->thn", q, keys))
        weights = u @ self.w(at + "weights_proj.weight").T
        scores = width**-0.5 * heads**-0.5 * torch.einsum("th,thn->tn", weights, per_head)
        seen = [visible(p, ratio) for p in self.positions]
        for t, n_vis in enumerate(seen):
            scores[t, n_vis:] = -INF
        self.out.index_scores[layer] = scores

        rows, source = scores.tolist(), c.get("candidate_source_layer_id", -1)
        if layer == source:
            block, count = c["candidate_block_size"], c["candidate_topk_blocks"]
            kept = [candidate_blocks(row, n_vis, block, count) for row, n_vis in zip(rows, seen, strict=True)]
            self.out.candidates, gaps = [blocks for blocks, _ in kept], [gap for _, gap in kept]
            self.out.candidate_gap = torch.tensor(gaps, dtype=torch.float64)
            limits = [math.ceil(n_vis / block) for n_vis in seen]
            self.candidates = self.replayed("candidates", self.forced.get("candidates"), limits, self.out.candidates)
        elif 0 <= source < layer:
            assert self.candidates is not None
            block = c["candidate_block_size"]
            rows = [restrict(row, own, block) for row, own in zip(rows, self.candidates, strict=True)]
        picked = [top_k(row, n_vis, c["index_topk"]) for row, n_vis in zip(rows, seen, strict=True)]
        self.out.selection[layer] = [own for own, _ in picked]
        self.out.selection_gap[layer] = torch.tensor([gap for _, gap in picked], dtype=torch.float64)
        forced = self.forced.get("selection", {}).get(layer)
        self.selected[layer] = self.replayed(f"selection of layer {layer}", forced, seen, self.out.selection[layer])

    def replayed(self, what: str, forced: Any, limits: Sequence[int], own: Rows) -> Rows:
        """The other implementation's choice if there is one (-1 entries are padding), but never beyond what exists."""
        if forced is None:
            return own
        chosen = [[int(entry) for entry in row if int(entry) != -1] for row in forced]
        if len(chosen) != len(limits):
            raise ValueError(f"forced {what}: {len(chosen)} tokens, the sequence has {len(limits)}")
        for t, (row, limit) in enumerate(zip(chosen, limits, strict=True)):
            if any(not 0 <= entry < limit for entry in row) or len(set(row)) < len(row):
                raise ValueError(f"forced {what}, token {t}: {row}, must be distinct and in 0..{limit - 1}")
        return chosen

    def ffn(self, layer: int, x: Tensor) -> Tensor:
        c, at = self.c, f"layers.{layer}.ffn."
        scores = router_scores(x @ self.w(at + "gate.weight").T)
        choice = scores + self.w(at + "gate.bias")
        picked = [best(dict(enumerate(row)), c["num_experts_per_tok"]) for row in choice.tolist()]
        ids = [own for own, _ in picked]
        self.out.expert_choice[layer], self.out.experts[layer] = choice, torch.tensor(ids)
        self.out.expert_gap[layer] = torch.tensor([gap for _, gap in picked], dtype=torch.float64)
        forced = self.forced.get("experts", {}).get(layer)
        limits = [c["n_routed_experts"]] * len(ids)
        ids = self.replayed(f"experts of layer {layer}", forced, limits, ids)

        out = torch.zeros_like(x)
        for expert in sorted({expert for row in ids for expert in row}):
            y = self.expert(f"{at}experts.{expert}.", x)
            for t, row in enumerate(ids):
                if expert in row:
                    weights = router_weights(scores[t], row, c["routed_scaling_factor"], c["norm_topk_prob"])
                    out[t] += weights[row.index(expert)] * y[t]
        return out + self.expert(f"{at}shared_experts.", x) if c["n_shared_experts"] else out

    def expert(self, at: str, x: Tensor) -> Tensor:
        gate, up = x @ self.w(at + "w1.weight").T, x @ self.w(at + "w3.weight").T
        return swiglu(gate, up, self.c.get("swiglu_limit")) @ self.w(at + "w2.weight").T

    def engram(self, layer: int, stream: Tensor) -> Tensor:
        c, at = self.c, f"layers.{layer}.engram."
        if self.token_map is None:
            raise ValueError("engram_layer_ids is not empty: token_map is needed")
        layers, orders = c["engram_layer_ids"], c["engram_max_ngram_size"]
        primes = engram_primes(c["engram_vocab_size"], len(layers), orders, c["engram_n_heads"])[layers.index(layer)]
        multipliers = engram_multipliers(layer, c["engram_compressed_vocab_size"], orders)
        dead = [token == c.get("image_token_id") for token in self.ids]
        compressed = [None if gone else self.token_map[token] for token, gone in zip(self.ids, dead, strict=True)]
        pad = self.token_map[c["engram_pad_token_id"]]
        rows = torch.tensor(engram_hashes(compressed, primes, multipliers, pad))
        self.out.engram_rows[layer] = rows

        tokens, copies, hidden = stream.shape
        memory = self.w(at + "embed.weight")[rows].reshape(tokens, -1)
        projected = (memory @ self.w(at + "wkv.weight").T).reshape(tokens, copies + 1, hidden)
        value, q_weight, k_weight = projected[:, copies], self.w(at + "q_weight"), self.w(at + "k_weight")
        updated = []
        for i in range(copies):
            x, key = stream[:, i], projected[:, i]
            q, k = rms_norm(x, q_weight[i], c["rms_norm_eps"]), rms_norm(key, k_weight[i], c["rms_norm_eps"])
            gate = engram_gate((q * k).sum(-1) * hidden**-0.5)
            gate = torch.where(torch.tensor(dead), 0.0, gate)
            updated.append(x + gate[:, None] * value)
        return torch.stack(updated, 1)


def forward(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    ids: Sequence[int],
    *,
    token_map: Sequence[int] | None = None,
    forced: Mapping[str, Any] | None = None,
) -> Forward:
    """One request, all its tokens, from position 0.

    config: flat text fields (sections 1.2, 1.3, 1.6); tensors: plain float weights under the names of section 9.1;
    token_map: compressed id of every token id, needed when Engram layers exist. `forced` replays another
    implementation's choices: {"selection": {layer: rows per token}, "candidates": blocks per token,
    "experts": {layer: ids per token}}, each part optional, -1 entries ignored; ValueError for a row, block or expert
    that the token cannot see.
    """
    return _Pass(config, tensors, ids, token_map, forced or {}).run()
