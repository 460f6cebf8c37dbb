"""KV-cache specs (specification, sections 4.1, 4.4): what vLLM's planner is told about the four kinds of cache.

Each is vLLM's own class, so that its managers, planners and connectors treat it as they treat any other; what is ours
is the comparison. Two caches may share a group, and so a block table and pages, only when every field that decides the
geometry of a page agrees: a comparison that leaves one out lets a page of one width be read as a page of another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from vllm.v1.kv_cache_interface import CircularBufferSpec, KVCacheSpec, MLAAttentionSpec, SlidingWindowMLASpec


def differing_fields(one: KVCacheSpec, other: KVCacheSpec, free: Collection[str] = ()) -> list[str]:
    """The names of the fields in which two specs differ, the class itself as ``type``; ``free`` ones do not count."""
    if type(one) is not type(other):
        return ["type"]
    names = (f.name for f in fields(one) if f.name not in free)
    return [name for name in names if getattr(one, name) != getattr(other, name)]


class _SameGeometry:
    """Uniform with a collection when no field differs, but those that may (``FREE``); merged with its equals only."""

    FREE: Collection[str] = ()

    @classmethod
    def merge(cls, specs: list[Any]) -> Any:
        """The one spec that all of ``specs`` are.

        Raises:
            AssertionError: two of them differ; the error by which vLLM's planner learns that specs do not merge.
        """
        for spec in specs:
            if names := differing_fields(specs[0], spec):
                raise AssertionError(f"KV cache specs of one group differ in {', '.join(names)}")
        return specs[0]

    def is_uniform_with_collection(self, kv_cache_specs: Mapping[str, KVCacheSpec]) -> bool:
        return not any(differing_fields(self, spec, self.FREE) for spec in kv_cache_specs.values())  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class WindowSpec(_SameGeometry, SlidingWindowMLASpec):
    """The last ``sliding_window`` roped latents of a layer: one row per token, ``head_size`` values each."""


@dataclass(frozen=True, kw_only=True)
class CompressedSpec(_SameGeometry, MLAAttentionSpec):
    """One row per ``tokens_per_state`` tokens, for ever: the long latents or the index keys of a kv source.

    All of them are written by the same tokens, so they share one group and one block table, whatever their row widths
    and ratios: a block holds ``block_size`` tokens in each.
    """

    FREE = frozenset({"head_size", "tokens_per_state", "page_size_padded", "cache_role"})


@dataclass(frozen=True, kw_only=True)
class RingSpec(_SameGeometry, CircularBufferSpec):
    """The open pair of a ratio-2 compressor: one block per request, ``block_size`` fp32 rows [a | g] of 2·D values."""


def window_spec(*, block_size: int, width: int, window: int, dtype: torch.dtype) -> WindowSpec:
    """The spec of one layer's sliding-window cache: ``block_size`` tokens a block, rows of ``width`` values."""
    return WindowSpec(
        block_size=block_size, num_kv_heads=1, head_size=width, dtype=dtype, sliding_window=window, max_tp_shards=1
    )


def compressed_spec(*, block_size: int, width: int, ratio: int, dtype: torch.dtype) -> CompressedSpec:
    """The spec of a long cache or an index-key cache: ``block_size // ratio`` rows of ``width`` values a block.

    Raises:
        ValueError: a block would end inside a group of ``ratio`` tokens.
    """
    if block_size % ratio:
        raise ValueError(f"block_size = {block_size}: must be a multiple of the compression ratio {ratio}")
    return CompressedSpec(
        block_size=block_size, num_kv_heads=1, head_size=width, dtype=dtype, tokens_per_state=ratio, max_tp_shards=1
    )


def ring_spec(*, capacity: int, width: int) -> RingSpec:
    """The spec of a compressor's ring: ``capacity`` fp32 rows of ``width`` values in the one block of a request."""
    return RingSpec(
        block_size=capacity, num_kv_heads=1, head_size=width, head_size_v=0, dtype=torch.float32, max_tp_shards=1
    )
