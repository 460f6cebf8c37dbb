"""Stand-ins for what runs on a device between scheduling and the cache."""

from __future__ import annotations

from typing import Any


def install() -> None:
    """Needs vLLM imported, and must run before a model runner is constructed."""
    import vllm.utils.torch_utils as torch_utils

    torch_utils.get_accelerator_view_from_cpu_tensor = _same


def _same(tensor: Any) -> Any:
    """The device's view of a host tensor is the tensor itself: the same memory."""
    return tensor
