"""What vllm-ascend's worker would run on the card after the cache exists, and what this machine leaves out."""

from __future__ import annotations

from typing import Any


def without_warm_up(worker_module: Any) -> None:
    """No kernel is warmed up, no graph captured, no core bound."""
    from vllm.v1.worker.worker_base import CompilationTimes

    def compile_or_warm_up_model(self: Any) -> Any:
        del self
        return CompilationTimes(language_model=0.0, encoder=0.0)

    worker_module.NPUWorker.compile_or_warm_up_model = compile_or_warm_up_model
