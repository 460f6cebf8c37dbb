"""Engram without a tokenizer: DeepSeek-V4.1 derives a token map from one, and a described model has none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvproof.findings.case import Case
from kvproof.findings.model import Substitution

ENGRAM_SUBSTITUTION = Substitution(
    "transformers.AutoTokenizer.from_pretrained, build_compressed_token_map (Engram, models without a tokenizer)",
    "W",
    "Engram compresses token ids by a map it builds from the model's tokenizer; a described model has none",
    "a lookup table in a buffer of the model; no cache spec derives from its content",
)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def missing(model_dir: str) -> bool:
    """Whether the model directory holds no tokenizer."""
    return not any(Path(model_dir, name).exists() for name in _TOKENIZER_FILES)


def stand_in(case: Case, engram_module: str) -> tuple[Substitution, ...]:
    """Give Engram a map of the size its config expects, where the model has Engram and no tokenizer."""
    config = json.loads(Path(case.model_dir, "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    if not text.get("engram_layer_ids") or not missing(case.model_dir):
        return ()
    import transformers
    from wrapt import when_imported

    tokens, compressed = int(text["vocab_size"]), int(text["engram_compressed_vocab_size"])

    def patch(module: Any) -> None:
        module.build_compressed_token_map = lambda tokenizer: ([i % compressed for i in range(tokens)], compressed)

    when_imported(engram_module)(patch)
    transformers.AutoTokenizer.from_pretrained = lambda *args, **kwargs: None
    return (ENGRAM_SUBSTITUTION,)
