"""What a step asks of vllm-ascend's own operators (``_C_ascend``), which were not built: block transfers and plans.

The lists of a transfer are production's, the host copier runs them. A plan says how a kernel splits its work; no kernel
runs, so nobody reads it. Any other operator is missing and says so when it is called.
"""

from __future__ import annotations

from typing import Any

from kvproof.platforms.ascend_sim.kernels import refused
from kvproof.platforms.hostcopy import HOST_COPIER, CopyBatch

KERNEL_PLANS = (
    "npu_kv_quant_sparse_attn_sharedkv_metadata",
    "npu_quant_lightning_indexer_v2_metadata",
    "npu_sparse_attn_sharedkv_metadata",
    "npu_sparse_flash_mla_metadata",
)
"""Asked for in every step of DeepSeek-V4 and V4.1, before the kernels they are for."""
KERNELS_HELD = ("npu_kv_quant_sparse_attn_sharedkv", "npu_sparse_attn_sharedkv")
"""Kernels whose operators are looked up when a cache is planned, long before they would be called."""
NO_PLAN = -1
_SCHEMA = "swap_blocks_batch(Tensor src_ptrs, Tensor dst_ptrs, Tensor sizes, int direction) -> ()"

_libraries: list[Any] = []
"""A torch library takes its operators with it when it is collected."""


def define_operators() -> None:
    """Put the operators in place. A second call does nothing."""
    import torch

    if _libraries:
        return
    make: Any = torch.library.Library
    library = make("_C_ascend", "DEF")
    library.define(_SCHEMA)
    library.impl("swap_blocks_batch", _swap_blocks_batch, "CPU")
    for name in KERNEL_PLANS:
        setattr(torch.ops._C_ascend, name, _no_plan)
    for name in KERNELS_HELD:
        setattr(torch.ops._C_ascend, name, refused(f"_C_ascend.{name}"))
    _libraries.append(library)


def _swap_blocks_batch(sources: Any, targets: Any, sizes: Any, direction: int) -> None:
    """Addresses and sizes in bytes, int64, one entry per copy."""
    del direction
    HOST_COPIER.copy(CopyBatch.of_tensors(sources, targets, sizes))


def _no_plan(*args: Any, **kwargs: Any) -> Any:
    """A plan that no kernel could follow, spread over whatever buffer it is copied to."""
    import torch

    del args, kwargs
    return torch.tensor(NO_PLAN, dtype=torch.int32, device="npu")


def copy_at_once(copy_backend: Any) -> None:
    """Copies run in the thread that launches them."""
    import torch

    def launch_copy(
        self: Any, src_blocks: Any, dst_blocks: Any, is_store: bool, event_idx: int, events_list: Any,
        wait_event: Any = None,
    ) -> None:  # fmt: skip
        if wait_event is not None:
            wait_event.synchronize()
        copy_backend.copy_blocks(src_blocks, dst_blocks, self._store_params if is_store else self._load_params)
        event = torch.npu.Event()  # type: ignore[attr-defined]
        event.record()
        events_list.append((event_idx, event))

    copy_backend.NPUDmaCopyBackend.launch_copy = launch_copy
