"""Device copies of vLLM's own connectors on host memory: the lists are production's, ``memmove`` runs them."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

from kvproof.findings.model import Substitution
from kvproof.platforms.hostcopy import HOST_COPIER, CopyBatch
from kvproof.platforms.streams import HostEvent

SUBSTITUTIONS = (
    Substitution(
        "vllm._custom_ops.swap_blocks_batch",
        "K",
        "device copy kernel; replaced by memmove over the same lists",
        "sources, targets and sizes are computed by production code and executed as they are",
    ),
    Substitution(
        "vllm.v1.simple_kv_offload.cuda_mem_ops._batch_memcpy",
        "K",
        "cuMemcpyBatchAsync of the CUDA driver; replaced by memmove over the same arrays",
        "sources, targets and sizes are computed by production code and executed as they are",
    ),
    Substitution(
        "vllm.v1.simple_kv_offload.copy_backend.DmaCopyBackend.launch_copy",
        "E",
        "its copy thread; the copy runs when it is launched, so that two runs are identical",
        "production copy_blocks computes the lists; only the thread that runs it differs",
    ),
    Substitution(
        "torch.Tensor.is_cuda during SingleDirectionOffloadingHandler.__init__",
        "P",
        "an assertion that the KV tensors are on a device",
        "an assertion about placement; no size derives from it",
    ),
)

ZERO_BLOCKS_SUBSTITUTION = Substitution(
    "vllm.v1.worker.utils._zero_kv_blocks_kernel",
    "K",
    "the Triton kernel that zeroes new blocks takes minutes in the interpreter; replaced by memset over the same table",
    "addresses, strides and sizes are computed by production code and zeroed as they are",
)
COPY_STATES_SUBSTITUTION = Substitution(
    "vllm.v1.worker.mamba_utils.batch_memcpy_kernel",
    "K",
    "the Triton kernel that carries a state into the block a request goes on in takes minutes in the interpreter; "
    "replaced by memmove over the same lists",
    "sources, targets and sizes are computed by production code and executed as they are",
)


def swap_blocks_batch(
    src_ptrs: Any, dst_ptrs: Any, sizes: Any, is_src_access_order_any: bool = False
) -> None:
    del is_src_access_order_any
    HOST_COPIER.copy(CopyBatch.of_tensors(src_ptrs, dst_ptrs, sizes))


def _batch_memcpy(targets: int, sources: int, sizes: int, count: int, *rest: Any) -> int:
    """Same argument order as the driver call; ``count`` pointers each. Returns 0, the driver's success."""
    del rest
    HOST_COPIER.copy(CopyBatch.of_arrays(sources, targets, sizes, count))
    return 0


def _launch_copy(
    self: Any,
    src_blocks: list[int],
    dst_blocks: list[int],
    is_store: bool,
    event_idx: int,
    events_list: list[tuple[int, Any]],
    wait_event: Any = None,
) -> None:
    del wait_event
    from vllm.v1.simple_kv_offload.copy_backend import copy_blocks

    copy_blocks(src_blocks, dst_blocks, self._store_params if is_store else self._load_params)
    events_list.append((event_idx, HostEvent()))


class _ZeroBlocks:
    """Host twin of the kernel: launched as ``kernel[grid](addresses, strides, sizes, block ids, ...)``."""

    def __getitem__(self, grid: Any) -> Any:
        del grid

        def launch(addresses: Any, strides: Any, sizes: Any, blocks: Any, **options: Any) -> None:
            """``strides`` and ``sizes`` count 4-byte words."""
            del options
            segments = list(zip(addresses.tolist(), strides.tolist(), sizes.tolist(), strict=True))
            for block in blocks.tolist():
                for address, stride, size in segments:
                    ctypes.memset(address + 4 * block * stride, 0, 4 * size)

        return launch


class _CopyStates:
    """Host twin of the kernel: launched as ``kernel[grid](sources, targets, sizes, ...)``, in bytes, one per copy."""

    def __getitem__(self, grid: Any) -> Any:
        del grid

        def launch(sources: Any, targets: Any, sizes: Any, **options: Any) -> None:
            del options
            for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
                ctypes.memmove(target, source, size)

        return launch


def copy_states_on_host() -> Substitution:
    """Replace the kernel that copies states in model runner V1. Not through the host copier: it is vLLM's own copy."""
    from vllm.v1.worker import mamba_utils

    mamba_utils.batch_memcpy_kernel = _CopyStates()
    return COPY_STATES_SUBSTITUTION


def zero_blocks_on_host() -> Substitution:
    """Replace the kernel that zeroes new blocks in model runner V2."""
    from vllm.v1.worker import utils

    utils._zero_kv_blocks_kernel = _ZeroBlocks()
    return ZERO_BLOCKS_SUBSTITUTION


@contextlib.contextmanager
def _tensors_count_as_cuda() -> Iterator[None]:
    import torch

    torch.Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        del torch.Tensor.is_cuda  # uncovers the attribute of the C base class


def install() -> tuple[Substitution, ...]:
    """Replace the copy primitives. Needs vLLM imported; idempotent."""
    import vllm._custom_ops as ops
    from vllm.v1.kv_offload.cpu import gpu_worker
    from vllm.v1.simple_kv_offload import copy_backend, cuda_mem_ops

    ops.swap_blocks_batch = swap_blocks_batch
    cuda_mem_ops._batch_memcpy = (_batch_memcpy, 0)
    copy_backend.DmaCopyBackend.launch_copy = _launch_copy  # type: ignore[method-assign]
    handler = gpu_worker.SingleDirectionOffloadingHandler
    if handler.__init__ is not _handler_init:
        _production_init.append(handler.__init__)
        handler.__init__ = _handler_init  # type: ignore[method-assign]
    return SUBSTITUTIONS


_production_init: list[Any] = []


def _handler_init(self: Any, *args: Any, **kwargs: Any) -> None:
    with _tensors_count_as_cuda():
        _production_init[0](self, *args, **kwargs)
