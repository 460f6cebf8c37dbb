"""A real Ascend NPU: nothing is declared, and only the model's weights and kernels are stood in for.

Written for the comparison with ``ascend-sim`` (``kvproof compare``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvproof.findings.case import Case
from kvproof.findings.model import Substitution
from kvproof.platforms import ascend_hooks, graphs, installed, tokenizers
from kvproof.platforms.ascend_sim.engine import without_profile_and_warm_up
from kvproof.platforms.ascend_sim.sim import PLUGINS
from kvproof.platforms.ascend_sim.soc import SOCS, require_build
from kvproof.platforms.ascend_sim.weights import DEVICE, weightless, without_engram_tables
from kvproof.platforms.device_memory import DeviceMemory, Memory
from kvproof.platforms.platform import Platform, TransferHooks

if TYPE_CHECKING:
    import torch

SUBSTITUTIONS = (
    graphs.UNCAPTURED,
    Substitution(
        "NPUWorker.determine_available_memory, NPUWorker.compile_or_warm_up_model",
        "K",
        "the model has no weights: nothing to profile, no kernel to tune, no graph to capture",
        "the planner gets the bytes it was told to plan with; the block count is an override anyway",
    ),
    Substitution(
        "AscendParallelEngramEmbedding._allocate_weights",
        "W",
        "n-gram tables of 24 to 51 GiB in host memory; on the meta device, like all weights",
        "tables of weights, no part of the KV cache",
    ),
)
DEVICES = Path("/dev")
"""Where the driver shows its devices, as davinci0 and so on."""


class Ascend(Platform):
    """vllm-ascend on the NPU of this machine."""

    name = "ascend"
    summary = "vllm-ascend on the Ascend NPU of this machine; --soc, if given, is asserted against the build"
    register = (*SUBSTITUTIONS, *tokenizers.REGISTER)
    inputs: ClassVar[dict[str, str]] = {"--soc": f"asserted where it is given: {', '.join(SOCS)}"}
    runner_places = True

    def here(self) -> None:
        installed.require_ascend_build(self.name)
        if not any(name.name[len("davinci") :].isdigit() for name in DEVICES.glob("davinci*")):
            raise ValueError(
                f"--platform ascend: no NPU: {DEVICES} has no davinci0; run it where an Ascend driver is, or use "
                "--platform ascend-sim"
            )

    def require(self, case: Case) -> None:
        self.here()
        if case.soc:
            # vllm-ascend compares its build with the device when it starts; this compares the build with what was said.
            require_build(case.soc, declared=False)

    def environment(self, case: Case) -> dict[str, str]:
        del case
        return {"VLLM_PLUGINS": PLUGINS}

    def install(self, case: Case) -> tuple[Substitution, ...]:
        from wrapt import when_imported

        graphs.run_uncaptured()
        when_imported("vllm_ascend.worker.worker")(without_profile_and_warm_up)
        when_imported("vllm_ascend.models.deepseek_v41.engram.embedding")(without_engram_tables)
        return (*SUBSTITUTIONS, *tokenizers.stand_in(case))

    def transfer_hooks(self, layer: str, module: Any) -> TransferHooks | None:
        return ascend_hooks.of(layer, module)

    def constructing(self) -> contextlib.AbstractContextManager[Any]:
        return weightless()

    def memory(self, storages: Sequence[torch.UntypedStorage]) -> Memory:
        return DeviceMemory(storages)

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        import torch

        return torch.zeros(*shape, dtype=dtype, device=DEVICE)
