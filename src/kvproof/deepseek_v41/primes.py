"""The primes Engram hashes with (specification, section 5.3): apart, so that a configuration needs no torch."""

from __future__ import annotations

import math
from itertools import count, islice


def primes(base: int, layers: int, orders: int, heads: int) -> list[list[list[int]]]:
    """Bucket counts [layers][orders][heads]: each is the smallest prime >= ``base`` that is still free."""
    free = filter(_is_prime, count(base))
    return [[list(islice(free, heads)) for _ in range(orders)] for _ in range(layers)]


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))
