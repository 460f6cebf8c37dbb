"""What layers hand to later layers within one step (specification, sections 2.2, 3.4, 3.9, 3.10)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvproof.deepseek_v41.ops.rope import Rope


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of the step's positions, fp32 [T, P / 2] each, and the frequencies they were made with."""

    rope: Rope
    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def at(cls, rope: Rope, positions: torch.Tensor) -> Rotation:
        return cls(rope, *rope.cos_sin(positions))


@dataclass
class Shared:
    """One object per forward pass.

    Attributes:
        window: the rotation of layers without compression.
        long: the rotation of compressed layers.
        selection: int32 [T, k], rows selected by the last index source, −1 = none; written over by the next.
        candidates: int32 [T, C], blocks of rows named by the candidate source, −1 = none.
    """

    window: Rotation
    long: Rotation
    selection: torch.Tensor | None = None
    candidates: torch.Tensor | None = None
