"""The stand-in libraries for CANN, built for the torch_npu installed here."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from kvproof.hostrt import build, libraries
from kvproof.platforms import ucm


def users() -> list[Path]:
    """The shared objects of torch_npu itself; its graph compiler, which is loaded on first use, is not among them."""
    package = importlib.util.find_spec("torch_npu")
    if package is None or package.submodule_search_locations is None:
        raise ValueError("--platform ascend-sim: torch_npu is not installed here")
    root = Path(package.submodule_search_locations[0])
    return build.users([root / "lib", *root.glob("_C*.so")])


def directory() -> Path:
    """Folder with all stand-ins, for LD_LIBRARY_PATH; built on first use."""
    connector = ucm.shared_objects()
    needed = (*libraries.CANN, libraries.RUNTIME) if connector else libraries.CANN
    binaries = [*users(), *connector]
    return build.directory([build.build(library, binaries) for library in needed])
