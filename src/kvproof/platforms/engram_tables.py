"""Engram's n-gram tables on vLLM 0.32: weights of 100 GB that it puts into host memory, whatever device is asked."""

from __future__ import annotations

from typing import Any

from kvproof.findings.model import Substitution
from kvproof.platforms import installed

MODULE = "vllm.models.deepseek_v41.common.engram"
RELEASE = "0.32"
"""From 0.33 on vLLM itself leaves the tables on the meta device when the model is constructed there."""

ON_META = Substitution(
    "ParallelEngramEmbedding._allocate_weights (vLLM 0.32)",
    "W",
    "n-gram tables of about 100 GB in host memory; on the meta device, like all weights",
    "tables of weights, no part of the KV cache",
)


def leave_on_meta() -> tuple[Substitution, ...]:
    """Put the tables where vLLM 0.33 puts them. Nothing to do, and nothing substituted, in another release."""
    from wrapt import when_imported

    if not installed.version("vllm").startswith(RELEASE):
        return ()
    when_imported(MODULE)(_patch)
    return (ON_META,)


def _patch(module: Any) -> None:
    import torch

    def allocate(self: Any) -> tuple[Any, Any]:
        rows, width = self.part_num_embeddings, self.dim
        return (
            torch.empty(rows, width, dtype=torch.float8_e4m3fn, device="meta"),
            torch.empty(rows, width // self.block_size, dtype=torch.uint8, device="meta"),
        )

    module.ParallelEngramEmbedding._allocate_weights = allocate
