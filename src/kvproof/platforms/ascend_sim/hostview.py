"""Host views of NPU tensors: the stand-in's device memory is host memory, so both name the same bytes."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the bytes of ``tensor``; same dtype, shape, strides and storage offset.

    It keeps the NPU storage alive. A tensor that is on the host already is returned as it is.
    """
    import torch

    if tensor.device.type == "cpu":
        return tensor
    if tensor.device.type != "npu":
        raise ValueError(f"no host view of a tensor on {tensor.device}, expected npu")
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    if nbytes == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_uint8 * nbytes).from_address(storage.data_ptr())
    memory.owner = storage  # type: ignore[attr-defined]
    view = torch.empty(0, dtype=tensor.dtype).set_(
        torch.frombuffer(memory, dtype=torch.uint8).untyped_storage(),
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
    )
    return view.conj() if tensor.is_conj() else view
