"""UCM (distribution ``uc-manager-cuda-*``): its wheel links the CUDA runtime, which is stood in for when it is here."""

from __future__ import annotations

from pathlib import Path

from kvproof.findings.model import Substitution

ENVIRONMENT = {
    # Its start-up hook runs in every interpreter and would write a folder of logs where the process happens to start.
    "UCM_LOG_TO_FILE": "0",
    "UCM_CAPTURE_VLLM_LOG": "0",
}

RUNTIME_SUBSTITUTION = Substitution(
    "libcudart.so.12 (kvproof.hostrt)",
    "M",
    "the CUDA runtime of binary connectors: host memory behind allocation and copies, a thread behind each stream; "
    "launching a kernel ends the process with its name",
    "addresses and sizes are computed by the connector's own binaries and copied as they are; vLLM does not link it",
)


def shared_objects(site: Path) -> list[Path]:
    """UCM's shared objects below the site-packages directory ``site``; empty where UCM is not installed."""
    return sorted(Path(site, "ucm").rglob("*.so"))
