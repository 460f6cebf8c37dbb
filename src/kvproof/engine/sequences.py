"""Orders of block ids and prefixes of token ids; needs nothing of vLLM."""

from __future__ import annotations

import math

import numpy as np


def common_prefix(a: list[int], b: list[int]) -> int:
    """Length in tokens of the longest common prefix."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(np.array(a[:n]) != np.array(b[:n]))
    return int(differs[0]) if differs.size else n


def scattered(blocks: list[int], rng: np.random.Generator) -> list[int]:
    """A seeded order of the sorted ids ``blocks`` in which no two neighbours follow each other.

    Steps of a size coprime to their number visit every place once; a step of 2 or more never meets a neighbour.
    """
    n = len(blocks)
    steps = [k for k in range(max(2, n // 5), n - max(1, n // 5)) if math.gcd(k, n) == 1]
    if not steps:
        return blocks[::-1]
    step, start = int(rng.choice(steps)), int(rng.integers(n))
    return [blocks[(start + i * step) % n] for i in range(n)]
