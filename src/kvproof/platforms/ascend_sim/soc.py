"""The SoCs that can be declared, and what the installed build of vllm-ascend says it was made for."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

GIB = 1 << 30


@dataclass(frozen=True)
class Soc:
    """One chip. ``build`` is vllm-ascend's name of the family; ``name`` what CANN calls one of its chips.

    ``number`` is torch_npu's version number for ``name``; vllm-ascend compares it with the build. ``memory_bytes`` is
    what the device says it has; no layout derives from it.
    """

    build: str
    name: str
    number: int
    cube_cores: int
    vector_cores: int
    memory_bytes: int = 64 * GIB
    l2_bytes: int = 192 << 20


SOCS = {
    "ascend910b": Soc("A2", "Ascend910B3", 223, 20, 40),
    "ascend910c": Soc("A3", "Ascend910_9391", 250, 24, 48),
    "ascend950": Soc("A5", "Ascend950PR_9599", 260, 32, 64),
}
"""As ``--soc`` spells them."""

BUILD_MODULE = "vllm_ascend._build_info"
_BUILD_FIELD = "__device_type__"


def soc(name: str, varied: Mapping[str, Any] = MappingProxyType({})) -> Soc:
    """The SoC called ``name``, with the quantities of ``varied`` in place of its own. ValueError."""
    if name not in SOCS:
        given = f"--soc {name}" if name else "no --soc given"
        raise ValueError(f"--platform ascend-sim: {given}, expected one of {', '.join(SOCS)}")
    return replace(SOCS[name], **varied)


def built_for() -> str:
    """The family the installed vllm-ascend says it was built for (A2, A3, A5, 310P). ValueError where it says nothing.

    Read from its source, because importing it would resolve the platform.
    """
    package = importlib.util.find_spec("vllm_ascend")
    if package is None or package.submodule_search_locations is None:
        raise ValueError("--platform ascend-sim: vllm_ascend is not installed here")
    path = Path(package.submodule_search_locations[0], "_build_info.py")
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
            names = [t.id for t in statement.targets if isinstance(t, ast.Name)]
            if _BUILD_FIELD in names:
                return str(statement.value.value)
    raise ValueError(f"{path}: no {_BUILD_FIELD} in it")


def require_build(name: str, declared: bool) -> None:
    """ValueError unless the build is for the SoC called ``name`` or that was declared explicitly."""
    wanted, built = soc(name), built_for()
    if wanted.build != built and not declared:
        made_for = next((n for n, s in SOCS.items() if s.build == built), built)
        raise ValueError(
            f"--soc {name}: the installed vllm-ascend is built for {made_for} ({built}), not {wanted.build}; "
            f"--declare-soc declares {name} all the same"
        )
