"""Lets vLLM's model runner V2 run without a device: Triton's interpreter behind a registered backend."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvproof.findings.model import Substitution

ENVIRONMENT = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
"""Must be set before Python starts: Triton decides at import which of its functions stay compiled."""


RUNNER_V2_SUBSTITUTION = Substitution(
    "triton.backends.backends['cpu'], TRITON_INTERPRET=1",
    "P",
    "model runner V2 wants an active Triton driver; its kernels run in Triton's interpreter",
    "the kernels are the published ones, interpreted; they fill block tables and slot mappings",
)


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True


def register(backend: str = "cpu", driver: Any = None) -> None:
    """Register ``backend`` as the active one, its kernels interpreted. Call before vLLM is imported."""
    from triton.backends import backends

    activate(backends, backend, driver or _Driver)
    take_masks_of_integers()
    compare_to_masks()


def activate(backends: dict[str, Any], name: str, driver: Any) -> None:
    """Make ``driver`` the one of backend ``name`` in Triton's table ``backends``."""
    backends[name] = SimpleNamespace(driver=driver, compiler=None)


def take_masks_of_integers() -> None:
    """Let the interpreter load and store under an integer mask, as compiled code does; vLLM's n-gram kernel has one."""
    from triton.runtime.interpreter import InterpreterBuilder

    for name, at in (("create_masked_load", 1), ("create_masked_store", 2)):
        native = getattr(InterpreterBuilder, name)
        if getattr(native, "_kvproof", False):
            continue

        def masked(self: Any, *args: Any, _native: Any = native, _at: int = at, **kwargs: Any) -> Any:
            args[_at].data = args[_at].data.astype(bool, copy=False)
            return _native(self, *args, **kwargs)

        masked._kvproof = True  # type: ignore[attr-defined]
        setattr(InterpreterBuilder, name, masked)


def compare_to_masks() -> None:
    """Let the interpreter's comparisons yield bits, as compiled ones do: it keeps the type of what was compared, and a
    comparison of two numbers, spread over a block, becomes a block of floats that no mask can be joined with."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    for name in [n for n in vars(InterpreterBuilder) if n.startswith(("create_fcmp", "create_icmp"))]:
        native = getattr(InterpreterBuilder, name)
        if getattr(native, "_kvproof", False):
            continue

        def compare(self: Any, left: Any, right: Any, _native: Any = native) -> Any:
            return TensorHandle(_native(self, left, right).data, tl.int1)

        compare._kvproof = True  # type: ignore[attr-defined]
        setattr(InterpreterBuilder, name, compare)
