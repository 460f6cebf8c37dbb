"""The part of ``--mode engine`` that runs inside vLLM's worker: it overwrites KV memory and suppresses restores.

vLLM adds :class:`WorkerProbe` to its worker by name, so every process of an engine can import this file alone.
"""

from __future__ import annotations

import functools
import random
from typing import Any

OVERWRITE = (0x3F, 0xBF)
"""The bytes KV memory is overwritten with, in a seeded random order.

Not 0xFF, the poison of the byte oracles: that is NaN, and attention kernels multiply masked rows by zero, so
NaN would spread from rows nobody reads. Any sequence of these two is a finite number near ±1 in bfloat16,
float16, float32 and both float8 formats. That they change the tokens when they are read is not assumed:
the sensitivity proof uses the same bytes.
"""
OVERWRITE_PERIOD = 65521  # bytes; prime, so no two blocks of a power-of-two size hold the same bytes


class WorkerProbe:
    """Methods that vLLM adds to its worker (``worker_extension_cls``), called by name over its own RPC."""

    def kvproof_describe(self) -> dict[str, Any]:
        """Layers with KV memory, and the block size [tokens] of each group."""
        runner = self.model_runner  # type: ignore[attr-defined]
        config = runner.kv_cache_config
        return {
            "layers": [name for group in config.kv_cache_groups for name in group.layer_names],
            "block_tokens": [int(group.kv_cache_spec.block_size) for group in config.kv_cache_groups],
            "prefix_caching": bool(runner.cache_config.enable_prefix_caching),
            "vocabulary": int(runner.model_config.get_vocab_size()),
        }

    def kvproof_overwrite(self) -> int:
        """Overwrite all KV memory, padding and null block included; returns the number of bytes."""
        memories = _memories(self.model_runner)  # type: ignore[attr-defined]
        for memory in memories.values():
            _overwrite(memory, 0, memory.numel())
        return sum(memory.numel() for memory in memories.values())

    def kvproof_suppress(self, layers: list[str]) -> int:
        """From now on overwrite what the connector restores into these layers, before it is read.

        The connector does all its work and reports it, so nothing waits and the hit stays claimed; the
        bytes are gone nevertheless. An empty list ends it. Returns the number of pages overwritten since
        the last call.
        """
        if not hasattr(self, "_kvproof_suppression"):
            self._kvproof_suppression = _Suppression(self.model_runner)  # type: ignore[attr-defined]
        return self._kvproof_suppression.select(layers)


class _Suppression:
    """Takes the restored bytes away again at each of the three moments at which they can have arrived."""

    def __init__(self, runner: Any) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self._config = runner.kv_cache_config
        self._runner = runner
        self._layers: frozenset[str] = frozenset()
        self._hits: dict[str, list[int]] = {}  # layer -> restored blocks of the requests of this step
        self._pages: set[tuple[str, int]] = set()  # (layer, block) overwritten since select()
        connector = get_kv_transfer_group()
        execute, start, wait = runner.execute_model, connector.start_load_kv, connector.wait_for_layer_load

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self._hits = self._restored_blocks(scheduler_output)
            self._take_away(self._layers)  # an asynchronous load arrived before this step
            try:
                return execute(scheduler_output, *args, **kwargs)
            finally:
                self._hits = {}

        def start_load_kv(*args: Any, **kwargs: Any) -> Any:
            result = start(*args, **kwargs)
            self._take_away(self._layers)  # a bulk load arrived now
            return result

        def wait_for_layer_load(layer_name: str) -> Any:
            result = wait(layer_name)
            self._take_away(self._layers & {layer_name})  # a layerwise load arrived now
            return result

        runner.execute_model = execute_model
        connector.start_load_kv = start_load_kv
        connector.wait_for_layer_load = wait_for_layer_load

    def select(self, layers: list[str]) -> int:
        pages, self._pages = len(self._pages), set()
        self._layers = frozenset(layers)
        return pages

    def _restored_blocks(self, scheduler_output: Any) -> dict[str, list[int]]:
        """Blocks before ``num_computed_tokens`` of new requests: the prefix cache was reset, so restored."""
        hits: dict[str, list[int]] = {}
        for request in scheduler_output.scheduled_new_reqs:
            for group, blocks in zip(self._config.kv_cache_groups, request.block_ids, strict=True):
                full = request.num_computed_tokens // group.kv_cache_spec.block_size
                for layer in group.layer_names:
                    hits.setdefault(layer, []).extend(b for b in blocks[:full] if b != 0)
        return hits

    def _take_away(self, layers: frozenset[str]) -> None:
        if not any(self._hits.get(layer) for layer in layers):
            return
        memory = next(iter(_memories(self._runner).values()))
        for tensor in self._config.kv_cache_tensors:
            for index, layer in enumerate(tensor.layers):
                if layer not in layers:
                    continue
                for block in self._hits.get(layer, ()):
                    start = tensor.offset + index * tensor.layer_stride + block * tensor.block_stride
                    _overwrite(memory, start, start + self._page_bytes(layer))
                    self._pages.add((layer, block))

    def _page_bytes(self, layer: str) -> int:
        group = next(g for g in self._config.kv_cache_groups if layer in g.layer_names)
        spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(layer, group.kv_cache_spec)
        return int(spec.page_size_bytes)


def _memories(runner: Any) -> dict[int, Any]:
    """The backing allocations of all KV tensors as flat uint8 tensors, by address."""
    import torch

    memories: dict[int, Any] = {}
    for layer in runner.compilation_config.static_forward_context.values():
        cache = getattr(layer, "kv_cache", None)
        for tensor in cache if isinstance(cache, list | tuple) else [cache]:
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                storage = tensor.untyped_storage()
                flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                memories.setdefault(storage.data_ptr(), flat)
    return memories


@functools.cache
def _pattern(device: Any) -> Any:
    import torch

    draw = random.Random(OVERWRITE_PERIOD)
    return torch.tensor(draw.choices(OVERWRITE, k=OVERWRITE_PERIOD), dtype=torch.uint8, device=device)


def _overwrite(memory: Any, start: int, stop: int) -> None:
    """Write bytes ``start`` to ``stop`` of a flat tensor; the byte depends on the address alone."""
    pattern = _pattern(memory.device)
    while start < stop:
        phase = start % OVERWRITE_PERIOD
        length = min(OVERWRITE_PERIOD - phase, stop - start)
        memory[start : start + length] = pattern[phase : phase + length]
        start += length
