"""Operators on NPU tensors, computed on the host bytes they lie in.

torch_npu's own kernels would call into CANN. Every operator it registers is therefore replaced, from Python, by one of
two things: the CPU kernel of the same operator on host views of its arguments, or an error with the operator's name.
What allocates, views and resizes stays torch_npu's own, because that is the code under test. Nothing is left that
succeeds without doing its work; :func:`still_native` asks torch's dispatcher for what would be.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from kvproof.platforms.ascend_sim.hostview import host_view

if TYPE_CHECKING:
    import torch

KEY = "PrivateUse1"

ALLOCATION = frozenset(
    {
        "aten::_pin_memory", "aten::_reshape_alias", "aten::as_strided", "aten::empty.memory_format",
        "aten::empty_like", "aten::empty_strided", "aten::is_pinned", "aten::is_set_to", "aten::new_empty_strided",
        "aten::record_stream", "aten::resize_", "aten::set_", "aten::set_.source_Storage",
        "aten::set_.source_Storage_storage_offset", "aten::set_.source_Tensor", "aten::squeeze", "aten::squeeze.dim",
        "aten::unfold", "aten::unsqueeze", "aten::view", "aten::view_as_complex", "aten::view_as_real",
        "npu::get_npu_format", "npu::get_storage_size",
    }
)  # fmt: skip
"""Operators left to torch_npu: they make, view or describe memory and call no kernel."""

COLLECTIVES = ("c10d::", "npu_custom_dist::", "symm_mem::", "fsdp::")
"""Namespaces left to torch_npu: they end in HCCL, of which nothing exists here."""

_ACTIVE = re.compile(rf"^{KEY}: registered at (?P<file>.*?):\d+ ::", re.MULTILINE)
_libraries: list[Any] = []
"""A torch library takes its kernels with it when it is collected."""


def install() -> int:
    """Replace the kernels; the number replaced. Call after torch_npu was imported; a second call replaces nothing."""
    import torch

    make: Any = torch.library.Library
    if _libraries:
        return 0
    names = replaceable()
    for namespace in sorted({name.partition("::")[0] for name in names}):
        library = make(namespace, "IMPL")
        _libraries.append(library)
        for name in names:
            if name.startswith(f"{namespace}::"):
                library.impl(name, _on_host(_operator(name)) if namespace == "aten" else refused(name), KEY)
    return len(names)


def replaceable() -> list[str]:
    """Operators with a schema that have a kernel for NPU tensors which is not left to torch_npu."""
    import torch

    names = torch._C._dispatch_get_registrations_for_dispatch_key(KEY)
    return sorted(
        n for n in names if n not in ALLOCATION and not n.startswith(COLLECTIVES) and _operator(n) is not None
    )


def still_native() -> list[str]:
    """Operators that nobody left to torch_npu and whose kernel in force is still its own, as the dispatcher says."""
    return [name for name in replaceable() if "torch_npu" in _registered_at(name)]


def _registered_at(name: str) -> str:
    """The file that registered the kernel in force."""
    import torch

    found = _ACTIVE.search(torch._C._dispatch_dump(name))
    return found["file"] if found else ""


def _operator(name: str) -> Any:
    """The operator called ``namespace::name.overload``, or None where it has no schema and cannot be called."""
    import torch

    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    return None if packet is None else getattr(packet, overload or "default", None)


def refused(name: str) -> Callable[..., Any]:
    """What stands in for a kernel without a host twin: it raises with the operator's name."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        raise NotImplementedError(f"kvproof ascend-sim: {name} is an NPU kernel and has no host twin")

    return refuse


def _on_host(operator: Any) -> Callable[..., Any]:
    """The CPU kernel of ``operator`` on the bytes of its NPU arguments."""
    writes = [
        (index, argument.name)
        for index, argument in enumerate(operator._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]

    def compute(*args: Any, **kwargs: Any) -> Any:
        owners: dict[int, torch.Tensor] = {}
        if not any(map(_is_npu, (*args, *kwargs.values()))):
            # Nothing here says NPU, so the CPU kernel would not be chosen either: torch would come back here for ever.
            raise NotImplementedError(
                f"kvproof ascend-sim: {operator} was chosen for the NPU without an argument on it"
            )
        host_args = [_to_host(a, owners) for a in args]
        host_kwargs = {k: _to_host(v, owners) for k, v in kwargs.items() if k != "pin_memory"}
        result = operator(*host_args, **host_kwargs)
        if _leaves_device(kwargs):
            return result
        written = list(_chosen(writes, args, kwargs))
        if not written or (isinstance(result, list | tuple) and len(written) != len(result)):
            return _to_device(result, owners)
        for host, device in zip(_chosen(writes, host_args, host_kwargs), written, strict=True):
            _follow_resize(host, device)
        return tuple(written) if isinstance(result, list | tuple) else written[0] if result is not None else None

    return compute


def _is_npu(value: Any) -> bool:
    """Whether an argument is, names or holds something on the NPU."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.device.type == "npu"
    if isinstance(value, list | tuple):
        return any(map(_is_npu, value))
    return isinstance(value, torch.device) and value.type == "npu"


def _to_host(value: Any, owners: dict[int, torch.Tensor]) -> Any:
    """``value`` with host views in place of NPU tensors; ``owners`` remembers one tensor per storage address."""
    import torch

    if isinstance(value, torch.Tensor):
        if value.device.type == "npu":
            owners.setdefault(value.untyped_storage().data_ptr(), value)
            return host_view(value)
        return value
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "npu" else value
    if isinstance(value, list | tuple):
        return type(value)(_to_host(v, owners) for v in value)
    return value


def _to_device(value: Any, owners: dict[int, torch.Tensor]) -> Any:
    """A CPU result as NPU tensors: a view where it shares an argument's storage, else a copy with the same strides."""
    import torch

    if isinstance(value, list | tuple):
        return [_to_device(v, owners) for v in value] if isinstance(value, list) else _tuple(value, owners)
    if not isinstance(value, torch.Tensor):
        return value
    owner = owners.get(value.untyped_storage().data_ptr()) if value.numel() else None
    if owner is not None:
        made = torch.empty(0, dtype=value.dtype, device=owner.device)
        return made.set_(owner.untyped_storage(), value.storage_offset(), value.shape, value.stride())
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="npu")
    if value.numel():
        host_view(made).copy_(value)
    return made


def _tuple(values: Any, owners: dict[int, torch.Tensor]) -> Any:
    """torch's named results are made of one sequence, plain tuples too."""
    return type(values)([_to_device(v, owners) for v in values])


def _leaves_device(kwargs: dict[str, Any]) -> bool:
    """Whether the caller asked for a result that is not on the NPU."""
    import torch

    device = kwargs.get("device")
    return device is not None and torch.device(device).type != "npu"


def _chosen(places: list[tuple[int, str]], args: Any, kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments at ``places``, given by position or by name; those not given are left out."""
    for index, name in places:
        value = kwargs.get(name, args[index] if index < len(args) else None)
        if value is not None:
            yield value


def _follow_resize(host: Any, device: Any) -> None:
    """An out= operator may resize its target: give the NPU tensor the size and bytes its host view was given."""
    import torch

    if isinstance(device, torch.Tensor) and host.shape != device.shape:
        device.resize_(host.shape)
        host_view(device).copy_(host)
