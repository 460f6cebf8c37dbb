"""Block transfers of vllm-ascend's connectors: the lists are production's, the host copier runs them."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvproof.platforms.hostcopy import HOST_COPIER, CopyBatch

_SCHEMA = "swap_blocks_batch(Tensor src_ptrs, Tensor dst_ptrs, Tensor sizes, int direction) -> ()"

_libraries: list[Any] = []
"""A torch library takes its operators with it when it is collected."""


def define_operators() -> None:
    """The one operator of vllm-ascend's binary that moves bytes; any other is missing and says so when it is called."""
    import torch

    if _libraries:
        return
    make: Any = torch.library.Library
    library = make("_C_ascend", "DEF")
    library.define(_SCHEMA)
    library.impl("swap_blocks_batch", _swap_blocks_batch, "CPU")
    _libraries.append(library)


def _swap_blocks_batch(sources: Any, targets: Any, sizes: Any, direction: int) -> None:
    """Addresses and sizes in bytes, int64, one entry per copy."""
    del direction
    HOST_COPIER.copy(
        CopyBatch(sources.numpy().astype(np.uint64), targets.numpy().astype(np.uint64), sizes.numpy().astype(np.int64))
    )


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
