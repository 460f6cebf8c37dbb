"""Small random checkpoints, made on demand: real models whose greedy tokens hang on every byte of KV.

A checkpoint with the usual initialisation (all weights N(0, 0.02)) is useless for a KV test: its next token
follows from the last token alone, and a server that restores nothing still answers "right". So every matrix
is drawn anew: attention is made peaky (each query looks at few keys) and loud (its output dominates the
residual stream), while the embedding is quiet.

transformers builds the model and writes the files, so names, shapes and ties are its own, for every
architecture it can construct. No tokenizer is written: the engine is asked in token ids.
"""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np

EMBEDDING_STD = 0.3
QUERY_KEY_GAIN = 2.0
"""Gain of the query and key projections; where a norm follows them, the norm carries it."""
VALUE_OUTPUT_GAIN = 2.0
MATRIX_GAIN = 1.0
QUERY_KEY = ("q_proj", "k_proj", "q_b_proj", "kv_b_proj", "qkv", "c_attn", "query", "key")
VALUE_OUTPUT = ("v_proj", "o_proj", "out_proj", "dense", "value")
DTYPES = {"bfloat16": "bfloat16", "float16": "half", "float32": "float"}
"""dtype of a config -> the method of a torch module that converts to it (zoo does not import torch)."""
SMALL_STATE = ("A_log", "dt_bias", "conv1d", "sinks", "bias")
"""Parameters whose scale is part of a recurrence or of a soft maximum: left as transformers made them."""


def make(directory: Path | str, config: dict[str, Any], seed: int = 0) -> Path:
    """Write ``config.json`` and ``model.safetensors`` of a random model; returns the directory.

    ``config`` is the content of a Hugging Face ``config.json`` with small sizes; its ``dtype`` (or
    ``torch_dtype``), default bfloat16, is the dtype of the weights. The same config and seed give the same
    bytes. Raises ``ValueError`` with one line when transformers cannot construct the model.
    """
    import transformers  # needs a second to import and is not needed to import this module

    directory = Path(directory)
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if dtype not in DTYPES:
        raise ValueError(f"config: dtype {dtype!r} is none of {', '.join(DTYPES)}")
    described = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    model_type = described.pop("model_type", None)
    if model_type is None:
        raise ValueError("config: model_type is missing; it names the architecture, e.g. 'qwen3'")
    transformers.set_seed(seed)
    try:
        built = transformers.AutoConfig.for_model(model_type, **described)
        model = transformers.AutoModelForCausalLM.from_config(built)
    except (ValueError, KeyError, TypeError, ImportError, RuntimeError) as error:
        # The first sentence: after it transformers lists every architecture it knows.
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise ValueError(f"model_type {model_type!r}: transformers cannot construct it: {reason}") from error
    for name, parameter in model.named_parameters():
        if any(part in name for part in SMALL_STATE):
            continue
        values = _draw(name, tuple(parameter.shape), seed)
        parameter.data.copy_(parameter.data.new_tensor(values))
    getattr(model, DTYPES[dtype])()
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    return directory


def _draw(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Values of one parameter [float32]; a function of its name, so adding a layer leaves the others."""
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if len(shape) < 2:  # a norm's weight, around 1 (or around 0 where the norm adds 1 itself: just as good)
        center = QUERY_KEY_GAIN if "q_norm" in name or "k_norm" in name else 1.0
        return (center * random.uniform(0.75, 1.25, shape)).astype(np.float32)
    if "embed" in name or "lm_head" in name:
        return random.normal(0.0, EMBEDDING_STD, shape).astype(np.float32)
    gain = MATRIX_GAIN
    if any(part in name for part in QUERY_KEY):
        gain = QUERY_KEY_GAIN
    elif any(part in name for part in VALUE_OUTPUT):
        gain = VALUE_OUTPUT_GAIN
    return random.normal(0.0, gain / math.sqrt(shape[-1]), shape).astype(np.float32)
