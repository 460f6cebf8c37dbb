"""Stand-ins for what runs on a device, or pins memory for it, between scheduling and the cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvproof.platforms import copies
from kvproof.platforms.cuda_sim import schedules


def install() -> None:
    """Needs vLLM imported, and must run before a model runner or a connector is constructed."""
    import torch
    import vllm.utils.torch_utils as torch_utils
    from vllm.v1.kv_offload.cpu import gpu_worker

    schedules.install()
    torch_utils.get_accelerator_view_from_cpu_tensor = _same
    done = SimpleNamespace(value=0)
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, nbytes, flags: done, cudaHostUnregister=lambda address: done
    )
    torch.cuda.cudart = lambda: runtime  # type: ignore[assignment, return-value]
    gpu_worker.host_register = lambda address, nbytes: True  # type: ignore[assignment]
    gpu_worker.host_unregister = lambda address: None  # type: ignore[assignment]
    gpu_worker.swap_blocks_batch = _swap_small_blocks  # type: ignore[assignment]


def _same(tensor: Any) -> Any:
    """The device's view of a host tensor is the tensor itself: the same memory."""
    return tensor


def _swap_small_blocks(sources: Any, targets: Any, sizes: Any, *rest: Any, **options: Any) -> None:
    """The Triton copy of small blocks; it moves the bytes its DMA twin moves, in chunks."""
    del rest, options
    copies.swap_blocks_batch(sources, targets, sizes)
