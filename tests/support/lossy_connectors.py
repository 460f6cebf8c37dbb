"""Connectors that lose every other load, and say so: vLLM then computes the lost blocks again."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import SimpleCPUOffloadConnector


class _Lossy:
    """Remembers the blocks of every other load, from its middle on, as not loaded."""

    _loads = 0
    _lost: frozenset[int] = frozenset()

    def _lose(self, blocks: list[int]) -> None:
        self._loads += 1
        if blocks and self._loads % 2:
            self._lost |= frozenset(blocks[len(blocks) // 2 :])

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Block ids that are not loaded, each once."""
        lost, self._lost = set(self._lost), frozenset()
        return lost


class LossyExample(_Lossy, ExampleConnector):
    """Loads within the step that needs them."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load, and lose some of it."""
        super().start_load_kv(forward_context, **kwargs)
        for request in self._get_connector_metadata().requests:
            if not request.is_store:
                self._lose([int(slot) // self._block_size for slot in request.slot_mapping[:: self._block_size]])


class LossySimple(_Lossy, SimpleCPUOffloadConnector):
    """Loads beside the steps."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load, and lose some of it."""
        self._lose(list(getattr(self._get_connector_metadata(), "load_gpu_blocks", [])))
        super().start_load_kv(forward_context, **kwargs)
