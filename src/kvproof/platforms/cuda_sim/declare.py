"""What every interpreter of a run is told about the absent GPU, and where its tensors are put.

Everything waits for the module it concerns to be imported: an interpreter that never imports torch pays nothing.
"""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import Any

from kvproof.platforms import triton_host
from kvproof.platforms.cuda_sim.devices import Device
from kvproof.platforms.cuda_sim.placement import place_on_host
from kvproof.platforms.platform import PlatformResolvedError
from kvproof.platforms.streams import HostEvent, HostStream, current_stream


def declare(device: Device) -> None:
    """Arrange that torch, Triton and vLLM find ``device``. PlatformResolvedError if one was imported already."""
    from wrapt import when_imported

    early = [name for name in ("torch", "vllm", "triton") if name in sys.modules]
    if early:
        raise PlatformResolvedError(f"{early[0]} was imported before the device could be declared")
    when_imported("torch")(lambda torch: _torch(torch, device))
    when_imported("triton.backends")(lambda module: triton_host.activate(module.backends, "nvidia", _Target(device)))
    # Not with the backends: Triton imports those before its language, which the interpreter needs.
    when_imported("triton")(lambda module: triton_host.take_masks_of_integers())
    when_imported("vllm.platforms")(_select_cuda)
    when_imported("vllm.platforms.cuda")(_count_one_device)


def _torch(torch: Any, device: Device) -> None:
    _answer_probes(torch, device)
    _order_nothing(torch)
    place_on_host(torch)


def _answer_probes(torch: Any, device: Device) -> None:
    """Questions about the device, asked through torch.cuda and torch.accelerator."""
    major, minor = device.capability
    properties = SimpleNamespace(
        name=device.name, major=major, minor=minor, total_memory=device.memory_bytes,
        multi_processor_count=device.cores, is_integrated=0, is_multi_gpu_board=0, warp_size=32,
        max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, L2_cache_size=50 << 20,
        shared_memory_per_block=48 << 10, shared_memory_per_block_optin=227 << 10,
        shared_memory_per_multiprocessor=228 << 10, gcnArchName="", uuid="00000000-0000-0000-0000-000000000000",
    )  # fmt: skip
    free_and_total = (device.memory_bytes, device.memory_bytes)
    answers = {
        "is_available": True, "device_count": 1, "current_device": 0, "is_initialized": True, "_is_in_bad_fork": False,
        "get_device_capability": device.capability, "get_device_name": device.name,
        "get_device_properties": properties, "mem_get_info": free_and_total, "memory_allocated": 0,
        "max_memory_allocated": 0, "memory_reserved": 0, "max_memory_reserved": 0,
        "get_arch_list": [f"sm_{major}{minor}"], "is_bf16_supported": True, "is_current_stream_capturing": False,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, _constant(answer))
    torch.cuda.memory_stats = _constant({})
    accelerator = {
        "is_available": True, "device_count": 1, "current_device_index": 0, "current_device_idx": 0,
        "current_accelerator": torch.device("cuda"), "get_memory_info": free_and_total, "memory_allocated": 0,
        "max_memory_allocated": 0, "memory_reserved": 0, "max_memory_reserved": 0, "memory_stats": {},
    }  # fmt: skip
    for name, answer in accelerator.items():
        setattr(torch.accelerator, name, _constant(answer))


def _order_nothing(torch: Any) -> None:
    """Streams, events, synchronisation and what else orders device work: host work is done when submitted."""
    torch.Event = HostEvent
    torch.Stream = HostStream
    for name in ("synchronize", "set_device", "empty_cache", "reset_peak_memory_stats", "manual_seed", "_lazy_init",
                 "manual_seed_all", "init", "set_stream", "ipc_collect"):  # fmt: skip
        setattr(torch.cuda, name, _constant(None))
    torch.cuda.Stream = torch.cuda.ExternalStream = HostStream
    torch.cuda.Event = HostEvent
    torch.cuda.current_stream = torch.cuda.default_stream = current_stream
    torch.cuda.stream = torch.cuda.device = contextlib.nullcontext
    for name in ("synchronize", "set_device_index", "set_device_idx", "empty_cache", "reset_peak_memory_stats",
                 "set_stream"):  # fmt: skip
        setattr(torch.accelerator, name, _constant(None))
    torch.accelerator.current_stream = current_stream
    torch.accelerator.device_index = contextlib.nullcontext


def _select_cuda(platforms: Any) -> None:
    """Let vLLM choose its genuine CUDA platform class, and no other."""
    if platforms._current_platform is not None:
        raise PlatformResolvedError(f"vLLM resolved {platforms._current_platform!r} before CUDA could be declared")
    # Changed in place: the module has a __setattr__ of its own.
    for name in platforms.builtin_platform_plugins:
        platforms.builtin_platform_plugins[name] = _constant(None)
    platforms.builtin_platform_plugins["cuda"] = _constant("vllm.platforms.cuda.CudaPlatform")


def _count_one_device(module: Any) -> None:
    module._cuda_device_count_stateless = _constant(1)


class _Target:
    """A Triton driver that knows its target and launches nothing."""

    def __init__(self, device: Device) -> None:
        self._device = device

    @staticmethod
    def is_active() -> bool:
        return True

    def __call__(self) -> _Target:
        return self

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        major, minor = self._device.capability
        return GPUTarget("cuda", major * 10 + minor, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        del device
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        import torch

        return torch.cuda


def _constant(value: Any) -> Any:
    """A function that answers ``value`` whatever it is asked."""

    def answer(*args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        return value

    return answer
