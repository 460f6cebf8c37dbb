"""vLLM's production GPU worker on a real device; only the warm-up of kernels that will not run is left out."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_worker import Worker


class DeviceWorker(Worker):
    """``worker_cls`` of cuda."""

    def compile_or_warm_up_model(self) -> Any:
        """The model has no weights: nothing to tune, compile or capture."""
        from vllm.v1.worker.worker_base import CompilationTimes

        return CompilationTimes(language_model=0.0, encoder=0.0)
