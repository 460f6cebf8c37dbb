"""The platform object of cuda-sim."""

from __future__ import annotations

import importlib.metadata
import json
import sysconfig
from pathlib import Path
from typing import Any, ClassVar

from kvproof.findings.case import Case
from kvproof.findings.model import Substitution
from kvproof.hostrt import build, libraries
from kvproof.platforms import copies, tokenizers
from kvproof.platforms.cuda_sim.devices import GIB, device, require_supported
from kvproof.platforms.cuda_sim.substitutions import SUBSTITUTIONS
from kvproof.platforms.platform import Platform

SUPPORTED_VERSIONS = ("0.32", "0.33")


class CudaSim(Platform):
    """vLLM's published CUDA wheel under a declared compute capability."""

    name = "cuda-sim"
    summary = "vLLM's published CUDA wheel, no GPU and no driver; --cuda-capability is declared"
    register = (*SUBSTITUTIONS, tokenizers.ENGRAM_SUBSTITUTION)
    declares = True
    variations: ClassVar[dict[str, tuple[Any, ...]]] = {
        "memory_bytes": (24 * GIB, 512 * GIB),
        "cores": (16, 512),
        "name": ("NVIDIA Unheard-of 1",),
    }

    def require(self, case: Case) -> None:
        device(case.cuda_capability, case.varied)
        try:
            version = importlib.metadata.version("vllm")
        except importlib.metadata.PackageNotFoundError:
            version = ""
        if "cpu" in version or not version.startswith(SUPPORTED_VERSIONS):
            here = f"vllm {version}" if version else "no vllm"
            raise ValueError(
                f"--platform cuda-sim: this environment has {here}, needs vLLM's CUDA wheel "
                f"{' or '.join(SUPPORTED_VERSIONS)}; `make env-cuda`, then .venv-cuda/bin/kvproof"
            )
        require_supported(_config(case)["model_type"], case.cuda_capability)

    def environment(self, case: Case) -> dict[str, str]:
        site = Path(sysconfig.get_paths()["platlib"])
        driver = build.build(libraries.CUDA_DRIVER, sorted(Path(site, "vllm").glob("*.so")))
        return {
            "LD_LIBRARY_PATH": str(build.directory([driver])),
            "VLLM_HAS_FLASHINFER_CUBIN": "1",
            "TRITON_INTERPRET": "1",
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
        config = _config(case)
        text = config.get("text_config", config)
        if text.get("engram_layer_ids") and tokenizers.missing(case.model_dir):
            return (*SUBSTITUTIONS, tokenizers.stand_in("vllm.models.deepseek_v41.common.engram", text))
        return SUBSTITUTIONS

    def engine_arguments(self, case: Case) -> dict[str, Any]:
        del case
        return {"worker_cls": "kvproof.platforms.cuda_sim.worker.HostWorker"}


def _config(case: Case) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(Path(case.model_dir, "config.json").read_text(encoding="utf-8"))
    return config
