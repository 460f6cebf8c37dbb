"""Random text weights under the released names (section 9.1), and the configurations to use them with.

Every tensor is drawn from its own generator, seeded by its name: a weight does not change because another one was
added. Scales keep activations near 1 and logits apart (section 12.3, end).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Config = dict[str, Any]

# Section 13.1: every mechanism in seven layers. A prompt of 40 tokens truncates every selection, filters and slides.
TINY: Config = {
    "num_hidden_layers": 7,
    "hidden_size": 64,
    "vocab_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": 8,
    "max_position_embeddings": 256,
    "compress_ratios": [0, 2, 2, 1, 1, 1, 1, 0, 0],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 5],
    "candidate_source_layer_id": 3,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 2,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 4,
    "rms_norm_eps": 1e-20,
    "hc_mult": 4,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "image_token_id": 300,
    "engram_layer_ids": [1, 3],
    "engram_max_ngram_size": 3,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_vocab_size": 61,
    "engram_num_embeddings": [272, 348],
    "engram_compressed_vocab_size": 97,
    "engram_pad_token_id": 2,
    "num_nextn_predict_layers": 2,
    "dspark_target_layer_ids": [4, 5, 6],
    "dspark_block_size": 3,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 1,
    "dspark_markov_rank": 8,
    "dspark_noise_token_id": 3,
}

# The public truncated topology (13.1, last paragraph): five layers, 24 hash columns, narrow everywhere else.
TRUNCATED: Config = TINY | {
    "num_hidden_layers": 5,
    "compress_ratios": [0, 2, 2, 1, 1, 0, 0, 0],
    "index_source_layer_ids": [1, 3, 4],
    "engram_layer_ids": [2],
    "engram_max_ngram_size": 4,
    "engram_n_heads": 8,
    "engram_vocab_size": 1000,
    "engram_num_embeddings": [32768],
    "num_nextn_predict_layers": 3,
    "dspark_target_layer_ids": [2, 3, 4],
}

# All forty layers with the released plan. 4 · 8 candidate rows: filtering starts beyond 32 tokens, so 40 reach it.
SMALL: Config = TINY | {
    "num_hidden_layers": 40,
    "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "candidate_source_layer_id": 20,
    "candidate_topk_blocks": 4,
    "candidate_block_size": 8,
    "index_n_heads": 4,  # with two, every fourth score is exactly 0
    "index_topk": 16,
    "engram_layer_ids": [1, 14],
    "engram_max_ngram_size": 4,
    "engram_num_embeddings": [434, 606],
    "num_nextn_predict_layers": 3,
    "dspark_target_layer_ids": [37, 38, 39],
    "dspark_block_size": 5,
}


def without_engram(config: Mapping[str, Any]) -> Config:
    return dict(config) | {"engram_layer_ids": [], "engram_num_embeddings": []}


def token_map(config: Mapping[str, Any]) -> list[int]:
    """A made-up compressed id for every token id, numbered by first appearance as section 5.2 wants."""
    return [token % config["engram_compressed_vocab_size"] for token in range(config["vocab_size"])]


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the text model (no draft, no vision) by released name."""
    c = config
    hidden, latent, copies = c["hidden_size"], c["head_dim"], c["hc_mult"]
    groups, out_rank, query_rank = c["o_groups"], c["o_lora_rank"], c["q_lora_rank"]
    queries = c["num_attention_heads"] * latent
    mixed = 2 * copies + copies * copies
    shape: dict[str, tuple[int, ...]] = {
        "embed.weight": (c["vocab_size"], hidden),
        "head.weight": (c["vocab_size"], hidden),
        "norm.weight": (hidden,),
    }
    for layer in range(c["num_hidden_layers"]):
        at = f"layers.{layer}."
        for sublayer in ("attn", "ffn"):
            shape[f"{at}{sublayer}_norm.weight"] = (hidden,)
            shape[f"{at}hc_{sublayer}_fn"] = (mixed, copies * hidden)
            shape[f"{at}hc_{sublayer}_base"] = (mixed,)
            shape[f"{at}hc_{sublayer}_scale"] = (3,)
        shape |= {
            at + "attn.wq_a.weight": (query_rank, hidden),
            at + "attn.q_norm.weight": (query_rank,),
            at + "attn.wq_b.weight": (queries, query_rank),
            at + "attn.wkv.weight": (latent, hidden),
            at + "attn.kv_norm.weight": (latent,),
            at + "attn.attn_sink": (c["num_attention_heads"],),
            at + "attn.wo_a.weight": (groups * out_rank, queries // groups),
            at + "attn.wo_b.weight": (hidden, groups * out_rank),
            at + "ffn.gate.weight": (c["n_routed_experts"], hidden),
            at + "ffn.gate.bias": (c["n_routed_experts"],),
        }
        if layer in c["kv_source_layer_ids"]:
            shape[at + "attn.compressor.wkv.weight"] = (latent, hidden)
            if c["compress_ratios"][layer] == 2:
                shape[at + "attn.compressor.wgate.weight"] = (latent, hidden)
            shape[at + "attn.compressor.norm.weight"] = (latent,)
            shape[at + "attn.indexer.wk.weight"] = (c["index_head_dim"], latent)
            shape[at + "attn.indexer.k_norm.weight"] = (c["index_head_dim"],)
        if layer in c["index_source_layer_ids"]:
            shape[at + "attn.indexer.wq_b.weight"] = (c["index_n_heads"] * c["index_head_dim"], query_rank)
            shape[at + "attn.indexer.weights_proj.weight"] = (c["index_n_heads"], hidden)
        widths = {f"experts.{expert}": c["moe_intermediate_size"] for expert in range(c["n_routed_experts"])}
        if c["n_shared_experts"]:
            widths["shared_experts"] = c["n_shared_experts"] * c["moe_intermediate_size"]
        for name, width in widths.items():
            shape[f"{at}ffn.{name}.w1.weight"] = (width, hidden)
            shape[f"{at}ffn.{name}.w2.weight"] = (hidden, width)
            shape[f"{at}ffn.{name}.w3.weight"] = (width, hidden)
    for layer, rows in zip(c["engram_layer_ids"], c["engram_num_embeddings"], strict=True):
        at = f"layers.{layer}.engram."
        columns = (c["engram_max_ngram_size"] - 1) * c["engram_n_heads"]
        shape[at + "embed.weight"] = (rows, c["engram_head_dim"])
        shape[at + "wkv.weight"] = ((copies + 1) * hidden, columns * c["engram_head_dim"])
        shape[at + "q_weight"] = shape[at + "k_weight"] = (copies, hidden)
    return shape


def random_weights(config: Mapping[str, Any], seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """`dtype` for the matrices and norms; hyper-connections, sinks and router biases are fp32 as released."""
    return {name: _drawn(name, shape, seed, dtype) for name, shape in shapes(config).items()}


def _drawn(name: str, shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ seed)
    n = torch.randn(shape, generator=generator, dtype=torch.float32)
    if name.endswith("_scale"):
        return (0.5 * n).abs() + 0.5
    if name.endswith(("_base", "attn_sink", "gate.bias")):
        return 0.1 * n
    if name.endswith("_fn"):
        return n / math.sqrt(shape[-1])
    if name.endswith(("norm.weight", "q_weight", "k_weight")):
        return (1 + 0.1 * n).to(dtype)
    if name.endswith("embed.weight"):
        return n.to(dtype)  # rows that are looked up, not summed over
    return (n / math.sqrt(shape[-1])).to(dtype)
