"""Lets vLLM's model runner V2 run on a CPU: Triton's interpreter behind a registered "cpu" backend."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

ENVIRONMENT = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
"""Must be set before Python starts: Triton decides at import which of its functions stay compiled."""


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True


def register() -> None:
    """Register the backend. Call before vLLM is imported."""
    from triton.backends import backends

    registry: dict[str, Any] = backends
    registry.setdefault("cpu", SimpleNamespace(driver=_Driver, compiler=None))
