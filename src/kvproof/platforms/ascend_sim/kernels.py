"""Operators on NPU tensors, computed on the host bytes they lie in.

torch_npu's own kernels would call into CANN. Every operator it registers is therefore replaced, from Python, by one of
two things: the CPU kernel of the same operator on host views of its arguments, or an error with the operator's name.
What allocates, views and resizes stays torch_npu's own, because that is the code under test. Nothing is left that
succeeds without doing its work; :func:`unhandled` lists what would be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from kvproof.platforms.ascend_sim.hostview import host_view

if TYPE_CHECKING:
    import torch

KEY = "PrivateUse1"

ALLOCATION = frozenset(
    {
        "aten::_reshape_alias", "aten::as_strided", "aten::empty.memory_format", "aten::empty_like",
        "aten::empty_strided", "aten::is_pinned", "aten::is_set_to", "aten::new_empty_strided", "aten::record_stream",
        "aten::resize_", "aten::set_", "aten::set_.source_Storage", "aten::set_.source_Storage_storage_offset",
        "aten::set_.source_Tensor", "aten::squeeze", "aten::squeeze.dim", "aten::unfold", "aten::unsqueeze",
        "aten::view", "aten::view_as_complex", "aten::view_as_real", "npu::get_npu_format", "npu::get_storage_size",
    }
)  # fmt: skip
"""Operators left to torch_npu: they make, view or describe memory and call no kernel."""

COLLECTIVES = ("c10d::", "npu_custom_dist::", "symm_mem::", "fsdp::")
"""Namespaces left to torch_npu: they end in HCCL, where every entry is a loud stub."""

_libraries: list[Any] = []
"""A torch library takes its kernels with it when it is collected."""


def install() -> int:
    """Replace the kernels; the number replaced. Call once, after torch_npu was imported."""
    import torch

    if _libraries:
        return 0
    replaced = 0
    namespaces = {name.partition("::")[0] for name in replaceable()}
    for namespace in sorted(namespaces):
        library = torch.library.Library(namespace, "IMPL")
        for name in replaceable():
            if name.startswith(f"{namespace}::"):
                kernel = _on_host(_operator(name)) if namespace == "aten" else _refused(name)
                library.impl(name, kernel, KEY)
                replaced += 1
        _libraries.append(library)
    return replaced


def replaceable() -> list[str]:
    """Operators with a schema that torch_npu registers kernels for and that are not left to it."""
    import torch

    names = torch._C._dispatch_get_registrations_for_dispatch_key(KEY)
    return sorted(
        n for n in names if n not in ALLOCATION and not n.startswith(COLLECTIVES) and _operator(n) is not None
    )


def unhandled() -> list[str]:
    """Operators whose kernel for NPU tensors is still torch_npu's and that are not on the lists above."""
    import torch

    return [n for n in replaceable() if "kvproof" not in torch._C._dispatch_dump(n) and not _is_ours(n)]


def _is_ours(name: str) -> bool:
    return any(f"{name.partition('::')[0]}/{name.partition('::')[2]}/{KEY}" in lib._op_impls for lib in _libraries)


def _operator(name: str) -> Any:
    """The operator called ``namespace::name.overload``, or None where it has no schema and cannot be called."""
    import torch

    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    return None if packet is None else getattr(packet, overload or "default", None)


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        raise NotImplementedError(f"kvproof ascend-sim: {name} is an NPU kernel and has no host twin")

    return refuse


def _on_host(operator: Any) -> Callable[..., Any]:
    """The CPU kernel of ``operator`` on the bytes of its NPU arguments."""
    import torch

    def compute(*args: Any, **kwargs: Any) -> Any:
        seen: dict[int, torch.Tensor] = {}  # storage address -> an NPU tensor that owns it

        def to_host(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if value.device.type == "npu":
                    seen.setdefault(value.untyped_storage().data_ptr(), value)
                    return host_view(value)
                return value
            if isinstance(value, torch.device):
                return torch.device("cpu") if value.type == "npu" else value
            if isinstance(value, list | tuple):
                return type(value)(to_host(v) for v in value)
            return value

        def to_device(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return _back(value, seen)
            if isinstance(value, list | tuple):
                return type(value)([to_device(v) for v in value]) if hasattr(value, "n_fields") else type(value)(map(to_device, value))
            return value

        host_args = [to_host(a) for a in args]
        host_kwargs = {k: to_host(v) for k, v in kwargs.items() if k != "pin_memory"}
        result = operator(*host_args, **host_kwargs)
        if _leaves_device(kwargs):
            return result
        written = list(_written(operator, args, kwargs))
        if written and not isinstance(result, list | tuple):
            _follow_resize(operator, host_args, host_kwargs, written)
            return written[0]
        if written:
            return tuple(written) if len(written) == len(result) else to_device(result)
        return to_device(result)

    compute.__name__ = f"kvproof_{operator._schema.name.partition('::')[2]}"
    return compute


def _leaves_device(kwargs: dict[str, Any]) -> bool:
    """Whether the caller asked for a result that is not on the NPU."""
    import torch

    device = kwargs.get("device")
    return device is not None and torch.device(device).type != "npu"


def _written(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments an in-place or out= operator writes and returns."""
    for index, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[index] if index < len(args) else None)
            if value is not None:
                yield value


def _follow_resize(operator: Any, args: list[Any], kwargs: dict[str, Any], written: list[Any]) -> None:
    """An out= operator may resize its target: give the NPU tensor the size and bytes its host view was given."""
    import torch

    for host, device in zip(_written(operator, tuple(args), kwargs), written, strict=True):
        if not isinstance(device, torch.Tensor) or host.shape == device.shape:
            continue
        device.resize_(host.shape)
        host_view(device).copy_(host)


def _back(value: torch.Tensor, seen: dict[int, torch.Tensor]) -> torch.Tensor:
    """The NPU tensor for a CPU result: a view where it aliases an argument, else a copy with the same strides."""
    import torch

    owner = seen.get(value.untyped_storage().data_ptr()) if value.numel() else None
    if owner is not None:
        made = torch.empty(0, dtype=value.dtype, device=owner.device)
        return made.set_(owner.untyped_storage(), value.storage_offset(), value.shape, value.stride())
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="npu")
    if value.numel():
        host_view(made).copy_(value)
    return made
