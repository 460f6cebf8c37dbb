"""Getting a runner's tensors to where the guard can look at them, without making the device wait."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvproof.trace.records import Ints


class Views:
    """numpy views of host tensors, remembered per tensor object: a runner's buffers live as long as the runner."""

    LIMIT = 256

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Ints]] = {}

    def of(self, tensor: Any) -> Ints | None:
        """The view; None for a tensor on a device."""
        if isinstance(tensor, np.ndarray):
            return tensor
        known = self._known.get(id(tensor))
        if known is not None and known[0] is tensor:
            return known[1]
        return tensor.numpy() if on_host(tensor) else None

    def keep(self, tensor: Any) -> Any:
        """Remember the view of a tensor that stays; returns the tensor."""
        if id(tensor) not in self._known and len(self._known) < self.LIMIT and on_host(tensor):
            self._known[id(tensor)] = (tensor, tensor.numpy())
        return tensor


class Copies:
    """Host views of tensors. On the CPU they are the tensors themselves, at once.

    On a device each tensor is cloned on the current stream (the runner reuses its buffers in the next step) and copied
    to the host asynchronously; ``arrive`` waits for the event behind the last copy and belongs at a boundary where the
    engine has waited for a later result anyway.
    """

    def __init__(self, views: Views) -> None:
        self._views = views
        self._waiting: list[tuple[str, Any]] = []
        self._here: dict[str, Ints] = {}
        self._event: Any = None
        self._arrived = False

    def take(self, name: str, tensor: Any, count: int | None = None) -> None:
        """Keep the first ``count`` rows of ``tensor`` (None: all) under ``name``; a None tensor is not kept."""
        if tensor is None:
            return
        view = self._views.of(tensor)
        if view is not None:
            self._here[name] = view if count is None else view[:count]
        elif not _capturing():
            part = tensor if count is None else tensor[:count]
            # torch gives the host side of a copy that does not block pinned memory, on CUDA and on NPU.
            self._waiting.append((name, part.detach().clone().to("cpu", non_blocking=True)))

    @property
    def was_device(self) -> bool:
        """Whether any of it came from a device."""
        return self._event is not None or self._arrived

    @property
    def pending(self) -> bool:
        """Whether something is still on its way."""
        return bool(self._waiting)

    def launch(self) -> None:
        """Mark the end of the copies on the current stream."""
        if self._waiting:
            import torch

            self._event = torch.Event()
            self._event.record()

    def arrive(self) -> None:
        """Wait for the copies; no effect when everything is here."""
        if self._event is not None:
            self._event.synchronize()
            self._event, self._arrived = None, True
        for name, tensor in self._waiting:
            self._here[name] = tensor.numpy()
        self._waiting.clear()

    def get(self, name: str) -> Ints | None:
        """The array kept under ``name``, None when there was none."""
        return self._here.get(name)


def _capturing() -> bool:
    """Whether the current stream records a graph, into which the guard's copies must not go."""
    import torch

    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def on_host(tensor: Any) -> bool:
    """Whether numpy can look at this tensor where it is."""
    return bool(tensor.device.type == "cpu")
