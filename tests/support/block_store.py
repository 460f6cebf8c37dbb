"""A KV connector of the simplest kind, right, and its faulty relatives: one entry per block, in this process's memory.

Named as ``block_store:Class``. For models with one group of attention layers.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

STORE: dict[tuple[int, ...], dict[str, torch.Tensor]] = {}
"""Key of a block -> layer -> bytes; both roles of a process see it."""


@dataclass
class Page:
    """One block of one request and its key."""

    request: str
    block: int
    key: tuple[int, ...]


@dataclass
class Plan(KVConnectorMetadata):
    """What the workers are to do in a step."""

    loads: list[Page] = field(default_factory=list)
    saves: list[Page] = field(default_factory=list)


class BlockStore(KVConnectorBase_V1):
    """Loads before the forward pass, saves after it."""

    asynchronous = False

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._size = vllm_config.cache_config.block_size
        self._requests: dict[str, Any] = {}
        self._blocks: dict[str, list[int]] = {}
        self._saved: dict[str, int] = {}
        self._local: dict[str, int] = {}  # tokens that the local cache has
        self._hits: dict[str, tuple[int, int]] = {}  # first block to load, and the one behind the last
        self._caches: dict[str, torch.Tensor] = {}

    # ------------------------------------------------------------------ scheduler

    def key(self, tokens: list[int], index: int) -> tuple[int, ...]:
        """A block's name: its tokens and all before them."""
        return tuple(tokens[: (index + 1) * self._size])

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        found, tokens = 0, list(request.all_token_ids)
        while (found + 1) * self._size < len(tokens) and self.key(tokens, found) in STORE:
            found += 1
        self._local[request.request_id] = num_computed_tokens
        external = max(0, found * self._size - num_computed_tokens)
        return external, self.asynchronous and external > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._requests[request.request_id] = request
        self._blocks[request.request_id] = list(blocks.get_block_ids()[0])
        if num_external_tokens:
            first = self._local[request.request_id] // self._size
            self._hits[request.request_id] = (first, first + num_external_tokens // self._size)

    def build_connector_meta(self, scheduler_output: Any) -> Plan:
        plan = Plan()
        for name, (first, last) in self._hits.items():
            plan.loads += self._pages(name, first, last)
            self._saved[name] = last
        self._hits.clear()
        cached = scheduler_output.scheduled_cached_reqs
        for name, new in zip(cached.req_ids, cached.new_block_ids, strict=True):
            self._blocks[name] += list(new[0]) if new else []
        computed = {r.req_id: r.num_computed_tokens for r in scheduler_output.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request in scheduler_output.scheduled_new_reqs:
            self._blocks[request.req_id] = list(request.block_ids[0])
        for name, count in scheduler_output.num_scheduled_tokens.items():
            first = self._saved.get(name, 0)
            last = min(computed[name] + count, self._requests[name].num_tokens) // self._size
            plan.saves += self._pages(name, first, last)
            self._saved[name] = max(first, last)
        return plan

    def _pages(self, name: str, first: int, last: int) -> list[Page]:
        tokens, blocks = list(self._requests[name].all_token_ids), self._blocks[name]
        return [Page(name, blocks[index], self.key(tokens, index)) for index in range(first, last)]

    # ------------------------------------------------------------------ worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = kv_caches

    def load(self, pages: list[Page]) -> None:
        for page in pages:
            for layer, cache in self._caches.items():
                cache[page.block].copy_(STORE[page.key][layer])

    def save(self, pages: list[Page]) -> None:
        for page in pages:
            if page.key not in STORE:
                STORE[page.key] = {layer: cache[page.block].clone() for layer, cache in self._caches.items()}

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.load(self._get_connector_metadata().loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        self.save(self._get_connector_metadata().saves)


class Threaded(BlockStore):
    """Right, too: a thread loads and saves, and vLLM keeps the blocks of a request until its saves are over."""

    asynchronous = True

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._pool = ThreadPoolExecutor(1)
        self._loading: dict[str, Future[None]] = {}
        self._saving: dict[str, Future[None]] = {}
        self._owed: set[str] = set()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for page in self._get_connector_metadata().loads:
            self._loading[page.request] = self._pool.submit(self.load, [page])

    def wait_for_save(self) -> None:
        for page in self._get_connector_metadata().saves:
            self._saving[page.request] = self._pool.submit(self.save, [page])

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return self._saved.get(request.request_id, 0) > 0, None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        self._owed |= finished_req_ids
        loaded = {name for name, job in self._loading.items() if job.done()}
        sent = {name for name in self._owed & self._saving.keys() if self._saving[name].done()}
        sent |= self._owed - self._saving.keys()
        self._owed -= sent
        for name in loaded:
            del self._loading[name]
        return sent, loaded


class NeverReports(Threaded):
    """Loads and never says so."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        return super().get_finished(finished_req_ids)[0], set()


class SavesLate(BlockStore):
    """Saves at the end of the next step, when the blocks may hold somebody else's tokens."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._late: list[Page] = []

    def wait_for_save(self) -> None:
        self.save(self._late)
        self._late = self._get_connector_metadata().saves


class KeysWithoutPrefix(BlockStore):
    """Names a block by its own tokens: the same block behind another prompt is taken for it."""

    def key(self, tokens: list[int], index: int) -> tuple[int, ...]:
        return tuple(tokens[index * self._size : (index + 1) * self._size])


class ByIndex(BlockStore):
    """Right: one gather and one scatter for all blocks of a step."""

    def load(self, pages: list[Page]) -> None:
        for layer, cache in self._caches.items() if pages else ():
            blocks = torch.tensor([page.block for page in pages], device=cache.device)
            cache.index_copy_(0, blocks, torch.stack([STORE[page.key][layer] for page in pages]).to(cache.device))

    def save(self, pages: list[Page]) -> None:
        pages = list({page.key: page for page in pages if page.key not in STORE}.values())
        for layer, cache in self._caches.items() if pages else ():
            blocks = torch.tensor([page.block for page in pages], device=cache.device)
            for page, copy in zip(pages, cache.index_select(0, blocks), strict=True):
                STORE.setdefault(page.key, {})[layer] = copy


class TouchesNeighbours(ByIndex):
    """Writes every block's neighbour as well, with the bytes that stand there already."""

    def load(self, pages: list[Page]) -> None:
        super().load(pages)
        for cache in self._caches.values() if pages else ():
            blocks = torch.tensor([page.block - 1 for page in pages], device=cache.device)
            cache.index_copy_(0, blocks, cache.index_select(0, blocks))
