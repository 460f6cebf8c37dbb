"""Random DeepSeek V4.1 checkpoints, text part, with the released tensor names (specification 9.1).

Weights follow the recipe of the public end-to-end tests (specification 12.3): norms near 1, small sinks and biases,
matrices that keep a vector's length. Those that write into the residual stream are smaller by √layers. At full length
rounding grows through forty layers until bfloat16 and float64 choose the same token in 4 of 10 places; so they do in
9 of 10, and new tokens outside the window still move the logits by a third of their length.

A tensor's values depend on its name, its shape, the seed and the number of layers, so the plain and the quantised form
of a model hold the same numbers up to the format's rounding.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kvproof import zoo
from kvproof.zoo import stored, tokenizer
from kvproof.zoo.stored import Stored

NAMES = ("deepseek-v41-small", "deepseek-v41-tiny")
MODEL_TYPE = "deepseek_v41"
"""The bundled models small enough to have weights."""
PLAIN = {"bfloat16": stored.bfloat16, "float32": stored.float32}
SHARD_BYTES = 1 << 19
"""A shard is closed before it would grow beyond this: small, so that even a tiny model has several."""
LINEAR_BLOCK = (32, 32)
TABLE_BLOCK = (1, 32)
"""Rows and columns under one scale: of a linear layer, of the Engram table."""
QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "scale_fmt": "ue8m0",
    "weight_block_size": list(LINEAR_BLOCK),
    "expert_dtype": "fp4",
}

Storage = Literal["plain", "float32", "linear", "expert", "table"]
"""plain: the model's dtype. float32: always that. The others: plain, or in the quantised form FP8 with a scale per
32 × 32, MXFP4, and FP8 with a scale per 32 of a row."""
Law = Literal["matrix", "output", "embedding", "norm", "scale", "small"]
"""How values are drawn, n being standard normal: n / √columns, n / √(columns · layers), n, 1 + 0.1 n, |0.5 n| + 0.5,
0.1 n."""


@dataclass(frozen=True)
class Tensor:
    """One line of the table of tensors; in the quantised form `scale_of` names a second tensor beside it."""

    name: str
    shape: tuple[int, ...]
    storage: Storage
    law: Law


def tensors(text: Mapping[str, Any]) -> Iterator[Tensor]:
    """Every tensor of the model that the text configuration ``text`` describes, in the order of the forward pass."""
    hidden, vocabulary = text["hidden_size"], text["vocab_size"]
    yield Tensor("embed.weight", (vocabulary, hidden), "plain", "embedding")
    for layer in range(text["num_hidden_layers"]):
        prefix = f"layers.{layer}"
        if layer in text["engram_layer_ids"]:
            yield from _engram(f"{prefix}.engram", text, layer)
        yield from _mixes(prefix, text)
        yield Tensor(f"{prefix}.attn_norm.weight", (hidden,), "plain", "norm")
        yield from _attention(f"{prefix}.attn", text, layer)
        yield Tensor(f"{prefix}.ffn_norm.weight", (hidden,), "plain", "norm")
        yield from _experts(f"{prefix}.ffn", text)
    yield Tensor("norm.weight", (hidden,), "plain", "norm")
    yield Tensor("head.weight", (vocabulary, hidden), "plain", "matrix")


def _mixes(prefix: str, text: Mapping[str, Any]) -> Iterator[Tensor]:
    copies = text["hc_mult"]
    rows = 2 * copies + copies * copies
    for part in ("attn", "ffn"):
        yield Tensor(f"{prefix}.hc_{part}_fn", (rows, copies * text["hidden_size"]), "float32", "matrix")
        yield Tensor(f"{prefix}.hc_{part}_base", (rows,), "float32", "small")
        yield Tensor(f"{prefix}.hc_{part}_scale", (3,), "float32", "scale")


def _attention(prefix: str, text: Mapping[str, Any], layer: int) -> Iterator[Tensor]:
    hidden, heads, width, latent = (
        text["hidden_size"],
        text["num_attention_heads"],
        text["head_dim"],
        text["q_lora_rank"],
    )
    groups, rank = text["o_groups"], text["o_lora_rank"]
    yield Tensor(f"{prefix}.wq_a.weight", (latent, hidden), "linear", "matrix")
    yield Tensor(f"{prefix}.q_norm.weight", (latent,), "plain", "norm")
    yield Tensor(f"{prefix}.wq_b.weight", (heads * width, latent), "linear", "matrix")
    yield Tensor(f"{prefix}.wkv.weight", (width, hidden), "linear", "matrix")
    yield Tensor(f"{prefix}.kv_norm.weight", (width,), "plain", "norm")
    yield Tensor(f"{prefix}.attn_sink", (heads,), "float32", "small")
    yield Tensor(f"{prefix}.wo_a.weight", (groups * rank, heads // groups * width), "linear", "matrix")
    yield Tensor(f"{prefix}.wo_b.weight", (hidden, groups * rank), "linear", "output")
    writes_latent = layer in text["kv_source_layer_ids"]
    if writes_latent:
        yield Tensor(f"{prefix}.compressor.wkv.weight", (width, hidden), "plain", "matrix")
        if text["compress_ratios"][layer] == 2:
            yield Tensor(f"{prefix}.compressor.wgate.weight", (width, hidden), "plain", "matrix")
        yield Tensor(f"{prefix}.compressor.norm.weight", (width,), "plain", "norm")
    if layer in text["index_source_layer_ids"]:
        index_heads, index_width = text["index_n_heads"], text["index_head_dim"]
        yield Tensor(f"{prefix}.indexer.wq_b.weight", (index_heads * index_width, latent), "linear", "matrix")
        yield Tensor(f"{prefix}.indexer.weights_proj.weight", (index_heads, hidden), "plain", "matrix")
        if writes_latent:
            yield Tensor(f"{prefix}.indexer.wk.weight", (index_width, width), "plain", "matrix")
            yield Tensor(f"{prefix}.indexer.k_norm.weight", (index_width,), "plain", "norm")


def _experts(prefix: str, text: Mapping[str, Any]) -> Iterator[Tensor]:
    hidden, width, experts = text["hidden_size"], text["moe_intermediate_size"], text["n_routed_experts"]
    yield Tensor(f"{prefix}.gate.weight", (experts, hidden), "plain", "matrix")
    yield Tensor(f"{prefix}.gate.bias", (experts,), "float32", "small")
    for expert in range(experts):
        yield from _swiglu(f"{prefix}.experts.{expert}", hidden, width, "expert")
    yield from _swiglu(f"{prefix}.shared_experts", hidden, text["n_shared_experts"] * width, "linear")


def _swiglu(prefix: str, hidden: int, width: int, storage: Storage) -> Iterator[Tensor]:
    yield Tensor(f"{prefix}.w1.weight", (width, hidden), storage, "matrix")
    yield Tensor(f"{prefix}.w2.weight", (hidden, width), storage, "output")
    yield Tensor(f"{prefix}.w3.weight", (width, hidden), storage, "matrix")


def _engram(prefix: str, text: Mapping[str, Any], layer: int) -> Iterator[Tensor]:
    hidden, copies, width = text["hidden_size"], text["hc_mult"], text["engram_head_dim"]
    rows = text["engram_num_embeddings"][text["engram_layer_ids"].index(layer)]
    columns = (text["engram_max_ngram_size"] - 1) * text["engram_n_heads"]
    yield Tensor(f"{prefix}.embed.weight", (rows, width), "table", "embedding")
    yield Tensor(f"{prefix}.wkv.weight", ((copies + 1) * hidden, columns * width), "linear", "matrix")
    yield Tensor(f"{prefix}.q_weight", (copies, hidden), "plain", "norm")
    yield Tensor(f"{prefix}.k_weight", (copies, hidden), "plain", "norm")


def make(name: str, directory: Path | str, *, dtype: str = "bfloat16", seed: int = 0, quantized: bool = False) -> Path:
    """Write the model ``name`` with random weights and a tokenizer, as ``vllm serve`` takes it; returns the directory.

    ``dtype`` is that of whatever is neither quantised nor always float32. The same arguments give the same bytes.
    ValueError, before anything is written: a name outside `NAMES`, a dtype outside `PLAIN`, a negative seed, a
    directory that is not new or empty, no package ``tokenizers``.
    """
    if name not in NAMES:
        raise ValueError(f"model {name!r} has no weights to make; names: {', '.join(NAMES)}")
    config = {**zoo.describe(name).config, "torch_dtype": dtype}
    if quantized:
        config["quantization_config"] = QUANTIZATION
    return write(directory, config, seed)


def write(directory: Path | str, config: Mapping[str, Any], seed: int = 0) -> Path:
    """Write a checkpoint of any configuration in the released nested form; returns the directory.

    ``config`` says by its ``torch_dtype`` and ``quantization_config`` how the weights are stored. ValueError as `make`.
    """
    dtype, quantized = config.get("torch_dtype"), bool(config.get("quantization_config"))
    if dtype not in PLAIN:
        raise ValueError(f"dtype is {dtype!r}, must be one of {', '.join(PLAIN)}")
    if seed < 0:
        raise ValueError(f"seed is {seed}, must be at least 0")
    text = config["text_config"]
    target = zoo.new_directory(directory)
    try:
        words = tokenizer.train(text["vocab_size"], text["image_token_id"])
    except ImportError as error:
        raise ValueError(f"a checkpoint needs the Python package 'tokenizers', which vLLM brings: {error}") from None

    parts: dict[str, Stored] = {}
    for tensor in tensors(text):
        parts |= _store(tensor, draw(tensor, text["num_hidden_layers"], seed), dtype, quantized)
    try:
        target.mkdir(parents=True, exist_ok=True)
        _write_shards(target, parts)
        tokenizer.write(target, words)
        ends = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        _write_json(target / "generation_config.json", ends)
        # Last: a directory without it is no model, should the writing end early.
        _write_json(target / "config.json", config)
    except OSError as error:
        raise ValueError(f"directory {str(target)!r} cannot be written: {error.strerror}") from None
    return target


def draw(tensor: Tensor, layers: int, seed: int) -> np.ndarray:
    """The values of one tensor of a model of ``layers`` layers, float64."""
    normal = np.random.default_rng(zlib.crc32(tensor.name.encode()) ^ seed).standard_normal(tensor.shape)
    match tensor.law:
        case "matrix":
            return normal / math.sqrt(tensor.shape[-1])
        case "output":
            return normal / math.sqrt(tensor.shape[-1] * layers)
        case "embedding":
            return normal
        case "norm":
            return 1 + 0.1 * normal
        case "scale":
            return np.abs(0.5 * normal) + 0.5
        case "small":
            return 0.1 * normal


def scale_of(name: str) -> str:
    """Name of the scale that belongs to the quantised weight ``name``."""
    return name.removesuffix(".weight") + ".scale"


def _store(tensor: Tensor, values: np.ndarray, dtype: str, quantized: bool) -> dict[str, Stored]:
    """The entries of a checkpoint that hold ``values``: a weight, and its scale where it is quantised."""
    if tensor.storage == "float32":
        return {tensor.name: stored.float32(values)}
    if tensor.storage == "plain" or not quantized:
        return {tensor.name: PLAIN[dtype](values)}
    if tensor.storage == "expert":
        weight, scale = stored.mxfp4(values)
    else:
        weight, scale = stored.fp8_blocks(values, LINEAR_BLOCK if tensor.storage == "linear" else TABLE_BLOCK)
    return {tensor.name: weight, scale_of(tensor.name): scale}


def _write_shards(directory: Path, parts: Mapping[str, Stored]) -> None:
    shards: list[dict[str, Stored]] = [{}]
    size = 0
    for name, part in parts.items():
        if shards[-1] and size + part.codes.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = part
        size += part.codes.nbytes
    total = 0
    owners: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        total += stored.write(directory / file, shard)
        owners |= dict.fromkeys(shard, file)
    _write_json(directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": owners})


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
