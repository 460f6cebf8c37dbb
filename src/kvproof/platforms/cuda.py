"""A real NVIDIA GPU: nothing is declared, and only the model's weights and kernels are stood in for.

Written for the comparison with ``cuda-sim`` (``kvproof compare``). What it does with vLLM is the same; where bytes lie
is the driver's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from kvproof.findings.case import Case
from kvproof.findings.model import Substitution
from kvproof.platforms import device_copies, engram_tables, graphs, installed, tokenizers
from kvproof.platforms.device_memory import DeviceMemory, Memory
from kvproof.platforms.platform import Platform

if TYPE_CHECKING:
    import torch

WARM_UP = Substitution(
    "Worker.compile_or_warm_up_model",
    "K",
    "the model has no weights: no kernel to tune, no graph to capture",
    "runs after the KV cache was placed",
)

_MAJOR, _MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of the driver's interface."""


class Cuda(Platform):
    """vLLM's CUDA wheel on the GPU of this machine."""

    name = "cuda"
    summary = "vLLM's CUDA wheel on the NVIDIA GPU of this machine; --cuda-capability, if given, is asserted"
    register = (
        WARM_UP, graphs.UNCAPTURED, *tokenizers.REGISTER, engram_tables.ON_META, device_copies.WATCHED,
    )  # fmt: skip
    inputs: ClassVar[dict[str, str]] = {"--cuda-capability": "the device's own; asserted where it is given"}

    def here(self) -> None:
        installed.require_cuda_wheel(self.name)
        capability()

    def require(self, case: Case) -> None:
        self.here()
        if case.cuda_capability and case.cuda_capability != capability():
            raise ValueError(f"--cuda-capability {case.cuda_capability}: device 0 has {capability()}")

    def install(self, case: Case) -> tuple[Substitution, ...]:
        graphs.run_uncaptured()
        return (
            WARM_UP,
            graphs.UNCAPTURED,
            *tokenizers.stand_in(case),
            *engram_tables.leave_on_meta(),
            *(() if case.connector is None else (device_copies.watch(),)),
        )

    def engine_arguments(self, case: Case) -> dict[str, Any]:
        del case
        return {"worker_cls": "kvproof.platforms.device_worker.DeviceWorker"}

    def memory(self, storages: Sequence[torch.UntypedStorage]) -> Memory:
        return DeviceMemory(storages)

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        import torch

        return torch.zeros(*shape, dtype=dtype, device="cuda")


def driver() -> Any:
    """The CUDA driver's library. ValueError where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ValueError(
            f"--platform cuda: no CUDA device: {error}; run it where an NVIDIA driver is, or use --platform cuda-sim"
        ) from error


def capability() -> str:
    """Compute capability of device 0, as ``9.0``. ValueError where there is no device. Asked of the driver itself:
    torch takes seconds to import and would make a context."""
    cuda = driver()
    count = ctypes.c_int(0)
    status = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    if status or not count.value:
        said = f"the driver answers error {status}" if status else "the driver counts 0 devices"
        raise ValueError(f"--platform cuda: no CUDA device: {said}; use --platform cuda-sim")
    parts = []
    for attribute in (_MAJOR, _MINOR):
        value = ctypes.c_int(0)
        status = cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, 0)
        if status:
            raise ValueError(f"--platform cuda: device 0 does not say its capability: driver error {status}")
        parts.append(str(value.value))
    return ".".join(parts)
