"""What one step means for one cache (specification, sections 3.7, 4.7): who is where, and which rows are written.

Built by vLLM once per step and group, on the host. Everything is exact: nothing is padded, sized in advance or reused,
so there is no buffer that could be too short.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, CommonAttentionMetadata, MultipleOf
from vllm.v1.kv_cache_interface import CircularBufferSpec, KVCacheSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvproof.deepseek_v41.ops.paging import slots_of
from kvproof.deepseek_v41.plan import static_capacity


@dataclass(frozen=True)
class CacheStep:
    """One step as one cache sees it. T tokens of R requests, in the order of the batch.

    Attributes:
        query_start: int64 [R + 1], where each request's tokens begin in the batch.
        start: int64 [R], position of each request's first token of this step.
        request: int64 [T], the request of each token.
        position: int64 [T], its position in the request.
        block_table: int64 [R, B]; of a ring, [R, 1].
        block_size: tokens a block holds; of a ring, its rows.
        ratio: tokens per row.
        write_slots: int64 [T], the row each token writes, −1 = none. Of a ring all −1: it is addressed by the
            compressor, which also reads it.
        window: tokens a query sees in a sliding-window cache; 0 = this is none.
    """

    query_start: torch.Tensor
    start: torch.Tensor
    request: torch.Tensor
    position: torch.Tensor
    block_table: torch.Tensor
    block_size: int
    ratio: int
    write_slots: torch.Tensor
    window: int

    @property
    def tokens(self) -> int:
        return self.position.shape[0]

    def slots(self, position: torch.Tensor) -> torch.Tensor:
        """The slots of positions int64 [T, …] of each token's own request; a negative position has slot −1."""
        return slots_of(self.block_table, self.request, position, self.block_size, self.ratio)

    @cached_property
    def window_slots(self) -> torch.Tensor:
        """The slots each token sees in its window, int64 [T, window], oldest first; −1 before the request begins."""
        return self.slots(self.position.unsqueeze(1) - torch.arange(self.window - 1, -1, -1))

    @cached_property
    def rectangles(self) -> list[Rectangle]:
        """The batch as requests × tokens: all requests with one token together, every longer one by itself."""
        lengths = self.query_start.diff()
        single = (lengths == 1).nonzero().flatten()
        found = [Rectangle(single, self.query_start[single].unsqueeze(1))] if len(single) else []
        for request in (lengths > 1).nonzero().flatten().tolist():
            tokens = torch.arange(int(self.query_start[request]), int(self.query_start[request + 1]))
            found.append(Rectangle(torch.tensor([request]), tokens.unsqueeze(0)))
        return found


@dataclass(frozen=True)
class Rectangle:
    """Requests int64 [B] with equally many tokens each, int64 [B, Q]: numbers of rows of the batch."""

    requests: torch.Tensor
    tokens: torch.Tensor


class CacheMetadataBuilder(AttentionMetadataBuilder[CacheStep]):
    """Turns vLLM's common metadata into a :class:`CacheStep`."""

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.ring = isinstance(kv_cache_spec, CircularBufferSpec)
        self.ratio = int(kv_cache_spec.tokens_per_state)
        self.window = kv_cache_spec.sliding_window if isinstance(kv_cache_spec, SlidingWindowSpec) else 0
        scheduler = vllm_config.scheduler_config
        self.max_requests = scheduler.max_num_seqs
        self.max_tokens = static_capacity(
            scheduler.max_num_batched_tokens, vllm_config.compilation_config.max_cudagraph_capture_size
        )

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CacheStep:
        """Raises ValueError, before anything else, for a batch larger than the engine was built for."""
        common = common_attn_metadata
        requests, tokens = common.num_reqs, int(common.query_start_loc_cpu[common.num_reqs])
        if requests > self.max_requests:
            raise ValueError(f"requests in one step = {requests}: at most max_num_seqs = {self.max_requests}")
        if tokens > self.max_tokens:
            raise ValueError(f"tokens in one step = {tokens}: at most {self.max_tokens}")
        query_start = common.query_start_loc[: requests + 1].long()
        lengths = query_start.diff()
        request = torch.arange(requests).repeat_interleave(lengths)
        start = common.seq_lens[:requests].long() - lengths
        position = start[request] + torch.arange(tokens) - query_start[request]
        block_table = common.block_table_tensor[:requests].long()
        block_size = self.kv_cache_spec.block_size
        if self.ring:
            write_slots = torch.full_like(position, -1)
        else:
            # vLLM says which tokens write at all (a replayed or padded one does not); a compressed cache is written by
            # the last token of a group only.
            writes = (common.slot_mapping[:tokens] >= 0) & ((position + 1) % self.ratio == 0)
            slots = slots_of(block_table, request, position, block_size, self.ratio)
            write_slots = torch.where(writes, slots, -1)
        return CacheStep(
            query_start=query_start,
            start=start,
            request=request,
            position=position,
            block_table=block_table,
            block_size=block_size,
            ratio=self.ratio,
            write_slots=write_slots,
            window=self.window,
        )


class CacheBackend(AttentionBackend):
    """Any block size, any layout whose blocks lie side by side: all layers of a block in one piece.

    With the block outermost vLLM packs groups of unlike page sizes into one pool; with the layer outermost it would
    have to make all pages equally long first, and the pages of this model never are.
    """

    supported_dtypes = [torch.float32, torch.bfloat16]  # noqa: RUF012
    supported_kv_cache_dtypes = ["auto", "float32", "bfloat16"]  # noqa: RUF012

    @staticmethod
    def get_name() -> str:
        return "KVPROOF_DEEPSEEK_V41"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("the layers of this model attend by themselves")

    @staticmethod
    def get_builder_cls() -> type[CacheMetadataBuilder]:
        return CacheMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.BLHNC, KVCacheLayout.BLNHC)
