"""Caches as vLLM layers (specification, section 4): allocated, bound, grouped and moved by vLLM like any other.

A cache is a layer of its own, registered by name in the static forward context, because vLLM's unit of cache is the
layer: a kv source owns up to four of them (window, long, index key, ring), a consumer one.
"""

from __future__ import annotations

import torch
from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group, is_v1_kv_transfer_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import KVCacheSpec

from kvproof.deepseek_v41.metadata import CacheBackend, CacheStep


class Cache(nn.Module, AttentionLayerBase):
    """One paged cache: ``rows`` is [blocks, rows per block, width], a view whose block stride may exceed its rows.

    Raises:
        ValueError: a layer of this name is registered already.
    """

    def __init__(self, spec: KVCacheSpec, prefix: str) -> None:
        super().__init__()
        layers = get_current_vllm_config().compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f"layer name {prefix}: registered twice, every cache needs its own")
        layers[prefix] = self
        self.spec = spec
        self.prefix = prefix
        self.kv_cache = torch.empty(0)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return self.spec

    def get_attn_backend(self) -> type[AttentionBackend]:
        return CacheBackend

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Take the tensor vLLM allocated, [blocks, 1 head, rows, width]."""
        self.kv_cache = kv_cache

    @property
    def rows(self) -> torch.Tensor:
        return self.kv_cache.squeeze(1)

    @property
    def step(self) -> CacheStep | None:
        """What this step means for this cache; None while vLLM measures memory, before any cache exists."""
        metadata = get_forward_context().attn_metadata
        return metadata[self.prefix] if isinstance(metadata, dict) else None


def wait_for_connector(caches: list[Cache]) -> None:
    """Before a layer reads or writes its caches: let a KV connector finish loading them."""
    if connector := _connector():
        for cache in caches:
            connector.wait_for_layer_load(cache.prefix)


def save_with_connector(caches: list[Cache]) -> None:
    """After a layer has written its caches: hand them to a KV connector."""
    if connector := _connector():
        for cache in caches:
            connector.save_kv_layer(cache.prefix, cache.kv_cache, cache.step)


def _connector():  # type: ignore[no-untyped-def]
    if not has_kv_transfer_group() or not is_v1_kv_transfer_group():
        return None
    connector = get_kv_transfer_group()
    return connector if connector.has_connector_metadata() else None
