"""Where a CUDA tensor's bytes are: in host memory. Sizes, strides and dtypes of every call stay as they are."""

from __future__ import annotations

from typing import Any


def place_on_host(torch: Any) -> None:
    """From now on ``device="cuda"`` means the host in every torch call of this thread; pinning does nothing."""
    from torch.overrides import TorchFunctionMode

    host = torch.device("cpu")

    def moved(value: Any) -> Any:
        if isinstance(value, torch.device):
            return host if value.type == "cuda" else value
        return host if isinstance(value, str) and value.partition(":")[0] == "cuda" else value

    class Placement(TorchFunctionMode):
        """Rewrites the device of a call and drops ``pin_memory``."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            kwargs = dict(kwargs or {})
            if "device" in kwargs:
                kwargs["device"] = host if isinstance(kwargs["device"], int) else moved(kwargs["device"])
            kwargs.pop("pin_memory", None)
            if func is torch.Tensor.to:
                args = tuple(moved(value) for value in args)
            return func(*args, **kwargs)

    mode = Placement()
    mode.__enter__()
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    torch.Tensor.record_stream = lambda self, stream: None
