"""The one place that knows how vLLM versions and vllm-ascend differ. Attribute reads only; nothing is imported here.

Every function answers None or an empty value for what the installed version does not have, and the rules that need it
are skipped. Names are those of vLLM 0.30 to 0.33 and vllm-ascend 0.30.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from kvproof.trace.records import CHUNKED, FULL, OTHER, SLIDING, STATE, Group, Parallel

_KINDS = (
    # Most specific first: several of these derive from each other.
    ("MambaSpec", STATE),
    ("RSWASpec", OTHER),
    ("CircularBufferSpec", OTHER),
    ("SinkFullAttentionSpec", OTHER),
    ("CrossAttentionSpec", OTHER),
    ("EncoderOnlyAttentionSpec", OTHER),
    ("SlidingWindowSpec", SLIDING),
    ("ChunkedLocalAttentionSpec", CHUNKED),
    ("FullAttentionSpec", FULL),
    ("MLAAttentionSpec", FULL),
)


def kind_of(spec: Any) -> tuple[str, int | None]:
    """(kind, window in tokens) of a KVCacheSpec; a class this table does not know is ``other``."""
    inner = getattr(spec, "kv_cache_specs", None)
    if isinstance(inner, Mapping) and inner:
        kinds = {kind_of(one) for one in inner.values()}
        return kinds.pop() if len(kinds) == 1 else (OTHER, None)
    names = {base.__name__ for base in type(spec).__mro__}
    for name, kind in _KINDS:
        if name in names:
            window = getattr(spec, "sliding_window" if kind == SLIDING else "attention_chunk_size", None)
            return kind, int(window) if kind in (SLIDING, CHUNKED) and window else None
    return OTHER, None


def groups_of(kv_cache_config: Any, block_sizes: list[int] | None = None, pools: list[Any] | None = None) -> tuple[
    Group, ...
]:
    """Groups of a KVCacheConfig. ``block_sizes`` (tokens) and ``pools`` of the managers, where they are known."""
    groups = []
    for index, native in enumerate(kv_cache_config.kv_cache_groups):
        spec = native.kv_cache_spec
        kind, window = kind_of(spec)
        pool = pools[index] if pools and index < len(pools) else None
        if getattr(native, "host_resident", False):
            kind = OTHER
        groups.append(
            Group(
                index=index,
                kind=kind,
                block_size=int(block_sizes[index] if block_sizes else spec.block_size),
                num_blocks=int(pool.num_gpu_blocks if pool is not None else kv_cache_config.num_blocks),
                window=window,
                layers=tuple(native.layer_names),
            )
        )
    return tuple(groups)


def parallel_of(vllm_config: Any) -> Parallel:
    """Context-parallel sizes from the config; ranks are filled in by the worker."""
    config = vllm_config.parallel_config
    return Parallel(
        dcp_size=int(getattr(config, "decode_context_parallel_size", 1) or 1),
        interleave=int(getattr(config, "cp_kv_cache_interleave_size", 1) or 1),
        pcp_size=int(getattr(config, "prefill_context_parallel_size", 1) or 1),
    )


def engine_id(vllm_config: Any) -> str:
    """8 hex digits that scheduler and workers of one engine derive alike from their own copy of the config."""
    rank = getattr(vllm_config.parallel_config, "data_parallel_rank", 0)
    return hashlib.blake2b(f"{vllm_config.instance_id}:{rank}".encode(), digest_size=4).hexdigest()


def managers_of(scheduler: Any) -> list[Any]:
    """The per-group block managers of a scheduler, [] when they cannot be seen."""
    coordinator = getattr(getattr(scheduler, "kv_cache_manager", None), "coordinator", None)
    return list(getattr(coordinator, "single_type_managers", ()) or ())


def budget_of(scheduler: Any) -> int | None:
    """Largest number of tokens one step may declare."""
    value = getattr(scheduler, "max_num_scheduled_tokens", None)
    return int(value) if isinstance(value, int) else None


def cached_entries(pool: Any) -> Counter[tuple[int, int]] | None:
    """Prefix-cache entries in a pool by (group, hash), one per block; None when they cannot be seen."""
    entries = getattr(getattr(pool, "cached_block_hash_to_block", None), "_cache", None)
    if not isinstance(entries, dict):
        return None
    found: Counter[tuple[int, int]] = Counter()
    for key, value in entries.items():
        # A pool's key is the block hash with the group's number behind it, 4 bytes.
        group, block_hash = int.from_bytes(key[-4:], "big"), _low64(key[:-4])
        found[group, block_hash] += len(value) if isinstance(value, dict) else 1
    return found


def _low64(block_hash: bytes | int) -> int:
    """The low 64 bits of a hash, which are all that events carry when they are told to use integers."""
    return (block_hash if isinstance(block_hash, int) else int.from_bytes(block_hash, "big")) & (1 << 64) - 1


def event_changes(events: Any) -> Iterator[tuple[str, Any]]:
    """(stored | removed | cleared, (group, hash)) of KV cache events; hashes as ``cached_entries`` has them."""
    for event in events:
        kind = type(event).__name__
        if kind == "AllBlocksCleared":
            yield "cleared", None
        elif kind in ("BlockStored", "BlockRemoved"):
            group = getattr(event, "group_idx", None)
            for value in event.block_hashes:
                yield ("stored" if kind == "BlockStored" else "removed"), (group, _low64(value))


def runner_kind(runner: Any) -> str | None:
    """v2 (prepare_attn) | v1 (_build_attention_metadata) | None."""
    if hasattr(runner, "prepare_attn"):
        return "v2"
    return "v1" if hasattr(runner, "_build_attention_metadata") else None


def state_rows(runner: Any, ids: list[str]) -> list[int] | None:
    """The worker's own row of each request, −1 for one it does not have yet."""
    states = getattr(runner, "req_states", None)
    index = getattr(states if states is not None else getattr(runner, "input_batch", None), "req_id_to_index", None)
    if not isinstance(index, Mapping):
        return None
    return [index.get(name, -1) for name in ids]


def gathered_plan(runner: Any) -> tuple[Any, Any, Any] | None:
    """(global batch, token of each gathered slot, which slots are written) under prefill context parallelism."""
    manager = getattr(runner, "pcp_manager", None)
    if manager is None:
        return None
    parts = [getattr(manager, n, None) for n in ("global_batch", "_padded_gather_idx", "_gathered_kv_write_mask")]
    return None if any(part is None for part in parts) else (parts[0], parts[1], parts[2])


def row_capacity(runner: Any, group: int) -> int | None:
    """Columns of the worker's block table for a group, in manager blocks."""
    tables = getattr(runner, "block_tables", None)
    if tables is not None:
        rows = getattr(tables, "block_tables", None)
        return int(rows[group].gpu.shape[1]) if rows is not None and group < len(rows) else None
    tables = getattr(getattr(getattr(runner, "input_batch", None), "block_table", None), "block_tables", None)
    if tables is None or group >= len(tables):
        return None
    return int(tables[group].max_num_blocks_per_req) // kernel_blocks(tables[group])


def kernel_blocks(table: Any) -> int:
    """Kernel blocks per manager block of a V1 block table: above 1 only where the table counts kernel blocks."""
    return int(getattr(table, "blocks_per_kv_block", 1) or 1)
