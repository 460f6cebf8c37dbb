"""The attention sublayer (specification, sections 3.3, 3.7, 3.11): projections, cache rows, attention, output.

Order inside a layer: write the window's and the compressed rows, select, attend. So a token finds itself in the window
and, when it completes a group, finds the group's row.
"""

from __future__ import annotations

import torch
from torch import nn
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear

from kvproof.deepseek_v41.caches import Cache, save_with_connector, wait_for_connector
from kvproof.deepseek_v41.compressor import Compressor
from kvproof.deepseek_v41.config import TextConfig
from kvproof.deepseek_v41.indexer import Indexer
from kvproof.deepseek_v41.ops.attention import sparse_attention
from kvproof.deepseek_v41.ops.paging import write_rows
from kvproof.deepseek_v41.ops.rope import rotate
from kvproof.deepseek_v41.parameters import Norm, Shard, parameter, replicated
from kvproof.deepseek_v41.plan import LayerRole
from kvproof.deepseek_v41.shared import Rotation, Shared
from kvproof.deepseek_v41.specs import compressed_spec, window_spec


class Attention(nn.Module):
    """One layer's attention. A kv source owns ``long`` and ``keys``; later layers are given the source's.

    Args:
        sources: the attention of the layers before this one, by layer.
        block_size: tokens per block of every cache but the ring.
    """

    def __init__(
        self,
        config: TextConfig,
        role: LayerRole,
        sources: dict[int, Attention],
        *,
        block_size: int,
        dtype: torch.dtype,
        speculative_tokens: int,
        prefix: str,
    ) -> None:
        super().__init__()
        ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        self.ratio = role.ratio
        self.heads, self.width = config.num_attention_heads // ranks, config.head_dim
        self.groups = config.o_groups // ranks
        self.scale = self.width**-0.5

        hidden, latent, heads = config.hidden_size, config.q_lora_rank, config.num_attention_heads
        plain = {"bias": False, "quant_config": None, "return_bias": False}
        self.wq_a = replicated(hidden, latent, f"{prefix}.wq_a")
        self.q_norm = Norm(latent, config.rms_norm_eps)
        self.wq_b = ColumnParallelLinear(latent, heads * self.width, **plain, prefix=f"{prefix}.wq_b")
        self.wkv = replicated(hidden, self.width, f"{prefix}.wkv")
        self.kv_norm = Norm(self.width, config.rms_norm_eps)
        self.attn_sink = parameter(self.heads, dtype=torch.float32, shard=Shard(rank, ranks))
        self.wo_a = GroupedLinear(self.groups, heads // config.o_groups * self.width, config.o_lora_rank, rank, ranks)
        self.wo_b = RowParallelLinear(config.o_groups * config.o_lora_rank, hidden, **plain, prefix=f"{prefix}.wo_b")

        self.swa_cache = Cache(
            window_spec(block_size=block_size, width=self.width, window=config.sliding_window, dtype=dtype),
            f"{prefix}.swa_cache",
        )
        self.compressor = self.indexer = None
        self.owned = [self.swa_cache]
        if role.is_kv_source:
            self.compressor = Compressor(
                config, self.ratio, speculative_tokens=speculative_tokens, prefix=f"{prefix}.compressor"
            )
            spec = {"block_size": block_size, "ratio": self.ratio, "dtype": dtype}
            self.long = Cache(compressed_spec(width=self.width, **spec), f"{prefix}.long_cache")
            self.keys = Cache(compressed_spec(width=config.index_head_dim, **spec), f"{prefix}.indexer.k_cache")
            self.owned += [self.long, self.keys]
            if self.compressor.ring is not None:
                self.owned.append(self.compressor.ring)
        elif role.kv_source is not None:
            # Reached through a tuple, or torch would list the source's caches as this layer's own.
            self._of_source = (sources[role.kv_source].long, sources[role.kv_source].keys)
        if role.is_index_source:
            self.indexer = Indexer(config, role, self._source_caches[1], prefix=f"{prefix}.indexer")

    @property
    def _source_caches(self) -> tuple[Cache, Cache]:
        return (self.long, self.keys) if self.compressor is not None else self._of_source

    def forward(self, u: torch.Tensor, shared: Shared) -> torch.Tensor:
        """u [T, H], normed → [T, H], the sum over ranks."""
        rotation = shared.long if self.ratio else shared.window
        qr = self.q_norm(self.wq_a(u))
        q = rotate(self.wq_b(qr).unflatten(-1, (self.heads, self.width)), rotation.cos, rotation.sin)
        kv = rotate(self.kv_norm(self.wkv(u)), rotation.cos, rotation.sin)
        if self.swa_cache.step is None:  # vLLM measures memory: there is no cache yet
            o = torch.zeros_like(q)
        else:
            wait_for_connector(self.owned)
            write_rows(self.swa_cache.rows, self.swa_cache.step.write_slots, kv)
            if self.compressor is not None:
                self._store(*self.compressor(u), rotation)
            save_with_connector(self.owned)
            if self.indexer is not None:
                self.indexer(u, qr, shared)
            o = self._attend(q, shared)
        o = rotate(o, rotation.cos, rotation.sin, inverse=True)
        return self.wo_b(self.wo_a(o.reshape(len(o), self.groups, -1)).flatten(1))

    def _store(self, latent: torch.Tensor, emitting: torch.Tensor, rotation: Rotation) -> None:
        """Write the long rows and index keys of latents [P, D], rotated at the first position of their groups."""
        step = self.long.step
        first = step.position[emitting] // self.ratio * self.ratio
        at = Rotation.at(rotation.rope, first)
        slots = step.write_slots[emitting]
        write_rows(self.long.rows, slots, rotate(latent, at.cos, at.sin))
        write_rows(self.keys.rows, slots, rotate(self.indexer.key(latent), at.cos, at.sin))

    def _attend(self, q: torch.Tensor, shared: Shared) -> torch.Tensor:
        step = self.swa_cache.step
        long, selected = None, None
        if self.ratio:
            if shared.selection is None:
                raise RuntimeError(f"{self.swa_cache.prefix}: attends to selected rows, and no layer has selected any")
            source = self._source_caches[0]
            long, selected = source.rows, source.step.slots(shared.selection.long() * self.ratio)
        return sparse_attention(q, self.swa_cache.rows, step.window_slots, long, selected, self.attn_sink, self.scale)


class GroupedLinear(nn.Module):
    """One matrix [outputs, inputs] per group of heads, in the checkpoint one below the other; split by whole groups."""

    def __init__(self, groups: int, inputs: int, outputs: int, rank: int, ranks: int) -> None:
        super().__init__()
        self.groups = groups
        self.weight = parameter(groups * outputs, inputs, shard=Shard(rank, ranks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, groups, inputs] → [T, groups, outputs], one rounding to x's dtype."""
        weight = self.weight.unflatten(0, (self.groups, -1))
        return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)
