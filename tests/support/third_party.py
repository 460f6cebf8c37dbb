"""Connectors nobody bundled: what a user names as ``third_party:Class``."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class Plain(ExampleConnector):
    """ExampleConnector under a name without a declared profile."""


class HeadsExchanged(ExampleConnector):
    """Loads every layer right, then exchanges the two KV heads of layer 1 in the first loaded block."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        cache = forward_context.no_compile_layers["model.layers.1.self_attn.attn"].kv_cache
        for request in self._get_connector_metadata().requests:
            if not request.is_store:
                block = int(request.slot_mapping[0]) // self._block_size
                cache[block] = cache[block].flip(0)


class Unseen(ExampleConnector):
    """Copies with code of its own: no torch operator touches KV memory, no copy list is seen."""

    store: dict[tuple[str, bytes], list[bytes]] = {}  # noqa: RUF012  shared by both roles on purpose

    def _pages(self, layer: torch.Tensor, request: Any) -> list[tuple[int, int]]:
        blocks = (request.slot_mapping[:: self._block_size] // self._block_size).tolist()
        nbytes = layer[0].numel() * layer.element_size()
        return [(layer.data_ptr() + block * layer.stride(0) * layer.element_size(), nbytes) for block in blocks]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for request in self._get_connector_metadata().requests:
            if request.is_store:
                continue
            for name, layer in forward_context.no_compile_layers.items():
                if isinstance(cache := getattr(layer, "kv_cache", None), torch.Tensor):
                    key = (name, request.token_ids.numpy().tobytes())
                    for (address, _), page in zip(self._pages(cache, request), self.store[key], strict=False):
                        ctypes.memmove(address, page, len(page))

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        for request in self._get_connector_metadata().requests:
            if request.is_store:
                key = (layer_name, request.token_ids.numpy().tobytes())
                self.store[key] = [ctypes.string_at(*page) for page in self._pages(kv_layer, request)]
                self._generate_foldername_debug(request.token_ids, request.mm_hashes, create_folder=True)


class Dies(ExampleConnector):
    """Takes the whole process with it on the first load, as an address outside of any tensor does."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if any(not request.is_store for request in self._get_connector_metadata().requests):
            os.kill(os.getpid(), signal.SIGSEGV)
