"""Python packages of CANN that are imported by name: each name in them is a function that raises when called.

But for the events of ``acl.rt``, which belong to the stand-in of ``libascendcl``.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

PACKAGES = ("acl", "fla_npu", "triton.language.extra.cann")
"""``acl`` is CANN's Python binding, ``fla_npu`` holds linear-attention kernels, the last is triton-ascend's."""

OPERATOR_SHAPES = "torchvision._meta_registrations"
"""Describes operators of torchvision's binary, which is built for CUDA on every registry and cannot be loaded here."""

GRAPH_COMPILER = "torch_npu._inductor"
"""Imported by the worker for its side effects on torch's compiler, which no eager engine uses."""


class AbsentModule(ModuleType):
    """A module whose every name is a function that says it is absent."""

    __path__: list[str]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        place = f"{self.__name__}.{name}"

        def absent(*args: Any, **kwargs: Any) -> Any:
            del args, kwargs
            raise NotImplementedError(f"kvproof ascend-sim: {place} needs CANN, which is not installed")

        return absent


class _Finder:
    """The last resort of the import system, so a package that is installed is used."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if not any(fullname == p or fullname.startswith(f"{p}.") for p in PACKAGES):
            return None
        return importlib.machinery.ModuleSpec(fullname, _Finder(), is_package=True)  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return AbsentModule(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        if module.__name__ == "acl":
            importlib.import_module("acl.rt")
        elif module.__name__ == "acl.rt":
            from kvproof.platforms.ascend_sim import acl_events

            for event in (acl_events.create_event, acl_events.record_event, acl_events.destroy_event):
                setattr(module, event.__name__, event)


def announce() -> None:
    """Let the packages be imported in this interpreter."""
    sys.meta_path.append(_Finder())
    # Empty: torchvision's Python part works, an operator that is called does not exist and says so.
    sys.modules.setdefault(OPERATOR_SHAPES, ModuleType(OPERATOR_SHAPES))
    sys.modules.setdefault(GRAPH_COMPILER, AbsentModule(GRAPH_COMPILER))
