"""vLLM's production GPU worker; only what needs a context, a profile or kernels is left out."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment


class HostWorker(Worker):
    """``worker_cls`` of cuda-sim."""

    def init_device(self) -> None:
        """Everything up to the model runner: gloo instead of NCCL, no memory snapshot, tensors on the host."""
        self.device = torch.device("cpu")
        init_worker_distributed_environment(
            self.vllm_config, self.rank, self.distributed_init_method, self.local_rank, "gloo"
        )
        self._init_workspace_and_model_runner()

    def determine_available_memory(self) -> int:
        """No profile: the planner gets the bytes it was told to plan with; the block count is an override anyway."""
        return int(self.cache_config.kv_cache_memory_bytes)

    def compile_or_warm_up_model(self) -> Any:
        """No kernel to warm up, no graph to capture."""
        from vllm.v1.worker.worker_base import CompilationTimes

        return CompilationTimes(language_model=0.0, encoder=0.0)
