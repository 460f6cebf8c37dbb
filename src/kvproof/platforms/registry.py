"""Platforms by name."""

from __future__ import annotations

import importlib

from kvproof.findings.case import Case
from kvproof.platforms.platform import Platform

_PLACES = {
    "cpu": "kvproof.platforms.cpu:Cpu",
    "cuda-sim": "kvproof.platforms.cuda_sim:CudaSim",
    "ascend-sim": "kvproof.platforms.ascend_sim:AscendSim",
    "cuda": "kvproof.platforms.cuda:Cuda",
    "ascend": "kvproof.platforms.ascend:Ascend",
}

NAMES = tuple(_PLACES)
HARDWARE = ("--cuda-capability", "--soc", "--declare-soc")
"""Options about a device that only some platforms take."""


def platform(name: str) -> Platform:
    """The platform called ``name``; ValueError where there is none."""
    if name not in _PLACES:
        raise ValueError(f"--platform {name}: expected one of {', '.join(NAMES)}")
    module, _, attribute = _PLACES[name].partition(":")
    found: Platform = getattr(importlib.import_module(module), attribute)()
    return found


def require_taken(case: Case) -> None:
    """ValueError, one line, for an option about a device that the platform of ``case`` would ignore."""
    chosen = platform(case.platform)
    for option in HARDWARE:
        value = getattr(case, option.removeprefix("--").replace("-", "_"))
        if value and not _takes(chosen, option):
            given = option if value is True else f"{option} {value}"
            takers = [name for name in NAMES if _takes(platform(name), option)]
            raise ValueError(f"{given}: not for --platform {chosen.name}, only for {' and '.join(takers)}")


def _takes(chosen: Platform, option: str) -> bool:
    return option in chosen.inputs or option in chosen.asserts
