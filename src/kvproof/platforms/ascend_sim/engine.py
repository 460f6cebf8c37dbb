"""What vllm-ascend's worker would run on the card after the cache exists, and what this machine leaves out."""

from __future__ import annotations

from typing import Any


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
