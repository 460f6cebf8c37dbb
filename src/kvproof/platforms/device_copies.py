"""Copy primitives of vLLM's connectors on a real device: executed as they are, and shown to whoever watches copies."""

from __future__ import annotations

from typing import Any

from kvproof.findings.model import Substitution
from kvproof.platforms.hostcopy import HOST_COPIER, CopyBatch

WATCHED = Substitution(
    "vllm._custom_ops.swap_blocks_batch, its Triton twin, vllm.v1.simple_kv_offload.cuda_mem_ops._batch_memcpy",
    "K",
    "nothing is replaced: the lists of a copy are read before the device executes it, to check the addresses in them",
    "sources, targets and sizes are computed and executed by production code",
)

_inside = False
"""Whether a watched primitive is running: one that hands its work to another is seen once."""


def watch() -> Substitution:
    """Wrap the copy primitives. Needs vLLM imported, and must run before a connector is constructed."""
    import vllm._custom_ops as ops
    from vllm.v1.kv_offload.cpu import gpu_worker
    from vllm.v1.simple_kv_offload import cuda_mem_ops

    ops.swap_blocks_batch = tensors_watched(ops.swap_blocks_batch)
    if hasattr(gpu_worker, "swap_blocks_batch"):
        gpu_worker.swap_blocks_batch = tensors_watched(gpu_worker.swap_blocks_batch)
    resolve = cuda_mem_ops._resolve_batch_memcpy

    def resolved() -> tuple[Any, int]:
        native, attributes = resolve()
        return pointers_watched(native), attributes

    cuda_mem_ops._resolve_batch_memcpy = resolved
    return WATCHED


def tensors_watched(native: Any) -> Any:
    """A copy that is given tensors of addresses and sizes [B]."""

    def copy(sources: Any, targets: Any, sizes: Any, *rest: Any, **options: Any) -> Any:
        global _inside
        outermost = not _inside
        if outermost:
            HOST_COPIER.show(CopyBatch.of_tensors(sources, targets, sizes))
        _inside = True
        try:
            return native(sources, targets, sizes, *rest, **options)
        finally:
            _inside = not outermost

    return copy


def pointers_watched(native: Any) -> Any:
    """A copy that is given addresses of arrays: targets, sources, sizes [B], ``count`` of each."""

    def copy(targets: int, sources: int, sizes: int, count: int, *rest: Any) -> Any:
        if count:
            HOST_COPIER.show(CopyBatch.of_arrays(sources, targets, sizes, count))
        return native(targets, sources, sizes, count, *rest)

    return copy
