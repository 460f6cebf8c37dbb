"""The caches of DeepSeek V4.1 by layer and role, whoever laid them out: this package, vLLM's CUDA classes, vllm-ascend.

``held`` reads them off a layout, ``planned`` derives them from the plan of a model. Both give, by backbone layer and
role, the rows a cache has per logical token; for the ring, which does not grow, the rows it has per request.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from kvproof import zoo

if TYPE_CHECKING:
    from kvproof.deepseek_v41.plan import Plan

Rows = dict[int, dict[str, Fraction]]

NAME = re.compile(r"(?:.+\.)?layers\.(\d+)\.(?:self_)?attn(?:\.(.+))?")
"""Layer, and what of it: vLLM's CUDA class is the long cache itself, so there is nothing behind its ``attn``."""
ROLES = {
    "swa_cache": "window",
    None: "long",
    "long_cache": "long",
    "long_kv_cache": "long",
    "indexer.k_cache": "index key",
    "compressor.state_cache": "ring",
    "indexer.k_cache_folded": "folded index",
}
"""The last one is vllm-ascend's on the 950 only: a copy of the candidate source's index keys."""


def held(layout: Mapping[str, Any]) -> tuple[Rows, dict[str, int]]:
    """What the JSON of ``kvproof layout`` holds: its rows by layer and role, and the bytes of one row by role.

    Values and scales of one cache count as one row of both. ValueError: a name nobody knows, one cache with two row
    counts, or one role with rows of two lengths.
    """
    tokens = {group["id"]: group["block_size"] for group in layout["groups"]}
    rows: Rows = defaultdict(dict)
    sizes: dict[tuple[int, str], Fraction] = defaultdict(Fraction)
    for resource in layout["resources"]:
        name = NAME.fullmatch(resource["layer"])
        if not name or name[2] not in ROLES:
            raise ValueError(f"no role is known for the cache {resource['layer']}")
        layer, role = int(name[1]), ROLES[name[2]]
        block = tokens[resource["group"]]
        in_block = math.prod(axis["count"] for axis in resource["row_axes"])
        size = Fraction(math.prod(axis["count"] for axis in resource["cell_axes"]))
        if role == "ring":
            # A request has one block, whose "tokens" are its rows; vllm-ascend's tensor does not divide it into rows.
            count, size = Fraction(block), size * in_block / block
        else:
            count = Fraction(in_block, block)
        if rows[layer].setdefault(role, count) != count:
            raise ValueError(f"{resource['layer']} has {rows[layer][role]} and {count} rows per token")
        sizes[layer, role] += size
    return dict(rows), _one_length(sizes)


def _one_length(sizes: Mapping[tuple[int, str], Fraction]) -> dict[str, int]:
    found: dict[str, Fraction] = {}
    for (layer, role), size in sizes.items():
        if found.setdefault(role, size) != size or size.denominator != 1:
            raise ValueError(f"a row of layer {layer}, {role}, has {size} bytes, others {found[role]}")
    return {role: int(size) for role, size in found.items()}


def planned(plan: Plan, ring: int) -> Rows:
    """What a plan needs (specification, section 4.1); ``ring``: rows of a ring, which the platform chooses."""
    rows: Rows = {}
    for role in plan.layers:
        mine = rows[role.layer] = {"window": Fraction(1)}
        if role.is_kv_source:
            mine["long"] = mine["index key"] = Fraction(1, role.ratio)
            if role.ratio == 2:
                mine["ring"] = Fraction(ring)
    return rows


def plan_of(model: str) -> Plan:
    """The plan of a bundled model. Imports torch, so only where it is asked for."""
    from kvproof.deepseek_v41.config import TextConfig
    from kvproof.deepseek_v41.plan import Plan

    return Plan.of(TextConfig.from_hf(zoo.describe(model).config))
