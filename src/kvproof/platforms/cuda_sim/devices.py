"""The devices that can be declared, by compute capability, and which models vLLM supports on them.

Only the capability decides a layout. Name, SM count and memory size are answers vLLM may ask for; ``kvproof ablate``
varies them to show that nothing moves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Device:
    """What is answered when a property of the device is asked. ``memory_bytes`` in bytes, ``cores`` in SMs."""

    capability: tuple[int, int]
    name: str
    cores: int
    memory_bytes: int


GIB = 1 << 30
DEVICES = {
    "8.0": Device((8, 0), "NVIDIA A100-SXM4-80GB", 108, 80 * GIB),
    "8.9": Device((8, 9), "NVIDIA L40S", 142, 48 * GIB),
    "9.0": Device((9, 0), "NVIDIA H100 80GB HBM3", 132, 80 * GIB),
    "10.0": Device((10, 0), "NVIDIA B200", 148, 180 * GIB),
    "12.0": Device((12, 0), "NVIDIA RTX PRO 6000 Blackwell Server Edition", 188, 96 * GIB),
}

EVERY = ("8.0", "8.9", "9.0", "10.0", "12.0")
HOPPER_ON = ("9.0", "10.0", "12.0")
SUPPORTED = {
    "deepseek_v32": HOPPER_ON,
    "deepseek_v4": HOPPER_ON,
    "deepseek_v41": HOPPER_ON,
    "glm_moe_dsa": HOPPER_ON,
}
"""model_type -> capabilities it is known to run on; others run on every capability listed here."""


def device(capability: str, varied: dict[str, Any]) -> Device:
    """The device declared by ``capability``, with the quantities of ``varied`` in place of its own. ValueError."""
    if not capability:
        raise ValueError("--platform cuda-sim needs --cuda-capability (it decides the layout and is never guessed)")
    if capability not in DEVICES:
        raise ValueError(f"--cuda-capability {capability}: expected one of {', '.join(DEVICES)}")
    return replace(DEVICES[capability], **varied)


def require_supported(model_type: str, capability: str) -> None:
    """ValueError for a pair vLLM would not serve; vLLM itself does not always refuse it."""
    known = SUPPORTED.get(model_type, EVERY)
    if capability not in known:
        raise ValueError(
            f"--cuda-capability {capability}: {model_type} has no supported attention kernels there, "
            f"limit {', '.join(known)}"
        )
