"""The snapshot of a KVCacheConfig is plain JSON and holds everything that decides a byte."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction

import pytest

from kvproof.engine.kv_cache_config import snapshot


class Mode(Enum):
    NONE = 0


@dataclass(frozen=True)
class Spec:
    block_size: int
    dtype: object
    mode: Mode = Mode.NONE
    ratio: Fraction = Fraction(1, 2)
    check: object = print

    @property
    def page_size_bytes(self) -> int:
        return self.block_size * 2


@dataclass
class Config:
    num_blocks: int
    groups: list[Spec]
    by_layer: dict[str, Spec] = field(default_factory=dict)
    ids: frozenset[int] = frozenset({2, 1})
    shapes: tuple[tuple[int, ...], ...] = ((1, 2),)


def test_every_field_is_plain():
    torch = pytest.importorskip("torch")
    spec = Spec(16, torch.bfloat16)
    found = snapshot(Config(7, [spec], {"layer": spec}))
    assert json.loads(json.dumps(found)) == found
    assert found == {
        "class": "Config", "num_blocks": 7, "groups": [found["by_layer"]["layer"]], "by_layer": found["by_layer"],
        "ids": ["1", "2"], "shapes": [[1, 2]],
    }  # fmt: skip
    assert found["groups"][0] == {
        "class": "Spec", "block_size": 16, "dtype": "bfloat16", "mode": "NONE", "ratio": "1/2",
        "check": "builtin_function_or_method", "page_size_bytes": 32,
    }  # fmt: skip
