"""OffloadingConnector, and a model runner V2 that lets it flush before it zeroes new blocks.

The counter-check of a fault of vLLM (docs/layouts.md). Named as ``early_flush:EarlyFlush``.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector


class EarlyFlush(OffloadingConnector):
    """Changes the runner's class when it is made; nothing of the connector."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner

        update = GPUModelRunner.update_requests
        if getattr(update, "flushes", False):
            return

        def flush_and_update(runner: Any, scheduler_output: Any) -> None:
            if scheduler_output.kv_connector_metadata is not None:
                runner.kv_connector.kv_connector.handle_preemptions(scheduler_output.kv_connector_metadata)
            update(runner, scheduler_output)

        flush_and_update.flushes = True  # type: ignore[attr-defined]
        GPUModelRunner.update_requests = flush_and_update
