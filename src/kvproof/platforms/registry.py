"""Platforms by name."""

from __future__ import annotations

import importlib

from kvproof.platforms.platform import Platform

_PLACES = {
    "cpu": "kvproof.platforms.cpu:Cpu",
    "cuda-sim": "kvproof.platforms.cuda_sim:CudaSim",
    "ascend-sim": "kvproof.platforms.ascend_sim:AscendSim",
    "cuda": "kvproof.platforms.cuda:Cuda",
    "ascend": "kvproof.platforms.ascend:Ascend",
}

NAMES = tuple(_PLACES)


def platform(name: str) -> Platform:
    """The platform called ``name``; ValueError where there is none."""
    if name not in _PLACES:
        raise ValueError(f"--platform {name}: expected one of {', '.join(NAMES)}")
    module, _, attribute = _PLACES[name].partition(":")
    found: Platform = getattr(importlib.import_module(module), attribute)()
    return found
