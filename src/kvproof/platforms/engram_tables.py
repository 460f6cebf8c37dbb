"""Engram's n-gram tables on vLLM 0.32: weights of 100 GB that it puts into host memory, whatever device is asked."""

from __future__ import annotations

from typing import Any

from kvproof.findings.model import Substitution
from kvproof.platforms import installed
from kvproof.platforms.tokenizers import ENGRAM_MODULE

_LEAVES_ON_META = (0, 33)
"""Release from which on vLLM itself leaves the tables on the meta device when the model is constructed there."""

ON_META = Substitution(
    "ParallelEngramEmbedding._allocate_weights (vLLM before 0.33)",
    "W",
    "n-gram tables of about 100 GB in host memory; on the meta device, like all weights",
    "tables of weights, no part of the KV cache",
)


def leave_on_meta() -> tuple[Substitution, ...]:
    """Put the tables where vLLM 0.33 puts them. Nothing to do, and nothing substituted, in another release."""
    from wrapt import when_imported

    if installed.vllm_release() >= _LEAVES_ON_META:
        return ()
    when_imported(ENGRAM_MODULE)(_patch)
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
