"""Engram without a tokenizer: DeepSeek-V4.1 derives a token map from one, and a described model has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


def stand_in(engram_module: str, config: dict[str, Any]) -> Substitution:
    """Give Engram a map of the size its config expects. ``config`` is the text config of the model."""
    import transformers
    from wrapt import when_imported

    tokens, compressed = int(config["vocab_size"]), int(config["engram_compressed_vocab_size"])

    def patch(module: Any) -> None:
        module.build_compressed_token_map = lambda tokenizer: ([i % compressed for i in range(tokens)], compressed)

    when_imported(engram_module)(patch)
    transformers.AutoTokenizer.from_pretrained = lambda *args, **kwargs: None
    return ENGRAM_SUBSTITUTION
