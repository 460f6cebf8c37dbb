"""The CPU platform: vLLM's CPU build as published, with stand-ins for what its connectors want of a device.

:func:`install` must run after vLLM is importable and before a connector is constructed, in every process that
constructs one. It is idempotent.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvproof.findings.model import Substitution
from kvproof.platforms.hostcopy import HOST_COPIER, CopyBatch

SUBSTITUTIONS = (
    Substitution(
        "torch.cuda.Stream, torch.cuda.current_stream, torch.Event, torch.cpu.Stream",
        "E",
        "vLLM's CPU build has placeholders too few connectors can use; work runs when it is submitted",
        "order only; no size or address derives from a stream or an event",
    ),
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
        "vllm.v1.kv_offload.cpu.spec: current_platform.is_cuda_alike",
        "P",
        "OffloadingConnector refuses the CPU before it plans anything",
        "selects the production CPUOffloadingWorker; sizes come from the registered tensors",
    ),
    Substitution(
        "torch.Tensor.is_cuda during SingleDirectionOffloadingHandler.__init__",
        "P",
        "an assertion that the KV tensors are on a device",
        "an assertion about placement; no size derives from it",
    ),
)

MODEL_SUBSTITUTIONS = (
    Substitution(
        "model loader (load_format kvproof)",
        "W",
        "the model is constructed on the meta device without weights",
        "cache specs are attributes of the constructed layers, none is set after loading",
    ),
    Substitution(
        "model.forward, model.compute_logits",
        "K",
        "attention kernels; the byte code is written where they would write, layer by layer, with vLLM's own "
        "per-layer connector hooks around it",
        "the layout is fixed before the first forward pass",
    ),
    Substitution(
        "BlockPool.free_block_queue (order)",
        "M",
        "free blocks are handed out scattered and in descending runs, so that block ids taken as consecutive "
        "or as equal on both ways are seen",
        "any order of free blocks can occur in production; sizes and strides are untouched",
    ),
    Substitution(
        "Scheduler.max_num_scheduled_tokens (layerwise mode)",
        "E",
        "the token budget of a step is lowered while the engine runs, so that prompts are cut inside blocks",
        "a budget of the scheduler, read anew in every step; the layout was fixed before",
    ),
    Substitution(
        "Executor.determine_available_memory -> num_gpu_blocks_override",
        "P",
        "the number of blocks is chosen for the scenarios instead of profiled",
        "the production planner applies the override; page sizes and strides inside a block do not depend on it",
    ),
)

ZERO_BLOCKS_SUBSTITUTION = Substitution(
    "vllm.v1.worker.utils._zero_kv_blocks_kernel",
    "K",
    "the Triton kernel that zeroes new blocks takes minutes in the interpreter; replaced by memset over the same table",
    "addresses, strides and sizes are computed by production code and zeroed as they are",
)

RUNNER_V2_SUBSTITUTION = Substitution(
    "triton.backends.backends['cpu'], TRITON_INTERPRET=1",
    "P",
    "model runner V2 wants an active Triton driver; its kernels run in Triton's interpreter",
    "the kernels are the published ones, interpreted; they fill block tables and slot mappings",
)


class HostEvent:
    """An event that is always complete, because host work is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def record(self, stream: Any = None) -> None:
        del stream

    def wait(self, stream: Any = None) -> None:
        del stream

    def synchronize(self) -> None:
        return

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds between two events; work is done when submitted, so a constant."""
        del end
        return 1.0


class HostStream:
    """A queue whose work runs when it is submitted."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def wait_stream(self, stream: Any) -> None:
        del stream

    def wait_event(self, event: Any) -> None:
        del event

    def record_event(self, event: Any = None) -> Any:
        return event or HostEvent()

    def synchronize(self) -> None:
        return

    def query(self) -> bool:
        return True

    def __enter__(self) -> HostStream:
        return self

    def __exit__(self, *exc: object) -> None:
        return


def _current_stream(device: Any = None) -> HostStream:
    del device
    return HostStream()


def _swap_blocks_batch(
    src_ptrs: Any, dst_ptrs: Any, sizes: Any, is_src_access_order_any: bool = False
) -> None:
    del is_src_access_order_any
    HOST_COPIER.copy(
        CopyBatch(
            src_ptrs.numpy().astype(np.uint64), dst_ptrs.numpy().astype(np.uint64), sizes.numpy().astype(np.int64)
        )
    )


def _batch_memcpy(targets: int, sources: int, sizes: int, count: int, *rest: Any) -> int:
    """Same argument order as the driver call; ``count`` pointers each. Returns 0, the driver's success."""
    del rest

    def array(address: int) -> Any:
        return np.ctypeslib.as_array((ctypes.c_uint64 * count).from_address(address)).copy()

    HOST_COPIER.copy(CopyBatch(array(sources), array(targets), array(sizes).astype(np.int64)))
    return 0


class _DeviceLike:
    """vLLM's current platform, answering yes to the one question that gates the offloading worker."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def is_cuda_alike(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)


@contextlib.contextmanager
def _tensors_count_as_cuda() -> Iterator[None]:
    import torch

    torch.Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        del torch.Tensor.is_cuda  # uncovers the attribute of the C base class


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


def zero_blocks_on_host() -> Substitution:
    """Replace the kernel that zeroes new blocks in model runner V2."""
    from vllm.v1.worker import utils

    utils._zero_kv_blocks_kernel = _ZeroBlocks()
    return ZERO_BLOCKS_SUBSTITUTION


def install() -> tuple[Substitution, ...]:
    """Put the stand-ins in place and return their register."""
    import torch

    if torch.Event is HostEvent:
        return SUBSTITUTIONS
    import vllm._custom_ops as ops
    import vllm.v1.worker.cpu.shm  # noqa: F401  vLLM's CPU worker sets placeholders of its own; ours must come after
    from vllm.v1.kv_offload.cpu import gpu_worker, spec
    from vllm.v1.simple_kv_offload import copy_backend, cuda_mem_ops

    # torch.Event is a type the rest of torch uses in annotations only.
    torch.Event = HostEvent  # type: ignore[misc, assignment]
    for module in (torch.cuda, torch.cpu):
        module.Stream = HostStream  # type: ignore[misc, assignment]
        module.current_stream = _current_stream  # type: ignore[assignment]
        module.stream = contextlib.nullcontext  # type: ignore[assignment]
    ops.swap_blocks_batch = _swap_blocks_batch
    cuda_mem_ops._batch_memcpy = (_batch_memcpy, 0)
    copy_backend.DmaCopyBackend.launch_copy = _launch_copy  # type: ignore[method-assign]
    spec.current_platform = _DeviceLike(spec.current_platform)  # type: ignore[assignment]
    production_init = gpu_worker.SingleDirectionOffloadingHandler.__init__

    def handler_init(self: Any, *args: Any, **kwargs: Any) -> None:
        with _tensors_count_as_cuda():
            production_init(self, *args, **kwargs)

    gpu_worker.SingleDirectionOffloadingHandler.__init__ = handler_init  # type: ignore[method-assign]
    return SUBSTITUTIONS
