"""Streams and events of a host: work is done when it is submitted, so every event is complete."""

from __future__ import annotations

from typing import Any


class HostEvent:
    """An event that is always complete, because host work is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    @property
    def cuda_event(self) -> int:
        """The handle compiled code gets of this event: not 0, and its own while the event lives."""
        return id(self)

    def record(self, stream: Any = None) -> None:
        del stream

    def wait(self, stream: Any = None) -> None:
        del stream

    def synchronize(self) -> None:
        return

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds between two events; work is done when submitted, so a constant."""
        del end
        return 1.0


class HostStream:
    """A queue whose work runs when it is submitted."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def wait_stream(self, stream: Any) -> None:
        del stream

    def wait_event(self, event: Any) -> None:
        del event

    def record_event(self, event: Any = None) -> Any:
        return event or HostEvent()

    def synchronize(self) -> None:
        return

    def query(self) -> bool:
        return True

    def __enter__(self) -> HostStream:
        return self

    def __exit__(self, *exc: object) -> None:
        return


def current_stream(device: Any = None) -> HostStream:
    del device
    return HostStream()
