"""The platform object of cuda-sim."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvproof.findings.case import Case
from kvproof.findings.model import Substitution
from kvproof.hostrt import build, libraries
from kvproof.platforms import copies, engram_tables, graphs, installed, tokenizers, ucm
from kvproof.platforms.cuda_sim.devices import DEVICES, GIB, device, require_supported
from kvproof.platforms.cuda_sim.substitutions import RUNTIME_SUBSTITUTION, SUBSTITUTIONS
from kvproof.platforms.platform import Platform

if TYPE_CHECKING:
    from kvproof.platforms.native_copies import NativeCopies


class CudaSim(Platform):
    """vLLM's published CUDA wheel under a declared compute capability."""

    name = "cuda-sim"
    summary = "vLLM's published CUDA wheel, no GPU and no driver; --cuda-capability is declared"
    register = (*SUBSTITUTIONS, *tokenizers.REGISTER, engram_tables.ON_META, RUNTIME_SUBSTITUTION)
    declares = True
    computes = False
    inputs: ClassVar[dict[str, str]] = {"--cuda-capability": ", ".join(DEVICES)}
    variations: ClassVar[dict[str, tuple[Any, ...]]] = {
        "memory_bytes": (24 * GIB, 512 * GIB),
        "cores": (16, 512),
        "name": ("NVIDIA Unheard-of 1",),
    }

    def here(self) -> None:
        installed.require_cuda_wheel(self.name)

    def require(self, case: Case) -> None:
        device(case.cuda_capability, case.varied)
        self.here()
        require_supported(_config(case)["model_type"], case.cuda_capability)

    def environment(self, case: Case) -> dict[str, str]:
        site = Path(sysconfig.get_paths()["platlib"])
        built = [build.build(libraries.CUDA_DRIVER, sorted(Path(site, "vllm").glob("*.so")))]
        if users := ucm.shared_objects():
            built.append(build.build(libraries.CUDA_RUNTIME_12, users))
        return {
            **(ucm.ENVIRONMENT if users else {}),
            "LD_LIBRARY_PATH": str(build.directory(built)),
            "VLLM_HAS_FLASHINFER_CUBIN": "1",
            "TRITON_INTERPRET": "1",
            # A kernel library builds its compiler in two processes behind every start; nothing here is built with it.
            "HUMMING_DISABLE_PARALLEL_BUILD": "1",
            # Host copies and small index arithmetic: threads that spin while they wait only take time from others.
            "OMP_NUM_THREADS": "1",
            # A stand-in that nobody wrote ends the process; this says who called it.
            "PYTHONFAULTHANDLER": "1",
        }

    def declare(self, case: Case) -> None:
        from kvproof.platforms.cuda_sim.declare import declare

        declare(device(case.cuda_capability, case.varied))

    def install(self, case: Case) -> tuple[Substitution, ...]:
        from kvproof.platforms.cuda_sim import kernels

        kernels.install()
        copies.install()
        copies.zero_blocks_on_host()
        copies.copy_states_on_host()
        done: tuple[Substitution, ...] = SUBSTITUTIONS
        if case.connector is not None and ucm.shared_objects():
            done += (RUNTIME_SUBSTITUTION,)
        graphs.run_uncaptured()
        return (*done, *tokenizers.stand_in(case), *engram_tables.leave_on_meta())

    def native_copies(self) -> NativeCopies | None:
        from kvproof.platforms.native_copies import NativeCopies

        users = ucm.shared_objects()
        return NativeCopies(libraries.CUDA_RUNTIME_12.soname) if users else None

    def engine_arguments(self, case: Case) -> dict[str, Any]:
        del case
        return {"worker_cls": "kvproof.platforms.cuda_sim.worker.HostWorker"}


def _config(case: Case) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(Path(case.model_dir, "config.json").read_text(encoding="utf-8"))
    return config
