"""The platform object of ascend-sim."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvproof.findings.case import Case
from kvproof.findings.model import Substitution
from kvproof.hostrt import libraries
from kvproof.platforms import ascend_hooks, graphs, installed, tokenizers, ucm
from kvproof.platforms.ascend_sim import triton_npu
from kvproof.platforms.ascend_sim.hostview import host_view
from kvproof.platforms.ascend_sim.soc import GIB, SOCS, require_build, soc
from kvproof.platforms.ascend_sim.substitutions import SUBSTITUTIONS
from kvproof.platforms.ascend_sim.weights import DEVICE, weightless
from kvproof.platforms.platform import Platform, TransferHooks

if TYPE_CHECKING:
    import torch

    from kvproof.platforms.native_copies import NativeCopies

PLUGINS = "ascend,ascend_kv_connector,ascend_model,ascend_model_loader"
"""vllm-ascend's own entry points, by name; no other installed package takes part."""


class AscendSim(Platform):
    """vllm-ascend and torch_npu as published, under a declared SoC."""

    name = "ascend-sim"
    summary = "vllm-ascend and torch_npu as published, no NPU and no CANN; --soc is asserted or declared"
    register = (*SUBSTITUTIONS, *tokenizers.REGISTER)
    declares = True
    computes = False
    asserts = ("--declare-soc",)
    load_format = "dummy"  # vllm-ascend refuses V4.1 under any name it does not know
    runner_places = True
    variations: ClassVar[dict[str, tuple[Any, ...]]] = {
        "memory_bytes": (32 * GIB, 128 * GIB),
        "cube_cores": (8, 40),
        "vector_cores": (16, 80),
        "l2_bytes": (64 << 20,),
    }
    inputs: ClassVar[dict[str, str]] = {"--soc": ", ".join(SOCS)}

    def here(self) -> None:
        installed.require_ascend_build(self.name)

    def require(self, case: Case) -> None:
        soc(case.soc, case.varied)
        self.here()
        require_build(case.soc, case.declare_soc)

    def environment(self, case: Case) -> dict[str, str]:
        from kvproof.platforms.ascend_sim import cann

        declared = soc(case.soc, case.varied)
        return {
            "VLLM_PLUGINS": PLUGINS,
            "LD_LIBRARY_PATH": str(cann.directory()),
            "KVPROOF_SOC": declared.name,
            "KVPROOF_DEVICE_BYTES": str(declared.memory_bytes),
            "KVPROOF_CUBE_CORES": str(declared.cube_cores),
            "KVPROOF_VECTOR_CORES": str(declared.vector_cores),
            "KVPROOF_L2_BYTES": str(declared.l2_bytes),
            **triton_npu.ENVIRONMENT,
            **(ucm.ENVIRONMENT if ucm.shared_objects() else {}),
            # The pool connector's lookups go through a socket of a fixed name; another engine's must not answer.
            **({"VLLM_RPC_BASE_PATH": case.store} if case.store else {}),
            "MMC_LOCAL_CONFIG_PATH": str(Path(__file__).with_name("memcache.conf")),
            # Operators run where they are called, so that an error names its caller.
            "TASK_QUEUE_ENABLE": "0",
            # A stand-in that nobody wrote ends the process; this says who called it.
            "PYTHONFAULTHANDLER": "1",
        }

    def declare(self, case: Case) -> None:
        from kvproof.platforms.ascend_sim.declare import declare

        declare(soc(case.soc, case.varied))

    def install(self, case: Case) -> tuple[Substitution, ...]:
        from kvproof.platforms.ascend_sim import transfers

        transfers.define_operators()
        graphs.run_uncaptured()
        return (*SUBSTITUTIONS, *tokenizers.stand_in(case))

    def transfer_hooks(self, layer: str, module: Any) -> TransferHooks | None:
        return ascend_hooks.of(layer, module)

    def constructing(self) -> contextlib.AbstractContextManager[Any]:
        return weightless()

    def native_copies(self) -> NativeCopies:
        from kvproof.platforms.native_copies import NativeCopies

        return NativeCopies(libraries.ACL.soname)

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        return host_view(tensor)

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        import torch

        return torch.zeros(*shape, dtype=dtype, device=DEVICE)

    def engine_arguments(self, case: Case) -> dict[str, Any]:
        del case
        return {}
