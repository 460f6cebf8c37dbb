"""The platform object of ascend-sim."""

from __future__ import annotations

import contextlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from kvproof.findings.case import Case
from kvproof.findings.model import Substitution
from kvproof.platforms.ascend_sim import cann
from kvproof.platforms.ascend_sim.hostview import host_view
from kvproof.platforms.ascend_sim.soc import GIB, require_build, soc
from kvproof.platforms.ascend_sim.substitutions import SUBSTITUTIONS
from kvproof.platforms.ascend_sim.weights import DEVICE, weightless
from kvproof.platforms.platform import Platform

if TYPE_CHECKING:
    import torch

SUPPORTED_VERSION = "0.30.0rc2"
PLUGINS = "ascend,ascend_kv_connector,ascend_model,ascend_model_loader"
"""vllm-ascend's own entry points, by name; no other installed package takes part."""


class AscendSim(Platform):
    """vllm-ascend and torch_npu as published, under a declared SoC."""

    name = "ascend-sim"
    summary = "vllm-ascend and torch_npu as published, no NPU and no CANN; --soc is asserted or declared"
    register = SUBSTITUTIONS
    declares = True
    variations = {"memory_bytes": (32 * GIB, 128 * GIB)}

    def require(self, case: Case) -> None:
        soc(case.soc)
        try:
            version = importlib.metadata.version("vllm_ascend")
        except importlib.metadata.PackageNotFoundError:
            version = ""
        if version != SUPPORTED_VERSION:
            here = f"vllm-ascend {version}" if version else "no vllm-ascend"
            raise ValueError(
                f"--platform ascend-sim: this environment has {here}, needs {SUPPORTED_VERSION}; "
                "`make env-ascend`, then .venv-ascend/bin/kvproof"
            )
        require_build(case.soc, case.declare_soc)

    def environment(self, case: Case) -> dict[str, str]:
        declared = soc(case.soc)
        return {
            "VLLM_PLUGINS": PLUGINS,
            "LD_LIBRARY_PATH": str(cann.directory()),
            "KVPROOF_SOC": declared.name,
            "KVPROOF_DEVICE_BYTES": str(case.varied.get("memory_bytes", declared.memory_bytes)),
            # Operators run where they are called, so that an error names its caller.
            "TASK_QUEUE_ENABLE": "0",
            # A stand-in that nobody wrote ends the process; this says who called it.
            "PYTHONFAULTHANDLER": "1",
        }

    def declare(self, case: Case) -> None:
        from kvproof.platforms.ascend_sim.declare import declare

        declare(soc(case.soc))

    def install(self, case: Case) -> tuple[Substitution, ...]:
        del case
        return SUBSTITUTIONS

    def constructing(self) -> contextlib.AbstractContextManager[Any]:
        return weightless()

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        return host_view(tensor)

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        import torch

        return torch.zeros(*shape, dtype=dtype, device=DEVICE)

    def engine_arguments(self, case: Case) -> dict[str, Any]:
        del case
        return {}
