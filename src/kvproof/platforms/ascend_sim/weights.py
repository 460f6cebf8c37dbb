"""A model without weights on an NPU: what holds a weight is on the meta device, everything else really exists."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

DEVICE = "npu:0"


@contextlib.contextmanager
def weightless() -> Iterator[None]:
    """Weights are made by ``torch.empty`` without a device. Tables that are computed (rope) must exist, so only those
    calls go to the meta device."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Weightless(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            kwargs = dict(kwargs or {})
            if func is torch.empty and kwargs.get("device") is None:
                kwargs["device"] = torch.device("meta")
            return func(*args, **kwargs)

    # The innermost mode is asked first: a call it leaves alone gets the device of the outer one.
    with torch.device(DEVICE), Weightless():
        yield


def without_engram_tables(module: Any) -> None:
    """Engram's n-gram tables are weights of 24 to 51 GiB in host memory: on the meta device, like all weights. A row
    looked up in them is zero, as production makes the rows of unknown ids."""
    import torch

    def allocate(self: Any) -> tuple[Any, Any]:
        def table(width: int, dtype: Any) -> Any:
            return torch.empty((self.part_num_embeddings, width), dtype=dtype, device="meta")

        scaled = self.storage_dtype != torch.bfloat16
        scales = table(self.dim // self.block_size, self.scale_dtype) if scaled else None
        return table(self.dim, self.storage_dtype), scales

    def lookup(self: Any, indices: Any, out: Any, background: bool = False) -> None:
        del self, indices, background
        out.zero_()

    module.AscendParallelEngramEmbedding._allocate_weights = allocate
    module.AscendParallelEngramEmbedding.lookup = lookup
