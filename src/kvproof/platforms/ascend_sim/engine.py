"""What vllm-ascend's worker would run on the card after the cache exists, and what this machine leaves out."""

from __future__ import annotations

from typing import Any

from kvproof.findings.model import Substitution

TEXT_ONLY = Substitution(
    "MultiModalRegistry.supports_multimodal_inputs (text part only, models without a tokenizer)",
    "P",
    "with a KV connector vLLM builds the vision processor of a model that was asked for its text part alone, and the "
    "processor wants a tokenizer",
    "the encoder's budget; no cache spec derives from it",
)


def without_profile_and_warm_up(worker_module: Any) -> None:
    """No dummy step is profiled, so production plans with the bytes it was told; no kernel is warmed up, no graph
    captured."""
    from vllm.v1.worker.worker_base import CompilationTimes

    production = worker_module.NPUWorker.determine_available_memory

    def determine_available_memory(self: Any) -> int:
        self.model_runner.profile_run = lambda: None
        return int(production(self))

    def compile_or_warm_up_model(self: Any) -> Any:
        del self
        return CompilationTimes(language_model=0.0, encoder=0.0)

    worker_module.NPUWorker.determine_available_memory = determine_available_memory
    worker_module.NPUWorker.compile_or_warm_up_model = compile_or_warm_up_model


def text_only_stays_text_only() -> None:
    """A KV consumer must accept embeddings, so vLLM builds the vision processor of a model that was asked for its text
    part alone; the processor wants a tokenizer, which a described model has none of."""
    from vllm.multimodal.registry import MultiModalRegistry

    production = MultiModalRegistry.supports_multimodal_inputs

    def supports_multimodal_inputs(self: Any, model_config: Any) -> bool:
        multimodal = model_config.multimodal_config
        text_only = multimodal is not None and multimodal.language_model_only
        return not text_only and bool(production(self, model_config))

    MultiModalRegistry.supports_multimodal_inputs = supports_multimodal_inputs  # type: ignore[method-assign]
