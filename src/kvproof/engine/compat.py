"""Differences between vLLM versions, in one place."""

from __future__ import annotations

import importlib
from typing import Any


def kv_cache_groups(vllm_config: Any, specs: dict[str, Any]) -> list[Any]:
    """The groups production planning forms of one worker's ``specs`` (layer name -> KVCacheSpec)."""
    for module in ("vllm.v1.core.kv_cache_planning", "vllm.v1.core.kv_cache_utils"):  # 0.33; up to 0.32
        try:
            plan = importlib.import_module(module).get_kv_cache_groups
        except (ImportError, AttributeError):
            continue
        groups: list[Any] = plan(vllm_config, dict(specs))
        return groups
    raise ImportError("vLLM has no get_kv_cache_groups where 0.30 to 0.33 have it")


def hit_unit(core: Any) -> int:
    """Tokens whose multiples a prefix hit ends on, as production resolved it: 0.30 asks the coordinator, later ones
    write it into the KVCacheConfig."""
    config, scheduler = core.scheduler.kv_cache_config, core.scheduler
    aligned = getattr(config, "cache_hit_alignment_tokens", None)
    if aligned is None:
        aligned = getattr(scheduler.kv_cache_manager.coordinator, "_cache_hit_alignment_tokens", None)
    return int(aligned or scheduler.block_size)
