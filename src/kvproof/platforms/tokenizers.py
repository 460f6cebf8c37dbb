"""Models that are described without a tokenizer: what in vLLM asks for one although only the layout is wanted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvproof.findings.case import Case
from kvproof.findings.model import Substitution
from kvproof.platforms import installed

ENGRAM_MAP = Substitution(
    "transformers.AutoTokenizer.from_pretrained, build_compressed_token_map (Engram, models without a tokenizer)",
    "W",
    "Engram compresses token ids by a map it builds from the model's tokenizer; a described model has none",
    "a lookup table in a buffer of the model; no cache spec derives from its content",
)
TEXT_ONLY = Substitution(
    "supports_multimodal_inputs of MultiModalRegistry or ModelConfig (text part, no tokenizer, vLLM before 0.33)",
    "W",
    "with a KV connector vLLM builds the vision processor of a model that was asked for its text part alone, and the "
    "processor wants a tokenizer",
    "the encoder's budget; no cache spec derives from it",
)
REGISTER = (ENGRAM_MAP, TEXT_ONLY)
ENGRAM_MODULE = "vllm.models.deepseek_v41.common.engram"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
_TEXT_ONLY_IS_HEEDED = (0, 33)
"""Release from which on vLLM needs no processor for the text part."""


def stand_in(case: Case) -> tuple[Substitution, ...]:
    """Answer whoever asks for the tokenizer of the case's model; the substitutions made. None where it has one."""
    if any(Path(case.model_dir, name).exists() for name in _TOKENIZER_FILES):
        return ()
    done: tuple[Substitution, ...] = ()
    if installed.vllm_release() < _TEXT_ONLY_IS_HEEDED:
        _text_only_stays_text_only()
        done += (TEXT_ONLY,)
    config = json.loads(Path(case.model_dir, "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    if text.get("engram_layer_ids"):
        _map_tokens(int(text["vocab_size"]), int(text["engram_compressed_vocab_size"]))
        done += (ENGRAM_MAP,)
    return done


def _map_tokens(tokens: int, compressed: int) -> None:
    """Give Engram a map of the size its config expects."""
    import transformers
    from wrapt import when_imported

    def patch(module: Any) -> None:
        module.build_compressed_token_map = lambda tokenizer: ([i % compressed for i in range(tokens)], compressed)

    when_imported(ENGRAM_MODULE)(patch)
    transformers.AutoTokenizer.from_pretrained = lambda *args, **kwargs: None


def _text_only_stays_text_only() -> None:
    """A KV consumer must accept embeddings, so vLLM builds the vision processor even of a text part."""
    from vllm.config import ModelConfig
    from vllm.multimodal.registry import MultiModalRegistry

    def is_text_only(model_config: Any) -> bool:
        multimodal = model_config.multimodal_config
        return multimodal is not None and bool(multimodal.language_model_only)

    if hasattr(MultiModalRegistry, "supports_multimodal_inputs"):  # vLLM 0.30
        of_registry = MultiModalRegistry.supports_multimodal_inputs
        MultiModalRegistry.supports_multimodal_inputs = (  # type: ignore[method-assign]
            lambda self, config: not is_text_only(config) and bool(of_registry(self, config))
        )
    else:
        of_config = ModelConfig.supports_multimodal_inputs.fget  # type: ignore[attr-defined]
        ModelConfig.supports_multimodal_inputs = property(  # type: ignore[assignment, method-assign]
            lambda self: not is_text_only(self) and bool(of_config(self))
        )
